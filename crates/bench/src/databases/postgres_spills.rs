//! PostgreSQL's temporary files on a mount: everything that spills, in one process and in parallel workers
//! that share files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, ensure};
use serde_json::Value;

use super::{Digest, Ground, Place};
use crate::postgres::{Server, ServerOptions};
use crate::query::{TempSpace, copy_out, explain};
use crate::tpch;

/// Name of the tablespaces' folders.
const SPACE: &str = "temporary";
/// `work_mem` at a scale factor of 1, PostgreSQL's default, and its minimum. With the same memory per row
/// everything spills at any scale.
const WORK_MEM_KIB_PER_SCALE: f64 = 4096.0;
const WORK_MEM_MIN_KIB: u32 = 128;
/// Tests kill servers, never the machine, so `fsync` would protect nothing. Without it, no query waits for a
/// disk that other programs keep busy.
const SETTINGS: [(&str, &str); 1] = [("fsync", "off")];
/// Divides every table among workers, however small it is and whatever the cost.
const PARALLEL: &str = "SET max_parallel_workers_per_gather = 2; SET parallel_setup_cost = 0; \
    SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SET enable_parallel_hash = on";
const HASH_JOINS_ONLY: &str = "SET enable_mergejoin = off; SET enable_nestloop = off";
const JOIN: &str = "SELECT l_orderkey, l_linenumber, o_custkey, l_comment, o_comment FROM lineitem \
    JOIN orders ON l_orderkey = o_orderkey ORDER BY l_extendedprice, l_orderkey, l_linenumber";
const SORT: &str = "SELECT * FROM lineitem ORDER BY l_comment, l_orderkey, l_linenumber";

/// What the plan must show: that temporary files were used, and in the way that the statement is meant to
/// test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    HashJoin,
    Sort,
    HashAggregate,
    /// A node of this type wrote temporary blocks.
    Blocks(&'static str),
    ParallelHashJoin,
    ParallelSort,
}

/// A statement that spills.
#[derive(Clone, Copy, Debug)]
struct Spilling {
    name: &'static str,
    settings: &'static [&'static str],
    select: &'static str,
    proof: Proof,
}

const SPILLS: [Spilling; 8] = [
    Spilling { name: "hash join", settings: &[HASH_JOINS_ONLY], select: JOIN, proof: Proof::HashJoin },
    Spilling { name: "sort", settings: &[], select: SORT, proof: Proof::Sort },
    Spilling {
        name: "materialised CTE",
        settings: &[],
        select: "WITH wide AS MATERIALIZED (SELECT * FROM orders) SELECT one.o_orderkey, other.o_comment \
                 FROM wide AS one JOIN wide AS other ON one.o_orderkey = other.o_orderkey \
                 WHERE one.o_custkey % 2 = 0 ORDER BY one.o_orderkey",
        proof: Proof::Blocks("CTE Scan"),
    },
    Spilling {
        name: "group",
        settings: &["SET enable_sort = off"],
        select: "SELECT count(*) AS lines, l_comment, l_partkey, sum(l_quantity) FROM lineitem \
                 GROUP BY l_comment, l_partkey ORDER BY lines, l_comment, l_partkey",
        proof: Proof::HashAggregate,
    },
    Spilling {
        name: "window",
        settings: &[],
        select: "SELECT l_orderkey, l_linenumber, sum(l_quantity) OVER (PARTITION BY l_suppkey), \
                 rank() OVER (PARTITION BY l_shipmode ORDER BY l_extendedprice) FROM lineitem \
                 ORDER BY l_orderkey, l_linenumber",
        proof: Proof::Sort,
    },
    Spilling {
        name: "merge join",
        settings: &["SET enable_hashjoin = off; SET enable_nestloop = off"],
        select: "SELECT one.l_orderkey, one.l_linenumber, other.l_linenumber FROM lineitem AS one JOIN lineitem AS other \
                 ON one.l_partkey = other.l_suppkey AND one.l_quantity = other.l_quantity ORDER BY 1, 2, 3, other.l_orderkey",
        proof: Proof::Sort,
    },
    Spilling {
        name: "parallel hash join",
        settings: &[HASH_JOINS_ONLY, PARALLEL],
        select: JOIN,
        proof: Proof::ParallelHashJoin,
    },
    Spilling { name: "parallel sort", settings: &[PARALLEL], select: SORT, proof: Proof::ParallelSort },
];

