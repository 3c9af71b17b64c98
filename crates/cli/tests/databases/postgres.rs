//! PostgreSQL's temporary files: everything that spills, and servers that crash while it does.

use farpool_workload::databases::postgres_spills::Spilled;
use farpool_workload::databases::{Ground, Place};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{eventually, ground};

const MEMORY_MIB: u64 = 512;
/// 180,000 line items, 24 MB.
const SCALE: f64 = 0.03;
/// What a statement writes at least; the materialised CTE, of half of the smaller table, writes the least.
const SPILLED_BYTES: u64 = 2 << 20;

fn kill(id: i32) {
    kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
}

/// All results in a place: of temporary files and of temporary tables.
#[track_caller]
fn results(spilled: &Spilled, ground: &Ground, place: Place) -> Vec<(&'static str, u64, u64)> {
    let mut results = Vec::new();
    for ran in spilled.run(ground, place).unwrap() {
        println!(
            "{place:?} {}: {:.2} s, {} rows, {} bytes",
            ran.name, ran.seconds, ran.rows.rows, ran.temp_bytes
        );
        assert!(ran.temp_bytes > SPILLED_BYTES, "{ran:?}");
        results.push((ran.name, ran.rows.rows, ran.rows.crc));
    }
    let tables = spilled.temporary_tables(place).unwrap();
    results.push(("temporary tables", tables.rows, tables.crc));
    results
}

/// The server lets clients in again, and what had spilled is gone.
#[track_caller]
fn assert_recovered(spilled: &mut Spilled, place: Place) {
    eventually("the server has recovered", || spilled.server().connect().is_ok());
    assert_eq!(spilled.temp_file_bytes(place).unwrap(), 0, "temporary files of the crash are left");
    spilled.server().check_alive().unwrap();
}

#[test]
fn everything_that_spills_into_far_memory_gives_the_rows_that_local_files_give() {
    let ground = ground(MEMORY_MIB);
    let spilled = Spilled::prepare(&ground, SCALE).unwrap();
    let local = results(&spilled, &ground, Place::Local);
    let (far, far_bytes) = ground.far_bytes_during(|| Ok(results(&spilled, &ground, Place::Far))).unwrap();
    assert_eq!(local, far);
    println!("{far_bytes} bytes at once on the mount");
    assert!(far_bytes > SPILLED_BYTES);
    drop(spilled);
    ground.tear_down().unwrap();
}

#[test]
fn server_whose_processes_are_killed_while_they_spill_recovers_and_the_mount_serves_on() {
    let ground = ground(MEMORY_MIB);
    let mut spilled = Spilled::prepare(&ground, SCALE).unwrap();
    let before = results(&spilled, &ground, Place::Local);

    let mut session = spilled.begin_sort(Place::Far).unwrap();
    assert!(spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES);
    let backend: i32 = session.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    kill(backend);
    assert!(session.batch_execute("FETCH ALL FROM sorted").is_err());
    assert_recovered(&mut spilled, Place::Far);

    let mut session = spilled.server().connect().unwrap();
    let joining = std::thread::spawn(move || session.batch_execute(&Spilled::parallel_join(Place::Far)));
    let mut watcher = spilled.server().connect().unwrap();
    let worker = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'parallel worker' LIMIT 1";
    let mut found = None;
    eventually("a parallel worker has spilled", || {
        assert!(!joining.is_finished(), "the join was over before a worker was seen to spill");
        found = watcher.query_opt(worker, &[]).unwrap().map(|row| row.get::<_, i32>(0));
        found.is_some() && spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES
    });
    kill(found.unwrap());
    assert!(joining.join().unwrap().is_err());
    assert_recovered(&mut spilled, Place::Far);

    let session = spilled.begin_sort(Place::Far).unwrap();
    assert!(spilled.temp_file_bytes(Place::Far).unwrap() > SPILLED_BYTES);
    spilled.server().stop_immediately().unwrap();
    spilled.server().start_again(ground.stop()).unwrap();
    assert_recovered(&mut spilled, Place::Far);
    drop(session);

    assert_eq!(results(&spilled, &ground, Place::Far), before);
    drop(spilled);
    ground.tear_down().unwrap();
}
