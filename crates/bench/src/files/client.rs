//! A client of a file: a process of its own that reads and writes the file on request.
//!
//! K1. It calls what programs call, `pread` and `pwrite` of libc, so that a preloaded library intercepts its
//!     calls like theirs.
//! K2. Every block of the file begins and ends with a word that depends on its place. Writes carry these
//!     words, and reads must return them: a wrong word ends the measurement.
//! K3. What happens before a slice (starting threads, allocating buffers, the first operations) is not
//!     counted.

use std::fs::{File, OpenOptions};
use std::io::BufRead;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::aligned::Aligned;
use crate::meeting::joined;
use crate::options::Pattern;
use crate::places::{Places, initial_word};
use crate::tally::Tally;

/// Each block of this size begins and ends with a word (K2). It is the unit of the mount's checksums.
const STAMPED_BYTES: usize = 8192;
const WORD_BYTES: usize = 8;
/// Bytes per request while filling: large, so that filling is fast.
const FILL_BYTES: usize = 1 << 20;
/// Run before each slice, not counted (K3).
const SETTLE: Duration = Duration::from_millis(10);

/// What to do, and for how long.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// Read or write.
    pub op: FileOp,
    /// Where.
    pub pattern: Pattern,
    /// Bytes per operation, a multiple of 8 KiB.
    pub block_bytes: usize,
    /// Threads, each with one operation in flight.
    pub threads: usize,
    /// How long.
    pub seconds: f64,
}

/// How a client opens its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opening {
    /// With O_DIRECT.
    Direct,
    /// Without: what the kernel has in its page cache is read from there.
    Buffered,
}

/// What a client does to a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileOp {
    /// `pread`.
    Read,
    /// `pwrite`.
    Write,
}

/// The result of a slice.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Operations per second of all threads.
    pub per_second: f64,
    /// Mean latency. On a disk that serves many operations and then none for a while, the median says little.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// MiB per second.
    pub mib_s: f64,
}

impl Answer {
    /// The result of a slice.
    pub fn of(tally: &Tally, ask: &Ask) -> Self {
        Answer {
            per_second: tally.per_second,
            mean_us: ask.threads as f64 * 1e6 / tally.per_second,
            p50_us: tally.quantile_us(0.5),
            p99_us: tally.quantile_us(0.99),
            mib_s: tally.per_second * ask.block_bytes as f64 / f64::from(1 << 20),
        }
    }
}

/// Serves requests from `input` until it ends: each line is the JSON of an [`Ask`] and is answered by that of
/// an [`Answer`]. Says `ready` first, when the file is filled up to `bytes`.
pub fn serve_file_client(
    path: &Path,
    bytes: u64,
    opening: Opening,
    input: impl BufRead,
    mut say: impl FnMut(String) -> Result<()>,
) -> Result<()> {
    let file = open(path, opening)?;
    fill(&file, bytes).with_context(|| format!("cannot fill {}", path.display()))?;
    say("ready".into())?;
    for (number, line) in input.lines().enumerate() {
        let ask: Ask = serde_json::from_str(&line?).context("a request that is no JSON of an `Ask`")?;
        let answer = slice(&file, bytes, ask, number as u64)?;
        say(serde_json::to_string(&answer)?)?;
    }
    Ok(())
}

/// A file system that refuses O_DIRECT, as tmpfs of some kernels does, has no cache to bypass.
fn open(path: &Path, opening: Opening) -> Result<File> {
    let opened =
        |flags| OpenOptions::new().read(true).write(true).create(true).custom_flags(flags).open(path);
    let file = match opening {
        Opening::Direct => opened(libc::O_DIRECT).or_else(|_| opened(0)),
        Opening::Buffered => opened(0),
    };
    file.with_context(|| format!("cannot open {}", path.display()))
}

fn fill(file: &File, bytes: u64) -> Result<()> {
    let mut buffer = Aligned::new(FILL_BYTES);
    let mut at = 0;
    while at < bytes {
        let length = FILL_BYTES.min((bytes - at) as usize);
        stamp(&mut buffer[..length], at);
        file.write_all_at(&buffer[..length], at)?;
        at += length as u64;
    }
    // Some file systems without a disk have no fsync either.
    let _ = file.sync_data();
    Ok(())
}

fn slice(file: &File, bytes: u64, ask: Ask, number: u64) -> Result<Answer> {
    let fits = (1..=bytes).contains(&(ask.block_bytes as u64));
    ensure!(fits && ask.block_bytes.is_multiple_of(STAMPED_BYTES), "no blocks of {} bytes", ask.block_bytes);
    let time = Duration::try_from_secs_f64(ask.seconds).context("an impossible duration")?;
    let thread = |thread: usize| {
        let seed = number * 1000 + thread as u64 + 1;
        let mut lane = Lane {
            file,
            op: ask.op,
            places: Places::new(ask.pattern, 1, bytes, ask.block_bytes, seed),
            buffer: Aligned::new(ask.block_bytes),
        };
        lane.run(SETTLE)?;
        lane.run(time)
    };
    let tallies = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ask.threads).map(|number| scope.spawn(move || thread(number))).collect();
        joined(threads.into_iter().map(|thread| thread.join()))
    })?;
    let mut all = Tally::new()?;
    for tally in &tallies {
        all.join(tally)?;
    }
    Ok(Answer::of(&all, &ask))
}

