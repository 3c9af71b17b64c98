//! RangeScan of paper 1 (section 5.2.1), read-only, measured for each place in turn, with the whole database
//! (tables, index and log) in that place.
//!
//! Each scan is planned anew, as in most programs. While planning, PostgreSQL asks for the length of each
//! file. So the figure shows the cost of `lseek(SEEK_END)`, beside the cost of pages that are not in the
//! server's buffers.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Effort;
use super::process::{ProcessorTime, children_titled, page_tables_kib as page_tables_kib_of};
use super::stage::{Spot, start_pool, subfolder};
use crate::child::run;
use crate::far_memory::{FarMemory, interposer};
use crate::machine;
use crate::meanwhile::looking_meanwhile;
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::stop::StopFlag;

/// Where the database may lie.
pub const SPOTS: [Spot; 4] = [Spot::Tmpfs, Spot::InterposedShm, Spot::FarShm, Spot::Disk];
/// Numbers of concurrent sessions: a few for each of two processors, and many. (The paper's figures 7 and 8
/// have 80 sessions on 20 processors.)
pub const SESSIONS: [u32; 2] = [8, 32];
/// Rows at scale 1: 280 MB, twice the size of PostgreSQL's own buffers, so that about half of all pages are
/// read from files.
const ROWS_PER_SCALE: f64 = 1_000_000.0;
/// Fewest rows, at any scale: a hundred times as many as a scan reads.
const LEAST_ROWS: u64 = 10_000;
/// Keys of a scan.
const RANGE: u64 = 100;
/// Bytes of text in a row; with its key and its value it has 245.
const PADDING: usize = 229;
/// Memory that each of two nodes lends: for the table, its index, a cluster, and the log of loading.
const NODE_MIB: u64 = 1024;
/// Threads of pgbench.
const ASKERS: &str = "2";
/// A text that the command line of each session's process contains, and that of no other process.
const SESSION_TITLE: &str = "[local]";
/// How often the size of the page tables is read: they grow with the memory that was touched.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long pgbench may take beyond the time that it measures.
const SURPLUS: Duration = Duration::from_secs(60);

/// The results of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scanned {
    /// Where the database lay.
    pub spot: Spot,
    /// Number of concurrent sessions.
    pub sessions: u32,
    /// Counted from 0.
    pub round: usize,
    /// Scans per second.
    pub per_second: f64,
    /// The largest page tables of a session's process, in KiB; `None` if no session was seen.
    pub page_tables_kib: Option<u64>,
}

/// The results of all slices.
#[derive(Clone, Debug)]
pub struct RangeScanReport {
    /// Each place once per round and number of sessions.
    pub slices: Vec<Scanned>,
    /// Rows of the table.
    pub rows: u64,
    /// The server's version.
    pub postgres: String,
}

/// A database in a place. Fields are dropped in this order.
struct Scene {
    spot: Spot,
    server: Server,
    far: Option<FarMemory>,
}

/// Measures all places in turn, round by round.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<RangeScanReport> {
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-paper-")?;
    let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-paper-")?;
    let rows = LEAST_ROWS.max((ROWS_PER_SCALE * effort.scale) as u64);
    let script = &work.path().join("scan.sql");
    fs::write(script, scan(rows)).context("cannot write the scan")?;
    let mut scenes = Vec::new();
    for spot in SPOTS {
        let step = progress.step(format!("loading {rows} rows: {}", spot.name()));
        scenes.push(Scene::set_up(spot, effort, (work.path(), tmpfs.path()), rows, stop)?);
        step.done("loaded");
    }
    let mut slices = Vec::new();
    for round in 0..effort.rounds {
        let step = progress.step(format!("round {}", round + 1));
        for sessions in SESSIONS {
            for turn in 0..scenes.len() {
                stop.check()?;
                let scene = &mut scenes[(turn + round) % SPOTS.len()];
                let Watched { per_second, page_tables_kib, .. } =
                    watched_pgbench(&mut scene.server, &[script.into()], sessions, effort.slice)?;
                slices.push(Scanned { spot: scene.spot, sessions, round, per_second, page_tables_kib });
            }
        }
        step.done("measured");
    }
    let postgres = scenes[0].server.version()?;
    let ended: Vec<Result<()>> = scenes.into_iter().map(Scene::tear_down).collect();
    ended.into_iter().collect::<Result<()>>()?;
    Ok(RangeScanReport { slices, rows, postgres })
}

/// The script that pgbench repeats.
pub(super) fn scan(rows: u64) -> String {
    let (last, further) = (rows - RANGE + 1, RANGE - 1);
    format!(
        "\\set first random(1, {last})\n\
         SELECT sum(value) FROM ranges WHERE id BETWEEN :first AND :first + {further};\n"
    )
}