/// The results of a statement.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The statement's name.
    pub name: &'static str,
    /// Its rows, in their order.
    pub rows: Digest,
    /// From sending it to receiving its last row.
    pub seconds: f64,
    /// Temporary bytes written, as the server counts them.
    pub temp_bytes: u64,
}

/// A server with TPC-H's two large tables, and a tablespace for temporary files in each place.
#[derive(Debug)]
pub struct Spilled {
    server: Server,
    spaces: [PathBuf; 2],
    work_mem_kib: u32,
}

impl Spilled {
    /// Starts the server, loads the tables, and makes the tablespaces.
    pub fn prepare(ground: &Ground, scale: f64) -> Result<Self> {
        let dir = ground.dir(Place::Local, "postgres-spills")?;
        let log = ground.log("postgres-spills.log");
        let options = ServerOptions {
            wrapper: ground.wrapper(),
            settings: &SETTINGS,
            ..ServerOptions::new(&dir, &log)
        };
        let server = Server::start(&options, ground.stop())?;
        tpch::load(&mut server.connect()?, scale, ground.stop(), |_, _| ())?;
        let spaces = Place::BOTH.map(|place| ground.path(place, SPACE));
        for (place, dir) in Place::BOTH.iter().zip(&spaces) {
            server.create_tablespace(space(*place), dir)?;
        }
        let work_mem_kib = ((WORK_MEM_KIB_PER_SCALE * scale).ceil() as u32).max(WORK_MEM_MIN_KIB);
        Ok(Self { server, spaces, work_mem_kib })
    }

    fn settings(&self, more: &[&str]) -> String {
        format!("SET work_mem = {}; SET hash_mem_multiplier = 1; {}", self.work_mem_kib, more.join("; "))
    }

    /// The server.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    /// Runs every statement that spills. An error if a plan was carried out in another way than intended.
    pub fn run(&self, ground: &Ground, place: Place) -> Result<Vec<Ran>> {
        for spilling in &SPILLS {
            let settings = self.settings(spilling.settings);
            let space = TempSpace::Tablespace(space(place));
            let plan = explain(&self.server, space, &settings, spilling.select, ground.stop(), || ())?;
            ensure!(spilling.proof.holds(&plan), "{}: no {:?} in {plan}", spilling.name, spilling.proof);
        }
        self.measure(ground, place)
    }

    /// The same, without checking the plans.
    pub fn measure(&self, ground: &Ground, place: Place) -> Result<Vec<Ran>> {
        SPILLS.iter().map(|spilling| self.ran(spilling, ground, place)).collect()
    }

    /// Runs `count` statements that spill, one after another, in a place that has no room for the temporary
    /// files. Returns the name of each and the SQLSTATE that it ended with: `None` for a statement that
    /// succeeded.
    pub fn codes_of_failures(
        &self,
        ground: &Ground,
        place: Place,
        count: usize,
    ) -> Result<Vec<(&'static str, Option<String>)>> {
        let code = |spilling: &Spilling| match self.ran(spilling, ground, place) {
            Ok(_) => Ok((spilling.name, None)),
            Err(error) => match code_of(&error) {
                Some(code) => Ok((spilling.name, Some(code))),
                None => Err(error),
            },
        };
        SPILLS.iter().cycle().take(count).map(code).collect()
    }

    fn ran(&self, spilling: &Spilling, ground: &Ground, place: Place) -> Result<Ran> {
        let settings = self.settings(spilling.settings);
        let space = TempSpace::Tablespace(space(place));
        let run = copy_out(&self.server, space, &settings, spilling.select, ground.stop(), |_| ())
            .with_context(|| format!("{} in {place:?}", spilling.name))?;
        let rows = Digest { rows: run.rows, crc: run.rows_hash };
        Ok(Ran { name: spilling.name, rows, seconds: run.seconds, temp_bytes: run.temp_bytes })
    }

