//! `farpool mount --overflow`: a full pool costs speed, and no errors.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::preload::compile;
use crate::support::{
    Mount, Pool, PoolOptions, assert_complaint, built, eventually, farpool, pattern, read_from_far, run,
    run_command, write_new,
};

const MIB: usize = 1 << 20;

/// A folder on a disk.
fn disk() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn pool(nodes: u32, memory: &'static str) -> Pool {
    Pool::start(PoolOptions { nodes, memory, ..PoolOptions::default() })
}

fn in_directory(mount: &Mount) -> u64 {
    status_of(mount, "overflow_bytes")
}

fn status_of(mount: &Mount, figure: &str) -> u64 {
    let output = run(["volume", "status", "--json", mount.path().to_str().unwrap()]);
    let state: Value = serde_json::from_str(&output.stdout).unwrap();
    state[figure].as_u64().unwrap()
}

/// Bytes of a file system: all, and free.
fn size_of(dir: &Path) -> (u64, u64) {
    let found = rustix::fs::statvfs(dir).unwrap();
    (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
}

fn overflow<'a>(dir: &'a TempDir, more: &[&'a str]) -> Vec<&'a str> {
    ["--overflow", dir.path().to_str().unwrap()].iter().chain(more).copied().collect()
}

#[test]
fn a_file_larger_than_the_pool_is_written_and_moves_into_the_pool_when_a_node_joins() {
    let (mut pool, dir) = (pool(1, "32MiB"), disk());
    let mount = Mount::of(&pool, &overflow(&dir, &["--accelerate"]));
    mount.process.await_complaint("not encrypted");
    let data = pattern(48 * MIB, 1);
    write_new(&mount.file("big"), &data).unwrap();
    assert!(in_directory(&mount) >= 16 * MIB as u64);
    assert!(read_from_far(&mount.file("big")).unwrap() == data);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the files there have no names");
    pool.add_node();
    eventually("all of it has moved to the new node", || in_directory(&mount) == 0);
    assert!(read_from_far(&mount.file("big")).unwrap() == data);
}

#[test]
fn programs_that_work_on_a_mount_s_files_directly_find_what_lies_in_the_directory() {
    let (pool, dir) = (pool(1, "16MiB"), disk());
    let mount = Mount::of(&pool, &overflow(&dir, &["--accelerate"]));
    let (big, copy) = (mount.file("big"), mount.file("copy"));
    let data = pattern(24 * MIB, 1);
    write_new(&big, &data).unwrap();
    let mut copying = farpool(["run", "--", "cp", big.to_str().unwrap(), copy.to_str().unwrap()]);
    copying.env("FARPOOL_PRELOAD", built("libfarpool_preload.so"));
    let output = run_command(copying);
    assert!(output.status.success(), "{output:?}");
    assert!(read_from_far(&copy).unwrap() == data);
}

/// A program that reads a file by position, inverts each bit, and writes it back by position.
const INVERTS: &str = "
    #include <fcntl.h>
    #include <unistd.h>
    int main(int count, char **arguments) {
        unsigned char page[8192];
        int fd = open(arguments[count - 1], O_RDWR);
        for (long at = 0, bytes; (bytes = pread(fd, page, sizeof page, at)) > 0; at += bytes) {
            for (long place = 0; place < bytes; place++) page[place] ^= 255;
            if (pwrite(fd, page, bytes, at) != bytes) return 1;
        }
        return close(fd);
    }";

#[test]
fn a_program_under_farpool_run_reads_and_writes_the_directory_without_the_daemon() {
    let (pool, dir) = (pool(1, "16MiB"), disk());
    let mount = Mount::of(&pool, &overflow(&dir, &["--accelerate"]));
    let program = dir.path().join("inverts");
    compile(dir.path(), INVERTS, &[], &program);
    let (big, mut data) = (mount.file("big"), pattern(24 * MIB, 1));
    write_new(&big, &data).unwrap();
    assert!(in_directory(&mount) >= 8 * MIB as u64);
    let mut inverting = farpool(["run", "--", program.to_str().unwrap(), big.to_str().unwrap()]);
    inverting.env("FARPOOL_PRELOAD", built("libfarpool_preload.so"));
    let output = run_command(inverting);
    assert!(output.status.success(), "{output:?}");
    data.iter_mut().for_each(|byte| *byte ^= 255);
    assert!(read_from_far(&big).unwrap() == data);
    for figure in ["direct_read_bytes", "direct_written_bytes"] {
        let bytes = status_of(&mount, figure);
        assert!(bytes > 23 * MIB as u64, "{figure}: {bytes}");
    }
}

#[test]
fn both_limits_hold_and_df_shows_their_sum() {
    let (pool, dir) = (pool(1, "32MiB"), disk());
    let limits = ["--limit", "16MiB", "--overflow-limit", "9MiB"];
    let mut mount = Mount::of(&pool, &overflow(&dir, &limits));
    assert_eq!(size_of(mount.path()), (24 * MIB as u64, 24 * MIB as u64), "whole regions of 4 MiB");
    let data = pattern(24 * MIB, 1);
    write_new(&mount.file("fits"), &data).unwrap();
    assert_eq!(size_of(mount.path()), (24 * MIB as u64, 0));
    let full = write_new(&mount.file("more"), &data).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    assert!(read_from_far(&mount.file("fits")).unwrap() == data);
    fs::remove_file(mount.file("fits")).unwrap();
    write_new(&mount.file("more"), &data).unwrap();
    let output = mount.unmount();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn memory_that_goes_back_to_its_machine_moves_into_the_directory() {
    let (pool, dir) = (pool(2, "32MiB"), disk());
    let mount = Mount::of(&pool, &overflow(&dir, &[]));
    let data = pattern(60 * MIB, 1);
    write_new(&mount.file("big"), &data).unwrap();
    let status = pool.status();
    let node = status["nodes"][0]["id"]
        .as_str()
        .map(str::to_owned)
        .unwrap_or_else(|| panic!("the status names no node: {status}"));
    let shrunk = run(["node", "shrink", "--to", "0", "--node", &node, "--broker", &pool.address]);
    assert!(shrunk.status.success(), "{shrunk:?}");
    assert!(in_directory(&mount) >= 24 * MIB as u64);
    assert!(read_from_far(&mount.file("big")).unwrap() == data);
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_with_the_fix() {
    let pool = pool(1, "16MiB");
    let parent = tempfile::tempdir().unwrap();
    let mount = |options: &[&str]| {
        let dir = parent.path().to_str().unwrap();
        run(["mount", dir, "--broker", &pool.address].iter().chain(options).copied())
    };
    assert_complaint(&mount(&["--overflow", "/dev/shm"]), 1, "name a directory on a disk");
    assert_complaint(&mount(&["--overflow", "/proc"]), 1, "name a directory on ext4");
    assert_complaint(&mount(&["--overflow", "/nowhere"]), 1, "No such file");
    assert_complaint(&mount(&["--overflow-limit", "1GiB"]), 2, "--overflow");
}
