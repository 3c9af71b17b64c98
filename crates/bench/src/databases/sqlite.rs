//! SQLite: temporary files on a mount, and databases with each kind of journal.
//!
//! A database in WAL mode maps its `-shm` file and locks ranges of it, so several processes on one database
//! need coherent shared mappings and record locks. The other modes need journals that survive a killed
//! writer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::{Digest, Ground, Home, Job, Place, Runner};
use crate::child::run;

/// The shell answers within milliseconds.
const VERSION_DEADLINE: Duration = Duration::from_secs(10);
/// A writer may have to wait for all others, each of which waits for the disk several times.
const BUSY_TIMEOUT_MS: u32 = 120_000;
/// Little memory for pages, so that temporary tables and open transactions spill.
const CACHE_KIB: u32 = 512;
/// Rows of a transaction that is killed: several times as large as the cache.
const OPEN_ROWS: u32 = 20_000;
/// Transactions that a writer commits before it is killed while it commits more.
const SEEN_COMMITS: u32 = 20;
/// Transactions that this writer would commit in all if it were not killed.
const STREAM_COMMITS: u32 = 20_000;

/// A kind of journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Journal {
    /// Deleted by each commit.
    Delete,
    /// Truncated by each commit.
    Truncate,
    /// A write-ahead log with its index in shared memory.
    Wal,
}

impl Journal {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Delete, Self::Truncate, Self::Wal];

    fn name(self) -> &'static str {
        match self {
            Self::Delete => "delete",
            Self::Truncate => "truncate",
            Self::Wal => "wal",
        }
    }
}

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Rows, of 90 bytes, that are sorted.
    pub sorted_rows: u32,
    /// Number of processes that write at the same time.
    pub writers: u32,
    /// Number of transactions of each.
    pub transactions: u32,
}

/// The results of a query with temporary files.
#[derive(Clone, Debug)]
pub struct Spill {
    /// The query's name.
    pub name: &'static str,
    /// Its rows.
    pub rows: Digest,
    /// From the shell's start to its end.
    pub seconds: f64,
    /// By how much the files on the mount grew meanwhile, at most.
    pub far_bytes: u64,
}

/// Statements that need temporary files: for sorting, for temporary tables and their indexes, and for the
/// copy that VACUUM makes.
const SPILLS: [(&str, &str); 6] = [
    ("sort", "SELECT * FROM numbers ORDER BY noise;"),
    (
        "group",
        "SELECT substr(noise, 1, 5) AS part, count(*), sum(i) FROM numbers GROUP BY part ORDER BY part;",
    ),
    (
        "distinct",
        "SELECT DISTINCT reversed FROM (SELECT noise || i AS reversed FROM numbers) ORDER BY 1 DESC;",
    ),
    (
        "temporary table",
        "CREATE TEMP TABLE copied AS SELECT * FROM numbers; CREATE INDEX temp.by_noise ON copied (noise); \
         UPDATE copied SET noise = noise || 'x' WHERE i % 3 = 0; DELETE FROM copied WHERE i % 7 = 0; \
         SELECT * FROM copied INDEXED BY by_noise ORDER BY noise;",
    ),
    (
        "index",
        "CREATE INDEX by_noise ON numbers (noise, i); SELECT i FROM numbers INDEXED BY by_noise ORDER BY noise, i;",
    ),
    ("vacuum", "VACUUM; PRAGMA integrity_check; SELECT count(*), sum(i), max(noise) FROM numbers;"),
];

/// The `sqlite3` shell.
#[derive(Clone, Debug)]
pub struct Sqlite {
    shell: PathBuf,
}

impl Sqlite {
    /// Finds the shell; an error says how to install it.
    pub fn find() -> Result<Self> {
        run("sqlite3", &["--version".as_ref()], VERSION_DEADLINE).context(
            "there is no sqlite3 shell: run `scripts/setup databases`, or apt-get install sqlite3",
        )?;
        Ok(Self { shell: "sqlite3".into() })
    }

    fn job(&self, database: &Path, script: String) -> Job {
        let head = format!(".bail on\n.timeout {BUSY_TIMEOUT_MS}\nPRAGMA cache_size = -{CACHE_KIB};\n");
        Job::new(&self.shell, head + &script).arg("-batch").arg(database)
    }

