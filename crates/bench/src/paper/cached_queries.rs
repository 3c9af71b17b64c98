//! TPC-H and TPC-DS on a PostgreSQL whose tables are in the page cache and whose temporary files are in far
//! memory: figures 18 to 21 of paper 1 (appendix B.1).
//!
//! One server loads the tables. Each case gets a copy of it by a base backup, so that all have the same
//! statistics, and thus the same plans. All queries are run one after the other. The first run of all fills
//! caches, and is not measured.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use postgres::Client;

use super::Effort;
use super::cached_server::{REPLICATION, VERIFIED_ONE_IN, forget_pages, readable_module};
use super::stage::{NODES, Spot, start_pool, subfolder};
use crate::cgroup::MemoryLimit;
use crate::databases::Runner;
use crate::databases::duckdb::{Benchmark, DuckDb, Query};
use crate::far_memory::{FarMemory, REGION_MIB};
use crate::machine;
use crate::page_cache::{CacheUse, PageCache};
use crate::postgres::{Server, ServerOptions};
use crate::progress::Progress;
use crate::query::{Run, TempSpace, copy_out};
use crate::stop::StopFlag;
use crate::tally::median;
use crate::throttle::ThrottledVolume;

/// The benchmarks' scale factor at scale 1: some 450 MB of TPC-H, and 550 MB of TPC-DS, with the indexes.
const FACTOR_PER_SCALE: f64 = 0.3;
/// Memory of a server at scale 1, with the kernel's page cache for it: less than half of the data.
const LIMIT_MIB_PER_SCALE: f64 = 192.0;
/// The lowest limit: a server and one session need about that.
const LIMIT_MIN_MIB: u64 = 128;
/// The limit is this many times as large as PostgreSQL's own buffers.
const LIMIT_OVER_BUFFERS: u64 = 6;
/// More than the data and the indexes of either benchmark at scale 1, without those of one size.
const DATA_MIB_PER_SCALE: f64 = 700.0;
/// Tables that have the same size at each scale.
const DATA_MIN_MIB: u64 = 64;
/// More than temporary files hold at any time, at scale 1.
const TEMPORARY_MIB_PER_SCALE: f64 = 700.0;
/// Beside the data: the cluster, its log, and regions that are not full.
const SPARE_MIB: u64 = 512;
/// Queries of TPC-DS that take minutes with these indexes, wherever the tables are.
const LEFT_OUT: [&str; 4] = ["1", "4", "11", "74"];
/// Most rounds: each takes minutes.
pub const ROUNDS_MAX: usize = 3;
/// The tablespace for temporary files in far memory.
const TEMPORARY: &str = "temporary";
/// The usual memory for sorting and hashing. Scans begin at the first page, so that rows come in the same
/// order on each server.
const SETTINGS: &str = "SET work_mem = '4MB'; SET synchronize_seqscans = off";

/// Where tables and temporary files are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// Everything on tmpfs.
    Tmpfs,
    /// Tables on the throttled volume, behind a page cache; temporary files on a mount. Cache and mount share
    /// a pool, over shm.
    FarShm,
    /// The same over TCP.
    FarTcp,
    /// Everything on the throttled volume.
    Throttled,
}

impl Case {
    /// In the order of the report.
    pub const ALL: [Case; 4] = [Case::Tmpfs, Case::FarShm, Case::FarTcp, Case::Throttled];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Case::Tmpfs => Spot::Tmpfs.name(),
            Case::FarShm => "far memory, shm",
            Case::FarTcp => "far memory, tcp",
            Case::Throttled => Spot::Throttled.name(),
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Case::Tmpfs => "tmpfs",
            Case::FarShm => "shm",
            Case::FarTcp => "tcp",
            Case::Throttled => "throttled",
        }
    }

    /// How the cache and the mount reach far memory; each has a type of its own for that.
    fn far(self) -> Option<(&'static str, Spot)> {
        match self {
            Case::FarShm => Some(("shm", Spot::FarShm)),
            Case::FarTcp => Some(("tcp", Spot::FarTcp)),
            Case::Tmpfs | Case::Throttled => None,
        }
    }
}

