//! Figure 13 of paper 1: the speed of a processor-bound PostgreSQL on a machine that lends its memory to
//! another machine.
//!
//! Each of the two machines is a processor of this one. The lender has the first processor, with the server
//! and the nodes; the borrower has the second, with the mount and the program that reads. So the lender's
//! cost of lending is measured apart from the borrower's cost of borrowing. The server's work is the paper's
//! RangeScan without updates, on tables that fit in its memory.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use postgres::Client;
use serde_json::Value;

use super::Effort;
use super::process::confine;
use crate::child::run;
use crate::far_memory::{FarMemory, Guests, PoolOptions, REGION_MIB, Transport};
use crate::machine;
use crate::meeting::joined;
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::stop::StopFlag;
use crate::tpch;

/// The lender's processor, and the borrower's.
const LENDER: usize = 0;
const BORROWER: usize = 1;
/// Enough sessions to keep the lender's processor busy while a client handles an answer.
const SESSIONS: usize = 2;
/// Keys of a scan, as in the paper.
const RANGE: i64 = 10_000;
/// The borrower's file.
const BORROWED_MIB: u64 = 128;
const NODE_MIB: u64 = 320;
/// Time that the borrower needs to reach its full speed; not counted.
const SETTLE: Duration = Duration::from_millis(700);
/// How much longer the borrower reads than the server is measured.
const SURPLUS: Duration = Duration::from_millis(300);
/// Longest time that the borrower's program may run.
const BORROWER_DEADLINE: Duration = Duration::from_secs(60);

/// Whether, and how, the lender's memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The memory is not used.
    Unused,
    /// Over shared memory: the borrower's processor loads from it.
    Shm,
    /// Over TCP: the lender's processor answers.
    Tcp,
}

impl Use {
    /// All of them, the one to compare with first.
    pub const ALL: [Self; 3] = [Self::Unused, Self::Shm, Self::Tcp];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unused => "nobody borrows",
            Self::Shm => "borrowed over shm",
            Self::Tcp => "borrowed over tcp",
        }
    }
}

/// The results of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    /// How the lender's memory was used meanwhile.
    pub usage: Use,
    /// Counted from 0.
    pub round: usize,
    /// Scans per second.
    pub per_second: f64,
    /// Mean time of a scan.
    pub mean_ms: f64,
    /// 99th percentile of the time of a scan.
    pub p99_ms: f64,
    /// What the borrower read, in MiB per second.
    pub borrowed_mib_s: f64,
}

/// Measures all uses in turn, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Slice>> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    ensure!(processors >= 2, "lender and borrower need a processor each, and this machine has one");
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-paper-")?;
    let dir = &work.path().join("postgres");
    std::fs::create_dir(dir)?;
    let log = &work.path().join("postgres.log");
    let mut server = Server::start(&ServerOptions::new(dir, log), stop)?;
    let step = progress.step(format!("loading TPC-H at scale factor {}", effort.scale));
    let mut client = server.connect()?;
    let loaded = tpch::load(&mut client, effort.scale, stop, |done, all| step.advance(done, all))?;
    // No vacuum is needed: rows are loaded frozen.
    client.batch_execute("CREATE INDEX ON lineitem (l_orderkey); CHECKPOINT")?;
    step.done("loaded");
    let mut shm = start_pool(effort.farpool, work.path(), Transport::Shm, stop)?;
    let mut tcp = start_pool(effort.farpool, work.path(), Transport::Tcp, stop)?;
    confine(server.id(), LENDER)?;
    for far in [&shm, &tcp] {
        confine(far.pool_id(), LENDER)?;
        confine(far.mount_id(), BORROWER)?;
        fio(&borrowed(far), &["--rw=write", "--bs=512k"])?;
    }
    let mut scans = Scans::new(&server, loaded.orders)?;
    scans.run(effort.slice, stop)?; // warms up
    let mut slices = Vec::new();
    for round in 0..effort.rounds {
        let step = progress.step(format!("round {}", round + 1));
        for turn in 0..Use::ALL.len() {
            let usage = Use::ALL[(turn + round) % Use::ALL.len()];
            let file = match usage {
                Use::Unused => None,
                Use::Shm => Some(borrowed(&shm)),
                Use::Tcp => Some(borrowed(&tcp)),
            };
            let slice = slice(&mut scans, file.as_deref(), effort.slice, stop)?;
            slices.push(Slice { usage, round, ..slice });
        }
        step.done("measured");
    }
    drop(scans);
    drop(client);
    let ended = [server.stop(), shm.stop(), tcp.stop()];
    ended.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(slices)
}

fn borrowed(far: &FarMemory) -> PathBuf {
    far.mount_point().join("borrowed")
}

/// A pool of one node, with a mount.
fn start_pool(farpool: &Path, work: &Path, transport: Transport, stop: &StopFlag) -> Result<FarMemory> {
    let dir = &work.join(transport.to_string());
    let mount_point = &dir.join("far");
    std::fs::create_dir_all(mount_point)?;
    let options = PoolOptions {
        farpool,
        run_dir: &dir.join("pool"),
        mount_point,
        log_dir: dir,
        nodes: 1,
        memory_per_node_mib: NODE_MIB,
        region_mib: REGION_MIB,
        overflow: None,
        transport,
        allow_other: false,
        guests: Guests::None,
    };
    FarMemory::start(&options, stop)
}

