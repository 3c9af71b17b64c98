//! A program that computes in the manner of MonetDB: columns and intermediate results are shared mappings of
//! files, together larger than the memory that the program is given.
//!
//! [`work`] is the program. `farpool bench columns` runs it in a process of its own, and [`sum_file`] in
//! another process meanwhile. [`expected`] computes the same results in memory. The lines that the program
//! prints must be exactly those, in the same order.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::mapping::Mapping;
use super::{Ground, Job, Place};
use crate::cgroup::MemoryLimit;
use crate::child::joining;
use crate::machine::is_root;

/// Bytes that are copied out of mappings, computed, and copied into a mapping at a time.
const CHUNK: usize = 64 << 10;
const VALUE: usize = size_of::<u64>();

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Number of columns; there is one intermediate result less.
    pub columns: usize,
    /// Bytes of each, a multiple of 128 KiB, so that each half consists of whole chunks.
    pub column_bytes: usize,
}

impl Size {
    fn check(self) -> Result<()> {
        let halves = self.column_bytes > 0 && self.column_bytes.is_multiple_of(2 * CHUNK);
        ensure!(
            self.columns > 1 && halves,
            "at least two columns are needed, each a multiple of {} bytes",
            2 * CHUNK
        );
        Ok(())
    }

    /// Bytes of all columns and intermediate results.
    pub fn total_bytes(self) -> usize {
        (2 * self.columns - 1) * self.column_bytes
    }
}