/// A run of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryRun {
    /// Its number in the benchmark.
    pub query: String,
    /// Where tables and temporary files were.
    pub case: Case,
    /// Counted from 0.
    pub round: usize,
    /// How long it took.
    pub seconds: f64,
}

/// The results of all rounds.
#[derive(Clone, Debug)]
pub struct QueriesReport {
    /// Each query once per round and case.
    pub runs: Vec<QueryRun>,
    /// The benchmark's scale factor.
    pub factor: f64,
    /// Pages that were found in the cache, and those that were not, in all rounds.
    pub cache_use: Vec<(Case, CacheUse)>,
    /// Bytes of tables and indexes.
    pub data_bytes: u64,
    /// Bytes of the temporary files of all queries.
    pub temporary_bytes: u64,
    /// The limit of each server's memory but that on tmpfs.
    pub limit_mib: u64,
    /// Each server's own buffers.
    pub buffers_mib: u64,
    /// The server's version.
    pub postgres: String,
}

/// How much memory servers have, and how much room their files need.
#[derive(Clone, Copy)]
struct Room {
    limit_mib: u64,
    data_mib: u64,
    temporary_mib: u64,
}

impl Room {
    fn of(scale: f64) -> Self {
        Room {
            limit_mib: ((LIMIT_MIB_PER_SCALE * scale) as u64).max(LIMIT_MIN_MIB),
            data_mib: DATA_MIN_MIB + (DATA_MIB_PER_SCALE * scale).ceil() as u64,
            temporary_mib: (TEMPORARY_MIB_PER_SCALE * scale).ceil() as u64,
        }
    }

    fn buffers_mib(self) -> u64 {
        self.limit_mib / LIMIT_OVER_BUFFERS
    }

    fn all_mib(self) -> u64 {
        self.data_mib + self.temporary_mib + SPARE_MIB
    }

    /// Memory that each node lends.
    fn node_mib(self) -> u64 {
        (self.all_mib() / u64::from(NODES)).next_multiple_of(REGION_MIB)
    }
}

/// What all servers share.
struct Stage<'a> {
    effort: &'a Effort<'a>,
    work: &'a Path,
    tmpfs: &'a Path,
    volume: &'a Path,
    module: PathBuf,
    room: Room,
}

/// A server with its data. Fields are dropped in this order.
struct Scene {
    case: Case,
    server: Server,
    cache: Option<PageCache>,
    far: Option<FarMemory>,
    limit: MemoryLimit,
}

