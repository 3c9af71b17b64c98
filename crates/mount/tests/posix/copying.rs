//! `copy_file_range`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use rustix::fs::copy_file_range;
use rustix::mm::MapFlags;

use crate::support::Scratch;
use crate::support::mapped::Mapped;

const LENGTH: usize = 3 << 20;

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|at| (at / 7) as u8).collect()
}

fn copy(from: &File, mut at: u64, to: &File, mut target: u64, length: usize) -> usize {
    let mut copied = 0;
    while copied < length {
        match copy_file_range(from, Some(&mut at), to, Some(&mut target), length - copied).unwrap() {
            0 => break,
            bytes => copied += bytes,
        }
    }
    copied
}

#[test]
fn a_copied_range_has_the_source_s_data_even_if_not_yet_written_back() {
    let dir = Scratch::new();
    let open =
        |name: &str| File::options().read(true).write(true).create_new(true).open(dir.join(name)).unwrap();
    let (from, to) = (open("from"), open("to"));
    let data = pattern();
    from.write_all_at(&data, 0).unwrap();
    to.write_all_at(&[9; 100], 0).unwrap();
    assert_eq!(copy(&from, 1000, &to, 50, LENGTH), LENGTH - 1000);
    let back = fs::read(dir.join("to")).unwrap();
    assert!(back[..50] == [9; 50] && back[50..] == data[1000..]);
    assert_eq!(copy(&from, LENGTH as u64, &to, 0, 10), 0);
}

#[test]
fn a_range_is_copied_within_a_file_and_to_another_file_system() {
    let dir = Scratch::new();
    let data = pattern();
    fs::write(dir.join("file"), &data).unwrap();
    let file = File::options().read(true).write(true).open(dir.join("file")).unwrap();
    assert_eq!(copy(&file, 0, &file, LENGTH as u64, LENGTH), LENGTH);
    assert!(fs::read(dir.join("file")).unwrap() == [data.as_slice(), &data].concat());
    let elsewhere = tempfile::tempdir().unwrap();
    fs::copy(dir.join("file"), elsewhere.path().join("copy")).unwrap();
    fs::copy(elsewhere.path().join("copy"), dir.join("back")).unwrap();
    assert!(fs::read(dir.join("back")).unwrap() == [data.as_slice(), &data].concat());
}

#[test]
fn a_copy_shows_in_what_was_cached_and_mapped_of_the_target() {
    let dir = Scratch::new();
    let data = pattern();
    fs::write(dir.join("from"), &data).unwrap();
    fs::write(dir.join("to"), vec![9; LENGTH]).unwrap();
    let from = File::open(dir.join("from")).unwrap();
    let to = File::options().read(true).write(true).open(dir.join("to")).unwrap();
    let mapped = Mapped::new(&to, LENGTH, MapFlags::SHARED);
    assert!(mapped.read(0, LENGTH) == vec![9; LENGTH]);
    mapped.write(LENGTH - 5000, &[8; 5000]);
    assert_eq!(copy(&from, 10, &to, 10, LENGTH - 1010), LENGTH - 1010);
    let expected = [&[9; 10], &data[10..LENGTH - 1000], &[8; 1000]].concat();
    assert!(mapped.read(0, LENGTH) == expected);
    assert!(fs::read(dir.join("to")).unwrap() == expected);
}
