//! Directories, names, links, permissions, times.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::support::Scratch;

/// An ordinary user (Debian's `nobody`).
const NOBODY: u32 = 65534;

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn rename_over_an_open_file_keeps_the_old_data_readable() {
    let dir = Scratch::new();
    fs::write(dir.join("old"), "old data").unwrap();
    fs::write(dir.join("new"), "new data").unwrap();
    let mut open = File::open(dir.join("old")).unwrap();
    fs::rename(dir.join("new"), dir.join("old")).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old data");
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read_to_string(dir.join("old")).unwrap(), "new data");
    assert_eq!(names(dir.path()), BTreeSet::from(["old".into()]));
}

#[test]
fn renames_that_must_not_replace_or_that_exchange_do_so() {
    let dir = Scratch::new();
    let rename = |from: &str, to: &str, flags| -> io::Result<()> {
        Ok(renameat_with(CWD, dir.join(from), CWD, dir.join(to), flags)?)
    };
    fs::write(dir.join("a"), "a").unwrap();
    fs::create_dir(dir.join("d")).unwrap();
    assert_eq!(errno(rename("a", "d", RenameFlags::NOREPLACE)), libc::EEXIST);
    rename("a", "d", RenameFlags::EXCHANGE).unwrap();
    assert!(dir.join("a").is_dir());
    assert_eq!(fs::read_to_string(dir.join("d")).unwrap(), "a");
    rename("d", "e", RenameFlags::NOREPLACE).unwrap();
    assert_eq!(errno(rename("a", "missing", RenameFlags::EXCHANGE)), libc::ENOENT);
    assert_eq!(names(dir.path()), BTreeSet::from(["a".into(), "e".into()]));
}

