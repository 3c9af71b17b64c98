//! A whole tablespace of PostgreSQL on a mount: pgbench, maintenance, crashes, and tools that verify pages
//! and indexes.
//!
//! pgbench's transactions only add, each client draws its own sequence of numbers from the seed, and
//! additions commute. So, apart from times, the tables after a run are the same wherever they lie and however
//! the clients interleave.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use postgres::Client;

use super::{Digest, Finished, Ground, Job, Place, Running};
use crate::postgres::{Server, ServerOptions};

/// The tablespace's name.
const SPACE: &str = "space";
/// Clients of pgbench, and its threads.
const CLIENTS: &str = "4";
const THREADS: &str = "2";
const SEED: &str = "42";
/// Transactions of each client of a run that is interrupted: far more than it can finish.
const ENDLESS: &str = "1000000";
/// Rows of history that such a run must have committed first.
const COMMITTED: i64 = 500;
const COMMITTED_DEADLINE: Duration = Duration::from_secs(60);
/// Longest time of reading a cluster of some gigabytes.
const CHECKSUMS_DEADLINE: Duration = Duration::from_secs(600);
/// Checkpoints, background writing and vacuum run meanwhile, as they usually do.
const SETTINGS: [(&str, &str); 5] = [
    ("autovacuum", "on"),
    ("autovacuum_naptime", "1s"),
    ("checkpoint_timeout", "30s"),
    ("max_wal_size", "64MB"),
    ("shared_buffers", "8MB"), // a small part of the tables, so that pages come and go
];
/// Every table, in an order that is part of the result. Of the history, only the columns that pgbench chose.
const TABLES: [(&str, &str); 4] = [
    ("accounts", "SELECT aid, bid, abalance, filler FROM pgbench_accounts ORDER BY aid"),
    ("branches", "SELECT bid, bbalance FROM pgbench_branches ORDER BY bid"),
    ("tellers", "SELECT tid, bid, tbalance FROM pgbench_tellers ORDER BY tid"),
    ("history", "SELECT tid, bid, aid, delta FROM pgbench_history ORDER BY tid, bid, aid, delta"),
];
/// Maintenance that rewrites what is in the tablespace, or moves it out and back.
const MAINTENANCE: [(&str, &[&str]); 7] = [
    (
        "create index",
        &[
            "CREATE INDEX by_balance ON pgbench_accounts (abalance, aid) TABLESPACE space",
            "CREATE INDEX CONCURRENTLY by_delta ON pgbench_history (delta, aid) TABLESPACE space",
        ],
    ),
    ("vacuum full", &["VACUUM (FULL, ANALYZE)"]),
    ("cluster", &["CLUSTER pgbench_accounts USING by_balance"]),
    (
        "move out",
        &[
            "ALTER TABLE pgbench_accounts SET TABLESPACE pg_default",
            "ALTER INDEX pgbench_accounts_pkey SET TABLESPACE pg_default",
            "ALTER TABLE pgbench_history SET TABLESPACE pg_default",
        ],
    ),
    (
        "move back",
        &[
            "ALTER TABLE pgbench_accounts SET TABLESPACE space",
            "ALTER INDEX pgbench_accounts_pkey SET TABLESPACE space",
            "ALTER TABLE pgbench_history SET TABLESPACE space",
        ],
    ),
    (
        "alter table",
        &[
            "ALTER TABLE pgbench_accounts ADD COLUMN doubled bigint GENERATED ALWAYS AS (abalance * 2) STORED",
            "ALTER TABLE pgbench_accounts ALTER COLUMN bid TYPE bigint",
        ],
    ),
    (
        "reindex",
        &["REINDEX TABLE pgbench_accounts", "REINDEX (TABLESPACE space) TABLE CONCURRENTLY pgbench_history"],
    ),
];

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// pgbench's scale factor: 100,000 accounts (15 MB) for each unit.
    pub scale: u32,
    /// Number of transactions of each client.
    pub transactions: u32,
}

/// A step, and what the tables held after it.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// The digest of each table.
    pub tables: Vec<(&'static str, Digest)>,
    /// How long it took.
    pub seconds: f64,
}

/// A server, with data checksums, whose tables lie in one place.
#[derive(Debug)]
pub struct Tables {
    server: Server,
}

impl Tables {
    /// Starts the server and makes the tablespace.
    pub fn prepare(ground: &Ground, place: Place) -> Result<Self> {
        let dir = ground.dir(Place::Local, &format!("postgres-{place:?}"))?;
        let log = ground.log(&format!("postgres-{place:?}.log"));
        let options = ServerOptions {
            wrapper: ground.wrapper(),
            initdb_args: &["--data-checksums"],
            settings: &SETTINGS,
            ..ServerOptions::new(&dir, &log)
        };
        let server = Server::start(&options, ground.stop())?;
        server.create_tablespace(SPACE, &ground.path(place, SPACE))?;
        Ok(Self { server })
    }

    /// Fills the tables, runs pgbench, then maintenance, then an immediate shutdown; verifies everything.
    pub fn run(&mut self, ground: &Ground, size: Size) -> Result<Vec<Step>> {
        let transactions = size.transactions.to_string();
        let mut steps = vec![
            self.step("pgbench -i", |tables| tables.fill(ground, size))?,
            self.step("pgbench", |tables| {
                let args = ["-c", CLIENTS, "-j", THREADS, "-t", &transactions, "--random-seed", SEED];
                tables.tool(ground, "pgbench", &[&args[..], &["-n", "-M", "prepared", "postgres"]].concat())
            })?,
            self.step("copy", |tables| tables.copy_out_and_in())?,
        ];
        for (name, statements) in MAINTENANCE {
            steps.push(self.step(name, |tables| {
                let mut client = tables.server.connect()?;
                statements.iter().try_for_each(|statement| {
                    ground.stop().check()?;
                    client.batch_execute(statement).with_context(|| (*statement).to_owned())
                })
            })?);
        }
        self.verify(ground)?;
        steps.push(self.step("immediate shutdown and recovery", |tables| {
            tables.server.stop_immediately()?;
            tables.server.start_again(ground.stop())
        })?);
        Ok(steps)
    }

