//! Databases in far memory: compute servers are real processes, which are killed, stopped and evicted. Their
//! histories are checked for snapshot isolation.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use farpool_fabric::{TransportChoice, Transports};
use farpool_namdb::{CreateOptions, Credentials, Database, Reach, Table, TableOptions};
use farpool_pool::PoolConfig;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{
    Output, Pool, PoolOptions, Process, assert_complaint, farpool, run, run_command, within,
};

/// A compute server is declared dead after so long without a heartbeat: longer than a thread waits for a
/// processor on a busy machine.
const PATIENCE_SECONDS: &str = "2";
/// A process that is stopped for so long is declared dead, on a busy machine as well.
const STOPPED: Duration = Duration::from_secs(5);

/// A pool, and the path of a database's file that does not exist yet.
pub struct Ground {
    pool: Pool,
    dir: TempDir,
    /// Workers write rows of any length up to this.
    longest: Option<&'static str>,
    /// Workers insert new rows, and scan.
    scans: bool,
    /// Parts of the database's oracle.
    partitions: &'static str,
    /// A compute server is declared dead after so many seconds without a heartbeat.
    patience: &'static str,
}

impl Ground {
    pub fn new() -> Ground {
        let pool = Pool::start(PoolOptions { nodes: 2, memory: "16MiB", region_size: "4MiB" });
        let dir = tempfile::tempdir().unwrap();
        Ground { pool, dir, longest: None, scans: false, partitions: "1", patience: PATIENCE_SECONDS }
    }

    /// Where the pool's broker listens.
    pub fn pool_address(&self) -> &str {
        &self.pool.address
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("bank.far")
    }

    /// `farpool db COMMAND FILE ARGS`.
    pub fn command(&self, command: &str, transport: &str, args: &[&str]) -> Command {
        let mut built = farpool(["db", command]);
        built.arg(self.file()).args(["--broker", &self.pool.address, "--transport", transport]).args(args);
        built
    }

    /// A compute server that only recovers others; the first one creates the database.
    #[track_caller]
    pub fn up(&self) -> Process {
        let args = ["--memory", "24MiB", "--servers", "16", "--patience", self.patience];
        let args = [&args[..], &["--partitions", self.partitions]].concat();
        Process::ready("a compute server", self.command("up", "auto", &args)).0
    }

    #[track_caller]
    fn bank(&self, transport: &str, seconds: &str) -> Output {
        let output =
            run_command(self.command("bank", transport, &["--accounts", "50", "--seconds", seconds]));
        assert!(output.status.success(), "{output:?}");
        output
    }

    #[track_caller]
    fn status(&self) -> Value {
        let output = run_command(self.command("status", "auto", &["--json"]));
        assert!(output.status.success(), "{output:?}");
        serde_json::from_str(&output.stdout).unwrap()
    }

    fn history(&self, number: u32) -> PathBuf {
        self.dir.path().join(format!("{number}.jsonl"))
    }

    /// A compute server that works on a few rows and records what it sees.
    #[track_caller]
    fn work(&self, number: u32, transport: &str, seconds: u64) -> Process {
        self.work_until(number, transport, seconds, None)
    }

    /// As [`work`](Self::work), but it sends itself a signal, or hangs, at a step of a commit.
    #[track_caller]
    fn work_until(&self, number: u32, transport: &str, seconds: u64, strike: Option<&str>) -> Process {
        let (seed, seconds) = (number.to_string(), seconds.to_string());
        let mut command = self.command("work", transport, &["--seed", &seed, "--seconds", &seconds]);
        command.args(["--rows", "6", "--rate", "600", "--history"]).arg(self.history(number));
        // Every third worker begins from the snapshots of its fetch thread.
        command.args(number.is_multiple_of(3).then_some("--fetch-thread"));
        command.args(self.longest.into_iter().flat_map(|longest| ["--longest", longest]));
        command.args(self.scans.then_some("--scans"));
        command.args(strike.map(|strike| format!("--strike={strike}")));
        Process::ready(format!("worker {number}"), command).0
    }