/// Measures all cases in turn, round by round.
pub fn measure(benchmark: Benchmark, effort: &Effort<'_>, stop: &StopFlag) -> Result<QueriesReport> {
    ensure!(machine::is_root(), "only root can limit the memory of the servers, and make a throttled volume");
    let duckdb = DuckDb::find()?;
    let progress = Progress::on_stderr();
    let work = machine::scratch_dir(effort.work_dir, "farpool-queries-bench-")?;
    let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-queries-bench-")?;
    let (room, factor) = (Room::of(effort.scale), FACTOR_PER_SCALE * effort.scale);
    let on_volume = Case::ALL.len() as u64 - 1;
    machine::require_space(tmpfs.path(), room.all_mib())?;
    // Beside the volume: DuckDB's file with the exported tables, and the server that is copied.
    machine::require_disk(work.path(), (on_volume + 2) * room.all_mib())?;
    let module = readable_module(effort.farpool, &work)?;
    let mount_point = subfolder(work.path(), "volume")?;
    let mut volume = ThrottledVolume::make(work.path(), &mount_point, on_volume * room.all_mib(), None)?;
    let (work, tmpfs) = (work.path(), tmpfs.path());
    let stage = Stage { effort, work, tmpfs, volume: &mount_point, module, room };

    let step = progress.step(format!("loading {} at scale factor {factor}", benchmark.name()));
    let queries = generate(&duckdb, benchmark, factor, work, stop)?;
    let mut original = stage.original(&work.join("tables"), benchmark, stop)?;
    let data_bytes = database_bytes(&original)?;
    let (data_mib, room_mib) = (data_bytes >> 20, room.data_mib);
    ensure!(data_mib < room_mib, "the tables have {data_mib} MiB, and the cache only {room_mib}: a bug");
    step.done("loaded");
    let mut scenes = Vec::new();
    for case in Case::ALL {
        let step = progress.step(format!("a copy: {}", case.name()));
        scenes.push(stage.scene(case, &original, stop)?);
        step.done("started");
    }
    original.stop()?;
    let (expected, temporary_bytes) = warm_up(&mut scenes, &queries, &progress, stop)?;
    let before = uses(&scenes)?;
    let rounds_wanted = effort.rounds.min(ROUNDS_MAX);
    let runs = rounds(&mut scenes, (&queries, &expected), rounds_wanted, &progress, stop)?;
    let cache_use = uses(&scenes)?.into_iter().zip(before);
    let cache_use: Vec<_> = cache_use.map(|((case, now), (_, before))| (case, now.since(before))).collect();
    for (case, used) in &cache_use {
        ensure!(used.turns == 0, "{}: the cache was off for a while; its daemon says why", case.name());
    }
    let postgres = scenes[0].server.version()?;
    scenes.into_iter().try_for_each(Scene::tear_down)?;
    volume.remove()?;
    let (limit_mib, buffers_mib) = (room.limit_mib, room.buffers_mib());
    Ok(QueriesReport {
        runs,
        factor,
        cache_use,
        data_bytes,
        temporary_bytes,
        limit_mib,
        buffers_mib,
        postgres,
    })
}

/// Writes the benchmark's tables into the new folder `tables`, and returns its queries.
fn generate(
    duckdb: &DuckDb,
    benchmark: Benchmark,
    factor: f64,
    work: &Path,
    stop: &StopFlag,
) -> Result<Vec<Query>> {
    let (how, file) = (Runner { wrapper: &[], stop }, work.join("database"));
    let queries = duckdb.generate(&how, benchmark, factor, &file)?;
    let tables = work.join("tables");
    duckdb.export(&how, &file, &tables)?;
    readable_by_all(&tables).context("cannot let the server read DuckDB's files")?;
    fs::remove_file(&file).context("cannot remove DuckDB's file")?;
    // Without this project's `EXTRA`, which is in DuckDB's dialect.
    let is_left_out = |query: &Query| left_out(benchmark).contains(&&*query.name);
    Ok(queries.into_iter().filter(|query| query.is_numbered() && !is_left_out(query)).collect())
}

/// Queries that are not measured.
pub fn left_out(benchmark: Benchmark) -> &'static [&'static str] {
    if benchmark == Benchmark::TpcDs { &LEFT_OUT } else { &[] }
}

fn readable_by_all(dir: &Path) -> Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(dir)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Runs all queries once in each case. Returns the hash of each query's rows, and the bytes of all temporary
/// files. An error if a query has another plan or other rows than on tmpfs.
fn warm_up(
    scenes: &mut [Scene],
    queries: &[Query],
    progress: &Progress,
    stop: &StopFlag,
) -> Result<(Vec<u64>, u64)> {
    let (mut expected, mut plans, mut temporary_bytes) = (Vec::new(), Vec::new(), 0);
    for scene in scenes {
        let step = progress.step(format!("the first run: {}", scene.case.name()));
        let (own_plans, runs) = (scene.plans(queries)?, scene.run_all(queries, stop)?);
        if plans.is_empty() {
            expected = runs.iter().map(|run| run.rows_hash).collect();
            temporary_bytes = runs.iter().map(|run| run.temp_file_bytes).sum();
            plans = own_plans;
        } else {
            let other_plan = plans.iter().zip(&own_plans).position(|(one, other)| one != other);
            let other_plan = other_plan.map(|at| &*queries[at].name);
            ensure!(other_plan.is_none(), "query {other_plan:?} has another plan on {}", scene.case.name());
            scene.compare(queries, &expected, &runs)?;
        }
        step.done("done");
    }
    ensure!(temporary_bytes > 0, "the queries write no temporary files: take a larger --scale");
    Ok((expected, temporary_bytes))
}

