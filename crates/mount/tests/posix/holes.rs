//! Data and holes: `lseek` with `SEEK_DATA` and `SEEK_HOLE`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::support::Scratch;
use crate::support::mapped::Mapped;

/// Holes and data of at least this size, on multiples of it, are found exactly; finer ones may count as data.
const UNIT: u64 = 64 << 10;

fn new_file(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Where each range of data in a file begins and ends.
fn data_of(file: &File) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    loop {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(error) => {
                assert_eq!(error, Errno::NXIO);
                return found;
            }
        };
        at = seek(file, SeekFrom::Hole(start)).unwrap();
        found.push((start, at));
    }
}

#[test]
fn data_not_yet_written_back_are_no_hole() {
    let dir = Scratch::new();
    let file = new_file(&dir.join("file"));
    for (count, start) in (1..=4).map(|at| (at, at * 3 * UNIT)) {
        file.write_all_at(&vec![1; UNIT as usize], start).unwrap();
        let expected: Vec<_> = (1..=count).map(|at| (at * 3 * UNIT, (at * 3 + 1) * UNIT)).collect();
        assert_eq!(data_of(&file), expected);
    }
    assert_eq!(seek(&file, SeekFrom::Data(0)).unwrap(), 3 * UNIT);
    assert_eq!(seek(&file, SeekFrom::Hole(0)).unwrap(), 0);
}

#[test]
fn data_written_through_a_mapping_are_no_hole() {
    let dir = Scratch::new();
    let path = dir.join("file");
    let file = new_file(&path);
    file.set_len(8 * UNIT).unwrap();
    let mapped = Mapped::new(&file, 8 * UNIT as usize, MapFlags::SHARED);
    drop(file);
    mapped.write(5 * UNIT as usize, &vec![1; UNIT as usize]);
    // Only the mapping keeps the file open for writing.
    let reader = File::open(&path).unwrap();
    assert_eq!(data_of(&reader), [(5 * UNIT, 6 * UNIT)]);
    mapped.write(UNIT as usize, &vec![1; UNIT as usize]);
    assert_eq!(data_of(&reader), [(UNIT, 2 * UNIT), (5 * UNIT, 6 * UNIT)]);
    drop(mapped);
    assert_eq!(data_of(&reader), [(UNIT, 2 * UNIT), (5 * UNIT, 6 * UNIT)]);
}

#[test]
fn a_punched_range_is_a_hole_and_a_file_without_holes_has_one_at_its_end() {
    let dir = Scratch::new();
    let file = new_file(&dir.join("file"));
    file.write_all_at(&vec![1; 8 * UNIT as usize - 5], 0).unwrap();
    assert_eq!(seek(&file, SeekFrom::Hole(3)).unwrap(), 8 * UNIT - 5);
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 2 * UNIT, 3 * UNIT).unwrap();
    assert_eq!(data_of(&file), [(0, 2 * UNIT), (5 * UNIT, 8 * UNIT - 5)]);
    file.set_len(6 * UNIT).unwrap();
    file.set_len(8 * UNIT).unwrap();
    assert_eq!(data_of(&file), [(0, 2 * UNIT), (5 * UNIT, 6 * UNIT)]);
}

#[test]
fn seeking_from_the_end_on_finds_nothing() {
    let dir = Scratch::new();
    let file = new_file(&dir.join("file"));
    let nothing = |at| {
        for from in [SeekFrom::Data(at), SeekFrom::Hole(at)] {
            assert_eq!(seek(&file, from), Err(Errno::NXIO), "{at}");
        }
    };
    nothing(0);
    file.write_all_at(&[1; 100], 0).unwrap();
    assert_eq!(seek(&file, SeekFrom::Data(99)).unwrap(), 99);
    nothing(100);
    nothing(1 << 40);
    file.set_len(4 * UNIT).unwrap();
    assert_eq!(seek(&file, SeekFrom::Data(UNIT)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::Hole(UNIT)).unwrap(), UNIT);
}

#[test]
fn a_sparse_copy_stays_sparse_and_equal() {
    let dir = Scratch::new();
    let file = new_file(&dir.join("sparse"));
    for at in [0, 40, 90] {
        file.write_all_at(b"data", at * UNIT).unwrap();
    }
    file.set_len(128 * UNIT).unwrap();
    let script = "cp --sparse=auto sparse copy && cmp sparse copy";
    assert!(Command::new("sh").args(["-c", script]).current_dir(dir.path()).status().unwrap().success());
    let copy = fs::metadata(dir.join("copy")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&copy) * 512 < 32 * UNIT);
}

#[test]
fn processes_that_seek_in_files_being_written_do_not_wait_for_one_another() {
    let dir = Scratch::new();
    // More writers than a mount of these tests has workers.
    let writers: Vec<_> = (0..12)
        .map(|number| {
            let path = dir.join(&format!("file{number}"));
            std::thread::spawn(move || {
                let file = new_file(&path);
                for round in 0..20 {
                    file.write_all_at(&[1; 100], 2 * round * UNIT).unwrap();
                    assert_eq!(seek(&file, SeekFrom::Data(2 * round * UNIT)).unwrap(), 2 * round * UNIT);
                    let end = seek(&file, SeekFrom::Hole(2 * round * UNIT)).unwrap();
                    assert_eq!(end, 2 * round * UNIT + 100);
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}
