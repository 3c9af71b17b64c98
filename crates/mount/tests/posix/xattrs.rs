//! Extended attributes. Needs a file system that keeps those of class `user`.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{XattrFlags, getxattr, lgetxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::support::{Scratch, eventually};

/// An ordinary user (Debian's `nobody`).
const NOBODY: u32 = 65534;
/// The largest value that Linux allows, in bytes.
const LARGEST: usize = 64 << 10;

fn get(path: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let mut room = vec![0; LARGEST];
    let length = getxattr(path, name, &mut room)?;
    room.truncate(length);
    Ok(room)
}

fn set(path: &Path, name: &str, value: &[u8]) -> Result<(), Errno> {
    setxattr(path, name, value, XattrFlags::empty())
}

fn list(path: &Path) -> BTreeSet<String> {
    let mut room = vec![0; LARGEST];
    let length = listxattr(path, &mut room[..]).unwrap();
    let names = room[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect()
}

fn file(dir: &Scratch) -> std::path::PathBuf {
    let path = dir.join("file");
    File::create(&path).unwrap();
    path
}

#[test]
fn attributes_are_kept_listed_replaced_and_removed() {
    let dir = Scratch::new();
    let path = file(&dir);
    assert_eq!(list(&path), BTreeSet::new());
    set(&path, "user.first", b"one").unwrap();
    set(&path, "user.empty", b"").unwrap();
    set(&path, "user.first", b"another").unwrap();
    assert_eq!(get(&path, "user.first").unwrap(), b"another");
    assert_eq!(get(&path, "user.empty").unwrap(), b"");
    assert_eq!(list(&path), BTreeSet::from(["user.empty".to_owned(), "user.first".to_owned()]));
    removexattr(&path, "user.first").unwrap();
    assert_eq!(get(&path, "user.first"), Err(Errno::NODATA));
    assert_eq!(removexattr(&path, "user.first"), Err(Errno::NODATA));
    assert_eq!(list(&path), BTreeSet::from(["user.empty".to_owned()]));
    set(dir.path(), "user.of-a-directory", b"x").unwrap();
    assert_eq!(get(dir.path(), "user.of-a-directory").unwrap(), b"x");
}

#[test]
fn create_needs_a_new_attribute_and_replace_an_old_one() {
    let dir = Scratch::new();
    let path = file(&dir);
    assert_eq!(setxattr(&path, "user.x", b"1", XattrFlags::REPLACE), Err(Errno::NODATA));
    setxattr(&path, "user.x", b"2", XattrFlags::CREATE).unwrap();
    assert_eq!(setxattr(&path, "user.x", b"3", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(get(&path, "user.x").unwrap(), b"2");
    setxattr(&path, "user.x", b"4", XattrFlags::REPLACE).unwrap();
    assert_eq!(get(&path, "user.x").unwrap(), b"4");
}

#[test]
fn a_buffer_that_is_too_small_is_an_error_and_an_empty_one_asks_for_the_size() {
    let dir = Scratch::new();
    let path = file(&dir);
    set(&path, "user.name", b"value").unwrap();
    let mut small = [0; 4];
    assert_eq!(getxattr(&path, "user.name", &mut small), Err(Errno::RANGE));
    assert_eq!(listxattr(&path, &mut small[..]), Err(Errno::RANGE));
    let c_path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: both strings end with a zero and live until the call returns; no buffer is passed.
    let sizes = unsafe {
        let value = libc::getxattr(c_path.as_ptr(), c"user.name".as_ptr(), std::ptr::null_mut(), 0);
        (value, libc::listxattr(c_path.as_ptr(), std::ptr::null_mut(), 0))
    };
    assert_eq!(sizes, (5, 10));
}

#[test]
fn names_and_values_are_limited() {
    let dir = Scratch::new();
    let path = file(&dir);
    let longest = format!("user.{}", "n".repeat(250));
    set(&path, &longest, b"x").unwrap();
    assert_eq!(set(&path, &format!("{longest}n"), b"x"), Err(Errno::RANGE));
    assert_eq!(set(&path, "user.x", &vec![1; LARGEST + 1]), Err(Errno::TOOBIG));
    assert_eq!(list(&path), BTreeSet::from([longest]));
    let mut values = 0;
    let full = loop {
        match set(&path, &format!("user.{values}"), &vec![1; LARGEST]) {
            Ok(()) => values += 1,
            Err(error) => break error,
        }
        assert!(values < 1000, "a file takes any number of values");
    };
    assert_eq!(full, Errno::NOSPC);
}

#[test]
fn attributes_go_with_the_file_wherever_it_is_renamed_and_end_with_it() {
    let dir = Scratch::new();
    let path = file(&dir);
    set(&path, "user.label", b"kept").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    fs::rename(&path, dir.join("d/moved")).unwrap();
    fs::hard_link(dir.join("d/moved"), dir.join("link")).unwrap();
    assert_eq!(get(&dir.join("link"), "user.label").unwrap(), b"kept");
    fs::write(&path, "another file").unwrap();
    assert_eq!(list(&path), BTreeSet::new());
    fs::rename(&path, dir.join("link")).unwrap();
    fs::remove_file(dir.join("d/moved")).unwrap();
    assert_eq!(list(&dir.join("link")), BTreeSet::new());
}

#[test]
fn other_classes_are_refused_the_way_their_callers_expect() {
    if std::env::var_os("FARPOOL_POSIX_DIR").is_some() {
        return; // other file systems keep some of these classes
    }
    let dir = Scratch::new();
    let path = file(&dir);
    for name in ["security.selinux", "system.other"] {
        assert_eq!(set(&path, name, b"x"), Err(Errno::OPNOTSUPP), "{name}");
        assert_eq!(lgetxattr(&path, name, &mut [0; 10]), Err(Errno::OPNOTSUPP), "{name}");
    }
    assert_eq!(lgetxattr(&path, "system.posix_acl_access", &mut [0; 10]), Err(Errno::OPNOTSUPP));
    let script = "cp -a file copy && ls -lZ file && mv copy moved";
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir.path()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_file_that_an_ordinary_user_writes_to_loses_its_privileges() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can act as another user
    }
    let dir = Scratch::new();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, script) in
        [("written", "echo x >> written"), ("cut", "truncate -s 1 cut"), ("anew", "echo > anew")]
    {
        let path = dir.join(name);
        fs::write(&path, "contents").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o6777);
        let mut shell = Command::new("sh");
        shell.args(["-ec", script]).current_dir(dir.path()).uid(NOBODY).gid(NOBODY);
        assert!(shell.status().unwrap().success(), "{name}");
        eventually(name, || fs::metadata(&path).unwrap().mode() & 0o7777 == 0o777);
    }
}