fn rounds(
    scenes: &mut [Scene],
    (queries, expected): (&[Query], &[u64]),
    rounds: usize,
    progress: &Progress,
    stop: &StopFlag,
) -> Result<Vec<QueryRun>> {
    let mut measured = Vec::new();
    for round in 0..rounds {
        let step = progress.step(format!("round {} of {rounds}", round + 1));
        for turn in 0..scenes.len() {
            let scene = &mut scenes[(turn + round) % Case::ALL.len()];
            let runs = scene.run_all(queries, stop)?;
            scene.compare(queries, expected, &runs)?;
            let case = scene.case;
            measured.extend(queries.iter().zip(runs).map(|(query, run)| QueryRun {
                query: query.name.clone(),
                case,
                round,
                seconds: run.seconds,
            }));
        }
        step.done("measured");
    }
    Ok(measured)
}

/// How the caches have been used so far.
fn uses(scenes: &[Scene]) -> Result<Vec<(Case, CacheUse)>> {
    let cached = scenes.iter().filter_map(|scene| Some((scene.case, scene.cache.as_ref()?)));
    cached.map(|(case, cache)| Ok((case, cache.status()?.cache_use()))).collect()
}

fn database_bytes(server: &Server) -> Result<u64> {
    let row = server.connect()?.query_one("SELECT pg_database_size(current_database())", &[])?;
    Ok(row.get::<_, i64>(0) as u64)
}

impl Stage<'_> {
    /// A server on the machine's disk with all tables and indexes.
    fn original(&self, tables: &Path, benchmark: Benchmark, stop: &StopFlag) -> Result<Server> {
        let (dir, log) = (subfolder(self.work, "original")?, self.work.join("original.log"));
        let options = ServerOptions {
            initdb_args: &["--data-checksums"],
            settings: &REPLICATION,
            ..ServerOptions::new(&dir, &log)
        };
        let server = Server::start(&options, stop)?;
        let mut client = server.connect()?;
        for script in ["schema.sql", "load.sql"] {
            let text = fs::read_to_string(tables.join(script)).context("DuckDB has exported nothing")?;
            client.batch_execute(&text).with_context(|| format!("cannot load the tables: {script}"))?;
        }
        fs::remove_dir_all(tables).context("cannot remove the exported tables")?;
        for (table, column) in indexed(&mut client, benchmark)? {
            client.batch_execute(&format!("CREATE INDEX ON {table} ({column})"))?;
        }
        for statement in ["VACUUM (FREEZE, ANALYZE)", "CHECKPOINT"] {
            client.batch_execute(statement)?;
        }
        Ok(server)
    }

    fn scene(&self, case: Case, original: &Server, stop: &StopFlag) -> Result<Scene> {
        let parent = if case == Case::Tmpfs { self.tmpfs } else { self.volume };
        let (dir, log) =
            (subfolder(parent, case.folder())?, self.work.join(format!("{}.log", case.folder())));
        // Files on tmpfs count as memory of the server.
        let limit_mib = if case == Case::Tmpfs { self.room.all_mib() } else { self.room.limit_mib };
        let limit = MemoryLimit::create(
            &format!("farpool-queries-bench-{}-{}", std::process::id(), case.folder()),
            limit_mib,
        )?;
        // The first counts the bytes of temporary files.
        let module = case.far().map_or(String::new(), |_| format!(", {}", self.module.display()));
        let libraries = format!("pg_stat_statements{module}");
        let [buffers, cached] =
            [self.room.buffers_mib(), self.room.limit_mib].map(|size| format!("{size}MB"));
        let own = [
            ("shared_preload_libraries", &*libraries),
            ("shared_buffers", &*buffers),
            // What a server without far memory can expect. All have the same, for the same plans.
            ("effective_cache_size", &*cached),
        ];
        let settings = [&REPLICATION[..], &own[..]].concat();
        let options =
            ServerOptions { limit: Some(&limit), settings: &settings, ..ServerOptions::new(&dir, &log) };
        let server = original.start_standby(&options, stop)?;
        server.promote()?;
        server.connect()?.batch_execute("CHECKPOINT")?;
        forget_pages(&dir)?;
        let (mut cache, mut far) = (None, None);
        if let Some((transport, spot)) = case.far() {
            let (farpool, node_mib) = (self.effort.farpool, self.room.node_mib());
            let pool = start_pool(farpool, self.work, self.work, spot, node_mib, stop)?;
            server.create_tablespace(TEMPORARY, &pool.mount_point().join(TEMPORARY))?;
            let memory = format!("{}MiB", self.room.data_mib);
            let more = ["--memory", &memory, "--transport", transport].map(OsString::from);
            let options = pool.operator_args().into_iter().chain(more);
            cache = Some(PageCache::attach(farpool, server.data_directory(), options)?);
            far = Some(pool);
        }
        Ok(Scene { case, server, cache, far, limit })
    }
}

