//! DuckDB with its `temp_directory` on a mount, and so little memory that TPC-H and TPC-DS need temporary
//! files.
//!
//! Each query runs in a process of its own, with the least memory of a ladder of sizes that suffices, so that
//! it spills as much as it can. DuckDB's profile tells the peak size of the directory.
//!
//! All rows are compared, in any order. A final `LIMIT` is removed, since ties make its choice arbitrary.
//! Sums and averages of floating point are compared to [`SIGNIFICANT`] digits, since threads add in any
//! order. The order of rows counts only in [`EXTRA`].

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Digest, Ground, Home, Job, Runner};

/// Memory limits to try, in MB, beginning with less than any query can run with.
const MEMORY_LADDER_MB: [u32; 18] =
    [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024, 2048, 4096];
/// Threads of each query: the fewest that share temporary files.
const THREADS: u32 = 2;
/// Digits of floating-point numbers that are compared.
const SIGNIFICANT: usize = 10;
/// A number with more digits than this is taken for floating point: TPC's decimals have fewer.
const FLOATING: usize = 14;
/// The beginning of DuckDB's message that a query needs more memory.
const NO_MEMORY: &str = "Out of Memory Error";

/// The name of a database in its place.
pub const DATABASE: &str = "database";

/// Changes of TPC-H's tables after which most queries give other rows. Blocks that the first checkpoint frees
/// are written again before the second one.
const CHANGES: &str = "UPDATE lineitem SET l_quantity = l_quantity + 1, l_discount = l_discount / 2 WHERE l_orderkey % 3 = 0; \
                       CHECKPOINT; DELETE FROM orders WHERE o_orderkey % 11 = 0; \
                       INSERT INTO partsupp SELECT ps_partkey + 1, ps_suppkey, ps_availqty + 1, ps_supplycost, ps_comment \
                       FROM partsupp WHERE ps_partkey % 5 = 0; CHECKPOINT;";

/// Queries that must spill, with a result that depends on the order: a join and sort of all rows, in the
/// manner of Li et al., and a grouping with as many groups as rows.
pub const EXTRA: [(&str, &str); 2] = [
    (
        "hash+sort",
        "SELECT count(*), sum(CAST(hash(place, l_orderkey, l_linenumber, l_comment, o_comment) AS HUGEINT)) FROM \
         (SELECT *, row_number() OVER (ORDER BY l_extendedprice, l_orderkey, l_linenumber) AS place \
         FROM lineitem JOIN orders ON l_orderkey = o_orderkey)",
    ),
    (
        "group",
        "SELECT count(*), sum(groups), max(comment), sum(CAST(hash(comment, groups) AS HUGEINT)) FROM \
         (SELECT l_comment AS comment, l_orderkey, count(*) AS groups FROM lineitem GROUP BY ALL)",
    ),
];

/// A benchmark whose tables and queries come from a DuckDB extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benchmark {
    /// 22 queries, and [`EXTRA`].
    TpcH,
    /// 99 queries.
    TpcDs,
}

impl Benchmark {
    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Self::TpcH => "TPC-H",
            Self::TpcDs => "TPC-DS",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::TpcH => "tpch",
            Self::TpcDs => "tpcds",
        }
    }

    fn generator(self) -> &'static str {
        match self {
            Self::TpcH => "dbgen",
            Self::TpcDs => "dsdgen",
        }
    }
}

/// A query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Its number in the benchmark, or its name.
    pub name: String,
    text: String,
}

impl Query {
    /// Its statement, without a final `LIMIT`.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is one of the benchmark's own, which have numbers; those of [`EXTRA`] have names.
    pub fn is_numbered(&self) -> bool {
        self.name.bytes().all(|byte| byte.is_ascii_digit())
    }
}

/// The results of a query.
#[derive(Clone, Debug)]
pub struct Ran {
    /// Its rows.
    pub rows: Digest,
    /// The memory limit that sufficed.
    pub memory_mb: u32,
    /// From the shell's start to its end.
    pub seconds: f64,
    /// Peak size of the temporary directory.
    pub temp_bytes: u64,
}

/// DuckDB's shell with its extensions.
#[derive(Clone, Debug)]
pub struct DuckDb {
    folder: PathBuf,
}

