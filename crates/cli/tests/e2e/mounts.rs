//! A mount leaves nothing behind, however its daemon ends.

use std::fs::{self, File};
use std::io::Read;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::{Mount, Pool, PoolOptions, eventually, is_mounted, within};

/// From the death of a daemon to the end of its mount.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);

fn pool() -> Pool {
    Pool::start(PoolOptions { nodes: 2, memory: "16MiB", ..PoolOptions::default() })
}

#[test]
fn terminated_mount_is_gone_and_gives_its_memory_back() {
    let pool = pool();
    for signal in [Signal::TERM, Signal::INT] {
        let mut mount = Mount::of(&pool, &[]);
        fs::write(mount.file("data"), [7; 1 << 20]).unwrap();
        assert!(pool.regions_free() < pool.regions_total());
        mount.process.signal(signal);
        let output = mount.process.wait();
        assert!(output.status.success(), "{output:?}");
        assert!(!is_mounted(mount.path()));
        eventually("all regions are free again", || pool.regions_free() == pool.regions_total());
    }
}

#[test]
fn terminated_mount_is_removed_even_while_a_file_is_open() {
    let pool = pool();
    let mut mount = Mount::of(&pool, &[]);
    fs::write(mount.file("data"), [7; 4096]).unwrap();
    let mut open = File::open(mount.file("data")).unwrap();
    mount.process.signal(Signal::TERM);
    mount.process.wait();
    assert!(!is_mounted(mount.path()));
    let mut bytes = Vec::new();
    // Either an error, or the right bytes from the kernel's cache.
    if open.read_to_end(&mut bytes).is_ok() {
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}

#[test]
fn killed_mount_is_removed_and_another_mount_can_use_the_directory() {
    let pool = pool();
    let mut mount = Mount::of(&pool, &[]);
    fs::write(mount.file("data"), [7; 4096]).unwrap();
    let open = File::open(mount.file("data")).unwrap();
    mount.process.kill();
    within(UNMOUNT_DEADLINE, "the mount is gone", || !is_mounted(mount.path()));
    drop(open);
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);

    let command =
        crate::support::farpool(["mount", mount.path().to_str().unwrap(), "--broker", &pool.address]);
    let mut next = Mount::with(command, mount.path().to_owned());
    assert_eq!(fs::read_dir(next.path()).unwrap().count(), 0);
    next.unmount();
}
