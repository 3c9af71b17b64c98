//! Directories of many files. `FARPOOL_TEST_FILES=100000` makes them larger than the default allows time for.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use crate::support::Scratch;

/// Files of a large directory: many times as many as one request of the kernel lists.
const FILES: usize = 10_000;
const FILES_WISHED: &str = "FARPOOL_TEST_FILES";

fn files() -> usize {
    std::env::var(FILES_WISHED).map_or(FILES, |count| count.parse().unwrap())
}

/// A directory with `count` files.
fn directory(dir: &Scratch, count: usize) -> std::path::PathBuf {
    let path = dir.join("large");
    fs::create_dir(&path).unwrap();
    (0..count).for_each(|number| drop(File::create(path.join(name(number))).unwrap()));
    path
}

fn name(number: usize) -> String {
    format!("file-{number:07}")
}

/// The numbers of the files in a listing, which must show each of them once.
fn numbers(directory: &Path) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(found.insert(name["file-".len()..].parse().unwrap()), "{name} is listed twice");
    }
    found
}

#[test]
fn a_large_directory_is_listed_completely_and_emptied() {
    let dir = Scratch::new();
    let count = files();
    let path = directory(&dir, count);
    assert_eq!(numbers(&path).len(), count);
    for entry in fs::read_dir(&path).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().len(), 0);
    }
    fs::remove_dir_all(&path).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_listing_shows_what_stays_once_while_other_files_come_and_go() {
    let dir = Scratch::new();
    let count = files() / 4;
    let path = directory(&dir, count);
    let mut found = BTreeSet::new();
    let mut change = 0;
    for entry in fs::read_dir(&path).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(found.insert(name.clone()), "{name} is listed twice");
        if change < count / 2 {
            // Odd files are removed, from the far end and the near one, and others are added.
            let odd = if change % 4 == 0 { change } else { count - change } | 1;
            let _gone = fs::remove_file(path.join(self::name(odd)));
            File::create(path.join(self::name(count + change))).unwrap();
            change += 1;
        }
    }
    for number in (0..count).step_by(2) {
        assert!(found.contains(&name(number)), "file {number} is not listed");
    }
}
