//! Hash+Sort (paper 1, section 5.2.2): the statement, the proof that it spills, and a measured run.
//!
//! PostgreSQL has no `TOP`, and its `LIMIT` keeps the best rows in a heap as long as they fit in `work_mem`.
//! 100,000 rows of all columns do not fit, so the sort writes runs to disk like the paper's. Ties are broken
//! by the key of `lineitem`. So every correct answer is the same sequence of bytes, and comparing one hash
//! suffices.
//!
//! Nothing here hangs: PostgreSQL is asked to cancel the query after a deadline. If it cannot even do that
//! (its process waits in the kernel for a file system that does not answer), the connection is left to its
//! thread and abandoned.

use std::io::BufRead;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use crc_fast::{CrcAlgorithm, Digest};
use postgres::{CancelToken, Client, NoTls, SimpleQueryMessage};
use serde_json::Value;

use crate::postgres::Server;
use crate::stop::StopFlag;

/// The statement may take this long: twenty times what it takes on a throttled volume at scale factor 1.
const QUERY_DEADLINE: Duration = Duration::from_secs(20 * 60);
/// Time from the request to cancel until the connection is abandoned.
const CANCEL_GRACE: Duration = Duration::from_secs(10);
/// How often the waiting thread checks the stop flag.
const TICK: Duration = Duration::from_millis(100);
/// The beginning of PostgreSQL's log line about a temporary file.
const TEMP_FILE: &str = "temporary file: path \"";

/// The query with its two sizes.
#[derive(Clone, Copy, Debug)]
pub struct HashSort {
    /// `work_mem`, for each hash table and sort; small, so that both spill.
    pub work_mem_kib: u32,
    /// Number of rows that are returned.
    pub top: u32,
}

impl Default for HashSort {
    /// The paper's 100,000 rows, and PostgreSQL's default `work_mem` of 4 MiB.
    fn default() -> Self {
        Self { work_mem_kib: 4096, top: 100_000 }
    }
}

/// Where temporary files go: a tablespace, or the data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TempSpace<'a> {
    /// The database's own directory.
    DataDirectory,
    /// The tablespace of this name.
    Tablespace(&'a str),
}

/// The results of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// From sending the statement to receiving its last row.
    pub seconds: f64,
    /// Number of rows.
    pub rows: u64,
    /// CRC-64/NVME of the rows as text, in their order.
    pub rows_hash: u64,
    /// Temporary bytes written. They are more than the files hold: a sort reuses blocks while it merges.
    pub temp_bytes: u64,
    /// Number of temporary files.
    pub temp_files: u32,
    /// The sum of their sizes.
    pub temp_file_bytes: u64,
}

/// How PostgreSQL spilled, as its plan says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spill {
    /// Number of batches of the hash join; 1 means that it was in memory.
    pub hash_batches: u64,
    /// `external merge` if the sort went to disk.
    pub sort_method: String,
}

impl HashSort {
    fn select(&self) -> String {
        format!(
            "SELECT * FROM lineitem l JOIN orders o ON l.l_orderkey = o.o_orderkey \
             ORDER BY l.l_extendedprice, l.l_orderkey, l.l_linenumber LIMIT {}",
            self.top
        )
    }

    /// Runs it once under `EXPLAIN ANALYZE` and returns how it spilled; an error if join or sort did not.
    ///
    /// This also warms up the caches, so call it before the first measured run.
    pub fn explain(
        &self,
        server: &Server,
        place: TempSpace<'_>,
        stop: &StopFlag,
        tick: impl FnMut(),
    ) -> Result<Spill> {
        let plan = explain(server, place, &self.settings(), &self.select(), stop, tick)?;
        let spill = read_plan(&plan).context("EXPLAIN shows no hash join under a sort")?;
        if spill.hash_batches < 2 || spill.sort_method != "external merge" {
            bail!(
                "the query fits in memory ({spill:?}), so there is nothing to measure: take a larger --scale"
            );
        }
        Ok(spill)
    }

    /// A measured run. An error if a temporary file was not in `place`, or if the number of rows is wrong.
    pub fn run(
        &self,
        server: &Server,
        place: TempSpace<'_>,
        stop: &StopFlag,
        mut tick: impl FnMut(),
    ) -> Result<Run> {
        self.run_watched(server, place, stop, |_| tick())
    }

    /// As [`run`](Self::run); `tick` gets the id of the server process that runs the query.
    pub fn run_watched(
        &self,
        server: &Server,
        place: TempSpace<'_>,
        stop: &StopFlag,
        tick: impl FnMut(u32),
    ) -> Result<Run> {
        let run = copy_out(server, place, &self.settings(), &self.select(), stop, tick)?;
        if run.rows != u64::from(self.top) {
            bail!("the query returned {} rows instead of {}: take a larger --scale", run.rows, self.top);
        }
        if run.temp_files == 0 || run.temp_bytes == 0 {
            bail!("the query wrote no temporary files: take a larger --scale");
        }
        Ok(run)
    }

