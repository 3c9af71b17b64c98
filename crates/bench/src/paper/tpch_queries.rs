//! Figures 4 and 5 and table 1 of paper 2: TPC-H's queries on DuckDB by where its temporary files lie, and
//! what they read and write meanwhile.
//!
//! TPC-H's queries are modest: DuckDB runs most of them without temporary files. So a join and sort of all
//! rows and a grouping of all rows, which this project's tests of DuckDB add to them, are measured as well.
//! Each query gets the least memory that suffices, determined once, on tmpfs. The process is limited to that
//! and a little more, so that the kernel's cache does not stand in for the disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::process::child_titled;
use super::stage::{Spot, make_volume, node_mib, noted, start_pool, subfolder};
use super::watch::{Sample, Watch};
use crate::cgroup::MemoryLimit;
use crate::child::joining;
use crate::databases::duckdb::{Benchmark, DuckDb, Query, Ran};
use crate::databases::{Access, Ground, GroundOptions, Place, Runner};
use crate::far_memory::{Transport, interposer};
use crate::machine;
use crate::meanwhile::looking_meanwhile;
use crate::progress::Progress;
use crate::stop::StopFlag;

/// The limit for files on tmpfs, which are charged to the process that writes them; the tables' file in the
/// page cache counts, too.
const LOCAL_LIMIT_MIB: u64 = 8192;
/// Memory beside the query's own: for the program, and for the tables' file in the page cache.
const BESIDE_QUERY_MIB: u64 = 256;
/// How often a query's process is sampled. Some queries take only a tenth of a second.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A text that only the command line of a query's process contains, among our children.
const QUERY_TITLE: &str = "-readonly";

/// The options of a measurement.
#[derive(Clone, Debug)]
pub struct QueriesOptions<'a> {
    /// TPC-H's scale factor.
    pub scale: f64,
    /// Number of rounds; each measures every place once.
    pub rounds: usize,
    /// Where the database is meanwhile; must be on a real disk.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
}

/// A run of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryRun {
    /// Its number in TPC-H, as in `q01`, or its name.
    pub query: String,
    /// Where its temporary files lay.
    pub spot: Spot,
    /// How long it took.
    pub seconds: f64,
    /// DuckDB's memory limit.
    pub memory_mb: u32,
    /// Peak size of its temporary files.
    pub temp_bytes: u64,
    /// What it read and wrote by system calls meanwhile, the tables included.
    pub samples: Vec<Sample>,
}

/// The results of all rounds.
#[derive(Clone, Debug)]
pub struct QueriesReport {
    /// In the order of their rounds.
    pub runs: Vec<QueryRun>,
    /// Whether the process's memory was limited.
    pub is_limited: bool,
    /// What was not available, and why.
    pub notes: Vec<String>,
}

/// Measures all queries in all places. An error if two runs of a query return different rows.
pub fn measure(options: &QueriesOptions<'_>, stop: &StopFlag) -> Result<QueriesReport> {
    let duckdb = DuckDb::find()?;
    let progress = Progress::on_stderr();
    let mut notes = Vec::new();
    let group = format!("farpool-queries-{}", std::process::id());
    let limit = MemoryLimit::create(&group, LOCAL_LIMIT_MIB);
    let mut limit = noted(limit, "the process's memory was not limited", &mut notes);
    let work = machine::scratch_dir(options.work_dir, "farpool-paper-")?;
    let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-paper-")?;
    let volume = make_volume(options.scale, work.path(), limit.as_ref());
    let mut volume = noted(volume, "there was no throttled disk", &mut notes);
    let ground = Ground::prepare(
        &GroundOptions {
            farpool: options.farpool,
            work_dir: options.work_dir,
            memory_per_node_mib: node_mib(options.scale),
            transport: Transport::Shm,
            access: Access::Kernel,
            wrapper: limit.as_ref().map(|limit| joining(&limit.procs_file()).to_vec()).unwrap_or_default(),
        },
        stop,
    )?;
    let mut interposed = start_pool(
        options.farpool,
        work.path(),
        work.path(),
        Spot::InterposedShm,
        node_mib(options.scale),
        stop,
    )?;
    let mut spots = vec![
        (Spot::Tmpfs, tmpfs.path().to_owned()),
        (Spot::InterposedShm, subfolder(interposed.mount_point(), "temporary")?),
        (Spot::FarShm, ground.dir(Place::Far, "temporary")?),
        (Spot::Disk, ground.dir(Place::Local, "temporary")?),
    ];
    if let Some(volume) = &volume {
        let dir = volume.mount_point().join("temporary");
        fs::create_dir(&dir)?;
        spots.push((Spot::Throttled, dir));
    }
    let step = progress.step(format!("generating TPC-H at scale factor {}", options.scale));
    let database = ground.path(Place::Local, "database");
    let queries = duckdb.generate(&ground.runner(Place::Local), Benchmark::TpcH, options.scale, &database)?;
    step.done("generated");
    let wrapper = [ground.wrapper(), &interposer(options.farpool)].concat();
    let interposer = Runner { wrapper: &wrapper, stop };
    let mut bench =
        Bench { duckdb, plain: ground.runner(Place::Local), interposer, database, limit: limit.as_mut() };
    let runs = bench.rounds(&queries, &spots, options.rounds, progress)?;
    interposed.stop()?;
    ground.tear_down()?;
    volume.as_mut().map_or(Ok(()), |volume| volume.remove())?;
    limit.as_mut().map_or(Ok(()), MemoryLimit::remove)?;
    Ok(QueriesReport { runs, is_limited: limit.is_some(), notes })
}

