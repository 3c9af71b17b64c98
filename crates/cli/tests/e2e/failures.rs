//! What happens to files when a broker or a node dies, or the pool is full.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::support::{
    Mount, PATIENCE, Pool, PoolOptions, eventually, pattern, read_from_far, within, write_new,
};

const MIB: usize = 1 << 20;
/// The pool gives up a lost node within 5 s; as much again is for a busy machine.
const LOST_NODE_DEADLINE: Duration = Duration::from_secs(10);

#[test]
fn files_go_on_without_the_broker_and_grow_again_after_its_restart() {
    let mut pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &[]);
    let first = pattern(4 * MIB, 1);
    write_new(&mount.file("first"), &first).unwrap();
    pool.kill_broker();

    // Longer than a lease lasts: owners renew with the nodes.
    let killed = Instant::now();
    let mut file = OpenOptions::new().read(true).write(true).open(mount.file("first")).unwrap();
    let mut round = 0;
    within(PATIENCE, "the term of the first leases has passed", || {
        round += 1;
        let data = pattern(MIB, round);
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&data).unwrap();
        file.sync_all().unwrap();
        assert!(fs::read(mount.file("first")).unwrap() == [&data, &first[MIB..]].concat(), "round {round}");
        killed.elapsed() > Duration::from_secs(15)
    });

    // More than was leased needs a broker.
    let large = pattern(64 * MIB, 2);
    let error = write_new(&mount.file("large"), &large).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    fs::remove_file(mount.file("large")).unwrap();

    pool.restart_broker();
    eventually("files grow again", || {
        let grown = write_new(&mount.file("large"), &large);
        if grown.is_err() {
            fs::remove_file(mount.file("large")).unwrap();
        }
        grown.is_ok()
    });
    assert!(fs::read(mount.file("large")).unwrap() == large);
    mount.unmount();
}

fn lose_a_node(transport: &str) {
    let mut pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--transport", transport]);
    let data = pattern(8 * MIB, 1);
    write_new(&mount.file("data"), &data).unwrap();
    pool.nodes[0].kill();
    // Shared memory outlives its node until the loss is noticed; what is read until then is right.
    within(LOST_NODE_DEADLINE, "reading gives an I/O error", || match read_from_far(&mount.file("data")) {
        Ok(bytes) => {
            assert!(bytes == data);
            false
        }
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()), "{error}");
            true
        }
    });
    fs::remove_file(mount.file("data")).unwrap();
    eventually("files go to the remaining node", || write_new(&mount.file("new"), &data).is_ok());
    assert!(read_from_far(&mount.file("new")).unwrap() == data);
    mount.unmount();
}

#[test]
fn lost_node_over_shared_memory_is_an_io_error_in_time_and_the_mount_keeps_working() {
    lose_a_node("shm");
}

#[test]
fn lost_node_over_tcp_is_an_io_error_in_time_and_the_mount_keeps_working() {
    lose_a_node("tcp");
}

#[test]
fn full_pool_gives_enospc_and_space_comes_back_after_unlink() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "16MiB", ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, &[]);
    let half = pattern(12 * MIB, 1);
    write_new(&mount.file("keep"), &half).unwrap();
    // The pool's free memory is as last reported: for a moment a region that has just been lent counts twice.
    eventually("the mount has the size of the pool", || {
        let capacity = rustix::fs::statvfs(mount.path()).unwrap();
        capacity.f_blocks * capacity.f_frsize == 32 * MIB as u64
            && capacity.f_bavail * capacity.f_frsize <= 20 * MIB as u64
    });
    let error = write_new(&mount.file("large"), &pattern(32 * MIB, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(fs::read(mount.file("keep")).unwrap() == half, "other files are as they were");
    fs::remove_file(mount.file("large")).unwrap();
    let again = pattern(16 * MIB, 3);
    write_new(&mount.file("again"), &again).unwrap();
    assert!(fs::read(mount.file("again")).unwrap() == again);
    assert!(fs::read(mount.file("keep")).unwrap() == half);
    mount.unmount();
    eventually("all regions are free again", || pool.regions_free() == pool.regions_total());
}

#[test]
fn a_mount_that_is_full_says_so_once_in_ten_seconds_however_much_is_written() {
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--limit", "8MiB"]);
    let began = Instant::now();
    for round in 0..6 {
        write_new(&mount.file("large"), &pattern(24 * MIB, round)).unwrap_err();
        fs::remove_file(mount.file("large")).unwrap();
    }
    let said = mount.unmount().stderr;
    let lines = said.matches("could not be stored").count() as u64;
    assert!((1..=1 + began.elapsed().as_secs() / 10).contains(&lines), "{said}");
}

#[test]
fn limit_of_a_mount_gives_enospc_while_the_pool_has_more() {
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--limit", "8MiB"]);
    write_new(&mount.file("fits"), &pattern(4 * MIB, 1)).unwrap();
    let error = write_new(&mount.file("large"), &pattern(32 * MIB, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(pool.regions_free() >= pool.regions_total() - 2);
    mount.unmount();
}
