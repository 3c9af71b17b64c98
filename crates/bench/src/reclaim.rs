//! How fast a node gives memory back to its machine when another process demands it, and what clients of the
//! memory see.
//!
//! Question: does a machine that needs its memory get it within a second, and do the borrowers go on working?
//! (Paper 1, Li et al., SIGMOD 2016, section 4.2.)
//! Sketch: the node notices within 0.2 s. The mount that borrows its memory then copies what lies there to
//! another node, at some GB/s.
//! Method: a node and a process that demands memory share one control group, whose limit stands in for the
//! machine's memory. The node has lent its memory to a mount, revocably; a client reads or writes a file
//! there for some seconds, in the midst of which the memory is demanded. A second node, outside the group,
//! has room for what moves out. The clock starts when the process is told to take its memory. It stops when
//! the process has it, and finds as much memory available as the node has to leave to its machine (the
//! *reserve*), counted as nodes count it.
//! Check: the client must see no error, neither then nor when it reads the file afterwards.

use std::fmt;
use std::io::BufRead;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_fabric::TransportChoice;
use serde::Serialize;
use serde_json::Value;

use crate::cgroup::MemoryLimit;
use crate::child::{Child, Talk, joining, output, tied};
use crate::files::{Ask, FileOp, Kind, MountablePool, Opening, Spec, Surroundings, Volume};
use crate::local_pool::{Confined, Lend, LocalPool};
use crate::options::Pattern;
use crate::progress::{Progress, warn};
use crate::stop::check_stop;
use crate::tally::quantile;

/// Least and most that the process may demand: some regions, and a good part of a machine's memory.
const DEMAND_BYTES: std::ops::RangeInclusive<u64> = 16 << 20..=4 << 30;
/// How much the first node lends, in demands.
const LENT_DEMANDS: u64 = 4;
/// Regions in a demand: many more than a mount leases beyond what its file takes.
const DEMAND_REGIONS: u64 = 16;
/// Regions that a mount may lease beyond what its file takes.
const SPARE_REGIONS: u64 = 3;
const REGION_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;
/// Room in the group for the programs themselves while the node starts.
const PROGRAMS_BYTES: u64 = 256 << 20;
/// How long the client works, and how much of that lies before the demand.
const AT_WORK: Duration = Duration::from_secs(4);
const BEFORE_DEMAND: Duration = Duration::from_millis(300);
/// How long the client reads its file from the beginning afterwards.
const READING: Duration = Duration::from_secs(2);
/// How long memory may take to come back: longer than a lease lasts if its owner does not answer.
const DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(1);

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct ReclaimOptions {
    /// How often; each time with a new pool.
    pub runs: u32,
    /// How much memory the process demands at once.
    pub demand_bytes: u64,
}

impl ReclaimOptions {
    /// Why these options cannot be measured.
    pub fn check(&self) -> Result<(), String> {
        if self.runs == 0 {
            return Err("0 runs measure nothing: give --runs at least 1".into());
        }
        if !DEMAND_BYTES.contains(&self.demand_bytes) {
            return Err("--demand takes 16MiB to 4GiB".into());
        }
        Ok(())
    }

    /// Memory that a run takes: both nodes, what is demanded, and room for programs.
    pub fn needed_bytes(&self) -> u64 {
        3 * self.lent_bytes() + self.demand_bytes + 2 * PROGRAMS_BYTES
    }

    fn region_bytes(&self) -> u64 {
        let fitting = 1 << (self.demand_bytes / DEMAND_REGIONS).ilog2();
        u64::clamp(fitting, *REGION_BYTES.start(), *REGION_BYTES.end())
    }

    fn lent_bytes(&self) -> u64 {
        (LENT_DEMANDS * self.demand_bytes).next_multiple_of(self.region_bytes())
    }

    /// The node leaves more than is demanded at once. Otherwise the kernel would have to end a process before
    /// the node can act.
    fn reserve_bytes(&self) -> u64 {
        self.demand_bytes / 2 * 3
    }

    /// How much more than the reserve is available before the demand. The node gives back that much less.
    fn slack_bytes(&self) -> u64 {
        self.region_bytes() / 2
    }
}

/// What was measured. Names and meanings of the fields are stable; fields may be added.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReclaimReport {
    /// How often the memory was demanded.
    pub runs: u32,
    /// How much was demanded each time.
    pub demand_mib: u64,
    /// Median of the time until the memory was given back.
    pub p50_ms: f64,
    /// 99th percentile of that time; of less than 100 runs, the longest.
    pub p99_ms: f64,
    /// All times, ascending.
    pub runs_ms: Vec<f64>,
    /// About how many operations the client carried out.
    pub client_operations: u64,
    /// Runs in which an operation of the client failed, or read what was never written.
    pub client_errors: u32,
}

