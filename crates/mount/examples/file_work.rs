//! Question: does a directory return the bytes that were written there, on whatever storage its files lie?
//! Method: the same work from the same seed: large and small writes, reads after the kernel has forgotten
//! all its pages, and what databases do with names and sizes. `testbed/test-rdma paper2` runs it on a mount
//! and, for comparison, on paper 2's own stack.
//! Check: all bytes, against a model in memory; the first wrong one ends the program with a panic. The
//! files `large` and `cut` stay, and are the same on every directory.
//!
//!     file_work DIRECTORY
//!
//! Prints a line for each part of the work: its name and the milliseconds that it took. Needs root, to make
//! the kernel forget its pages.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Some hundred extents, and more than the unwritten data that the kernel holds back in a virtual machine
/// with 1 GiB of memory.
const LARGE_BYTES: usize = 96 << 20;
/// The size in which database systems write temporary files and sort runs.
const SEQUENTIAL_BYTES: usize = 512 << 10;
/// A page of a database; offsets are multiples of it.
const PAGE_BYTES: usize = 8 << 10;
/// A sixth of the file's pages.
const PAGES_WRITTEN: u64 = 2048;
/// The sequential reads have compared every page already, so these reads only test the path of small reads.
const PAGES_READ: u64 = 1024;
/// Several extents, and not a multiple of one.
const SMALL_BYTES: usize = 1_300_000;

fn main() -> io::Result<()> {
    let directory = std::env::args_os().nth(1).map(PathBuf::from).expect("file_work DIRECTORY");
    let mut random = Random(20130624); // the day of paper 2
    let mut model = random.bytes(LARGE_BYTES);
    let path = directory.join("large");
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;

    timed("sequential-write", || write_from_start_to_end(&file, &model))?;
    timed("random-write", || write_pages(&file, &mut model, &mut random))?;
    forget_cached()?;
    timed("sequential-read", || read_from_start_to_end(&file, &model))?;
    forget_cached()?;
    timed("random-read", || read_pages(&file, &model, &mut random))?;
    timed("names-and-lengths", || {
        rename_over_an_open_file(&directory, &mut random)?;
        unlink_while_open(&directory, &mut random)?;
        truncate_and_grow(&directory, &mut random)
    })?;
    assert_eq!(names(&directory)?, ["cut", "large"], "names in {}", directory.display());
    Ok(())
}

/// Prints how long a part of the work took, or which part failed.
fn timed(name: &str, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let started = Instant::now();
    let ended = work();
    match &ended {
        Ok(()) => println!("{name} {}", started.elapsed().as_millis()),
        Err(error) => eprintln!("{name}: {error}"),
    }
    ended
}

fn write_from_start_to_end(file: &File, model: &[u8]) -> io::Result<()> {
    for (number, chunk) in model.chunks(SEQUENTIAL_BYTES).enumerate() {
        file.write_all_at(chunk, (number * SEQUENTIAL_BYTES) as u64)?;
    }
    file.sync_all()
}

fn write_pages(file: &File, model: &mut [u8], random: &mut Random) -> io::Result<()> {
    for _ in 0..PAGES_WRITTEN {
        let offset = random.page();
        let page = random.bytes(PAGE_BYTES);
        file.write_all_at(&page, offset as u64)?;
        model[offset..offset + PAGE_BYTES].copy_from_slice(&page);
    }
    file.sync_all()
}

fn read_from_start_to_end(file: &File, model: &[u8]) -> io::Result<()> {
    assert_eq!(file.metadata()?.len(), model.len() as u64, "length of the file");
    for (number, chunk) in model.chunks(SEQUENTIAL_BYTES).enumerate() {
        compare(file, number * SEQUENTIAL_BYTES, chunk)?;
    }
    Ok(())
}

fn read_pages(file: &File, model: &[u8], random: &mut Random) -> io::Result<()> {
    for _ in 0..PAGES_READ {
        let offset = random.page();
        compare(file, offset, &model[offset..offset + PAGE_BYTES])?;
    }
    Ok(())
}

/// A process that has the old file open still reads the old file; the name stands for the new one.
fn rename_over_an_open_file(directory: &Path, random: &mut Random) -> io::Result<()> {
    let (old, new) = (random.bytes(SMALL_BYTES), random.bytes(SMALL_BYTES));
    let (name, other_name) = (directory.join("name"), directory.join("other-name"));
    let opened = written(&name, &old)?;
    written(&other_name, &new)?;
    fs::rename(&other_name, &name)?;
    forget_cached()?;
    compare(&opened, 0, &old)?;
    compare(&File::open(&name)?, 0, &new)?;
    fs::remove_file(&name)
}

/// A file without a name is read, written and read again until it is closed.
fn unlink_while_open(directory: &Path, random: &mut Random) -> io::Result<()> {
    let path = directory.join("without-a-name");
    let file = written(&path, &random.bytes(SMALL_BYTES))?;
    fs::remove_file(&path)?;
    assert_eq!(file.metadata()?.nlink(), 0, "names of an unlinked file");
    let later = random.bytes(SMALL_BYTES);
    file.write_all_at(&later, 0)?;
    file.sync_all()?;
    forget_cached()?;
    compare(&file, 0, &later)
}

/// Data that was cut off is gone: where the file grows again there are zeros.
fn truncate_and_grow(directory: &Path, random: &mut Random) -> io::Result<()> {
    const CUT_AT: usize = 700_001;
    const GROWN_TO: usize = 1_000_003;
    let mut model = random.bytes(SMALL_BYTES);
    let file = written(&directory.join("cut"), &model)?;
    file.set_len(CUT_AT as u64)?;
    file.set_len(GROWN_TO as u64)?;
    file.sync_all()?;
    model.truncate(CUT_AT);
    model.resize(GROWN_TO, 0);
    forget_cached()?;
    assert_eq!(file.metadata()?.len(), GROWN_TO as u64, "length of a truncated file");
    compare(&file, 0, &model)
}

/// A new file with these bytes, synchronised.
fn written(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.sync_all()?;
    Ok(file)
}

fn compare(file: &File, offset: usize, expected: &[u8]) -> io::Result<()> {
    let mut back = vec![0; expected.len()];
    file.read_exact_at(&mut back, offset as u64)?;
    if back != expected {
        let wrong = back.iter().zip(expected).position(|(got, wanted)| got != wanted);
        panic!("wrong byte at {}", offset + wrong.unwrap_or_default());
    }
    Ok(())
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Makes the kernel forget the contents of all files, including those below a loop device.
fn forget_cached() -> io::Result<()> {
    rustix::fs::sync(); // the kernel keeps pages that are not written yet
    fs::write("/proc/sys/vm/drop_caches", "3")
}

/// SplitMix64: it gives the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        bytes
            .chunks_mut(8)
            .for_each(|chunk| chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]));
        bytes
    }

    /// Where a page of the large file begins.
    fn page(&mut self) -> usize {
        self.next() as usize % (LARGE_BYTES / PAGE_BYTES) * PAGE_BYTES
    }
}
