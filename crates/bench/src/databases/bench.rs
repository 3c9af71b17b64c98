//! Question: how much slower or faster is each database with its files in far memory than on the local disk?
//!
//! Sketch: none. The answer depends on the disk and on how much of it the page cache holds, which is not
//! limited here. So this bench shows what unmodified databases get on this machine, and `farpool demo` what
//! they get if memory is scarce.
//! Method: rounds, each in both places in turn; medians over the rounds.
//! Check: in each round, results are equal in both places.

use anyhow::{Result, bail, ensure};

use super::columns;
use super::duckdb::{self, Benchmark, DuckDb};
use super::postgres_spills::Spilled;
use super::postgres_tables::{self, Tables};
use super::sqlite::{self, Journal, Sqlite};
use super::{Ground, GroundOptions, Home, Place};
use crate::options::named;
use crate::stop::StopFlag;
use crate::tally::median;

/// Transactions of each pgbench client.
const PGBENCH_TRANSACTIONS: u32 = 5_000;
/// pgbench's scale at a scale factor of 1: 300 MB.
const PGBENCH_PER_SCALE: f64 = 20.0;
/// Rows that SQLite sorts at a scale factor of 1.
const SQLITE_ROWS_PER_SCALE: f64 = 2e6;
/// Columns, and MiB of each at a scale factor of 1.
const COLUMNS: usize = 8;
const COLUMN_MIB_PER_SCALE: f64 = 64.0;

/// Memory of each node: at a scale factor of 1, where DuckDB sorts a gigabyte, and at least.
const NODE_MIB_PER_SCALE: f64 = 3072.0;
const NODE_MIN_MIB: u64 = 256;

/// Memory that each node lends at this scale factor.
pub fn node_mib(scale: f64) -> u64 {
    let memory = (NODE_MIB_PER_SCALE * scale).ceil() as u64;
    memory.max(NODE_MIN_MIB).next_multiple_of(NODE_MIN_MIB)
}

/// The databases that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Database {
    /// Temporary files and a tablespace.
    Postgres,
    /// TPC-H and TPC-DS.
    DuckDb,
    /// Temporary files and journals.
    Sqlite,
    /// The mapping program.
    Columns,
}

impl Database {
    /// All databases.
    pub const ALL: [Self; 4] = [Self::Postgres, Self::DuckDb, Self::Sqlite, Self::Columns];
}

named!(
    Database,
    "database",
    Postgres = "postgres",
    DuckDb = "duckdb",
    Sqlite = "sqlite",
    Columns = "columns"
);

/// The options of a bench.
#[derive(Clone, Debug)]
pub struct BenchOptions<'a> {
    /// The pool, the mount and the local folder.
    pub ground: GroundOptions<'a>,
    /// Scale factor of the data: 1 is TPC-H's and TPC-DS's gigabyte.
    pub scale: f64,
    /// Number of rounds.
    pub rounds: u32,
    /// The databases to measure.
    pub databases: Vec<Database>,
}

/// Measures, and passes the lines of a table to `print`. An error if a result differs.
pub fn run_bench(
    options: &BenchOptions<'_>,
    stop: &StopFlag,
    print: impl FnMut(String) -> Result<()>,
) -> Result<()> {
    ensure!(
        options.scale > 0.0 && options.rounds > 0,
        "a scale and a number of rounds above zero are needed"
    );
    let mut bench = Bench { options, stop, print, lines: Vec::new() };
    (bench.print)(format!("{:<50}{:>10}{:>10}{:>8}{:>10}", "", "local, s", "far, s", "ratio", "temp, MB"))?;
    for database in &options.databases {
        match database {
            Database::Postgres => {
                bench.postgres_spills()?;
                bench.flush()?;
                bench.postgres_tables()?;
            }
            Database::DuckDb => {
                bench.duckdb(Benchmark::TpcH)?;
                bench.flush()?;
                bench.duckdb(Benchmark::TpcDs)?;
            }
            Database::Sqlite => bench.sqlite()?,
            Database::Columns => bench.columns()?,
        }
        bench.flush()?;
    }
    Ok(())
}

/// Something that was measured in both places, in several rounds.
#[derive(Clone, Debug)]
struct Line {
    what: String,
    local: Vec<f64>,
    far: Vec<f64>,
    temp_bytes: u64,
}

impl Line {
    fn text(&self) -> String {
        let middle = |values: &[f64]| median(values.iter().copied()).unwrap_or(f64::NAN);
        let (local, far) = (middle(&self.local), middle(&self.far));
        let pairs: Vec<f64> = self.local.iter().zip(&self.far).map(|(local, far)| far / local).collect();
        let temp =
            if self.temp_bytes > 0 { format!("{:.1}", self.temp_bytes as f64 / 1e6) } else { "-".into() };
        format!("{:<50}{local:>10.2}{far:>10.2}{:>8.2}{temp:>10}", self.what, middle(&pairs))
    }
}

struct Bench<'a, P> {
    options: &'a BenchOptions<'a>,
    stop: &'a StopFlag,
    print: P,
    lines: Vec<Line>,
}