    fn run(&self, how: &Runner<'_>, database: &Path, script: &str) -> Result<Vec<u8>> {
        Ok(self.job(database, script.into()).run(how.wrapper, how.stop)?.stdout)
    }

    /// How long a script takes, from the shell's start to its end.
    pub fn seconds(&self, how: &Runner<'_>, database: &Path, script: String) -> Result<f64> {
        Ok(self.job(database, script).run(how.wrapper, how.stop)?.seconds)
    }

    /// Runs statements that spill.
    pub fn spill(&self, ground: &Ground, home: Home, size: Size) -> Result<Vec<Spill>> {
        let how = &ground.runner(home.database);
        let temporary = ground.dir(home.temporary, "sqlite-temporary")?;
        let database = ground.path(home.database, &format!("sqlite-{:?}.db", home.temporary));
        self.run(how, &database, &numbers(size.sorted_rows))?;
        let mut spills = Vec::new();
        for (name, statement) in SPILLS {
            let job = self.job(&database, format!("PRAGMA temp_store = FILE;\n{statement}\n"));
            let job = job.env("SQLITE_TMPDIR", &temporary);
            let (done, far_bytes) = ground.far_bytes_during(|| job.run(how.wrapper, how.stop))?;
            spills.push(Spill {
                name,
                rows: Digest::ordered(&done.stdout),
                seconds: done.seconds,
                far_bytes,
            });
        }
        Ok(spills)
    }

    /// Several processes write to one database in `place` while another one reads; an error if a transaction
    /// is lost, or seen only in part.
    pub fn write_at_once(
        &self,
        ground: &Ground,
        place: Place,
        journal: Journal,
        size: Size,
    ) -> Result<(Digest, f64)> {
        let how = &ground.runner(place);
        let database = self.new_database(ground, place, journal, "shared")?;
        let writer = |number| {
            let transactions = (0..size.transactions).map(|turn| transaction(number, turn));
            self.job(&database, set_journal(journal) + &transactions.collect::<String>())
        };
        let read = "SELECT iif((SELECT count(*) FROM log) = (SELECT n FROM counter), 'same', 'torn');\n";
        let reader = self.job(&database, read.repeat(size.transactions as usize));
        let start = |job: Job| {
            let mut running = job.start(how.wrapper, how.stop)?;
            running.end_input();
            anyhow::Ok(running)
        };
        let mut writers =
            (0..size.writers).map(|number| start(writer(number))).collect::<Result<Vec<_>>>()?;
        let seen = start(reader)?.wait(how.stop)?.check().context("the reader")?.text();
        ensure!(!seen.contains("torn"), "{journal:?}: a reader saw half of a transaction");
        let mut seconds = 0_f64;
        for (number, writer) in writers.iter_mut().enumerate() {
            let done = writer.wait(how.stop)?.check().with_context(|| format!("writer {number}"))?;
            seconds = seconds.max(done.seconds);
        }
        let rows = self.contents(how, &database)?;
        let expected = u64::from(size.writers * size.transactions);
        let counted = self.count(how, &database)?;
        ensure!(
            counted == expected,
            "{journal:?}: {expected} transactions were committed and {counted} are there"
        );
        Ok((rows, seconds))
    }

