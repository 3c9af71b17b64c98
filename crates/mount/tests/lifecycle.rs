//! Mounts: how they begin, fill up, and end.

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use farpool_mount::{MountError, check_mountpoint};
use rustix::mount::{UnmountFlags, unmount};

use crate::support::{TestMount, eventually, is_mounted};

const MEMORY_BYTES: u64 = 16 << 20;

#[test]
fn stopped_mount_is_gone_even_while_files_are_open() {
    let mut mount = TestMount::start(MEMORY_BYTES);
    let path = mount.path().join("file");
    fs::write(&path, "x").unwrap();
    let open = File::options().read(true).write(true).open(&path).unwrap();
    mount.stop();
    assert!(mount.wait().success());
    assert!(!is_mounted(mount.path()));
    eventually("writing gives an error", || open.write_at(b"y", 0).is_err());
    assert!(open.sync_all().is_err());
}

#[test]
fn mount_that_another_process_unmounts_ends_without_an_error() {
    let mut mount = TestMount::start(MEMORY_BYTES);
    unmount(mount.path(), UnmountFlags::empty()).unwrap();
    assert!(mount.wait().success());
}

#[test]
fn killed_daemon_leaves_no_mount_behind_and_open_files_give_errors() {
    let mut mount = TestMount::start(MEMORY_BYTES);
    let path = mount.path().join("file");
    fs::write(&path, "x").unwrap();
    let open = File::options().write(true).open(&path).unwrap();
    mount.kill();
    mount.wait();
    eventually("the watcher has removed the mount", || !is_mounted(mount.path()));
    eventually("writing gives an error", || {
        open.write_at(b"y", 0).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    });
    check_mountpoint(mount.path()).unwrap();
}

#[test]
fn second_mount_on_the_same_directory_is_refused() {
    let mount = TestMount::start(MEMORY_BYTES);
    let refused = check_mountpoint(mount.path()).unwrap_err();
    assert!(matches!(refused, MountError::AlreadyMounted { .. }), "{refused}");
    assert!(refused.to_string().contains("umount"));
}

#[test]
fn full_pool_gives_enospc_from_fsync_and_later_writes_until_space_is_freed() {
    let mount = TestMount::start(MEMORY_BYTES);
    let path = mount.path().join("file");
    let mut file = File::create(&path).unwrap();
    let chunk = vec![7; 1 << 20];
    let mut written = 0;
    // The kernel accepts some data before it finds that there is no room for it.
    let refused = loop {
        match file.write_all(&chunk) {
            Ok(()) => written += chunk.len() as u64,
            Err(error) => break Some(error),
        }
        if written == 2 * MEMORY_BYTES {
            break None;
        }
    };
    assert!(written >= MEMORY_BYTES / 2, "full after {written} bytes");
    let synced = file.sync_all().expect_err("not all was stored");
    for error in refused.into_iter().chain([synced, file.write_all(&chunk).unwrap_err()]) {
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }
    let mut back = vec![0; chunk.len()];
    File::open(&path).unwrap().read_exact(&mut back).unwrap();
    assert!(back == chunk);
    file.set_len(0).unwrap();
    file.write_all(b"an emptied file is a new beginning").unwrap();
    file.sync_all().unwrap();
    drop(file);
    fs::remove_file(&path).unwrap();
    eventually("there is room again", || fs::write(&path, &chunk).is_ok());
}