    fn settings(&self) -> String {
        // The choice between hash join and merge join must not depend on the planner's estimates.
        format!("SET work_mem = {}; SET enable_mergejoin = off; SET enable_nestloop = off", self.work_mem_kib)
    }
}

/// Runs a `SELECT` to its last row, under `settings`; `tick` gets the id of the server process that runs it.
/// An error if a temporary file was not in `place`.
pub fn copy_out(
    server: &Server,
    place: TempSpace<'_>,
    settings: &str,
    select: &str,
    stop: &StopFlag,
    mut tick: impl FnMut(u32),
) -> Result<Run> {
    let files = Arc::new(Mutex::new(TempFiles::default()));
    let log = Arc::clone(&files);
    let mut client = server.connect_with(move |notice| {
        if let (Some((path, bytes)), Ok(mut files)) = (temp_file(notice.message()), log.lock()) {
            files.add(path, bytes);
        }
    })?;
    prepare(&mut client, place, settings)?;
    let prefix = place_prefix(&mut client, place)?;
    client.batch_execute("SET client_min_messages = log; SELECT pg_stat_statements_reset()")?;
    let statement = format!("COPY ({select}) TO STDOUT");
    if let Ok(mut files) = files.lock() {
        files.expected_prefix = prefix;
    }
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[])?.try_get(0)?;
    let pid = u32::try_from(pid).context("an impossible process id")?;
    let counted = attended(client, stop, || tick(pid), move |client| measure(client, &statement))?;
    let files = files.lock().map(|files| files.clone()).unwrap_or_default();
    if let Some(path) = files.misplaced {
        bail!("PostgreSQL put the temporary file {path} in another place than {place:?}");
    }
    Ok(Run { temp_files: files.count, temp_file_bytes: files.bytes, ..counted })
}

/// Runs a `SELECT` under `EXPLAIN ANALYZE` and returns the plan as it was carried out.
pub fn explain(
    server: &Server,
    place: TempSpace<'_>,
    settings: &str,
    select: &str,
    stop: &StopFlag,
    tick: impl FnMut(),
) -> Result<Value> {
    let mut client = server.connect()?;
    prepare(&mut client, place, settings)?;
    let statement = format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {select}");
    let plan = attended(client, stop, tick, move |client| Ok(client.simple_query(&statement)?))?;
    serde_json::from_str(&plan_text(&plan)).context("EXPLAIN gave no JSON")
}

fn prepare(client: &mut Client, place: TempSpace<'_>, settings: &str) -> Result<()> {
    let space = match place {
        TempSpace::DataDirectory => "''",
        TempSpace::Tablespace(name) => name,
    };
    client.batch_execute(&format!(
        "SET temp_tablespaces = {space}; SET statement_timeout = '{} s'; {settings}; \
         CREATE EXTENSION IF NOT EXISTS pg_stat_statements",
        QUERY_DEADLINE.as_secs()
    ))?;
    Ok(())
}

/// What PostgreSQL logged about its temporary files.
#[derive(Clone, Debug, Default)]
struct TempFiles {
    expected_prefix: String,
    count: u32,
    bytes: u64,
    misplaced: Option<String>,
}

impl TempFiles {
    fn add(&mut self, path: &str, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
        if !path.starts_with(&self.expected_prefix) {
            self.misplaced = Some(path.into());
        }
    }
}

/// Parses `temporary file: path "...", size N`.
fn temp_file(message: &str) -> Option<(&str, u64)> {
    let (path, rest) = message.strip_prefix(TEMP_FILE)?.split_once('"')?;
    Some((path, rest.strip_prefix(", size ")?.trim().parse().ok()?))
}

fn place_prefix(client: &mut Client, place: TempSpace<'_>) -> Result<String> {
    let TempSpace::Tablespace(name) = place else { return Ok("base/pgsql_tmp/".into()) };
    let row = client.query_one("SELECT oid FROM pg_tablespace WHERE spcname = $1", &[&name])?;
    Ok(format!("pg_tblspc/{}/", row.try_get::<_, u32>(0)?))
}