    /// Kills a writer in the middle of a transaction that has spilled, then another one between commits.
    /// Everything that was committed must be there, and nothing else. Returns the digest of what the first
    /// writer left.
    pub fn kill_writers(&self, ground: &Ground, place: Place, journal: Journal) -> Result<Digest> {
        let how = &ground.runner(place);
        let database = self.new_database(ground, place, journal, "killed")?;
        let committed: String = (0..SEEN_COMMITS).map(|turn| transaction(0, turn)).collect();
        self.run(how, &database, &(set_journal(journal) + &committed))?;
        let before = self.contents(how, &database)?;

        let open = format!(
            "{}BEGIN IMMEDIATE; UPDATE log SET text = text || 'lost';\n{}DELETE FROM counter;\n.shell echo spilled\n",
            set_journal(journal),
            fill_log(OPEN_ROWS)
        );
        let mut writer = self.job(&database, open).start(how.wrapper, how.stop)?;
        writer.wait_for("spilled", how.stop)?;
        writer.kill()?;
        let after = self.contents(how, &database)?;
        ensure!(
            after == before,
            "{journal:?}: a killed writer left {after:?} where {before:?} was committed"
        );

        let mut stream = set_journal(journal);
        for turn in 0..STREAM_COMMITS {
            stream += &transaction(1, turn);
            if turn == SEEN_COMMITS {
                stream += ".shell echo committed\n";
            }
        }
        let script = tempfile::NamedTempFile::new()?;
        std::fs::write(script.path(), stream)?;
        let read = format!(".read {}\n", script.path().display());
        let mut writer = self.job(&database, read).start(how.wrapper, how.stop)?;
        writer.wait_for("committed", how.stop)?;
        writer.kill()?;
        let logged = self.count(how, &database)?;
        let seen = u64::from(SEEN_COMMITS) * 2;
        ensure!(logged > seen, "{journal:?}: {seen} transactions were committed and {logged} are there");
        Ok(after)
    }

    fn new_database(&self, ground: &Ground, place: Place, journal: Journal, name: &str) -> Result<PathBuf> {
        let dir = ground.dir(place, &format!("sqlite-{name}-{}", journal.name()))?;
        let database = dir.join("database");
        let tables = "CREATE TABLE log (writer, turn, text, PRIMARY KEY (writer, turn)); \
                      CREATE TABLE counter (n); INSERT INTO counter VALUES (0);";
        let said = self.run(&ground.runner(place), &database, &(set_journal(journal) + tables))?;
        let said = String::from_utf8_lossy(&said);
        if !said.lines().any(|line| line == journal.name()) {
            bail!("SQLite did not set the {} journal on {place:?}: {said}", journal.name());
        }
        Ok(database)
    }

    /// A digest of all rows, after an integrity check of the whole database.
    fn contents(&self, how: &Runner<'_>, database: &Path) -> Result<Digest> {
        let said = self.run(how, database, "PRAGMA integrity_check;")?;
        let said = String::from_utf8_lossy(&said);
        ensure!(said.trim() == "ok", "{}: {}", database.display(), said.trim());
        let rows = "SELECT * FROM log ORDER BY writer, turn; SELECT * FROM counter;";
        Ok(Digest::ordered(&self.run(how, database, rows)?))
    }

    /// Number of rows of the log; an error unless the counter agrees.
    fn count(&self, how: &Runner<'_>, database: &Path) -> Result<u64> {
        self.contents(how, database)?;
        let said = self.run(how, database, "SELECT count(*), (SELECT n FROM counter) FROM log;")?;
        let said = String::from_utf8_lossy(&said);
        let (rows, counter) = said.trim().split_once('|').context("cannot parse SQLite's counts")?;
        ensure!(rows == counter, "the log has {rows} rows, but the counter says {counter}");
        rows.parse().context("cannot parse SQLite's count")
    }
}

fn set_journal(journal: Journal) -> String {
    format!("PRAGMA journal_mode = {};\n", journal.name())
}

fn transaction(writer: u32, turn: u32) -> String {
    format!(
        "BEGIN IMMEDIATE; INSERT INTO log VALUES ({writer}, {turn}, printf('%0500d', {turn})); \
         UPDATE counter SET n = n + 1; COMMIT;\n"
    )
}

fn fill_log(rows: u32) -> String {
    format!(
        "INSERT INTO log WITH RECURSIVE turns (turn) AS (SELECT 0 UNION ALL SELECT turn + 1 FROM turns \
         WHERE turn < {rows}) SELECT 99, turn, printf('%0200d', turn) FROM turns;\n"
    )
}

/// Makes a table of rows whose order is unrelated to that of their text: a multiplicative hash (Knuth) in
/// hexadecimal.
fn numbers(rows: u32) -> String {
    format!(
        "CREATE TABLE numbers AS WITH RECURSIVE counted (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted \
         WHERE i < {rows}) SELECT i, printf('%08x%064d', (i * 2654435761) % 4294967296, i) AS noise FROM counted;\n"
    )
}