    /// Checks the histories of all workers for snapshot isolation; returns how many transactions committed.
    #[track_caller]
    fn judge(&self, workers: u32) -> u64 {
        let mut command = farpool(["db", "judge"]);
        command.args((1..=workers).map(|number| self.history(number)).filter(|file| file.exists()));
        let output = run_command(command);
        assert!(output.status.success(), "{output:?}");
        let committed = output.stdout.split_once(": ").and_then(|(_, rest)| rest.split(' ').next());
        committed.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{output:?}"))
    }
}

#[test]
fn money_moves_between_processes_over_shm_and_tcp_and_the_database_outlives_its_creator() {
    let ground = Ground::new();
    let mut first = ground.up();
    assert!(ground.bank("shm", "1").stdout.contains("opened 50 accounts"));
    let _second = ground.up();
    first.end_well();
    let fetching = run_command(ground.command("bank", "shm", &["--fetch-thread", "--seconds", "1"]));
    assert!(fetching.status.success() && fetching.stdout.contains("50000 cents"), "{fetching:?}");
    let output = ground.bank("tcp", "1");
    assert!(!output.stdout.contains("opened") && output.stdout.contains("50000 cents"), "{output:?}");
    let status = ground.status();
    assert_eq!(status["servers"].as_array().unwrap().len(), 1);
    assert_eq!(status["servers"][0]["publishes"], true);
    let names: Vec<_> = status["tables"].as_array().unwrap().iter().map(|table| &table["name"]).collect();
    assert_eq!(names, ["accounts", "bank"]);
}

#[test]
fn a_killed_publisher_is_replaced_and_no_commit_is_lost() {
    let ground = Ground { partitions: "2", ..Ground::new() };
    let mut publisher = ground.up();
    ground.bank("shm", "0");
    let mut moving = Process::start("the bank", ground.command("bank", "shm", &["--seconds", "4"]));
    moving.await_line("   0 s");
    publisher.kill();
    // The bank goes on only if the publisher is replaced.
    let output = moving.wait();
    assert!(output.status.success() && output.stdout.contains("50000 cents"), "{output:?}");
    // The last server has left, but the leases last for some seconds more.
    assert!(ground.bank("shm", "0").stdout.contains("50000 cents"));
}

/// A worker was evicted, and its error says so; in the middle of a commit, that the outcome is unknown.
#[track_caller]
fn assert_evicted(output: &Output) {
    let said = ["took this one for dead", "may have taken effect", "this process was held up"];
    assert!(said.iter().any(|said| output.stderr.contains(said)), "{output:?}");
}

/// Workers join, and are killed, or stopped until the others have evicted them. The histories of all of them
/// show snapshot isolation.
#[track_caller]
fn assert_isolated_while_workers_die(transport: &str, partitions: &'static str) {
    const SECONDS: u64 = 10;
    let ground = Ground { partitions, ..Ground::new() };
    let mut up = ground.up();
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let mut workers: Vec<Process> = (1..=3).map(|number| ground.work(number, transport, SECONDS)).collect();
    let mut started = 3;
    let mut stopped = Vec::new();
    while Instant::now() < end {
        // Long enough for work to be in progress, and different each time.
        std::thread::sleep(Duration::from_millis(500 + 37 * u64::from(started) % 300));
        let mut worker = workers.remove(0);
        if started % 3 == 0 {
            worker.signal(Signal::STOP);
            stopped.push((worker, Instant::now()));
        } else {
            worker.kill();
        }
        let (awake, asleep): (Vec<_>, Vec<_>) =
            stopped.into_iter().partition(|(_, since): &(Process, Instant)| since.elapsed() > STOPPED);
        stopped = asleep;
        for (worker, _) in awake {
            worker.signal(Signal::CONT);
            workers.push(worker);
        }
        started += 1;
        workers.push(ground.work(started, transport, SECONDS));
    }
    for (worker, since) in &stopped {
        // The workers that were started last go on meanwhile, and evict it.
        std::thread::sleep(STOPPED.saturating_sub(since.elapsed()));
        worker.signal(Signal::CONT);
    }
    let mut evicted = 0;
    for worker in workers.iter_mut().chain(stopped.iter_mut().map(|(worker, _)| worker)) {
        let output = worker.wait();
        if !output.status.success() {
            assert_evicted(&output);
            evicted += 1;
        }
    }
    assert!(evicted > 0, "no worker was stopped for long enough");
    let committed = ground.judge(started);
    assert!(committed > 150, "{committed} transactions");
    up.assert_running();
    // Nothing that dead workers have left blocks others, and their acknowledged commits are there.
    let last = started + 1;
    let output = ground.work(last, transport, 1).wait();
    assert!(output.status.success(), "{output:?}");
    assert!(ground.judge(last) > committed);
    within(Duration::from_secs(20), "the seats of all dead workers are free", || {
        up.assert_running();
        ground.status()["servers"].as_array().unwrap().len() == 1
    });
}

