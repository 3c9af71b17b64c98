//! PostgreSQL's temporary files: all kinds of statements that spill, and servers that crash meanwhile.

use std::fs::File;
use std::io::Write;

use farpool_bench::databases::postgres_spills::Spilled;
use farpool_bench::databases::{Access, Ground, Place};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{eventually, ground_with};

const MEMORY_MIB: u64 = 512;
/// 180,000 line items, 24 MB.
const SCALE: f64 = 0.03;
/// For the second run, with the interposer: a third of that.
const SCALE_AGAIN: f64 = 0.01;
/// Each statement writes at least as much; the materialised CTE, of half of the smaller table, writes the
/// least.
const SPILLED_BYTES: u64 = 2 << 20;

/// How often to try to catch a worker, which lives for a fraction of a second only.
const ATTEMPTS: u32 = 20;

fn kill(id: i32) {
    kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
}

/// A statement, how many rows it gave, and their checksum.
type Rows = (&'static str, u64, u64);

/// All results in a place, with temporary files and with temporary tables, and how many temporary bytes were
/// written.
#[track_caller]
fn results(spilled: &Spilled, ground: &Ground, place: Place) -> (Vec<Rows>, u64) {
    let (mut results, mut temp_bytes) = (Vec::new(), 0);
    for ran in spilled.run(ground, place).unwrap() {
        println!(
            "{place:?} {}: {:.2} s, {} rows, {} bytes",
            ran.name, ran.seconds, ran.rows.rows, ran.temp_bytes
        );
        assert!(ran.temp_bytes > SPILLED_BYTES, "{ran:?}");
        temp_bytes += ran.temp_bytes;
        results.push((ran.name, ran.rows.rows, ran.rows.crc));
    }
    let tables = spilled.temporary_tables(place).unwrap();
    results.push(("temporary tables", tables.rows, tables.crc));
    (results, temp_bytes)
}

/// Waits until the server accepts clients again, and the temporary files are gone. A connection alone proves
/// nothing: it may have been made before the server noticed the crash.
#[track_caller]
fn assert_recovered(spilled: &mut Spilled, place: Place) {
    eventually("the server has recovered, and no temporary file of the crash is left", || {
        spilled.temp_file_bytes(place).unwrap() == 0 && spilled.server().connect().is_ok()
    });
    spilled.server().check_alive().unwrap();
}

/// Kills a worker of a parallel join that has spilled; `false` if the join was faster.
#[track_caller]
fn kill_parallel_worker(spilled: &mut Spilled) -> bool {
    let mut session = spilled.server().connect().unwrap();
    let join = spilled.parallel_join(Place::Far);
    let joining = std::thread::spawn(move || session.batch_execute(&join));
    let mut watcher = spilled.server().connect().unwrap();
    let worker = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'parallel worker' LIMIT 1";
    let mut found = None;
    eventually("a parallel worker has spilled, or the join has ended", || {
        found = watcher.query_opt(worker, &[]).unwrap().map(|row| row.get::<_, i32>(0));
        let spilled = spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES;
        (found.is_some() && spilled) || joining.is_finished()
    });
    // The worker may have ended since it was found.
    let killed = found.and_then(Pid::from_raw).is_some_and(|id| kill_process(id, Signal::KILL).is_ok());
    joining.join().unwrap().is_err() && killed
}

/// Returns the temporary bytes that statements wrote on the mount.
#[track_caller]
fn assert_places_agree(ground: &Ground, scale: f64) -> u64 {
    let spilled = Spilled::prepare(ground, scale).unwrap();
    let (local, _) = results(&spilled, ground, Place::Local);
    let (far, far_bytes) = ground.far_bytes_during(|| Ok(results(&spilled, ground, Place::Far))).unwrap();
    let (far, temp_bytes) = far;
    assert_eq!(local, far);
    println!("{far_bytes} bytes at once on the mount");
    assert!(far_bytes > SPILLED_BYTES);
    temp_bytes
}

#[track_caller]
fn assert_crashes_are_survived(ground: &Ground) {
    let mut spilled = Spilled::prepare(ground, SCALE).unwrap();
    let (before, _) = results(&spilled, ground, Place::Local);

    let mut session = spilled.begin_sort(Place::Far).unwrap();
    assert!(spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES);
    let backend: i32 = session.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    kill(backend);
    assert!(session.batch_execute("FETCH ALL FROM sorted").is_err());
    assert_recovered(&mut spilled, Place::Far);

    let attempts = 0..ATTEMPTS;
    assert!(attempts.into_iter().any(|_| kill_parallel_worker(&mut spilled)), "no worker was caught");
    assert_recovered(&mut spilled, Place::Far);

    let session = spilled.begin_sort(Place::Far).unwrap();
    assert!(spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES);
    spilled.server().stop_immediately().unwrap();
    spilled.server().start_again(ground.stop()).unwrap();
    assert_recovered(&mut spilled, Place::Far);
    drop(session);

    let (after, _) = results(&spilled, ground, Place::Far);
    assert_eq!(after, before);
}

#[test]
fn everything_that_spills_into_far_memory_gives_the_rows_that_local_files_give() {
    let ground = ground_with(MEMORY_MIB, Access::Kernel);
    assert_places_agree(&ground, SCALE);
    ground.tear_down().unwrap();
}

#[test]
fn everything_that_spills_into_far_memory_without_the_kernel_gives_the_rows_that_local_files_give() {
    let ground = ground_with(MEMORY_MIB, Access::Direct);
    let work = || Ok(assert_places_agree(&ground, SCALE_AGAIN));
    let (temp_bytes, direct) = ground.direct_bytes_during(work).unwrap();
    println!("{temp_bytes} temporary bytes in statements without EXPLAIN, {direct:?} in all");
    assert!(direct.written > temp_bytes && direct.read > temp_bytes, "{temp_bytes}: {direct:?}");
    ground.tear_down().unwrap();
}

#[test]
fn server_whose_processes_are_killed_while_they_spill_recovers_and_the_mount_keeps_working() {
    let ground = ground_with(MEMORY_MIB, Access::Kernel);
    assert_crashes_are_survived(&ground);
    ground.tear_down().unwrap();
}

#[test]
fn server_whose_processes_are_killed_while_they_spill_without_the_kernel_recovers_and_the_mount_works() {
    let ground = ground_with(MEMORY_MIB, Access::Direct);
    let ((), direct) = ground.direct_bytes_during(|| Ok(assert_crashes_are_survived(&ground))).unwrap();
    println!("{direct:?}");
    assert!(direct.read > SPILLED_BYTES && direct.written > SPILLED_BYTES, "{direct:?}");
    ground.tear_down().unwrap();
}

/// PostgreSQL's code for a full disk.
const DISK_FULL: &str = "53100";
/// A region on each node: the smallest pool.
const FULL_MEMORY_MIB: u64 = 64;
/// 600,000 line items, 80 MB: more than the kernel keeps of a FUSE file system before it writes.
const SCALE_THAT_FILLS: f64 = 0.1;
/// Free space that is left in the pool: half of what the statement that spills least writes.
const LEFT_BYTES: u64 = SPILLED_BYTES / 2;
/// How many statements fill the pool, unless the variable below is set.
const FILLS: usize = 8;
/// `FARPOOL_TEST_FILLS=100 cargo test -p farpool-cli --test databases fills_the_pool` fills the pool a
/// hundred times.
const FILLS_WISHED: &str = "FARPOOL_TEST_FILLS";

/// Fills the pool with a file, except for [`LEFT_BYTES`].
fn fill(ground: &Ground) {
    let mut file = File::create(ground.path(Place::Far, "ballast")).unwrap();
    let piece = vec![1; 1 << 20];
    let mut bytes = 0;
    while let Ok(()) = file.write_all(&piece).and_then(|()| file.sync_all()) {
        bytes += piece.len() as u64;
    }
    file.set_len(bytes - LEFT_BYTES).unwrap();
}

#[track_caller]
fn assert_full_pool_is_disk_full(access: Access) {
    let ground = ground_with(FULL_MEMORY_MIB, access);
    fill(&ground);
    let mut spilled = Spilled::prepare(&ground, SCALE_THAT_FILLS).unwrap();
    let fills = std::env::var(FILLS_WISHED).map_or(FILLS, |count| count.parse().unwrap());
    let codes = spilled.codes_of_failures(&ground, Place::Far, fills).unwrap();
    println!("{codes:?}");
    // A temporary file that is deleted before the kernel has written it needs no room.
    assert!(codes.iter().all(|(_, code)| code.as_deref().is_none_or(|code| code == DISK_FULL)), "{codes:?}");
    assert!(codes.iter().filter(|(_, code)| code.is_some()).count() > fills / 2, "{codes:?}");
    let log = std::fs::read_to_string(ground.log("postgres-spills.log")).unwrap();
    assert!(log.contains("No space left on device") && !log.contains("Input/output error"), "{log}");
    spilled.server().check_alive().unwrap();
    eventually("the temporary files are gone", || spilled.temp_file_bytes(Place::Far).unwrap() == 0);
    drop(spilled);
    ground.tear_down().unwrap();
}

#[test]
fn statement_that_fills_the_pool_ends_with_disk_full_and_nothing_else() {
    assert_full_pool_is_disk_full(Access::Kernel);
}

#[test]
fn statement_that_fills_the_pool_without_the_kernel_ends_with_disk_full_and_nothing_else() {
    assert_full_pool_is_disk_full(Access::Direct);
}