impl Scene {
    fn set_up(
        spot: Spot,
        effort: &Effort<'_>,
        (work, tmpfs): (&Path, &Path),
        rows: u64,
        stop: &StopFlag,
    ) -> Result<Self> {
        let is_far = matches!(spot, Spot::InterposedShm | Spot::FarShm);
        let far = is_far.then(|| start_pool(effort.farpool, work, work, spot, NODE_MIB, stop)).transpose()?;
        let dir = match (&far, spot) {
            (Some(far), _) => subfolder(far.mount_point(), "postgres")?,
            (None, Spot::Tmpfs) => subfolder(tmpfs, "postgres")?,
            (None, _) => subfolder(work, "postgres")?,
        };
        let wrapper =
            if spot == Spot::InterposedShm { interposer(effort.farpool).to_vec() } else { Vec::new() };
        let log: PathBuf = work.join(format!("{}.log", spot.name().replace([' ', ','], "-")));
        let of_server = ServerOptions { wrapper: &wrapper, ..ServerOptions::new(&dir, &log) };
        let server = Server::start(&of_server, stop)?;
        load(&server, rows)?;
        Ok(Scene { spot, server, far })
    }

    fn tear_down(mut self) -> Result<()> {
        let ended = [self.server.stop(), self.far.as_mut().map_or(Ok(()), FarMemory::stop)];
        ended.into_iter().collect()
    }
}

/// Loads the table. Afterwards rows are frozen, statistics exist, and nothing is left to write.
pub(super) fn load(server: &Server, rows: u64) -> Result<()> {
    let table = format!(
        "CREATE TABLE ranges AS SELECT id, id * 7919::bigint % 1000003 AS value, repeat('x', {PADDING}) AS padding \
         FROM generate_series(1, {rows}) AS id"
    );
    let mut client = server.connect()?;
    for statement in
        [&table, "CREATE UNIQUE INDEX ON ranges (id)", "VACUUM (FREEZE, ANALYZE) ranges", "CHECKPOINT"]
    {
        client.batch_execute(statement).with_context(|| format!("cannot load: {statement}"))?;
    }
    Ok(())
}

/// Measures transactions per second of this many sessions, which repeat these scripts. A script may have its
/// weight behind an `@`.
pub(super) fn pgbench(
    server: &mut Server,
    scripts: &[OsString],
    sessions: u32,
    slice: Duration,
) -> Result<f64> {
    let said = run_pgbench(server, scripts, sessions, slice, Vec::new())?;
    per_second(&said).with_context(|| format!("cannot parse pgbench's output: {said}"))
}

/// What [`watched_pgbench`] has seen.
pub(super) struct Watched {
    /// Transactions per second.
    pub(super) per_second: f64,
    /// How long pgbench was told to measure, in seconds.
    pub(super) seconds: f64,
    /// The largest page tables of a session's process, in KiB; `None` if no session was seen.
    pub(super) page_tables_kib: Option<u64>,
    /// The share of the time in which the machine's processors were busy.
    pub(super) busy: f64,
}

/// As [`pgbench`], and watches sessions and processors meanwhile.
pub(super) fn watched_pgbench(
    server: &mut Server,
    scripts: &[OsString],
    sessions: u32,
    slice: Duration,
) -> Result<Watched> {
    let id = server.id();
    let mut page_tables_kib = None;
    let look = || {
        let tables = children_titled(id, SESSION_TITLE).filter_map(page_tables_kib_of);
        page_tables_kib = tables.max().max(page_tables_kib);
    };
    let (per_second, busy) = looking_meanwhile(LOOK_EVERY, look, || -> Result<_> {
        let before = ProcessorTime::now()?;
        let per_second = pgbench(server, scripts, sessions, slice)?;
        Ok((per_second, ProcessorTime::now()?.busy_since(before)))
    })?;
    Ok(Watched { per_second, seconds: whole_seconds(slice) as f64, page_tables_kib, busy })
}

/// A transaction of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// When it ended, in seconds since 1970.
    pub at_s: f64,
    /// How long it took.
    pub latency: Duration,
}

/// As [`pgbench`], with one in ten of the transactions. pgbench writes them to files in `dir`, an empty
/// folder.
pub(super) fn timed_pgbench(
    server: &mut Server,
    scripts: &[OsString],
    sessions: u32,
    slice: Duration,
    dir: &Path,
) -> Result<(f64, Vec<Timed>)> {
    let mut prefix = OsString::from("--log-prefix=");
    prefix.push(dir.join("transactions"));
    let log = vec!["--log".into(), prefix, "--sampling-rate=0.1".into()];
    let said = run_pgbench(server, scripts, sessions, slice, log)?;
    let per_second = per_second(&said).with_context(|| format!("cannot parse pgbench's output: {said}"))?;
    let mut timed = Vec::new();
    for entry in fs::read_dir(dir)? {
        let log = fs::read_to_string(entry?.path()).context("cannot read what pgbench has logged")?;
        timed.extend(log.lines().filter_map(timed_line));
    }
    Ok((per_second, timed))
}