/// A thread at work.
struct Lane<'a> {
    file: &'a File,
    op: FileOp,
    places: Places,
    buffer: Aligned,
}

impl Lane<'_> {
    /// Runs for `time`, and at least one operation, however slow it is.
    fn run(&mut self, time: Duration) -> Result<Tally> {
        let mut tally = Tally::new()?;
        let (started, mut operations) = (Instant::now(), 0);
        while operations == 0 || started.elapsed() < time {
            let at = self.places.pick().offset;
            tally.record(self.operation(at)?, 1);
            operations += 1;
        }
        tally.finish(operations, started.elapsed());
        Ok(tally)
    }

    fn operation(&mut self, at: u64) -> Result<Duration> {
        match self.op {
            FileOp::Read => {
                let started = Instant::now();
                self.file.read_exact_at(&mut self.buffer, at).context("cannot read")?;
                let elapsed = started.elapsed();
                ensure!(is_stamped(&self.buffer, at), "what was read at {at} was never written there");
                Ok(elapsed)
            }
            FileOp::Write => {
                stamp(&mut self.buffer, at);
                let started = Instant::now();
                self.file.write_all_at(&self.buffer, at).context("cannot write")?;
                Ok(started.elapsed())
            }
        }
    }
}

/// The first and the last word of each stamped block of a buffer for offset `at`: where they are, and their
/// values.
fn stamps(bytes: usize, at: u64) -> impl Iterator<Item = (usize, [u8; WORD_BYTES])> {
    let word = move |offset: usize| (offset, initial_word(0, at + offset as u64).to_le_bytes());
    (0..bytes).step_by(STAMPED_BYTES).flat_map(move |block| {
        let last = (block + STAMPED_BYTES).min(bytes) - WORD_BYTES;
        [word(block), word(last)]
    })
}

fn stamp(buffer: &mut [u8], at: u64) {
    for (offset, word) in stamps(buffer.len(), at) {
        buffer[offset..offset + WORD_BYTES].copy_from_slice(&word);
    }
}

fn is_stamped(buffer: &[u8], at: u64) -> bool {
    stamps(buffer.len(), at).all(|(offset, word)| buffer[offset..offset + WORD_BYTES] == word)
}

/// The request line for a slice.
pub fn ask_line(ask: &Ask) -> Result<String> {
    Ok(serde_json::to_string(ask)?)
}

/// Parses the client's answer line.
pub fn answer_of(line: &str) -> Result<Answer> {
    serde_json::from_str(line).with_context(|| format!("cannot parse a client's answer {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 20;

    fn ask(op: FileOp, pattern: Pattern, block_bytes: usize, threads: usize) -> Ask {
        Ask { op, pattern, block_bytes, threads, seconds: 0.01 }
    }

    fn serve(path: &Path, asks: &[Ask]) -> Result<Vec<Answer>> {
        let input: String = asks.iter().map(|ask| ask_line(ask).unwrap() + "\n").collect();
        let mut said = Vec::new();
        serve_file_client(path, BYTES, Opening::Direct, input.as_bytes(), |line| {
            said.push(line);
            Ok(())
        })?;
        assert_eq!(said.remove(0), "ready");
        said.iter().map(|line| answer_of(line)).collect()
    }

    #[test]
    fn every_kind_of_slice_is_answered_by_figures() {
        let dir = tempfile::tempdir().unwrap();
        let asks = [
            ask(FileOp::Read, Pattern::Random, 8192, 1),
            ask(FileOp::Write, Pattern::Random, 8192, 3),
            ask(FileOp::Write, Pattern::Sequential, 512 << 10, 1),
            ask(FileOp::Read, Pattern::Sequential, 512 << 10, 2),
        ];
        let answers = serve(&dir.path().join("file"), &asks).unwrap();
        assert_eq!(answers.len(), asks.len());
        let positive = |answer: &Answer| answer.per_second > 0.0 && answer.p50_us > 0.0 && answer.mib_s > 0.0;
        assert!(answers.iter().all(positive), "{answers:?}");
    }

    #[test]
    fn a_block_that_lies_where_another_should_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = open(&path, Opening::Buffered).unwrap();
        fill(&file, BYTES).unwrap();
        let mut block = Aligned::new(STAMPED_BYTES);
        file.read_exact_at(&mut block, 0).unwrap();
        assert!(is_stamped(&block, 0) && !is_stamped(&block, 8192));
        block[STAMPED_BYTES - 1] ^= 1;
        assert!(!is_stamped(&block, 0));
        (0..BYTES).step_by(STAMPED_BYTES).for_each(|at| file.write_all_at(&block, at).unwrap());
        let read = ask(FileOp::Read, Pattern::Random, STAMPED_BYTES, 1);
        assert!(slice(&file, BYTES, read, 0).unwrap_err().to_string().contains("never written there"));
    }

    #[test]
    fn impossible_blocks_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for block_bytes in [0, 100, 2 << 20] {
            let asks = [ask(FileOp::Read, Pattern::Random, block_bytes, 1)];
            assert!(serve(&dir.path().join("file"), &asks).unwrap_err().to_string().contains("no blocks"));
        }
    }
}
