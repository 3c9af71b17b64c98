//! The cost of verification: files whose blocks are checked against their block words, beside files whose
//! blocks are not.
//!
//! No option of any program turns verification off. Files take their rules as a type parameter, so that
//! simulations can break one of them. Here the broken rule is the checksum, and the files belong to this
//! process.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_fabric::TransportChoice;
use farpool_file::{FileCore, Rules, Session, Shipped, StoreCore};
use farpool_pool::{Pool, PoolConfig};
use farpool_wire::MAX_TRANSFER_BYTES;

use super::figure::Figure;
use super::section::{Section, conditions};
use super::verdict::Verdict;
use super::volume::MountablePool;
use super::{Effort, Surroundings, document_rounds};
use crate::options::Pattern;
use crate::places::Places;
use crate::progress::Tasks;
use crate::spread::{Spread, middle};
use crate::stop::check_stop;
use crate::tally::Tally;

const BLOCK_BYTES: usize = 8192;
/// The largest share of a read that verification may take.
const PROMISES: [(&str, f64); 2] = [("shm", 0.25), ("tcp", 0.03)];
/// Run before each slice, not counted.
const SETTLE: Duration = Duration::from_millis(10);

/// Rules that no real file may have: every checksum is zero, so every block passes.
enum Unverified {}

impl Rules for Unverified {
    fn checksum(_: &[u8]) -> u64 {
        0
    }
}

/// A filled file, read by one thread.
struct Reader<R: Rules> {
    file: Arc<FileCore<R>>,
    places: Places,
}

impl<R: Rules> Reader<R> {
    fn new(pool: &Pool, session: &Session, bytes: u64) -> Result<Self> {
        let store = Arc::new(StoreCore::<R>::new(pool.stock().clone())?);
        let file = store.create();
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard is dropped.
        let core = unsafe { guard.core() };
        let data = vec![7; MAX_TRANSFER_BYTES];
        for at in (0..bytes).step_by(data.len()) {
            let length = data.len().min((bytes - at) as usize);
            guard.block_on(file.write(core, at, &data[..length])).context("cannot fill a file")?;
        }
        Ok(Reader { file, places: Places::new(Pattern::Random, 1, bytes, BLOCK_BYTES, 1) })
    }

    /// The median latency of a slice, in microseconds.
    fn slice(&mut self, session: &Session, time: Duration) -> Result<f64> {
        self.run(session, SETTLE)?;
        Ok(self.run(session, time)?.quantile_us(0.5))
    }

    fn run(&mut self, session: &Session, time: Duration) -> Result<Tally> {
        let guard = session.lock();
        // SAFETY: the buffer that is read into is dropped before the guard; all futures end in `block_on`.
        let core = unsafe { guard.core() };
        let mut tally = Tally::new()?;
        let began = Instant::now();
        while began.elapsed() < time || tally.is_empty() {
            let at = self.places.pick().offset;
            let started = Instant::now();
            let (buffer, range) = guard.block_on(self.file.read(core, at, BLOCK_BYTES))?;
            tally.record(started.elapsed(), 1);
            ensure!(
                buffer.is_some_and(|bytes| bytes[range].iter().all(|&byte| byte == 7)),
                "a wrong byte at {at}"
            );
        }
        Ok(tally)
    }
}

/// Median latencies of slices that were measured in turn.
#[derive(Default)]
struct Slices {
    verified_us: Vec<f64>,
    unverified_us: Vec<f64>,
}

impl Slices {
    /// The share of a read that verification takes, slice by slice.
    fn share(&self) -> Option<Spread> {
        let pairs = self.verified_us.iter().zip(&self.unverified_us);
        Spread::of(pairs.map(|(with, without)| 1.0 - without / with))
    }
}

/// Measures over both transports.
pub fn checksum(around: &Surroundings<'_>, effort: &Effort, stop: &AtomicBool) -> Result<Section> {
    let mut progress = Tasks::start(PROMISES.len() * effort.rounds);
    let mut body = String::from(
        "| 8 KiB random read | verified: p50 µs | unverified: p50 µs | share of the read |\n|---|--:|--:|--:|\n",
    );
    let mut verdicts = Vec::new();
    for (transport, promise) in PROMISES {
        let slices = measure(transport, around, effort, &mut progress, stop)?;
        let share = slices.share().context("there were no rounds")?;
        body += &format!(
            "| {transport} | {} | {} | {:.1} % |\n",
            middle(Spread::of(slices.verified_us), 2),
            middle(Spread::of(slices.unverified_us), 2),
            100.0 * share.middle,
        );
        let what = format!("checksums' share of an 8 KiB random read over {transport}");
        verdicts.push(Verdict::share(&what, promise, share));
    }
    let notes = vec![
        ("Question", "how much of a read is spent on verifying what was read?".to_owned()),
        ("Floor", "the same read of a file whose rules make every checksum zero.".into()),
        (
            "Method",
            format!(
                "files of this process, without a mount, whose own cost would hide the difference; {}",
                document_rounds(effort)
            ),
        ),
        conditions(&format!(
            "two files of {} MiB on one node; checksums by {}",
            around.bytes >> 20,
            crc_fast::get_calculator_target(crc_fast::CrcAlgorithm::Crc64Nvme)
        )),
    ];
    Ok(Section { figure: Figure::Checksum, notes, body, verdicts, drawing: None })
}

fn measure(
    transport: &'static str,
    around: &Surroundings<'_>,
    effort: &Effort,
    progress: &mut Tasks,
    stop: &AtomicBool,
) -> Result<Slices> {
    progress.step(&format!("starting and filling: files over {transport}"));
    let local = MountablePool::start(around.farpool, 1, 2 * around.bytes, 1)?;
    let choice: TransportChoice = transport.parse().map_err(anyhow::Error::msg)?;
    let broker = local.broker().to_owned();
    let pool = Pool::connect(PoolConfig { broker, tls: None, transport: choice.into(), limit_bytes: None })?;
    let session = pool.session();
    let mut verified = Reader::<Shipped>::new(&pool, &session, around.bytes)?;
    let mut unverified = Reader::<Unverified>::new(&pool, &session, around.bytes)?;
    let (mut slices, time) = (Slices::default(), Duration::from_secs_f64(effort.seconds));
    for round in 1..=effort.rounds {
        check_stop(stop)?;
        progress.step(&format!("round {round}: 8 KiB random read over {transport}"));
        slices.verified_us.push(verified.slice(&session, time)?);
        slices.unverified_us.push(unverified.slice(&session, time)?);
        progress.done();
    }
    Ok(slices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_the_extra_time_of_the_verified_read() {
        let slices = Slices { verified_us: vec![1.25, 2.0, 1.0], unverified_us: vec![1.0, 1.0, 1.0] };
        let share = slices.share().unwrap();
        assert!((share.middle - 0.2).abs() < 1e-9 && share.least == 0.0 && share.most == 0.5);
        assert_eq!(Slices::default().share(), None);
    }
}