/// Parses a line of pgbench's log: client, number, microseconds, script, and the time of day in seconds and
/// microseconds.
fn timed_line(line: &str) -> Option<Timed> {
    let words: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
    let &[_, _, latency_us, _, seconds, us, ..] = &*words else { return None };
    Some(Timed { at_s: seconds as f64 + us as f64 / 1e6, latency: Duration::from_micros(latency_us) })
}

fn run_pgbench(
    server: &mut Server,
    scripts: &[OsString],
    sessions: u32,
    slice: Duration,
    further: Vec<OsString>,
) -> Result<String> {
    let (program, mut args) = server.client_program("pgbench")?;
    let seconds = whole_seconds(slice).to_string();
    let sessions = sessions.to_string();
    args.extend(["-n", "-j", ASKERS, "-c", &sessions, "-T", &seconds].map(Into::into));
    args.extend(further);
    args.extend(scripts.iter().flat_map(|script| ["-f".into(), script.clone()]));
    args.push("postgres".into());
    let args: Vec<_> = args.iter().map(OsString::as_os_str).collect();
    run(&program, &args, slice + SURPLUS).or_else(|error| {
        server.check_alive()?;
        Err(error)
    })
}

/// pgbench takes whole seconds, at least one.
fn whole_seconds(slice: Duration) -> u64 {
    (slice.as_secs_f64().round() as u64).max(1)
}

/// Parses the line "tps = 1234.5 (without initial connection time)"; `None` if a session failed.
fn per_second(said: &str) -> Option<f64> {
    let line = said.lines().find_map(|line| line.strip_prefix("tps = "))?;
    line.split(' ').next()?.parse().ok().filter(|&per_second: &f64| per_second > 0.0)
}

impl RangeScanReport {
    /// Scans per second of a place, round by round.
    pub fn per_second(&self, spot: Spot, sessions: u32) -> Vec<f64> {
        let of_it = self.slices.iter().filter(|slice| slice.spot == spot && slice.sessions == sessions);
        of_it.map(|slice| slice.per_second).collect()
    }

    /// The largest page tables of a session in a place.
    pub fn page_tables_kib(&self, spot: Spot, sessions: u32) -> Option<u64> {
        let of_it = self.slices.iter().filter(|slice| slice.spot == spot && slice.sessions == sessions);
        of_it.filter_map(|slice| slice.page_tables_kib).max()
    }

    /// The ratio of two places' scans per second, round by round.
    pub fn ratios(&self, spot: Spot, other: Spot, sessions: u32) -> Vec<f64> {
        let pairs = self.per_second(spot, sessions).into_iter().zip(self.per_second(other, sessions));
        pairs.map(|(one, other)| one / other).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_per_second_are_read_from_pgbenchs_output() {
        let said =
            "number of failed transactions: 0 (0.000%)\ntps = 1234.5 (without initial connection time)\n";
        assert_eq!(per_second(said), Some(1234.5));
        assert_eq!([per_second("tps = 0.000 (x)"), per_second("pgbench: error: no")], [None; 2]);
    }

    #[test]
    fn transactions_are_read_from_pgbenchs_log() {
        let timed = timed_line("3 199 2241 0 1175850568 995598").unwrap();
        assert_eq!((timed.at_s, timed.latency), (1_175_850_568.995_598, Duration::from_micros(2241)));
        // With --max-tries, a transaction may have failed; a run that was killed leaves half a line.
        assert_eq!(["3 199 failed 0 1175850568 995598", "3 199 22", ""].map(timed_line), [None; 3]);
    }

    #[test]
    fn pgbench_runs_for_the_nearest_whole_second_and_at_least_for_one() {
        let seconds = [0.02, 0.6, 1.4, 1.5, 2.9, 3.0].map(|s| whole_seconds(Duration::from_secs_f64(s)));
        assert_eq!(seconds, [1, 1, 1, 2, 3, 3]);
    }

    #[test]
    fn a_scan_never_reaches_beyond_the_last_row() {
        let script = scan(1000);
        assert!(script.contains("random(1, 901)") && script.contains(":first + 99;"), "{script}");
    }

    #[test]
    fn ratios_pair_the_slices_of_a_round() {
        let slice = |spot, round, per_second| Scanned {
            spot,
            sessions: 8,
            round,
            per_second,
            page_tables_kib: Some(1),
        };
        let slices = vec![
            slice(Spot::Tmpfs, 0, 100.0),
            slice(Spot::FarShm, 0, 80.0),
            slice(Spot::FarShm, 1, 45.0),
            slice(Spot::Tmpfs, 1, 50.0),
        ];
        let report = RangeScanReport { slices, rows: 1, postgres: "15".into() };
        assert_eq!(report.ratios(Spot::FarShm, Spot::Tmpfs, 8), [0.8, 0.9]);
        assert!(report.ratios(Spot::FarShm, Spot::Tmpfs, 32).is_empty());
    }
}