#[test]
fn snapshot_isolation_holds_while_processes_are_killed_and_stopped_over_shared_memory() {
    assert_isolated_while_workers_die("shm", "1");
}

#[test]
fn snapshot_isolation_holds_while_processes_are_killed_and_stopped_over_tcp_with_an_oracle_of_two_parts() {
    assert_isolated_while_workers_die("tcp", "2");
}

#[test]
fn keys_lead_to_all_rows_after_each_of_20_kills_of_compute_servers_that_insert_and_scan() {
    const KILLS: u32 = 20;
    /// Longer than the test takes: all workers are killed.
    const SECONDS: u64 = 600;
    let ground = Ground { scans: true, ..Ground::new() };
    let mut up = ground.up();
    let mut workers: Vec<Process> = (1..=3).map(|number| ground.work(number, "shm", SECONDS)).collect();
    for kill in 0..KILLS {
        // Long enough for work to be in progress, and different each time.
        std::thread::sleep(Duration::from_millis(200 + 61 * u64::from(kill) % 300));
        workers.remove(7 * kill as usize % workers.len()).kill();
        workers.push(ground.work(4 + kill, "shm", SECONDS));
        let output = run_command(ground.command("verify", "auto", &[]));
        assert!(
            output.status.success() && output.stdout.contains("rows, found by their keys and in order"),
            "{output:?}"
        );
    }
    for worker in &mut workers {
        worker.assert_running();
        worker.kill();
    }
    assert!(ground.judge(3 + KILLS) > 500);
    up.assert_running();
}

#[test]
fn an_index_by_balance_has_all_accounts_after_each_of_20_kills_of_compute_servers_that_change_it() {
    const KILLS: usize = 20;
    let ground = Ground::new();
    let mut up = ground.up();
    assert!(ground.bank("shm", "0").stdout.contains("50000 cents"));
    // The first one creates the index while another one moves money already.
    let mut started = 0;
    let mut bank = || {
        let args = ["--seconds", "600", if started == 0 { "--threads=1" } else { "--by-balance" }];
        started += 1;
        let mut process = Process::start(format!("bank {started}"), ground.command("bank", "shm", &args));
        process.await_line("  ");
        process
    };
    let mut banks = vec![bank(), bank()];
    for kill in 0..KILLS {
        std::thread::sleep(Duration::from_millis(100 + 61 * kill as u64 % 200));
        banks.remove(0).kill();
        banks.push(bank());
        assert!(ground.bank("shm", "0").stdout.contains("50000 cents, also by balance"));
    }
    for bank in &mut banks {
        bank.assert_running();
        bank.kill();
    }
    up.assert_running();
}