/// Tables with the columns that get an index: the first one of each table, by which most joins are, and one
/// without which two queries of TPC-H take minutes.
fn indexed(client: &mut Client, benchmark: Benchmark) -> Result<Vec<(String, String)>> {
    let firsts = "SELECT table_name::text, column_name::text FROM information_schema.columns \
                  WHERE table_schema = 'public' AND ordinal_position = 1 ORDER BY table_name";
    let mut all: Vec<(String, String)> =
        client.query(firsts, &[])?.iter().map(|row| (row.get(0), row.get(1))).collect();
    if benchmark == Benchmark::TpcH {
        all.push(("lineitem".into(), "l_partkey".into()));
    }
    Ok(all)
}

impl Scene {
    /// The plans of the queries.
    fn plans(&self, queries: &[Query]) -> Result<Vec<String>> {
        let mut client = self.server.connect()?;
        client.batch_execute(SETTINGS)?;
        let mut plan = |query: &Query| {
            let rows = client.query(&format!("EXPLAIN (COSTS OFF) {}", query.text()), &[])?;
            let lines: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
            anyhow::Ok(lines.join("\n"))
        };
        queries.iter().map(|query| plan(query).with_context(|| format!("query {}", query.name))).collect()
    }

    /// Runs all queries; an error if temporary files were not where they belong.
    fn run_all(&mut self, queries: &[Query], stop: &StopFlag) -> Result<Vec<Run>> {
        let space =
            if self.far.is_some() { TempSpace::Tablespace(TEMPORARY) } else { TempSpace::DataDirectory };
        let mut runs = Vec::new();
        for query in queries {
            let run = copy_out(&self.server, space, SETTINGS, query.text(), stop, |_| ());
            runs.push(run.or_else(|error| {
                stop.check()?;
                // If a process has ended, that is the cause, and the failed query only the consequence.
                self.far.as_mut().map_or(Ok(()), FarMemory::check_alive)?;
                self.cache.as_mut().map_or(Ok(()), PageCache::check_alive)?;
                self.server.check_alive()?;
                Err(error.context(format!("query {} failed: {}", query.name, self.case.name())))
            })?);
        }
        Ok(runs)
    }