struct Bench<'a> {
    duckdb: DuckDb,
    plain: Runner<'a>,
    interposer: Runner<'a>,
    database: PathBuf,
    limit: Option<&'a mut MemoryLimit>,
}

impl Bench<'_> {
    fn rounds(
        &mut self,
        queries: &[Query],
        spots: &[(Spot, PathBuf)],
        rounds: usize,
        progress: Progress,
    ) -> Result<Vec<QueryRun>> {
        let (_, local) = spots.first().context("no place for temporary files")?;
        let mut known: BTreeMap<&str, Ran> = BTreeMap::new();
        let step = progress.step("looking for the least memory of each query");
        for query in queries {
            self.limit_to(LOCAL_LIMIT_MIB)?;
            known.insert(&query.name, self.duckdb.run(&self.plain, &self.database, local, query, 0)?);
        }
        step.done("found");
        let mut runs = Vec::new();
        for round in 0..rounds {
            let step = progress.step(format!("round {} of {rounds}", round + 1));
            for query in queries {
                let before = &known[query.name.as_str()];
                for turn in 0..spots.len() {
                    let (spot, dir) = &spots[(turn + round) % spots.len()];
                    let beside = u64::from(before.memory_mb) + BESIDE_QUERY_MIB;
                    self.limit_to(if *spot == Spot::Tmpfs { LOCAL_LIMIT_MIB } else { beside })?;
                    let (ran, samples) = self.watched(query, *spot, dir, before.memory_mb)?;
                    ensure!(
                        ran.rows == before.rows,
                        "query {}: the rows differ on {}",
                        query.name,
                        spot.name()
                    );
                    let Ran { seconds, memory_mb, temp_bytes, .. } = ran;
                    runs.push(QueryRun {
                        query: label(&query.name),
                        spot: *spot,
                        seconds,
                        memory_mb,
                        temp_bytes,
                        samples,
                    });
                }
            }
            step.done("measured");
        }
        Ok(runs)
    }

    fn limit_to(&mut self, mib: u64) -> Result<()> {
        self.limit.as_mut().map_or(Ok(()), |limit| limit.change(mib))
    }

    /// Runs a query and samples its process meanwhile.
    fn watched(&self, query: &Query, spot: Spot, dir: &Path, memory_mb: u32) -> Result<(Ran, Vec<Sample>)> {
        let how = if spot == Spot::InterposedShm { &self.interposer } else { &self.plain };
        let mut watch = Watch::default();
        let look = || watch.look_for(|| child_titled(std::process::id(), QUERY_TITLE));
        let run = || self.duckdb.run(how, &self.database, dir, query, memory_mb);
        let ran = looking_meanwhile(LOOK_EVERY, look, run)?;
        Ok((ran, watch.samples))
    }
}

/// Numbers with leading zeros, so that they sort in order.
fn label(name: &str) -> String {
    name.parse::<u32>().map_or_else(|_| name.to_owned(), |number| format!("q{number:02}"))
}

impl QueriesReport {
    /// The queries, in their order.
    pub fn queries(&self) -> Vec<&str> {
        let mut queries: Vec<&str> = Vec::new();
        for run in &self.runs {
            if !queries.contains(&run.query.as_str()) {
                queries.push(&run.query);
            }
        }
        queries
    }

    /// The runs of a query in a place, round by round.
    pub fn of<'a>(&'a self, query: &'a str, spot: Spot) -> impl Iterator<Item = &'a QueryRun> {
        self.runs.iter().filter(move |run| run.query == query && run.spot == spot)
    }
}

impl QueryRun {
    /// Bytes read and written up to the last sample.
    pub fn traffic(&self) -> (u64, u64) {
        self.samples.last().map_or((0, 0), |last| (last.read_bytes, last.written_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_by_query_and_place() {
        let run = |query: &str, spot, seconds| QueryRun {
            query: label(query),
            spot,
            seconds,
            memory_mb: 16,
            temp_bytes: 0,
            samples: vec![Sample { at_s: 1.0, read_bytes: 5, written_bytes: 7, cpu_s: 0.5 }],
        };
        let runs = vec![run("9", Spot::Disk, 2.0), run("group", Spot::Tmpfs, 1.0), run("9", Spot::Disk, 3.0)];
        let report = QueriesReport { runs, is_limited: true, notes: Vec::new() };
        assert_eq!(report.queries(), ["q09", "group"]);
        assert_eq!(report.of("q09", Spot::Disk).map(|run| run.seconds).collect::<Vec<_>>(), [2.0, 3.0]);
        assert_eq!(report.runs[0].traffic(), (5, 7));
    }
}