/// The values of a chunk of a column.
fn base(column: usize, chunk: usize) -> impl Iterator<Item = u64> {
    let first = (chunk * CHUNK / VALUE) as u64;
    (first..first + (CHUNK / VALUE) as u64)
        .map(move |row| (row ^ (column as u64) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// The value of an intermediate result, computed from those of its two columns.
fn combine(one: u64, other: u64) -> u64 {
    one.rotate_left(7).wrapping_add(other)
}

fn bytes(values: impl Iterator<Item = u64>) -> Vec<u8> {
    values.flat_map(u64::to_ne_bytes).collect()
}

fn values(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<VALUE>().0.iter().map(|value| u64::from_ne_bytes(*value))
}

/// A checksum that depends on the order of the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum(u64);

impl Sum {
    fn add(self, values: impl Iterator<Item = u64>) -> Self {
        Self(values.fold(self.0, |sum, value| sum.wrapping_mul(31).wrapping_add(value)))
    }
}

/// The lines of a correct run: the sum of each intermediate result, and the sum of its first half followed by
/// zeros.
pub fn expected(size: Size) -> Result<Vec<String>> {
    size.check()?;
    let chunks = size.column_bytes / CHUNK;
    let sums = (1..size.columns).map(|column| {
        let values =
            |chunk| base(column - 1, chunk).zip(base(column, chunk)).map(|(one, other)| combine(one, other));
        let half = (0..chunks / 2).fold(Sum::default(), |sum, chunk| sum.add(values(chunk)));
        let whole = (chunks / 2..chunks).fold(half, |sum, chunk| sum.add(values(chunk)));
        let zeros = std::iter::repeat_n(0, chunks / 2 * CHUNK / VALUE);
        line(column, whole, half.add(zeros))
    });
    Ok(sums.collect())
}

fn line(column: usize, whole: Sum, cut: Sum) -> String {
    format!("{column} {:016x} {:016x}", whole.0, cut.0)
}

/// The program: makes columns, computes an intermediate result from each two neighbours, and reads it in
/// every possible way; an error if two ways differ. `program` runs [`sum_file`] on a file in a process of its
/// own and returns the answer.
pub fn work(
    dir: &Path,
    size: Size,
    program: impl Fn(&Path) -> Result<String>,
    mut tell: impl FnMut(String),
) -> Result<()> {
    size.check()?;
    for column in 0..size.columns {
        make_column(dir, column, size.column_bytes)?;
    }
    for column in 1..size.columns {
        let path = dir.join(format!("intermediate-{column}"));
        let (file, mapping) = compute(dir, column, &path, size.column_bytes)?;
        let whole = sum_mapping(&mapping)?;
        // Before anything is synced, another process must see what was written through the mapping.
        let seen = program(&path)?;
        ensure!(
            seen == format!("{:016x}", whole.0),
            "another process sees {seen} where {:016x} was written",
            whole.0
        );
        if column % 2 == 0 {
            mapping.sync()?;
        }
        ensure!(sum_read(&file)? == whole, "read() and the mapping of {} differ", path.display());
        drop(mapping);
        let cut = cut_and_grow(&file, &path, size.column_bytes)?;
        tell(line(column, whole, cut));
    }
    (0..size.columns).try_for_each(|column| Ok(fs::remove_file(column_path(dir, column))?))
}

fn column_path(dir: &Path, column: usize) -> std::path::PathBuf {
    dir.join(format!("column-{column}"))
}

fn create(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    file.with_context(|| format!("cannot make {}", path.display()))
}

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).open(path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

/// Writes through a mapping of half of the file, which grows when it is full.
fn make_column(dir: &Path, column: usize, length: usize) -> Result<()> {
    let file = create(&column_path(dir, column))?;
    file.set_len(length as u64 / 2)?;
    let mut mapping = Mapping::new(&file, length / 2)?;
    for chunk in 0..length / CHUNK {
        if chunk * CHUNK == mapping.length() {
            file.set_len(length as u64)?;
            mapping.grow(length)?;
        }
        mapping.write(chunk * CHUNK, &bytes(base(column, chunk)))?;
    }
    Ok(())
}

fn compute(dir: &Path, column: usize, path: &Path, length: usize) -> Result<(File, Mapping)> {
    let open_column = |column| Mapping::new(&open(&column_path(dir, column))?, length);
    let (one, other) = (open_column(column - 1)?, open_column(column)?);
    let file = create(path)?;
    file.set_len(length as u64)?;
    let mut mapping = Mapping::new(&file, length)?;
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    for offset in (0..length).step_by(CHUNK) {
        one.read(offset, &mut left)?;
        other.read(offset, &mut right)?;
        let combined = values(&left).zip(values(&right)).map(|(one, other)| combine(one, other));
        mapping.write(offset, &bytes(combined))?;
    }
    Ok((file, mapping))
}

fn sum_mapping(mapping: &Mapping) -> Result<Sum> {
    let mut chunk = vec![0; CHUNK];
    (0..mapping.length()).step_by(CHUNK).try_fold(Sum::default(), |sum, offset| {
        mapping.read(offset, &mut chunk)?;
        Ok(sum.add(values(&chunk)))
    })
}

fn sum_read(mut file: &File) -> Result<Sum> {
    use std::io::{Seek, SeekFrom};
    file.seek(SeekFrom::Start(0))?;
    let (mut sum, mut chunk) = (Sum::default(), vec![0; CHUNK]);
    let chunks = file.metadata()?.len() / CHUNK as u64;
    for _ in 0..chunks {
        file.read_exact(&mut chunk)?;
        sum = sum.add(values(&chunk));
    }
    Ok(sum)
}

/// Truncates the file to half its length and extends it again, so that the second half reads as zeros. Then
/// unlinks the file while it is mapped, which must not lose the contents. Returns the sum of the values.
fn cut_and_grow(file: &File, path: &Path, length: usize) -> Result<Sum> {
    file.set_len(length as u64 / 2)?;
    file.set_len(length as u64)?;
    let mapping = Mapping::new(file, length)?;
    fs::remove_file(path)?;
    let (mapped, read) = (sum_mapping(&mapping)?, sum_read(file)?);
    ensure!(mapped == read, "read() and the mapping of a truncated and unlinked file differ");
    Ok(mapped)
}

/// Sums a file through a mapping of it.
pub fn sum_file(path: &Path) -> Result<String> {
    let file = open(path)?;
    let length = usize::try_from(file.metadata()?.len())?;
    ensure!(
        length > 0 && length.is_multiple_of(CHUNK),
        "{} is not a column: it has {length} bytes",
        path.display()
    );
    Ok(format!("{:016x}", sum_mapping(&Mapping::new(&file, length)?)?.0))
}

/// Sums a file in a process of its own.
pub fn sum_elsewhere(farpool: &Path, file: &Path) -> Result<String> {
    let output = Command::new(farpool).args(["bench", "columns", "--sum"]).arg(file).output()?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the sum of {} failed: {}", file.display(), complaint.trim());
    Ok(String::from_utf8(output.stdout).context("the sum is not text")?.trim().to_owned())
}

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The lines that the program printed.
    pub lines: Vec<String>,
    /// How long it took.
    pub seconds: f64,
    /// The memory that it was given; `None` if we are not root and cannot limit it.
    pub memory_mib: Option<u64>,
}

/// Runs the program in `place`; as root with a third of the memory that its files take.
pub fn run(ground: &Ground, place: Place, size: Size) -> Result<Ran> {
    let dir = ground.dir(place, "columns")?;
    let limit = if is_root() {
        let name = format!("farpool-columns-{}-{place:?}", std::process::id());
        Some(MemoryLimit::create(&name, (size.total_bytes() >> 20) as u64 / 3)?)
    } else {
        None
    };
    let mut wrapper = Vec::new();
    if let Some(limit) = &limit {
        wrapper.extend(joining(&limit.procs_file()));
    }
    wrapper.extend_from_slice(ground.wrapper());
    let job = Job::new(ground.farpool(), "").arg("bench").arg("columns").arg(&dir);
    let job = job.arg("--columns").arg(size.columns.to_string());
    let job = job.arg("--column-size").arg(size.column_bytes.to_string());
    let done = job.run(&wrapper, ground.stop())?;
    ensure!(fs::read_dir(&dir)?.next().is_none(), "the program left files in {}", dir.display());
    let lines = done.text().lines().map(str::to_owned).collect();
    Ok(Ran { lines, seconds: done.seconds, memory_mib: limit.as_ref().map(MemoryLimit::limit_mib) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { columns: 3, column_bytes: 4 * CHUNK };

    #[test]
    fn files_give_the_sums_that_memory_gives() {
        let dir = tempfile::tempdir().unwrap();
        let mut lines = Vec::new();
        work(dir.path(), SIZE, sum_file, |line| lines.push(line)).unwrap();
        assert_eq!(lines, expected(SIZE).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn process_that_sees_something_else_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = work(dir.path(), SIZE, |_| Ok("0".into()), |_| ()).unwrap_err().to_string();
        assert!(error.contains("another process sees 0"), "{error}");
    }

    #[test]
    fn sizes_whose_halves_are_not_whole_chunks_are_refused() {
        for column_bytes in [0, CHUNK, 3 * CHUNK] {
            assert!(expected(Size { column_bytes, ..SIZE }).is_err());
        }
    }
}
