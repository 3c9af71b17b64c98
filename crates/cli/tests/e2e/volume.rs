//! Redundancy of a mount: nodes killed under load, rebuilds, scrubs.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{
    Mount, Pool, PoolOptions, assert_complaint, eventually, pattern, read_from_far, run, write_new,
};

const MIB: usize = 1 << 20;
const REDUNDANCY: &str = "user.farpool.redundancy";

fn volume(command: &str, mount: &Mount) -> String {
    let output = run(["volume", command, mount.path().to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

fn state(mount: &Mount) -> Value {
    let output = run(["volume", "status", "--json", mount.path().to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_str(&output.stdout).unwrap()
}

fn chosen(path: &Path) -> String {
    let mut value = [0; 64];
    let bytes = rustix::fs::getxattr(path, REDUNDANCY, &mut value[..]).unwrap();
    String::from_utf8(value[..bytes].to_vec()).unwrap()
}

fn choose(path: &Path, redundancy: &str) -> Result<(), Errno> {
    rustix::fs::setxattr(path, REDUNDANCY, redundancy.as_bytes(), XattrFlags::empty())
}

/// Kills two nodes while a file is written over and over: one, and another after the rebuild.
fn lose_two_nodes_one_after_the_other(redundancy: &str) {
    let mut pool = Pool::start(PoolOptions { nodes: 4, ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, &["--redundancy", redundancy]);
    let (kept, busy) = (mount.file("kept"), mount.file("busy"));
    let data = pattern(8 * MIB + 12_345, 1);
    write_new(&kept, &data).unwrap();
    write_new(&busy, &pattern(4 * MIB, 2)).unwrap();

    let stop = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let file = File::options().write(true).open(&busy).unwrap();
            let mut round = 2;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                file.write_all_at(&pattern(4 * MIB, round), 0).unwrap();
                file.sync_all().unwrap();
            }
            round
        });
        pool.nodes[0].kill();
        assert!(read_from_far(&kept).unwrap() == data, "one lost node loses no data");
        eventually("the loss is noticed", || volume("status", &mount).contains("rebuild     done"));
        volume("rebuild", &mount);
        assert_eq!(state(&mount)["missing_extents"], 0);
        pool.nodes[1].kill();
        assert!(read_from_far(&kept).unwrap() == data, "nor does a second lost node, after the rebuild");
        stop.store(true, Ordering::Relaxed);
        load.join().unwrap()
    });
    assert!(
        read_from_far(&busy).unwrap() == pattern(4 * MIB, last),
        "what was written while nodes died is there"
    );
    assert_eq!(state(&mount)["lost_blocks"], 0);
    mount.unmount();
}

#[test]
fn a_parity_file_survives_a_killed_node_under_load_and_another_after_the_rebuild() {
    lose_two_nodes_one_after_the_other("parity:2");
}

#[test]
fn a_mirrored_file_survives_a_killed_node_under_load_and_another_after_the_rebuild() {
    lose_two_nodes_one_after_the_other("mirror");
}

#[test]
fn a_scrub_reads_every_block_and_finds_nothing_wrong_with_sound_memory() {
    let pool = Pool::start(PoolOptions { nodes: 3, ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, &["--redundancy", "parity:2"]);
    write_new(&mount.file("data"), &pattern(2 * MIB, 1)).unwrap();
    // Eight extents of data in four rows, each with one of parity.
    let said = volume("scrub", &mount);
    assert_eq!(said.trim(), "384 blocks read: 0 wrong, 0 repaired, 0 lost");
    let lines = volume("status", &mount);
    assert!(lines.contains("redundancy  parity:2") && lines.contains("missing     nothing"), "{lines}");
    mount.unmount();
}

/// A mount of `parity:2` on three nodes, with a file of 1.5 MiB: six extents of data in three rows, each with
/// one of parity.
fn three_rows_on_three_nodes() -> (Pool, Mount, PathBuf) {
    let pool = Pool::start(PoolOptions { nodes: 3, ..PoolOptions::default() });
    let mount = Mount::of(&pool, &["--redundancy", "parity:2"]);
    let path = mount.file("data");
    write_new(&path, &pattern(3 * MIB / 2, 1)).unwrap();
    (pool, mount, path)
}

fn lose_the_node(pool: &mut Pool, mount: &Mount, index: usize, missing: u64) {
    pool.nodes[index].kill();
    eventually("the loss is noticed without any read", || state(mount)["missing_extents"] == missing);
}

#[test]
fn a_rebuild_without_enough_nodes_fails_with_the_reason_and_a_new_node_is_used() {
    let (mut pool, mut mount, path) = three_rows_on_three_nodes();
    lose_the_node(&mut pool, &mount, 0, 3);
    let refused = run(["volume", "rebuild", mount.path().to_str().unwrap()]);
    assert_complaint(
        &refused,
        1,
        "rows need 3 nodes with room, there are 2; 3 of 9 extents are still missing",
    );
    let lines = volume("status", &mount);
    assert!(lines.contains("rebuild     waiting: rows need 3 nodes with room, there are 2"), "{lines}");
    assert!(lines.contains("missing     3 of 9 extents, reconstructed from the others"), "{lines}");
    assert_eq!(state(&mount)["rebuild"]["finished"], 0, "no rebuild has completed");
    assert!(read_from_far(&path).unwrap() == pattern(3 * MIB / 2, 1));

    pool.add_node();
    eventually("what is missing is rebuilt", || state(&mount)["missing_extents"] == 0);
    volume("rebuild", &mount);
    let lines = volume("status", &mount);
    assert!(lines.contains("rebuild     done") && lines.contains("lost        nothing"), "{lines}");
    mount.unmount();
}

#[test]
fn one_lost_node_more_than_a_file_survives_is_reported_and_reading_is_an_error() {
    let (mut pool, mut mount, path) = three_rows_on_three_nodes();
    lose_the_node(&mut pool, &mount, 0, 3);
    lose_the_node(&mut pool, &mount, 1, 6);
    // Each of the three rows has lost two extents, at most one of them the parity.
    let lost = state(&mount)["lost_extents"].as_u64().unwrap();
    assert!((3..=6).contains(&lost), "{lost}");
    let lines = volume("status", &mount);
    assert!(
        lines.contains("missing     6 of 9 extents\n"),
        "nothing can be reconstructed from the others: {lines}"
    );
    assert!(lines.contains(&format!("lost        {lost} extents: their data are lost for good")), "{lines}");
    File::open(&path).unwrap(); // only reading it is an error
    let read = read_from_far(&path).map_err(|error| error.raw_os_error());
    assert_eq!(read, Err(Some(Errno::IO.raw_os_error())));
    let said = volume("scrub", &mount);
    let lost_blocks = lost * 32;
    let told = format!("96 of 288 blocks read, 192 unreadable: 0 wrong, 0 repaired, {lost_blocks} lost");
    assert_eq!(said.trim(), told);

    pool.add_node();
    pool.add_node();
    eventually("no extent is missing any more", || {
        let state = state(&mount);
        state["missing_extents"] == 0 && state["to_rebuild"] == false && state["rebuild"]["finished"] == 1
    });
    assert!(fs::read(&path).is_err(), "what was lost stays lost");
    mount.unmount();
}

#[test]
fn a_mount_that_needs_more_nodes_than_there_are_warns_and_starts() {
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &["--redundancy", "parity:4", "--rebuild-rate", "1GiB"]);
    let mut file = File::create(mount.file("data")).unwrap();
    let refused = file.write_all(&pattern(2 * MIB, 1)).and_then(|()| file.sync_all());
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    drop(file);
    let said = mount.unmount().stderr;
    let count = pool.nodes.len();
    assert!(said.contains(&format!("parity:4 needs 5 nodes and the pool has {count}")), "{said}");
}

#[test]
fn a_node_that_is_slow_to_answer_is_not_waited_for() {
    let pool = Pool::start(PoolOptions { nodes: 3, ..PoolOptions::default() });
    // Over TCP, as to another machine: a node of this host is reached without asking it anything.
    let mut mount = Mount::of(&pool, &["--redundancy", "parity:2", "--transport", "tcp"]);
    let path = mount.file("data");
    let data = pattern(2 * MIB + 12_345, 1);
    write_new(&path, &data).unwrap();
    pool.nodes[0].signal(Signal::STOP);
    assert!(read_from_far(&path).unwrap() == data, "reconstructed from the others");
    // The read does not wait until the node is given up, which takes seconds.
    assert!(state(&mount)["hedged_reads"].as_u64() > Some(0), "{}", state(&mount));
    pool.nodes[0].signal(Signal::CONT);
    assert!(read_from_far(&path).unwrap() == data, "read from it, or from its replacement");
    assert!(volume("status", &mount).contains("reads done without them"));
    assert_eq!(state(&mount)["lost_blocks"], 0);
    mount.unmount();
}

#[test]
fn redundancy_is_chosen_for_a_directory_or_an_empty_file_and_stays_once_there_is_data() {
    let pool = Pool::start(PoolOptions::default());
    let mut mount = Mount::of(&pool, &[]);
    let plain = mount.file("plain");
    write_new(&plain, b"data").unwrap();
    assert_eq!(chosen(&plain), "stripe");
    assert_eq!(choose(&plain, "mirror"), Err(Errno::BUSY), "it has data");

    let directory = mount.file("directory");
    fs::create_dir(&directory).unwrap();
    choose(&directory, "mirror").unwrap();
    assert_eq!(choose(&directory, "raid7"), Err(Errno::INVAL));
    let misspelt =
        rustix::fs::setxattr(&directory, "user.farpool.redundency", b"mirror", XattrFlags::empty());
    assert_eq!(misspelt, Err(Errno::INVAL));
    fs::create_dir(directory.join("deeper")).unwrap();
    let inherits = directory.join("deeper/file");
    write_new(&inherits, &pattern(MIB, 1)).unwrap();
    assert_eq!(chosen(&inherits), "mirror");
    assert_eq!(state(&mount)["redundant_files"], 1);

    let empty = mount.file("empty");
    File::create(&empty).unwrap();
    choose(&empty, "parity:3").unwrap();
    assert_eq!(chosen(&empty), "parity:3");
    let error = fs::write(&empty, pattern(MIB, 1)).and_then(|()| File::open(&empty)?.sync_all());
    assert!(error.is_err(), "four nodes are needed and there are two");
    mount.unmount();
}

#[test]
fn a_mount_whose_daemon_is_stopped_is_reported_and_not_waited_for() {
    let pool = Pool::start(PoolOptions { nodes: 1, ..PoolOptions::default() });
    let mut mount = Mount::of(&pool, &[]);
    mount.process.signal(Signal::STOP);
    let asked = run(["volume", "status", mount.path().to_str().unwrap()]);
    mount.process.signal(Signal::CONT);
    assert_complaint(&asked, 1, "kill -CONT");
    volume("status", &mount);
    mount.unmount();
}

#[test]
fn volume_of_a_directory_that_is_no_mount_names_the_fix() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(["volume", "status", directory.path().to_str().unwrap()]);
    assert_complaint(&output, 1, "farpool mount");
}

#[test]
fn revoking_all_leases_of_a_mirrored_file_without_room_elsewhere_stops_after_one_node_and_loses_nothing() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "16MiB", ..PoolOptions::default() });
    let mount = Mount::of(&pool, &["--redundancy", "mirror"]);
    let data = pattern(12 * MIB, 1);
    write_new(&mount.file("data"), &data).unwrap();
    let listed = run(["leases", "list", "--json", "--broker", &pool.address]).stdout;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let owner = listed["leases"][0]["owner"].as_str().unwrap().to_owned();
    let revoked = run(["leases", "revoke", &owner, "32MiB", "--grace", "0", "--broker", &pool.address]);
    assert!(!revoked.status.success() && revoked.stderr.contains("make room first"), "{revoked:?}");
    assert!(read_from_far(&mount.file("data")).unwrap() == data);
    volume("rebuild", &mount); // the memory that was taken back is free again
    assert!(read_from_far(&mount.file("data")).unwrap() == data);
}