    /// Shuts the server down immediately while pgbench runs, starts it again, and verifies that no
    /// transaction is there only in part.
    pub fn crash(&mut self, ground: &Ground) -> Result<()> {
        let before = count_history(&mut self.server.connect()?)?;
        let args = ["-c", CLIENTS, "-j", THREADS, "-t", ENDLESS, "-n", "postgres"];
        let mut pgbench = self.start_tool(ground, "pgbench", &args)?;
        let mut client = self.server.connect()?;
        let started = Instant::now();
        while count_history(&mut client)? < before + COMMITTED {
            ground.stop().check()?;
            ensure!(started.elapsed() < COMMITTED_DEADLINE, "pgbench commits nothing");
        }
        self.server.stop_immediately()?;
        let done = pgbench.wait(ground.stop())?;
        ensure!(!done.status.success(), "pgbench succeeded although its server was shut down");
        self.server.start_again(ground.stop())?;
        let mut client = self.server.connect()?;
        ensure!(count_history(&mut client)? >= before + COMMITTED, "committed transactions are lost");
        let sums = client.query_one(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches), \
             (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(delta) FROM pgbench_history)",
            &[],
        )?;
        let sums: Vec<i64> = (0..4).map(|column| sums.try_get(column)).collect::<Result<_, _>>()?;
        ensure!(sums.iter().all(|sum| *sum == sums[0]), "transactions are there only in part: {sums:?}");
        self.verify(ground)
    }

    /// Verifies every index and table with `pg_amcheck`, and, with the server stopped, the checksum of every
    /// page.
    fn verify(&mut self, ground: &Ground) -> Result<()> {
        let all = ["--install-missing", "--heapallindexed", "--rootdescend", "--database", "postgres"];
        self.tool(ground, "pg_amcheck", &all)?;
        self.server.stop()?;
        self.server.verify_checksums(CHECKSUMS_DEADLINE)?;
        self.server.start_again(ground.stop())
    }

    /// Fills the tables.
    pub fn fill(&self, ground: &Ground, size: Size) -> Result<()> {
        let scale = size.scale.to_string();
        let spaces = ["--tablespace", SPACE, "--index-tablespace", SPACE];
        let args = [&["-i", "-q", "-s", &scale], &spaces[..], &["--foreign-keys", "postgres"]].concat();
        self.tool(ground, "pgbench", &args)?;
        let elsewhere = "SELECT count(*) FROM pg_class WHERE relname LIKE 'pgbench%' AND reltablespace <> \
                         (SELECT oid FROM pg_tablespace WHERE spcname = 'space')";
        let elsewhere: i64 = self.server.connect()?.query_one(elsewhere, &[])?.try_get(0)?;
        ensure!(elsewhere == 0, "{elsewhere} tables or indexes are not in the tablespace");
        Ok(())
    }

    /// Copies the accounts into a new table, whose rows must be the same.
    fn copy_out_and_in(&self) -> Result<()> {
        let (mut reader, mut writer) = (self.server.connect()?, self.server.connect()?);
        writer.batch_execute("CREATE TABLE copied (LIKE pgbench_accounts INCLUDING ALL) TABLESPACE space")?;
        let mut rows = reader.copy_out("COPY pgbench_accounts TO STDOUT (FORMAT binary)")?;
        let mut copy = writer.copy_in("COPY copied FROM STDIN (FORMAT binary)")?;
        std::io::copy(&mut rows, &mut copy)?;
        copy.flush()?;
        copy.finish()?;
        drop(rows);
        let differ = "SELECT count(*) FROM (TABLE copied EXCEPT ALL TABLE pgbench_accounts) AS differing";
        let differ: i64 = writer.query_one(differ, &[])?.try_get(0)?;
        ensure!(differ == 0, "{differ} rows differ from those they were copied from");
        Ok(())
    }

    fn step(&mut self, name: &'static str, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Step> {
        let started = Instant::now();
        work(self).with_context(|| format!("the step `{name}` failed"))?;
        let seconds = started.elapsed().as_secs_f64();
        let mut client = self.server.connect()?;
        let digest = |(table, select): (&'static str, &str)| {
            let mut text = Vec::new();
            client.copy_out(&format!("COPY ({select}) TO STDOUT"))?.read_to_end(&mut text)?;
            anyhow::Ok((table, Digest::ordered(&text)))
        };
        let tables = TABLES.into_iter().map(digest).collect::<Result<_>>();
        Ok(Step { name, tables: tables.with_context(|| format!("after `{name}`"))?, seconds })
    }

    fn start_tool(&self, ground: &Ground, name: &str, args: &[&str]) -> Result<Running> {
        let (program, mut all) = self.server.client_program(name)?;
        all.extend(args.iter().map(Into::into));
        let running = Job { program, args: all, env: Vec::new(), script: String::new() };
        let mut running = running.start(&[], ground.stop())?;
        running.end_input();
        Ok(running)
    }

    fn tool(&self, ground: &Ground, name: &str, args: &[&str]) -> Result<()> {
        let done: Finished = self.start_tool(ground, name, args)?.wait(ground.stop())?;
        done.check_status().with_context(|| name.to_owned()).map(drop)
    }
}

fn count_history(client: &mut Client) -> Result<i64> {
    Ok(client.query_one("SELECT count(*) FROM pgbench_history", &[])?.try_get(0)?)
}