/// The fault itself: how long the first node stops. Leases last ten seconds, and every member has at least
/// 9.7 seconds left when a node stops.
const LONGEST_STANDSTILL: Duration = Duration::from_secs(9);
/// The fault itself: how long the second node stops, which is longer than most operations wait for a node.
const STANDSTILL: Duration = Duration::from_secs(6);
/// How long workers may take until each has recorded another transaction, on a busy machine.
const GO_ON_WITHIN: Duration = Duration::from_secs(20);

/// Stops each node in turn, while the bank and the workers run: all members wait, and go on.
#[track_caller]
fn assert_a_node_may_stand_still(transport: &str) {
    const SECONDS: u64 = 22;
    // Shorter than a node is stopped, and longer than a thread waits for a processor on a busy machine.
    let ground = Ground { patience: "4", ..Ground::new() };
    let mut up = ground.up();
    ground.bank(transport, "0");
    let mut moving =
        Process::start("the bank", ground.command("bank", transport, &["--seconds", &SECONDS.to_string()]));
    moving.await_line("  "); // the first sum is complete, however long that took
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let mut workers: Vec<Process> = (1..=3).map(|number| ground.work(number, transport, SECONDS)).collect();
    let histories =
        || [1, 2, 3].map(|number| fs::metadata(ground.history(number)).map_or(0, |file| file.len()));
    let all_wrote_since =
        |before: [u64; 3]| histories().iter().zip(before).all(|(now, before)| *now > before);
    within(GO_ON_WITHIN, "all workers are at work", || all_wrote_since([0; 3]));
    for (node, long) in ground.pool.nodes.iter().zip([LONGEST_STANDSTILL, STANDSTILL]) {
        node.signal(Signal::STOP);
        std::thread::sleep(long);
        let before = histories();
        node.signal(Signal::CONT);
        within(GO_ON_WITHIN, "all workers go on", || all_wrote_since(before));
    }
    assert!(Instant::now() < end, "the workers ended before the nodes had stopped and gone on");
    let output = moving.wait();
    assert!(output.status.success() && output.stdout.contains("50000 cents"), "{output:?}");
    for worker in &mut workers {
        let output = worker.wait();
        assert!(output.status.success(), "{output:?}");
    }
    assert!(ground.judge(3) > 150);
    up.assert_running();
    assert_eq!(ground.status()["servers"].as_array().unwrap().len(), 1);
    assert!(ground.bank(transport, "0").stdout.contains("50000 cents"));
}

#[test]
fn members_wait_for_a_node_that_stands_still_and_go_on_over_shared_memory() {
    assert_a_node_may_stand_still("shm");
}

#[test]
fn members_wait_for_a_node_that_stands_still_and_go_on_over_tcp() {
    assert_a_node_may_stand_still("tcp");
}

/// Only the publisher's thread stops: its process goes on, with its other threads.
#[test]
fn a_publisher_whose_thread_hangs_is_evicted_and_replaced() {
    let ground = Ground::new();
    let mut first = ground.up();
    let mut second = ground.up();
    ground.bank("shm", "0");
    let publisher = || {
        let status = ground.status();
        let servers = status["servers"].as_array().unwrap();
        servers.iter().find(|server| server["publishes"] == true)?["slot"].as_u64()
    };
    assert_eq!(publisher(), Some(0), "the first server to join");
    let still = first.stop_thread("db-publisher");
    // Commits are acknowledged, and later transactions see them.
    assert!(ground.bank("shm", "1").stdout.contains("50000 cents"));
    assert_ne!(publisher(), Some(0));
    first.assert_running();
    drop(still);
    let output = first.wait();
    assert!(output.stderr.contains("took this one for dead"), "{output:?}");
    second.assert_running();
}