#[test]
fn directories_move_with_their_contents_and_go_only_when_empty() {
    let dir = Scratch::new();
    let links = |name: &str| fs::metadata(dir.join(name)).unwrap().nlink();
    fs::create_dir_all(dir.join("a/b/c")).unwrap();
    fs::create_dir(dir.join("x")).unwrap();
    fs::write(dir.join("a/b/file"), "contents").unwrap();
    fs::rename(dir.join("a/b"), dir.join("x/b")).unwrap();
    assert_eq!(fs::read_to_string(dir.join("x/b/file")).unwrap(), "contents");
    assert_eq!(errno(fs::remove_dir(dir.join("x/b"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_dir(dir.join("x/b/file"))), libc::ENOTDIR);
    assert!(matches!(errno(fs::remove_file(dir.join("x/b/c"))), libc::EISDIR | libc::EPERM));
    assert_eq!(errno(fs::rename(dir.join("x"), dir.join("x/b/inside"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(dir.join("a"), dir.join("x"))), libc::ENOTEMPTY);
    fs::rename(dir.join("x"), dir.join("a")).unwrap();
    assert_eq!(fs::read_to_string(dir.join("a/b/file")).unwrap(), "contents");
    if links("a") > 1 {
        // Some file systems do not count the links of directories.
        assert_eq!((links("a"), links("a/b")), (3, 3));
    }
    fs::remove_dir_all(dir.join("a")).unwrap();
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_large_directory_lists_every_file_once_while_others_come_and_go() {
    let dir = Scratch::new();
    for count in 0..3000 {
        File::create(dir.join(&format!("stays-{count}"))).unwrap();
    }
    let mut seen = BTreeSet::new();
    for (count, entry) in fs::read_dir(dir.path()).unwrap().enumerate() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(seen.insert(name.clone()) || name.starts_with("passes"), "{name} twice");
        if count % 10 == 0 && count < 3000 {
            File::create(dir.join(&format!("passes-{count}"))).unwrap();
            fs::remove_file(dir.join(&format!("passes-{count}"))).unwrap();
        }
    }
    let stayed = seen.iter().filter(|name| name.starts_with("stays")).count();
    assert_eq!(stayed, 3000);
}

#[test]
fn hard_links_are_one_file() {
    let dir = Scratch::new();
    fs::write(dir.join("a"), "one").unwrap();
    fs::hard_link(dir.join("a"), dir.join("b")).unwrap();
    fs::write(dir.join("b"), "another").unwrap();
    assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "another");
    let (a, b) = (fs::metadata(dir.join("a")).unwrap(), fs::metadata(dir.join("b")).unwrap());
    assert_eq!((a.ino(), a.nlink(), a.len()), (b.ino(), 2, 7));
    fs::remove_file(dir.join("a")).unwrap();
    assert_eq!(fs::metadata(dir.join("b")).unwrap().nlink(), 1);
    assert_eq!(fs::read_to_string(dir.join("b")).unwrap(), "another");
    assert_eq!(errno(fs::hard_link(dir.path(), dir.join("c"))), libc::EPERM);
}

#[test]
fn symbolic_links_lead_to_their_target() {
    let dir = Scratch::new();
    fs::create_dir(dir.join("d")).unwrap();
    fs::write(dir.join("d/file"), "through a link").unwrap();
    symlink("d/file", dir.join("link")).unwrap();
    assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("d/file"));
    assert_eq!(fs::read_to_string(dir.join("link")).unwrap(), "through a link");
    assert_eq!(fs::symlink_metadata(dir.join("link")).unwrap().len(), 6);
    symlink("loop", dir.join("loop")).unwrap();
    assert_eq!(errno(File::open(dir.join("loop"))), libc::ELOOP);
}

#[test]
fn sockets_and_pipes_work_by_their_names() {
    let dir = Scratch::new();
    let listener = UnixListener::bind(dir.join("socket")).unwrap();
    let client = UnixStream::connect(dir.join("socket")).unwrap();
    drop((listener.accept().unwrap(), client));
    let status = Command::new("mkfifo").arg(dir.join("pipe")).status().unwrap();
    assert!(status.success());
    let script = "echo through > pipe & read line < pipe; [ \"$line\" = through ]";
    assert!(Command::new("sh").args(["-c", script]).current_dir(dir.path()).status().unwrap().success());
}

#[test]
fn names_are_limited_to_255_bytes() {
    let dir = Scratch::new();
    let longest = "x".repeat(255);
    File::create(dir.join(&longest)).unwrap();
    assert_eq!(names(dir.path()), BTreeSet::from([longest]));
    assert_eq!(errno(File::create(dir.join(&"x".repeat(256)))), libc::ENAMETOOLONG);
}

#[test]
fn mode_owner_and_times_are_kept_and_writing_moves_the_times() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = File::create(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4711)).unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o4711);
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    file.set_times(fs::FileTimes::new().set_accessed(then).set_modified(then)).unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.accessed().unwrap(), metadata.modified().unwrap()), (then, then));
    fs::write(&path, "x").unwrap();
    assert!(file.metadata().unwrap().modified().unwrap() > then);
    if rustix::process::geteuid().is_root() {
        chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (NOBODY, NOBODY));
        assert_eq!(metadata.mode() & 0o7777, 0o711, "a new owner must not get the set-user-id bit");
    }
}

#[test]
fn creating_and_removing_moves_the_times_of_the_directory() {
    let dir = Scratch::new();
    fs::create_dir(dir.join("d")).unwrap();
    let modified = || fs::metadata(dir.join("d")).unwrap().modified().unwrap();
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    for change in [|at: &Path| drop(File::create(at).unwrap()), |at: &Path| fs::remove_file(at).unwrap()] {
        let times = fs::FileTimes::new().set_modified(long_ago);
        File::open(dir.join("d")).unwrap().set_times(times).unwrap();
        assert_eq!(modified(), long_ago);
        change(&dir.join("d/file"));
        assert!(modified() > long_ago);
    }
}

#[test]
fn permissions_keep_other_users_out() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can act as another user
    }
    let dir = Scratch::new();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(dir.join("secret"), "x").unwrap();
    fs::set_permissions(dir.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(dir.join("open"), "x").unwrap();
    fs::set_permissions(dir.join("open"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(dir.join("theirs")).unwrap();
    chown(dir.join("theirs"), Some(NOBODY), Some(NOBODY)).unwrap();
    let may = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir.path()).stderr(std::process::Stdio::null());
        command.uid(NOBODY).gid(NOBODY).status().unwrap().success()
    };
    assert!(may("cat open > theirs/copy && ls"));
    assert!(!may("cat secret"));
    assert!(!may("echo x >> open"));
    assert!(!may("rm -f secret || touch new"));
    assert_eq!(fs::metadata(dir.join("theirs/copy")).unwrap().uid(), NOBODY);
}