impl DuckDb {
    /// Finds what `scripts/setup databases` installed; otherwise an error that says so.
    pub fn find() -> Result<Self> {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = || std::env::home_dir().map(|home| home.join(".cache"));
        let cache = cache.or_else(home).context("HOME is not set, so DuckDB cannot be found")?;
        let folder = cache.join("farpool/duckdb");
        if !folder.join("complete").exists() {
            bail!("there is no DuckDB in {}: run `scripts/setup databases`", folder.display());
        }
        Ok(Self { folder })
    }

    /// Makes a database at `file` with the benchmark's tables, and returns its queries.
    pub fn generate(
        &self,
        how: &Runner<'_>,
        benchmark: Benchmark,
        scale: f64,
        file: &Path,
    ) -> Result<Vec<Query>> {
        let extension = self.folder.join(format!("{}.duckdb_extension", benchmark.extension()));
        let script = format!(
            "LOAD '{}';\n.mode trash\nCALL {}(sf = {scale});\n.mode json\n\
             SELECT query_nr, query FROM {}_queries() ORDER BY query_nr;\n",
            extension.display(),
            benchmark.generator(),
            benchmark.extension()
        );
        let said = self.job(script).arg("-bail").arg(file).run(how.wrapper, how.stop)?;
        let mut queries = read_queries(&said.stdout).context("cannot parse DuckDB's list of queries")?;
        if benchmark == Benchmark::TpcH {
            queries.extend(EXTRA.map(|(name, text)| Query { name: name.into(), text: text.into() }));
        }
        Ok(queries)
    }

    /// Writes all tables of a database into the new folder `dir`: `schema.sql` and `load.sql`, which
    /// PostgreSQL understands as well, and a file of comma-separated values for each table.
    pub fn export(&self, how: &Runner<'_>, file: &Path, dir: &Path) -> Result<()> {
        let script = format!("EXPORT DATABASE '{}' (FORMAT csv);\n", dir.display());
        let job = self.job(script).arg("-bail").arg("-readonly").arg(file);
        job.run(how.wrapper, how.stop).map(drop)
    }

    /// Changes TPC-H's tables.
    pub fn change(&self, how: &Runner<'_>, file: &Path) -> Result<()> {
        let job = self.job(format!("SET threads = {THREADS};\n{CHANGES}\n")).arg("-bail").arg(file);
        job.run(how.wrapper, how.stop).map(drop)
    }

    /// Runs a query with temporary files in the folder `temporary`, with the least memory that suffices, but
    /// at least `memory_mb`.
    pub fn run(
        &self,
        how: &Runner<'_>,
        database: &Path,
        temporary: &Path,
        query: &Query,
        memory_mb: u32,
    ) -> Result<Ran> {
        for memory_mb in MEMORY_LADDER_MB.into_iter().filter(|&step| step >= memory_mb) {
            if let Some(ran) = self.try_with(how, database, temporary, query, memory_mb)? {
                return Ok(ran);
            }
        }
        bail!("query {} needs more than {} MB", query.name, MEMORY_LADDER_MB[MEMORY_LADDER_MB.len() - 1])
    }

    /// `None` if the query needs more memory.
    fn try_with(
        &self,
        how: &Runner<'_>,
        database: &Path,
        temporary: &Path,
        query: &Query,
        memory_mb: u32,
    ) -> Result<Option<Ran>> {
        let profile = tempfile::Builder::new().suffix(".json").tempfile()?; // DuckDB insists on the ending
        let script = format!(
            "SET temp_directory = '{}'; SET memory_limit = '{memory_mb}MB'; SET threads = {THREADS};\n\
             SET enable_progress_bar = false;\n\
             PRAGMA enable_profiling = 'json'; PRAGMA profiling_output = '{}';\n\
             SET custom_profiling_settings = '{{\"SYSTEM_PEAK_TEMP_DIR_SIZE\": \"true\"}}';\n\
             .mode csv\n.headers off\n{};\n",
            temporary.display(),
            profile.path().display(),
            query.text
        );
        let job = self.job(script).arg("-bail").arg("-readonly").arg(database);
        let mut running = job.start(how.wrapper, how.stop)?;
        running.end_input();
        let done = running.wait(how.stop)?;
        if done.stderr.contains(NO_MEMORY) {
            return Ok(None);
        }
        let done = done.check().with_context(|| format!("query {} with {memory_mb} MB", query.name))?;
        let profile: Value = serde_json::from_slice(&std::fs::read(profile.path())?)
            .with_context(|| format!("query {} left no profile", query.name))?;
        let temp_bytes = profile.get("system_peak_temp_dir_size").and_then(Value::as_u64);
        Ok(Some(Ran {
            rows: Digest::unordered(&rounded(&done.stdout)),
            memory_mb,
            seconds: done.seconds,
            temp_bytes: temp_bytes
                .context("DuckDB's profile does not tell the size of its temporary directory")?,
        }))
    }