    /// Temporary tables with indexes, and an index built by workers that sort in shared files.
    pub fn temporary_tables(&self, place: Place) -> Result<Digest> {
        let mut client = self.server.connect()?;
        client.batch_execute(&format!(
            "SET temp_tablespaces = {}; SET temp_buffers = 100; SET work_mem = {}; \
             SET maintenance_work_mem = '1MB'; SET max_parallel_maintenance_workers = 2; \
             CREATE TEMPORARY TABLE copied AS SELECT l_orderkey, l_linenumber, l_partkey, l_comment::text FROM lineitem; \
             CREATE INDEX ON copied (l_comment, l_orderkey, l_linenumber); \
             UPDATE copied SET l_comment = l_comment || l_partkey WHERE l_partkey % 5 = 0; \
             DELETE FROM copied WHERE l_partkey % 7 = 0; \
             ALTER TABLE lineitem SET (parallel_workers = 2); \
             CREATE INDEX by_comment ON lineitem (l_comment, l_orderkey, l_linenumber); \
             SET enable_seqscan = off; SET enable_sort = off",
            space(place),
            self.work_mem_kib
        ))?;
        client.batch_execute("VACUUM copied")?; // separate, since it must not be part of a transaction
        let lines = "SELECT l_comment, l_orderkey, l_linenumber";
        let mut text = Vec::new();
        for from in ["copied", "lineitem"] {
            let copy = format!("COPY ({lines} FROM {from} ORDER BY 1, 2, 3) TO STDOUT");
            std::io::Read::read_to_end(&mut client.copy_out(&copy)?, &mut text)?;
        }
        client.batch_execute("DROP TABLE copied; DROP INDEX by_comment")?;
        Ok(Digest::ordered(&text))
    }

    /// Starts a sort in `place`, in a session of its own, that has spilled and not ended.
    pub fn begin_sort(&self, place: Place) -> Result<postgres::Client> {
        let mut client = self.server.connect()?;
        client.batch_execute(&format!(
            "SET temp_tablespaces = {}; SET work_mem = {}; BEGIN; DECLARE sorted CURSOR FOR {SORT}",
            space(place),
            self.work_mem_kib
        ))?;
        // When the first row arrives, all rows have been sorted into runs.
        ensure!(client.query("FETCH 100 FROM sorted", &[])?.len() == 100, "there are no rows to sort");
        Ok(client)
    }

    /// The parallel join in `place`, as text, for a session that the caller watches.
    pub fn parallel_join(&self, place: Place) -> String {
        format!(
            "SET temp_tablespaces = {}; {}; SELECT count(*) FROM ({JOIN} OFFSET 0) AS joined",
            space(place),
            self.settings(&[HASH_JOINS_ONLY, PARALLEL])
        )
    }

    /// Bytes of temporary files in a place.
    pub fn temp_file_bytes(&self, place: Place) -> Result<u64> {
        let dir = &self.spaces[usize::from(place == Place::Far)];
        bytes_below(dir, false).with_context(|| format!("cannot look into {}", dir.display()))
    }
}

fn space(place: Place) -> &'static str {
    match place {
        Place::Local => "local_space",
        Place::Far => "far_space",
    }
}

/// The SQLSTATE of the server's error that caused this one.
fn code_of(error: &Error) -> Option<String> {
    error.chain().find_map(|cause| {
        // An error in the middle of the rows is wrapped in an `io::Error`, which does not name it as its
        // source.
        let inside = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let cause = inside.and_then(|inside| inside.downcast_ref()).or_else(|| cause.downcast_ref());
        cause.and_then(postgres::Error::code).map(|code| code.code().into())
    })
}

