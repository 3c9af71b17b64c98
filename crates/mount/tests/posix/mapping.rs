//! Files mapped into memory.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use rustix::mm::MapFlags;

use crate::support::Scratch;
use crate::support::mapped::Mapped;

fn file_of(path: &Path, length: u64) -> File {
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(length).unwrap();
    file
}

#[test]
fn mmap_writes_are_seen_by_read_and_writes_by_mmap() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = file_of(&path, 1 << 20);
    let mapped = Mapped::new(&file, 1 << 20, MapFlags::SHARED);
    mapped.write(100_000, b"through the mapping");
    let mut back = [0; 19];
    file.read_exact_at(&mut back, 100_000).unwrap();
    assert_eq!(&back, b"through the mapping");
    file.write_all_at(b"through the descriptor", 200_000).unwrap();
    assert_eq!(mapped.read(200_000, 22), b"through the descriptor");
}

#[test]
fn mmap_writes_reach_far_memory_once_synced() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = file_of(&path, 1 << 20);
    let mapped = Mapped::new(&file, 1 << 20, MapFlags::SHARED);
    mapped.write(8192, &[9; 4096]);
    mapped.sync();
    // Direct I/O reads from the daemon, not from the page cache.
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let mut room = vec![0; 3 * 4096];
    let skip = room.as_ptr().align_offset(4096);
    let page = &mut room[skip..skip + 4096];
    direct.read_exact_at(page, 8192).unwrap();
    assert!(page.iter().all(|&byte| byte == 9));
}

#[test]
fn mmap_writes_survive_closing_and_unmapping() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = file_of(&path, 3 << 20);
    let mapped = Mapped::new(&file, 3 << 20, MapFlags::SHARED);
    drop(file);
    mapped.write(2 << 20, &[5; 300_000]);
    drop(mapped);
    let output = Command::new("tail").args(["-c", "1048576"]).arg(&path).output().unwrap().stdout;
    assert!(output[..300_000].iter().all(|&byte| byte == 5));
    assert!(output[300_000..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_private_mapping_changes_nothing() {
    let dir = Scratch::new();
    let file = file_of(&dir.join("file"), 8192);
    file.write_all_at(b"public", 0).unwrap();
    let mapped = Mapped::new(&file, 8192, MapFlags::PRIVATE);
    assert_eq!(mapped.read(0, 6), b"public");
    mapped.write(0, b"secret");
    let mut back = [0; 6];
    file.read_exact_at(&mut back, 0).unwrap();
    assert_eq!(&back, b"public");
}

#[test]
fn an_unlinked_file_lives_on_in_its_mapping() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = file_of(&path, 1 << 20);
    file.write_all_at(&[3; 1 << 20], 0).unwrap();
    let mapped = Mapped::new(&file, 1 << 20, MapFlags::SHARED);
    drop(file);
    std::fs::remove_file(&path).unwrap();
    mapped.write(0, &[4; 4096]);
    mapped.sync();
    assert_eq!(mapped.read(4000, 200), [[4; 96].as_slice(), &[3; 104]].concat());
}