    /// An error if the rows of a query are not those that it had on tmpfs.
    fn compare(&self, queries: &[Query], expected: &[u64], runs: &[Run]) -> Result<()> {
        for ((query, expected), run) in queries.iter().zip(expected).zip(runs) {
            let (name, case) = (&query.name, self.case.name());
            ensure!(run.rows_hash == *expected, "query {name}: {case}: other rows than on tmpfs");
        }
        Ok(())
    }

    fn tear_down(mut self) -> Result<()> {
        if let Some(cache) = &self.cache {
            ensure!(cache.verify(VERIFIED_ONE_IN)? > 0, "no page could be compared with the disk");
        }
        let stopped = self.server.stop();
        let cache = self.cache.as_mut().map_or(Ok(()), PageCache::detach);
        let far = self.far.as_mut().map_or(Ok(()), FarMemory::stop);
        [stopped, cache, far, self.limit.remove()].into_iter().collect()
    }
}

impl QueriesReport {
    /// Queries per hour of a case, round by round.
    pub fn per_hour(&self, case: Case) -> Vec<f64> {
        let rounds = self.runs.iter().map(|run| run.round + 1).max().unwrap_or(0);
        let of_round = |round| {
            let runs = self.runs.iter().filter(move |run| (run.case, run.round) == (case, round));
            let seconds: Vec<f64> = runs.map(|run| run.seconds).collect();
            seconds.len() as f64 * 3600.0 / seconds.iter().sum::<f64>()
        };
        (0..rounds).map(of_round).collect()
    }

    /// The ratio of two cases' queries per hour, round by round.
    pub fn ratios(&self, case: Case, other: Case) -> Vec<f64> {
        self.per_hour(case).into_iter().zip(self.per_hour(other)).map(|(one, other)| one / other).collect()
    }

    /// The speed of each query in multiples of its speed on the throttled volume: medians over the rounds.
    pub fn improvements(&self, case: Case) -> Vec<f64> {
        let mut ratios: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for slow in self.runs.iter().filter(|run| run.case == Case::Throttled) {
            let same = |it: &&QueryRun| (&it.query, it.round, it.case) == (&slow.query, slow.round, case);
            let fast = self.runs.iter().find(same);
            ratios.entry(&slow.query).or_default().extend(fast.map(|fast| slow.seconds / fast.seconds));
        }
        ratios.into_values().filter_map(median).collect()
    }

    /// Number of rounds.
    pub fn rounds(&self) -> usize {
        self.per_hour(Case::Tmpfs).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_per_hour_and_improvements_are_of_a_round() {
        let run = |query: &str, case, round, seconds| QueryRun { query: query.into(), case, round, seconds };
        let runs = vec![
            run("1", Case::Tmpfs, 0, 1.0),
            run("2", Case::Tmpfs, 0, 3.0),
            run("1", Case::Throttled, 0, 4.0),
            run("2", Case::Throttled, 0, 6.0),
            run("1", Case::Throttled, 1, 8.0),
            run("2", Case::Throttled, 1, 8.0),
            run("1", Case::Tmpfs, 1, 4.0),
            run("2", Case::Tmpfs, 1, 4.0),
        ];
        let report = QueriesReport {
            runs,
            factor: 0.1,
            cache_use: Vec::new(),
            data_bytes: 1,
            temporary_bytes: 1,
            limit_mib: 1,
            buffers_mib: 1,
            postgres: "15".into(),
        };
        assert_eq!(report.per_hour(Case::Tmpfs), [1800.0, 900.0]);
        assert_eq!(report.ratios(Case::Tmpfs, Case::Throttled), [2.5, 2.0]);
        // 4 and 2 for the first query, and 2 twice for the second.
        assert_eq!(report.improvements(Case::Tmpfs), [3.0, 2.0]);
        assert_eq!(report.rounds(), 2);
    }
}