    fn job(&self, script: String) -> Job {
        // Ignores the user's start-up file.
        Job::new(self.folder.join("duckdb"), script).arg("-init").arg("/dev/null")
    }
}

fn read_queries(json: &[u8]) -> Option<Vec<Query>> {
    let rows: Value = serde_json::from_slice(json).ok()?;
    let query = |row: &Value| {
        let name = row.get("query_nr")?.as_u64()?.to_string();
        Some(Query { name, text: without_limit(row.get("query")?.as_str()?).to_owned() })
    };
    rows.as_array()?.iter().map(query).collect()
}

/// Removes the final `LIMIT` of a query.
fn without_limit(query: &str) -> &str {
    let query = query.trim_end().trim_end_matches(';').trim_end();
    let digits = query.trim_end_matches(|character: char| character.is_ascii_digit());
    let head = digits.trim_end();
    match head.len().checked_sub("limit".len()).filter(|&at| head.is_char_boundary(at)) {
        Some(at) if digits.len() < query.len() && head[at..].eq_ignore_ascii_case("limit") => &head[..at],
        _ => query,
    }
}

/// Rounds numbers with many digits.
fn rounded(csv: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(csv.len());
    for cell in csv.split_inclusive(|byte| matches!(byte, b',' | b'\n')) {
        let (value, end) =
            cell.split_at(cell.len() - usize::from(cell.ends_with(b",") || cell.ends_with(b"\n")));
        let number = std::str::from_utf8(value)
            .ok()
            .filter(|text| text.contains('.') && text.bytes().filter(u8::is_ascii_digit).count() > FLOATING);
        match number.and_then(|text| text.trim_end().parse::<f64>().ok()) {
            Some(number) => out.extend_from_slice(format!("{number:.*e}", SIGNIFICANT - 1).as_bytes()),
            None => out.extend_from_slice(value),
        }
        out.extend_from_slice(end);
    }
    out
}

/// Runs queries in two homes in turn, with the same memory, and compares the rows. Calls `tell` for each
/// round of each query.
pub fn compare(
    duckdb: &DuckDb,
    ground: &Ground,
    homes: [Home; 2],
    queries: &[Query],
    rounds: u32,
    mut tell: impl FnMut(&Query, &Ran, &Ran) -> Result<()>,
) -> Result<()> {
    let run = |home: Home, query, memory_mb| {
        let how = &ground.runner(home.database);
        let database = ground.path(home.database, DATABASE);
        let temporary = ground.path(home.temporary, "duckdb-temporary"); // which DuckDB makes
        duckdb.run(how, &database, &temporary, query, memory_mb)
    };
    let [first, second] = homes;
    for query in queries {
        let mut memory_mb = 0;
        for _ in 0..rounds {
            let mut here = run(first, query, memory_mb)?;
            let there = run(second, query, here.memory_mb)?;
            // The least memory that suffices depends a little on the timing of threads.
            if there.memory_mb != here.memory_mb {
                here = run(first, query, there.memory_mb)?;
            }
            if here.rows != there.rows {
                let name = &query.name;
                bail!("query {name}: {:?} with {first:?}, {:?} with {second:?}", here.rows, there.rows);
            }
            memory_mb = here.memory_mb;
            tell(query, &here, &there)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_final_limit_is_removed() {
        assert_eq!(without_limit("SELECT 1\nLIMIT 100;\n"), "SELECT 1\n");
        assert_eq!(without_limit("SELECT 1 ORDER BY 1"), "SELECT 1 ORDER BY 1");
        assert_eq!(without_limit("(SELECT 1 LIMIT 5) ;"), "(SELECT 1 LIMIT 5)");
        assert_eq!(without_limit("5"), "5");
    }

    #[test]
    fn only_floating_point_numbers_are_rounded() {
        let csv = b"1.2345678901234567,x,0.1\n12345.67,123456789012345678,1.2345678901234999\n";
        let same = b"1.234567890e0,x,0.1\n12345.67,123456789012345678,1.234567890e0\n";
        assert_eq!(rounded(csv), same);
    }
}