impl ReclaimReport {
    fn of(options: &ReclaimOptions, runs: &[Reclaimed]) -> Self {
        let mut runs_ms: Vec<f64> = runs.iter().map(|run| run.returned.as_secs_f64() * 1e3).collect();
        runs_ms.sort_by(f64::total_cmp);
        let quantile = |part| quantile(runs_ms.iter().copied(), part).unwrap_or(f64::NAN);
        ReclaimReport {
            runs: options.runs,
            demand_mib: options.demand_bytes >> 20,
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            client_operations: runs.iter().map(|run| run.operations).sum(),
            client_errors: runs.iter().map(|run| run.errors).sum(),
            runs_ms,
        }
    }
}

impl fmt::Display for ReclaimReport {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, demand_mib, p50_ms, p99_ms, client_operations, client_errors, .. } = self;
        writeln!(text, "{demand_mib} MiB demanded {runs} times of a node that has lent its memory")?;
        writeln!(text, "given back within  p50 {p50_ms:.0} ms, p99 {p99_ms:.0} ms")?;
        write!(text, "client             {client_operations} operations, {client_errors} runs with errors")
    }
}

/// The result of one run.
struct Reclaimed {
    returned: Duration,
    operations: u64,
    errors: u32,
}

/// Measures; `farpool` is this program's file.
pub fn run_reclaim(options: &ReclaimOptions, farpool: &Path, stop: &AtomicBool) -> Result<ReclaimReport> {
    let step = Progress::on_stderr().step("demanding memory of a node");
    let mut runs = Vec::new();
    for number in 0..options.runs {
        step.advance(u64::from(number), u64::from(options.runs));
        runs.push(run_once(options, farpool, number, stop)?);
    }
    let report = ReclaimReport::of(options, &runs);
    step.done(&format!("{:.0} ms (p99)", report.p99_ms));
    Ok(report)
}

fn run_once(options: &ReclaimOptions, farpool: &Path, number: u32, stop: &AtomicBool) -> Result<Reclaimed> {
    check_stop(stop)?;
    let (lent, region, reserve) = (options.lent_bytes(), options.region_bytes(), options.reserve_bytes());
    let start_bytes = lent + region + PROGRAMS_BYTES + 2 * reserve;
    let mut group =
        MemoryLimit::create(&format!("farpool-reclaim-{}", std::process::id()), start_bytes >> 20).context(
            "the node and the process that demands memory share a control group; making one takes root",
        )?;
    let procs_file = group.procs_file();
    let lend = |bytes_each| Lend { nodes: 1, bytes_each, region_bytes: region };
    let mut pool = LocalPool::without_nodes(farpool)?;
    let confined = Confined { procs_file: &procs_file, reserve_bytes: reserve };
    pool.add_node(farpool, lend(lent), TransportChoice::Auto, Some(confined))?;
    let mut pool = MountablePool::of(pool, 3 * lent);
    let mut volume = start_volume(&pool, farpool, lent - SPARE_REGIONS * region)?;
    let free = free_regions(farpool, pool.broker(), stop)?;
    ensure!(free <= SPARE_REGIONS, "{free} regions of the node are free, although a file fills it");
    pool.pool().add_node(farpool, lend(2 * lent), TransportChoice::Auto, None)?;

    let mut demand = Demand::start(farpool, &procs_file, options.demand_bytes, reserve)?;
    let used = (group.limit_mib() << 20).saturating_sub(demand.available(stop)?);
    group.change((used + reserve + options.slack_bytes()).div_ceil(1 << 20))?;
    let (op, pattern) =
        (if number.is_multiple_of(2) { FileOp::Read } else { FileOp::Write }, Pattern::Random);
    let at_work = Ask { op, pattern, block_bytes: 64 << 10, threads: 1, seconds: AT_WORK.as_secs_f64() };
    volume.begin(&at_work)?;
    std::thread::sleep(BEFORE_DEMAND);
    let available = demand.available(stop)?;
    let given_back = available.saturating_sub(reserve);
    ensure!(given_back < options.demand_bytes / 4, "the node has given memory back before any was demanded");
    let mut run = Reclaimed { returned: demand.until_returned(stop)?, operations: 0, errors: 0 };
    if run.client_goes_on(&mut volume, &at_work, stop)? {
        let (op, pattern, seconds) = (FileOp::Read, Pattern::Sequential, READING.as_secs_f64());
        let reading = Ask { op, pattern, block_bytes: 1 << 20, threads: 1, seconds };
        volume.begin(&reading)?;
        run.client_goes_on(&mut volume, &reading, stop)?;
    }
    Ok(run)
}

/// How many regions of the pool are free, by its broker.
fn free_regions(farpool: &Path, broker: &str, stop: &AtomicBool) -> Result<u64> {
    let mut command = tied(farpool);
    command.args(["status", "--json", "--broker", broker]);
    let status: Value = serde_json::from_str(&output("farpool status", command, stop)?)?;
    status["regions_free"].as_u64().context("farpool status does not say how many regions are free")
}

impl Reclaimed {
    /// Waits for the client's slice to end. Returns whether the client goes on: it ends with an error.
    fn client_goes_on(&mut self, volume: &mut Volume, ask: &Ask, stop: &AtomicBool) -> Result<bool> {
        let answer = volume.end(ask, stop);
        check_stop(stop)?;
        match answer {
            Ok(answer) => self.operations += (answer.per_second * ask.seconds) as u64,
            Err(error) => {
                warn(&format!("{error:#}"));
                self.errors += 1;
            }
        }
        Ok(self.errors == 0)
    }
}