fn measure(client: &mut Client, statement: &str) -> Result<Run> {
    let mut hash = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut rows = 0;
    let started = Instant::now();
    let mut reader = client.copy_out(statement)?;
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            break;
        }
        hash.update(bytes);
        rows += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let length = bytes.len();
        reader.consume(length);
    }
    let seconds = started.elapsed().as_secs_f64();
    drop(reader);
    let written = "SELECT coalesce(sum(temp_blks_written)::bigint, 0) * current_setting('block_size')::bigint \
                   FROM pg_stat_statements";
    let temp_bytes: i64 = client.query_one(written, &[])?.try_get(0)?;
    let temp_bytes = u64::try_from(temp_bytes).unwrap_or(0);
    Ok(Run { seconds, rows, rows_hash: hash.finalize(), temp_bytes, temp_files: 0, temp_file_bytes: 0 })
}

/// Runs `work` on a thread of its own and watches it: calls `tick`, cancels the query on request or at the
/// deadline, and abandons it if it hangs.
fn attended<T: Send + 'static>(
    mut client: Client,
    stop: &StopFlag,
    mut tick: impl FnMut(),
    work: impl FnOnce(&mut Client) -> Result<T> + Send + 'static,
) -> Result<T> {
    let cancel = client.cancel_token();
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || {
        // Sending fails if the caller has abandoned this thread; then the result is not needed.
        let _ = sender.send(work(&mut client));
    });
    let started = Instant::now();
    let mut cancelled: Option<Instant> = None;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(result) => {
                stop.check()?; // a cancelled query fails, but the cause is the request to stop
                return result;
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that ran the query panicked"),
            Err(RecvTimeoutError::Timeout) => tick(),
        }
        match cancelled {
            Some(since) if since.elapsed() > CANCEL_GRACE => {
                stop.check()?;
                bail!("the query did not end within {QUERY_DEADLINE:?} and could not be cancelled");
            }
            None if stop.is_raised() || started.elapsed() > QUERY_DEADLINE => {
                cancelled = Some(Instant::now());
                ask_to_cancel(&cancel);
            }
            _ => (),
        }
    }
}

fn ask_to_cancel(cancel: &CancelToken) {
    let cancel = cancel.clone();
    // On a thread of its own, since connecting can block. A failure changes nothing: the grace period ends in
    // any case.
    thread::spawn(move || drop(cancel.cancel_query(NoTls)));
}

fn plan_text(messages: &[SimpleQueryMessage]) -> String {
    let rows = messages.iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    rows.collect()
}

fn read_plan(plan: &Value) -> Option<Spill> {
    let root = plan.get(0)?.get("Plan")?;
    let sort_method = find(root, "Sort Method")?.as_str()?.to_owned();
    let hash_batches = find(root, "Hash Batches")?.as_u64()?;
    Some(Spill { hash_batches, sort_method })
}

/// The first value with that name in a plan node or below it.
fn find<'a>(plan: &'a Value, name: &str) -> Option<&'a Value> {
    plan.get(name).or_else(|| plan.get("Plans")?.as_array()?.iter().find_map(|child| find(child, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_line_about_a_temporary_file_gives_path_and_size() {
        let line = "temporary file: path \"pg_tblspc/1/PG_15/pgsql_tmp/pgsql_tmp1.0\", size 6440291";
        assert_eq!(temp_file(line), Some(("pg_tblspc/1/PG_15/pgsql_tmp/pgsql_tmp1.0", 6_440_291)));
        assert_eq!(temp_file("temporary file: path \"x\", size many"), None);
        assert_eq!(temp_file("checkpoint starting"), None);
    }

    #[test]
    fn temporary_file_outside_the_expected_place_is_noticed() {
        let mut files = TempFiles { expected_prefix: "pg_tblspc/1/".into(), ..TempFiles::default() };
        files.add("pg_tblspc/1/t", 5);
        assert_eq!(files.misplaced, None);
        files.add("base/pgsql_tmp/t", 6);
        assert_eq!((files.count, files.bytes), (2, 11));
        assert_eq!(files.misplaced.as_deref(), Some("base/pgsql_tmp/t"));
    }

    #[test]
    fn plan_tells_how_join_and_sort_spilled() {
        let plan = serde_json::json!([{"Plan": {"Node Type": "Limit", "Plans": [
            {"Node Type": "Sort", "Sort Method": "external merge", "Plans": [
                {"Node Type": "Hash Join", "Plans": [
                    {"Node Type": "Seq Scan"}, {"Node Type": "Hash", "Hash Batches": 32}]}]}]}}]);
        let spill = read_plan(&plan).unwrap();
        assert_eq!(spill, Spill { hash_batches: 32, sort_method: "external merge".into() });
    }

    #[test]
    fn plan_without_a_hash_join_is_no_spill() {
        assert_eq!(read_plan(&serde_json::json!([{"Plan": {"Sort Method": "quicksort"}}])), None);
        assert_eq!(read_plan(&Value::Null), None);
    }
}
