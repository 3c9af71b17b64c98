//! Reading and writing, appending, truncating, allocating, `O_DIRECT`.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

use crate::support::{Scratch, eventually};

/// The alignment of buffers, offsets and lengths that satisfies `O_DIRECT` on every file system.
const ALIGNMENT: usize = 4096;

fn read_write(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn direct(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// The aligned part of a buffer, for `O_DIRECT`.
fn aligned(buffer: &mut [u8], length: usize) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(ALIGNMENT);
    &mut buffer[skip..skip + length]
}

fn shell(script: &str, directory: &Path) -> Child {
    Command::new("sh").args(["-ec", script]).current_dir(directory).spawn().unwrap()
}

#[test]
fn what_was_written_is_read_across_blocks_pages_and_requests() {
    let dir = Scratch::new();
    let file = read_write(&dir.join("file"));
    let data = pattern(3_000_001, 1);
    file.write_all_at(&data, 4095).unwrap();
    let mut back = vec![1; data.len()];
    file.read_exact_at(&mut back, 4095).unwrap();
    assert!(back == data);
    let mut head = [1; 4095];
    file.read_exact_at(&mut head, 0).unwrap();
    assert_eq!(head, [0; 4095]);
    assert_eq!(file.metadata().unwrap().len(), 4095 + 3_000_001);
    assert_eq!(file.read_at(&mut back, 4095 + 3_000_001).unwrap(), 0);
}

#[test]
fn unlinked_file_stays_readable_through_its_descriptor() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let mut file = read_write(&path);
    file.write_all(b"before").unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!path.exists());
    file.write_all(b" and after").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before and after");
    assert_eq!(file.metadata().unwrap().nlink(), 0);
}

#[test]
fn append_from_two_processes_loses_nothing() {
    let dir = Scratch::new();
    let script = |name: &str| {
        format!("exec 3>>log; i=0; while [ $i -lt 2000 ]; do echo {name}-$i >&3; i=$((i+1)); done")
    };
    let mut children = [shell(&script("left"), dir.path()), shell(&script("right"), dir.path())];
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let text = fs::read_to_string(dir.join("log")).unwrap();
    for name in ["left", "right"] {
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with(name)).collect();
        let expected: Vec<_> = (0..2000).map(|count| format!("{name}-{count}")).collect();
        assert_eq!(lines, expected);
    }
    assert_eq!(text.lines().count(), 4000);
}

#[test]
fn processes_writing_parts_of_one_file_see_one_another() {
    let dir = Scratch::new();
    let mut children: Vec<_> = (0..4)
        .map(|part| {
            let script = format!(
                "head -c 1000000 /dev/zero | tr '\\0' '{part}' | dd of=shared bs=7000 seek={} \
                 oflag=seek_bytes iflag=fullblock conv=notrunc status=none",
                part * 1_000_000,
            );
            shell(&script, dir.path())
        })
        .collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let data = fs::read(dir.join("shared")).unwrap();
    assert_eq!(data.len(), 4_000_000);
    for (part, bytes) in (b'0'..).zip(data.chunks(1_000_000)) {
        assert!(bytes.iter().all(|&byte| byte == part));
    }
}

#[test]
fn a_hole_reads_as_zeros_and_takes_no_memory() {
    let dir = Scratch::new();
    let file = read_write(&dir.join("file"));
    file.write_all_at(b"end", 8 << 20).unwrap();
    let mut hole = vec![1; 1 << 20];
    file.read_exact_at(&mut hole, 3 << 20).unwrap();
    assert!(hole.iter().all(|&byte| byte == 0));
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), (8 << 20) + 3);
    assert!(metadata.blocks() * 512 < 4 << 20);
}

#[test]
fn a_tail_that_was_cut_off_reads_as_zeros_when_the_file_grows_again() {
    let dir = Scratch::new();
    let file = read_write(&dir.join("file"));
    for (written, cut, grown) in [(20_000, 5_000, 20_000), (8192, 8191, 8193), (3 << 20, 1, 2 << 20)] {
        file.set_len(0).unwrap();
        file.write_all_at(&vec![7; written], 0).unwrap();
        file.set_len(cut).unwrap();
        assert_eq!(file.metadata().unwrap().len(), cut);
        file.set_len(grown).unwrap();
        let mut back = vec![1; grown as usize];
        file.read_exact_at(&mut back, 0).unwrap();
        let (kept, new) = back.split_at(cut as usize);
        assert!(kept.iter().all(|&byte| byte == 7) && new.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn opening_with_truncation_empties_the_file_for_every_process() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let old = read_write(&path);
    old.write_all_at(&[7; 10_000], 0).unwrap();
    drop(File::create(&path).unwrap());
    assert_eq!(old.metadata().unwrap().len(), 0);
    assert_eq!(old.read_at(&mut [0; 10], 0).unwrap(), 0);
    let exclusive = OpenOptions::new().write(true).create_new(true).open(&path);
    assert_eq!(exclusive.unwrap_err().raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn o_direct_reads_what_buffered_wrote_and_the_other_way_round() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let length = 1 << 20;
    let (buffered, direct) = (read_write(&path), direct(&path));
    let mut room = vec![0; length + ALIGNMENT];

    let first = pattern(length, 1);
    buffered.write_all_at(&first, 0).unwrap();
    let back = aligned(&mut room, length);
    direct.read_exact_at(back, 0).unwrap();
    assert!(back == first);

    let second = pattern(length, 2);
    back.copy_from_slice(&second);
    direct.write_all_at(back, 0).unwrap();
    let mut cached = vec![0; length];
    buffered.read_exact_at(&mut cached, 0).unwrap();
    assert!(cached == second);

    direct.write_all_at(back, length as u64).unwrap();
    assert_eq!(buffered.metadata().unwrap().len(), 2 * length as u64);
}

#[test]
fn allocating_takes_memory_and_lengthens_the_file_only_if_asked() {
    let dir = Scratch::new();
    let file = read_write(&dir.join("file"));
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 0);
    assert!(metadata.blocks() * 512 >= 1 << 20);
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    assert!(fs::read(dir.join("file")).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn a_punched_or_zeroed_range_reads_as_zeros_and_nothing_else_does() {
    let dir = Scratch::new();
    for (name, flags) in [
        ("punched", FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
        ("zeroed", FallocateFlags::ZERO_RANGE),
    ] {
        let file = read_write(&dir.join(name));
        let mut expected = vec![7; 2 << 20];
        file.write_all_at(&expected, 0).unwrap();
        for range in [1_000..1_100, 8_192..16_384, 500_000..1_900_001] {
            fallocate(&file, flags, range.start as u64, range.len() as u64).unwrap();
            expected[range].fill(0);
            assert!(fs::read(dir.join(name)).unwrap() == expected);
        }
    }
}

#[test]
fn statfs_counts_what_files_take_and_give_back() {
    let dir = Scratch::new();
    let free = || {
        let stat = statvfs(dir.path()).unwrap();
        assert!(stat.f_bavail <= stat.f_blocks);
        stat.f_bavail * stat.f_frsize
    };
    if std::env::var_os("FARPOOL_POSIX_DIR").is_some() {
        return; // other processes write there too
    }
    let before = free();
    fs::write(dir.join("file"), vec![7; 10 << 20]).unwrap();
    // The free memory of nodes is known with a delay of seconds.
    let with_file = before - (12 << 20)..=before - (10 << 20);
    eventually("the file is counted", || with_file.contains(&free()));
    fs::remove_file(dir.join("file")).unwrap();
    eventually("the memory is free again", || free() == before);
}