/// Sizes of all files below folders that are named `pgsql_tmp`.
fn bytes_below(dir: &Path, temporary: bool) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        // A file may have been deleted by now; then it takes no space.
        let Ok(found) = entry.metadata() else { continue };
        if found.is_dir() {
            let temporary = temporary || entry.file_name() == "pgsql_tmp";
            bytes += bytes_below(&entry.path(), temporary).or_else(gone)?;
        } else if temporary {
            bytes += found.len();
        }
    }
    Ok(bytes)
}

fn gone(error: std::io::Error) -> std::io::Result<u64> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(0) } else { Err(error) }
}

impl Proof {
    fn holds(self, plan: &Value) -> bool {
        let workers = || numbers(plan, "Workers Launched").any(|workers| workers > 0);
        let node = |kind: &str| nodes(plan, kind);
        let batches =
            |found: &Vec<&Value>| found.iter().any(|node| numbers(node, "Hash Batches").any(|n| n > 1));
        let external = |plan: &Value| {
            values(plan, "Sort Method")
                .iter()
                .any(|method| method.as_str().is_some_and(|text| text.starts_with("external")))
        };
        match self {
            Self::HashJoin => batches(&node("Hash")),
            Self::Sort => external(plan),
            Self::HashAggregate => numbers(plan, "HashAgg Batches").any(|batches| batches > 1),
            Self::Blocks(kind) => node(kind)
                .iter()
                .any(|node| node["Temp Written Blocks"].as_u64().is_some_and(|blocks| blocks > 0)),
            Self::ParallelHashJoin => {
                let shared = node("Hash").into_iter().filter(|node| node["Parallel Aware"] == true).collect();
                workers() && batches(&shared)
            }
            Self::ParallelSort => workers() && nodes(plan, "Gather Merge").into_iter().any(external),
        }
    }
}

/// All values with that name, at any depth.
fn values<'a>(plan: &'a Value, name: &str) -> Vec<&'a Value> {
    let below: Vec<&Value> = match plan {
        Value::Object(fields) => fields.values().collect(),
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    };
    let here = plan.get(name);
    here.into_iter().chain(below.into_iter().flat_map(|value| values(value, name))).collect()
}

fn numbers<'a>(plan: &'a Value, name: &str) -> impl Iterator<Item = u64> + 'a {
    values(plan, name).into_iter().filter_map(Value::as_u64)
}

/// All nodes of that type, each with its subtree.
fn nodes<'a>(plan: &'a Value, kind: &str) -> Vec<&'a Value> {
    let below: Vec<&Value> = match plan {
        Value::Object(fields) => fields.values().collect(),
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    };
    let here = (plan.get("Node Type").and_then(Value::as_str) == Some(kind)).then_some(plan);
    here.into_iter().chain(below.into_iter().flat_map(|value| nodes(value, kind))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plan_that_stayed_in_memory_is_no_proof() {
        let plan = json!([{"Plan": {"Node Type": "Gather Merge", "Workers Launched": 2, "Plans": [
            {"Node Type": "Sort", "Sort Method": "quicksort", "Plans": [{"Node Type": "Hash Join", "Plans": [
                {"Node Type": "Hash", "Parallel Aware": true, "Hash Batches": 1}]}]}]}}]);
        for proof in
            [Proof::HashJoin, Proof::Sort, Proof::HashAggregate, Proof::ParallelHashJoin, Proof::ParallelSort]
        {
            assert!(!proof.holds(&plan), "{proof:?}");
        }
    }

    #[test]
    fn plan_that_spilled_without_workers_is_not_parallel() {
        let plan = |workers: u32| {
            json!([{"Plan": {"Node Type": "Gather Merge", "Workers Launched": workers, "Plans": [
                {"Node Type": "Sort", "Workers": [{"Sort Method": "external merge"}], "Plans": [
                    {"Node Type": "Hash", "Parallel Aware": true, "Hash Batches": 8}]}]}}])
        };
        for proof in [Proof::ParallelHashJoin, Proof::ParallelSort] {
            assert!(proof.holds(&plan(1)) && !proof.holds(&plan(0)), "{proof:?}");
        }
    }
}