/// Mounts the pool, and fills a file.
fn start_volume(pool: &MountablePool, farpool: &Path, bytes: u64) -> Result<Volume> {
    let around = Surroundings { farpool, disk: Path::new("/"), throttled: None, peers: false, bytes };
    let kind = Kind::Far { transport: "shm", nodes: 1, percent: 100, mount_args: &[] };
    let spec = Spec { id: "far", name: "far memory", kind, launcher: &[], opening: Opening::Direct };
    spec.start_on(pool, "shm", &around)
}

/// The process that demands memory.
struct Demand {
    talk: Talk,
    _process: Child,
}

impl Demand {
    fn start(farpool: &Path, procs_file: &Path, bytes: u64, reserve: u64) -> Result<Self> {
        let [shell, words @ ..] = joining(procs_file);
        let mut command = tied(shell);
        command.args(words).arg(farpool).args(["bench", "demand", "--bytes"]).arg(bytes.to_string());
        command.arg("--reserve").arg(reserve.to_string());
        let (process, talk) = Child::talking("the process that demands memory", command)?;
        Ok(Demand { talk, _process: process })
    }

    /// How much memory is available to it, in bytes.
    fn available(&mut self, stop: &AtomicBool) -> Result<u64> {
        self.talk.tell("available")?;
        self.talk.hear(DEADLINE, stop)?.parse().context("an answer that is no number")
    }

    /// Has the process take its memory. Returns the time until it has it and the reserve is available again.
    fn until_returned(&mut self, stop: &AtomicBool) -> Result<Duration> {
        self.talk.tell("demand")?;
        let millis = self.talk.hear(DEADLINE + DEADLINE, stop)?;
        Ok(Duration::from_secs_f64(millis.parse::<f64>().context("an answer that is no number")? / 1e3))
    }
}

/// Says `ready`, and answers each line of `input`: `available` by how many bytes are `available`; another by
/// taking `bytes` of memory, and then by the milliseconds until it had them and the reserve was available
/// again. It keeps the memory until `input` ends.
pub fn serve_demand(
    bytes: usize,
    reserve: u64,
    available: impl Fn() -> std::io::Result<u64>,
    input: impl BufRead,
    mut say: impl FnMut(String) -> Result<()>,
) -> Result<()> {
    say("ready".into())?;
    let mut taken = Vec::new();
    for line in input.lines() {
        if line? == "available" {
            say(available()?.to_string())?;
            continue;
        }
        let started = Instant::now();
        taken.push(std::hint::black_box(vec![1_u8; bytes]));
        while available()? < reserve {
            let is_late = started.elapsed() > DEADLINE;
            ensure!(!is_late, "the node has not given the memory back within {} s", DEADLINE.as_secs());
            std::thread::sleep(POLL);
        }
        say((started.elapsed().as_secs_f64() * 1e3).to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(demand_mib: u64) -> ReclaimOptions {
        ReclaimOptions { runs: 4, demand_bytes: demand_mib << 20 }
    }

    #[test]
    fn quantiles_are_of_the_runs_and_errors_are_counted() {
        let run = |ms, errors| Reclaimed { returned: Duration::from_millis(ms), operations: 5, errors };
        let report = ReclaimReport::of(&options(64), &[run(30, 0), run(10, 1), run(20, 0), run(900, 2)]);
        assert_eq!((report.p50_ms, report.p99_ms), (20.0, 900.0));
        assert_eq!((report.client_operations, report.client_errors), (20, 3));
        assert_eq!(report.runs_ms, [10.0, 20.0, 30.0, 900.0]);
    }

    #[test]
    fn more_is_reserved_than_is_demanded_at_once_and_lent_than_is_reserved() {
        for demand_mib in [16, 100, 256, 4096] {
            let options = options(demand_mib);
            options.check().unwrap();
            assert!(options.demand_bytes < options.reserve_bytes());
            assert!(options.reserve_bytes() < options.lent_bytes());
            assert!(options.demand_bytes >= DEMAND_REGIONS * options.region_bytes());
        }
        assert!(options(15).check().is_err() && options(4097).check().is_err());
    }

    #[test]
    fn a_demand_is_met_once_the_reserve_is_available_again() {
        let (mut said, looks) = (Vec::new(), std::cell::Cell::new(0));
        let available = || {
            looks.set(looks.get() + 1);
            Ok([70, 5, 9, 10][looks.get() - 1])
        };
        serve_demand(1 << 20, 10, available, &b"available\ndemand\n"[..], |line| {
            said.push(line);
            Ok(())
        })
        .unwrap();
        assert_eq!((&said[..2], looks.get()), (&["ready".to_owned(), "70".to_owned()][..], 4));
        assert!(said[2].parse::<f64>().unwrap() > 0.0);
    }
}