#[test]
fn a_compute_server_with_a_thread_that_hangs_in_a_commit_is_evicted_and_its_locks_are_released() {
    let ground = Ground::new();
    let mut up = ground.up();
    let hung = ["prepared", "locked", "installed"].map(|step| format!("hang:{step}:20"));
    let mut hung: Vec<Process> =
        (1..).zip(&hung).map(|(number, strike)| ground.work_until(number, "shm", 60, Some(strike))).collect();
    within(Duration::from_secs(60), "the processes with a thread that hangs are evicted", || {
        up.assert_running();
        ground.status()["servers"].as_array().unwrap().len() == 1
    });
    for process in &mut hung {
        process.assert_running();
        process.kill();
    }
    assert!(ground.work(4, "shm", 1).wait().status.success(), "nothing is locked any more");
    assert!(ground.judge(4) > 20);
}

const STEPS: [&str; 5] = ["prepared", "logged", "locked", "installed", "reached"];

/// Processes are killed, or stopped until they are evicted, at each step of a commit, while others work.
#[track_caller]
fn assert_isolated_at_each_step(transport: &str, longest: Option<&'static str>) {
    let ground = Ground { longest, ..Ground::new() };
    let mut up = ground.up();
    let mut others = ground.work(1, transport, 8);
    let strikes: Vec<String> =
        ["kill", "stop"].iter().flat_map(|signal| STEPS.map(|step| format!("{signal}:{step}:20"))).collect();
    let struck: Vec<Process> = (2..)
        .zip(&strikes)
        .map(|(number, strike)| ground.work_until(number, transport, 60, Some(strike)))
        .collect();
    let (mut killed, mut stopped) = (Vec::from_iter(struck), Vec::new());
    stopped.extend(killed.split_off(STEPS.len()));
    for process in &mut killed {
        assert_eq!(process.wait().status.signal(), Some(9), "it kills itself");
    }
    assert!(others.wait().status.success());
    within(Duration::from_secs(30), "the stopped processes are evicted", || {
        up.assert_running();
        ground.status()["servers"].as_array().unwrap().len() == 1
    });
    for process in &mut stopped {
        process.signal(Signal::CONT);
        assert_evicted(&process.wait());
    }
    let last = strikes.len() as u32 + 2;
    assert!(ground.work(last, transport, 1).wait().status.success(), "nothing is locked any more");
    assert!(ground.judge(last) > 150);
}

#[test]
fn snapshot_isolation_holds_where_processes_are_killed_and_stopped_at_each_step_of_a_commit_over_shared_memory()
 {
    assert_isolated_at_each_step("shm", None);
}

/// Rows of 10 bytes to 40 KB: most of them are stored outside their table, in blocks of their writers.
#[test]
fn rows_of_any_length_are_whole_where_their_writers_are_killed_and_stopped_at_each_step_of_a_commit() {
    assert_isolated_at_each_step("shm", Some("40000"));
}

#[test]
fn snapshot_isolation_holds_where_processes_are_killed_and_stopped_at_each_step_of_a_commit_over_tcp() {
    assert_isolated_at_each_step("tcp", None);
}

/// How the test process reaches the pool, whatever the pools of this user require.
pub fn in_plain_text() -> Reach {
    Reach { credentials: Credentials::PlainText, ..Reach::default() }
}

/// Many versions of a row, and of the catalog's rows.
#[test]
fn a_snapshot_stays_whole_while_others_go_on_writing_its_rows_and_changing_tables() {
    const UPDATES: u64 = 300;
    const TABLES: u64 = 12;
    let ground = Ground::new();
    let _up = ground.up();
    let database = Database::open(&ground.file(), &in_plain_text()).unwrap();
    let client = database.client().unwrap();
    let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(4)).unwrap();
    client.transact(async |tx| tx.insert(&rows, 1, 0).await).unwrap();
    let writes = || {
        let client = database.client().unwrap();
        let rows: Table<u64, u64> = client.open_table("rows").unwrap();
        for _ in 0..UPDATES {
            client
                .transact(async |tx| {
                    let row = tx.get(&rows, 1).await?.unwrap_or_default();
                    tx.update(&rows, 1, row + 1).await
                })
                .unwrap();
        }
        for _ in 0..TABLES {
            client.create_table::<u64, u64>("another", &TableOptions::rows(4)).unwrap();
            client.drop_table("another").unwrap();
        }
    };
    let seen = client.transact(async |tx| {
        let before = tx.get(&rows, 1).await?;
        std::thread::scope(|scope| scope.spawn(writes).join()).unwrap();
        Ok((before, tx.get(&rows, 1).await?))
    });
    assert_eq!(seen.unwrap(), (Some(0), Some(0)));
    assert_eq!(client.transact(async |tx| tx.get(&rows, 1).await).unwrap(), Some(UPDATES));
    let names: Vec<_> = client.tables().unwrap().into_iter().map(|table| table.name).collect();
    assert_eq!(names, ["rows"]);
}