/// Measures the server while the borrower reads `file`, or reads nothing.
fn slice(scans: &mut Scans, file: Option<&Path>, time: Duration, stop: &StopFlag) -> Result<Slice> {
    thread::scope(|scope| {
        let reading = file.map(|file| {
            let runtime = format!("--runtime={}ms", (SETTLE + time + SURPLUS).as_millis());
            scope.spawn(move || fio(file, &["--rw=randread", "--bs=8k", "--time_based", &runtime]))
        });
        scans.run(SETTLE, stop)?;
        let mut slice = scans.run(time, stop)?;
        if let Some(reading) = reading {
            slice.borrowed_mib_s =
                reading.join().map_err(|_| anyhow!("the borrower's thread panicked"))??;
        }
        Ok(slice)
    })
}

/// Runs one thread of the borrower, which reads or fills its file and bypasses the kernel's cache. Returns
/// what it read, in MiB per second.
fn fio(file: &Path, args: &[&str]) -> Result<f64> {
    let mut all: Vec<OsString> = ["--name=borrower", "--ioengine=psync", "--direct=1", "--norandommap"]
        .into_iter()
        .chain(["--randrepeat=0", "--output-format=json"])
        .chain(args.iter().copied())
        .map(OsString::from)
        .collect();
    all.push(format!("--size={BORROWED_MIB}m").into());
    all.push(format!("--cpus_allowed={BORROWER}").into());
    all.push([OsString::from("--filename="), file.into()].into_iter().collect());
    let args: Vec<_> = all.iter().map(OsString::as_os_str).collect();
    let said = run("fio", &args, BORROWER_DEADLINE)?;
    read_mib_s(&said).context("cannot parse fio's output")
}

/// Parses fio's JSON; warnings may precede it.
fn read_mib_s(said: &str) -> Option<f64> {
    let json: Value = serde_json::from_str(&said[said.find('{')?..]).ok()?;
    Some(json["jobs"][0]["read"]["bw_bytes"].as_f64()? / f64::from(1 << 20))
}

/// Sessions that scan ranges.
struct Scans {
    sessions: Vec<Client>,
    /// An upper bound of the keys, roughly.
    last_key: i64,
    /// Counts slices, so that each scans other ranges.
    seed: u64,
}

/// TPC-H uses eight of every 32 keys.
const KEYS_PER_ORDER: u64 = 4;

impl Scans {
    fn new(server: &Server, orders: u64) -> Result<Self> {
        let connect = |_| {
            let mut client = server.connect()?;
            client.batch_execute("SET enable_seqscan = off")?;
            Ok(client)
        };
        let sessions = (0..SESSIONS).map(connect).collect::<Result<_>>()?;
        Ok(Scans { sessions, last_key: i64::try_from(orders * KEYS_PER_ORDER)?, seed: 1 })
    }

    /// Runs scans in all sessions for `time`.
    fn run(&mut self, time: Duration, stop: &StopFlag) -> Result<Slice> {
        self.seed += 1;
        let (last_key, seed) = (self.last_key, self.seed);
        let mut took_ms: Vec<f64> = thread::scope(|scope| {
            let threads: Vec<_> = self
                .sessions
                .iter_mut()
                .zip(1..)
                .map(|(client, number)| {
                    scope.spawn(move || scan(client, last_key, seed * 1000 + number, time, stop))
                })
                .collect();
            joined(threads.into_iter().map(|thread| thread.join())).map(|all| all.concat())
        })?;
        took_ms.sort_by(f64::total_cmp);
        let count = took_ms.len();
        ensure!(count > 0, "no scan ended: give more --seconds");
        Ok(Slice {
            usage: Use::Unused,
            round: 0,
            per_second: count as f64 / time.as_secs_f64(),
            mean_ms: took_ms.iter().sum::<f64>() / count as f64,
            p99_ms: took_ms[(count * 99).div_ceil(100) - 1],
            borrowed_mib_s: 0.0,
        })
    }
}

/// Runs scans in one session for `time`. Returns the time of each, in milliseconds.
fn scan(client: &mut Client, last_key: i64, seed: u64, time: Duration, stop: &StopFlag) -> Result<Vec<f64>> {
    let statement = client.prepare(
        "SELECT count(*), sum(l_extendedprice * (1 - l_discount)) FROM lineitem \
         WHERE l_orderkey >= $1 AND l_orderkey < $2",
    )?;
    let (began, mut took_ms, mut state) = (Instant::now(), Vec::new(), seed);
    while began.elapsed() < time {
        stop.check()?;
        // A linear congruential generator (Knuth's MMIX) is good enough for a few million keys.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let first = ((state >> 33) as i64) % (last_key - RANGE).max(1);
        let started = Instant::now();
        let rows: i64 = client.query_one(&statement, &[&first, &(first + RANGE)])?.try_get(0)?;
        took_ms.push(started.elapsed().as_secs_f64() * 1000.0);
        ensure!(rows > 0, "the range from {first} is empty");
    }
    Ok(took_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_json_is_found_after_its_warnings() {
        let said = "note: x\n{\"jobs\": [{\"read\": {\"bw_bytes\": 2097152}}]}";
        assert_eq!(read_mib_s(said), Some(2.0));
        assert_eq!(read_mib_s("fio: failed"), None);
    }
}