impl<P: FnMut(String) -> Result<()>> Bench<'_, P> {
    fn ground(&self) -> Result<Ground> {
        Ground::prepare(&self.options.ground, self.stop)
    }

    fn add(&mut self, what: String, local: f64, far: f64, temp_bytes: u64) {
        match self.lines.iter_mut().find(|line| line.what == what) {
            Some(line) => {
                line.local.push(local);
                line.far.push(far);
                line.temp_bytes = line.temp_bytes.max(temp_bytes);
            }
            None => self.lines.push(Line { what, local: vec![local], far: vec![far], temp_bytes }),
        }
    }

    fn flush(&mut self) -> Result<()> {
        std::mem::take(&mut self.lines).iter().try_for_each(|line| (self.print)(line.text()))
    }

    fn postgres_spills(&mut self) -> Result<()> {
        let ground = self.ground()?;
        let spilled = Spilled::prepare(&ground, self.options.scale)?;
        for round in 0..self.options.rounds {
            let run = |place| match round {
                0 => spilled.run(&ground, place),
                _ => spilled.measure(&ground, place),
            };
            let (local, far) = (run(Place::Local)?, run(Place::Far)?);
            for (local, far) in local.iter().zip(&far) {
                ensure!(local.rows == far.rows, "{}: {local:?} and {far:?}", far.name);
                self.add(format!("PostgreSQL, {}", far.name), local.seconds, far.seconds, far.temp_bytes);
            }
        }
        drop(spilled);
        ground.tear_down()
    }

    fn postgres_tables(&mut self) -> Result<()> {
        let scale = (PGBENCH_PER_SCALE * self.options.scale).ceil() as u32;
        let size = postgres_tables::Size { scale, transactions: PGBENCH_TRANSACTIONS };
        for _ in 0..self.options.rounds {
            let ground = self.ground()?;
            let run = |place| Tables::prepare(&ground, place)?.run(&ground, size);
            let (local, far) = (run(Place::Local)?, run(Place::Far)?);
            for (local, far) in local.iter().zip(&far) {
                ensure!(local.tables == far.tables, "{}: {local:?} and {far:?}", far.name);
                self.add(format!("PostgreSQL tables, {}", far.name), local.seconds, far.seconds, 0);
            }
            ground.tear_down()?;
        }
        Ok(())
    }

    fn duckdb(&mut self, benchmark: Benchmark) -> Result<()> {
        let duckdb = DuckDb::find()?;
        let ground = self.ground()?;
        let database = ground.path(Place::Local, duckdb::DATABASE);
        let how = &ground.runner(Place::Local);
        let queries = duckdb.generate(how, benchmark, self.options.scale, &database)?;
        let homes = Place::BOTH.map(Home::spilling_to);
        duckdb::compare(&duckdb, &ground, homes, &queries, self.options.rounds, |query, local, far| {
            let what = format!("DuckDB, {} {}, {} MB", benchmark.name(), query.name, far.memory_mb);
            self.add(what, local.seconds, far.seconds, far.temp_bytes);
            Ok(())
        })?;
        ground.tear_down()
    }

    fn sqlite(&mut self) -> Result<()> {
        let sqlite = Sqlite::find()?;
        let sorted_rows = (SQLITE_ROWS_PER_SCALE * self.options.scale).ceil() as u32;
        let size = sqlite::Size { sorted_rows, writers: 4, transactions: 500 };
        for _ in 0..self.options.rounds {
            let ground = self.ground()?;
            let spill = |place| sqlite.spill(&ground, Home::spilling_to(place), size);
            let (local, far) = (spill(Place::Local)?, spill(Place::Far)?);
            for (local, far) in local.iter().zip(&far) {
                ensure!(local.rows == far.rows, "{}: {local:?} and {far:?}", far.name);
                self.add(format!("SQLite, {}", far.name), local.seconds, far.seconds, far.far_bytes);
            }
            for journal in Journal::ALL {
                let run = |place| sqlite.write_at_once(&ground, place, journal, size);
                let ((local, local_seconds), (far, far_seconds)) = (run(Place::Local)?, run(Place::Far)?);
                ensure!(local == far, "{journal:?}: {local:?} and {far:?}");
                self.add(format!("SQLite, 4 writers, {journal:?}"), local_seconds, far_seconds, 0);
            }
            ground.tear_down()?;
        }
        Ok(())
    }

    fn columns(&mut self) -> Result<()> {
        let column_bytes = ((COLUMN_MIB_PER_SCALE * self.options.scale).ceil() as usize) << 20;
        let size = columns::Size { columns: COLUMNS, column_bytes };
        let expected = columns::expected(size)?;
        for _ in 0..self.options.rounds {
            let ground = self.ground()?;
            let (local, far) =
                (columns::run(&ground, Place::Local, size)?, columns::run(&ground, Place::Far, size)?);
            for ran in [&local, &far] {
                if ran.lines != expected {
                    bail!("mapped columns: {:?} where {expected:?} is right", ran.lines);
                }
            }
            self.add("mapped columns".into(), local.seconds, far.seconds, size.total_bytes() as u64);
            ground.tear_down()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_shows_medians_and_the_median_of_the_pairs_ratios() {
        let line = Line {
            what: "sort".into(),
            local: vec![1.0, 2.0, 8.0],
            far: vec![2.0, 1.0, 4.0],
            temp_bytes: 5_000_000,
        };
        let words: Vec<String> = line.text().split_whitespace().map(str::to_owned).collect();
        assert_eq!(words, ["sort", "2.00", "2.00", "0.50", "5.0"]);
    }

    #[test]
    fn database_that_does_not_exist_is_refused_with_those_that_do() {
        assert_eq!("duckdb".parse(), Ok(Database::DuckDb));
        assert!("monetdb".parse::<Database>().unwrap_err().contains("postgres, duckdb, sqlite or columns"));
    }
}