/// Each round opens the database again. All rounds together write more than the slab holds, so space is
/// reused.
#[test]
fn rows_of_any_length_survive_their_writers_and_their_space_is_reused() {
    const ROWS: u64 = 20;
    const ROUNDS: u64 = 5;
    const LONGEST: usize = 40_000;
    let row_of = |row: u64, round: u64| {
        let length = 10 + (LONGEST - 20) * ((7 * row + 3 * round) % ROWS) as usize / ROWS as usize;
        vec![(row + round) as u8; length]
    };
    let ground = Ground::new();
    let _up = ground.up();
    for round in 0..ROUNDS {
        let database = Database::open(&ground.file(), &in_plain_text()).unwrap();
        let client = database.client().unwrap();
        let options = TableOptions::rows(ROWS).row_bytes(100).longest(LONGEST).slab_bytes(4 << 20);
        let rows: Table<u64, Vec<u8>> = match round {
            0 => client.create_table("rows", &options).unwrap(),
            _ => client.open_table("rows").unwrap(),
        };
        for row in 0..ROWS {
            let new = row_of(row, round);
            let written = client.transact(async |tx| match round {
                0 => tx.insert(&rows, row, &new).await,
                _ => {
                    assert_eq!(tx.get(&rows, row).await?, Some(row_of(row, round - 1)));
                    tx.update(&rows, row, &new).await
                }
            });
            written.unwrap_or_else(|error| panic!("row {row}, round {round}: {error}"));
        }
        let refused = client.transact(async |tx| tx.update(&rows, 0, vec![1; LONGEST + 1]).await);
        assert!(refused.unwrap_err().to_string().contains("40000"));
        assert_eq!(client.tables().unwrap()[0].row_bytes as usize, LONGEST);
    }
}

#[test]
fn a_writer_that_an_open_snapshot_blocks_for_too_long_gets_an_error() {
    /// More than the log has room for.
    const MOST_UPDATES: u64 = 100_000;
    let ground = Ground::new();
    let _up = ground.up();
    let database = Database::open(&ground.file(), &in_plain_text()).unwrap();
    let client = database.client().unwrap();
    let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(1)).unwrap();
    client.transact(async |tx| tx.insert(&rows, 1, 0).await).unwrap();
    let writes = || {
        let client = database.client().unwrap();
        let rows: Table<u64, u64> = client.open_table("rows").unwrap();
        let mut updates =
            (1..MOST_UPDATES).map(|row| client.transact(async |tx| tx.update(&rows, 1, row).await));
        updates.find_map(Result::err).expect("there is no room for so many versions").to_string()
    };
    let told = client.transact(async |tx| {
        let before = tx.get(&rows, 1).await?;
        let told = std::thread::scope(|scope| scope.spawn(writes).join()).unwrap();
        assert_eq!(tx.get(&rows, 1).await?, before);
        Ok(told)
    });
    let told = told.unwrap();
    assert!(told.contains("end long transactions") && told.contains("larger logs"), "{told}");
}

/// A region has at most 64 grants, and each process needs one for each region.
#[test]
fn any_number_of_processes_may_come_and_go_while_one_stays() {
    const TIMES: usize = 80;
    let ground = Ground::new();
    let _up = ground.up();
    for _ in 0..TIMES {
        let database = Database::open(&ground.file(), &in_plain_text()).unwrap();
        assert_eq!(database.members().unwrap().len(), 2);
    }
}

#[test]
fn a_database_that_cannot_be_reached_gives_its_leases_back_at_once() {
    let ground = Ground::new();
    let transport = TransportChoice::Verbs.into(); // this program has no transport for network cards
    let pool = PoolConfig { broker: ground.pool.address.clone(), tls: None, transport, limit_bytes: None };
    let options = CreateOptions { bytes: 8 << 20, ..CreateOptions::default() };
    assert!(Database::create(&pool, &ground.file(), &options).is_err());
    // A lease that is not given back lasts for nine seconds.
    within(Duration::from_secs(3), "all regions are free again", || {
        ground.pool.regions_free() == ground.pool.regions_total()
    });
    assert!(!ground.file().exists());
}

#[test]
fn a_file_that_is_there_is_not_replaced_by_another_database() {
    let ground = Ground::new();
    std::fs::write(ground.file(), "precious").unwrap();
    let pool = PoolConfig {
        broker: ground.pool.address.clone(),
        tls: None,
        transport: Transports::default(),
        limit_bytes: None,
    };
    let refused = Database::create(&pool, &ground.file(), &CreateOptions::default()).err().unwrap();
    assert!(refused.to_string().contains("exists"), "{refused}");
    assert_eq!(std::fs::read(ground.file()).unwrap(), b"precious");
}

#[test]
fn a_history_with_a_lost_update_is_no_snapshot_isolation() {
    let dir = tempfile::tempdir().unwrap();
    let line = |session: u32, slot: u16| {
        format!(
            r#"{{"session":{session},"number":1,"cut":1,"counts":[0,0],"reads":[[1,[0,0],null]],"writes":[[1,[0,0],{session}]],"version":[{slot},1],"committed":true}}"#
        )
    };
    let history = dir.path().join("lost.jsonl");
    std::fs::write(&history, format!("{}\n{}\n", line(1, 0), line(2, 1))).unwrap();
    let mut command = farpool(["db", "judge"]);
    command.arg(&history);
    assert_complaint(&run_command(command), 1, "not snapshot isolation");
}

#[track_caller]
fn assert_refused(file: &Path, fix: &str) {
    let args = ["db".as_ref(), "status".as_ref(), file.as_os_str()];
    assert_complaint(&run(args), 1, fix);
}

#[test]
fn a_file_of_no_database_or_of_a_lost_one_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    assert_refused(&dir.path().join("none.far"), "farpool db up");
    assert_refused(dir.path(), "is a directory");
    let notes = dir.path().join("notes.txt");
    std::fs::write(&notes, "nothing").unwrap();
    assert_refused(&notes, "not the file of a database");
    let ground = Ground::new();
    let mut up = ground.up();
    up.kill();
    within(Duration::from_secs(30), "the leases have ended", || {
        ground.pool.regions_free() == ground.pool.regions_total()
    });
    let output = run_command(ground.command("status", "auto", &[]));
    assert_complaint(&output, 1, "its data are lost");
}

#[test]
fn histories_without_a_transaction_prove_nothing_and_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let history = dir.path().join("history.jsonl");
    for text in ["", "garbage"] {
        std::fs::write(&history, text).unwrap();
        let mut command = farpool(["db", "judge"]);
        command.arg(&history);
        assert_complaint(&run_command(command), 1, "farpool db work --history");
    }
}

#[test]
fn a_database_that_does_not_fit_the_pool_leaves_nothing_behind() {
    let ground = Ground::new();
    let output = run_command(ground.command("up", "auto", &["--memory", "1GiB"]));
    assert_complaint(&output, 1, "1024 MiB are wanted, but");
    assert!(!ground.file().exists());
    within(Duration::from_secs(20), "all regions are free again", || {
        ground.pool.regions_free() == ground.pool.regions_total()
    });
}
