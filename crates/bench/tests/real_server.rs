//! The parts of the demo, tested against a real PostgreSQL, small enough for every test run.
//!
//! `scripts/setup` installs the server. Far memory is not needed: a second folder serves as another place.

use std::path::Path;

use farpool_bench::postgres::{Server, ServerOptions};
use farpool_bench::query::{HashSort, TempSpace};
use farpool_bench::{StopFlag, machine, tpch};
use tempfile::TempDir;

/// 15,000 orders, which load within a second.
const SCALE: f64 = 0.01;
/// So little `work_mem` that 4 MB of orders do not fit, by far.
const SMALL: HashSort = HashSort { work_mem_kib: 256, top: 20_000 };

struct Fixture {
    server: Server, // dropped before its folder
    dir: TempDir,
}

fn loaded_server() -> Fixture {
    let dir = machine::scratch_dir(&std::env::temp_dir(), "farpool-test-").unwrap();
    let log = dir.path().join("log");
    let options = ServerOptions::new(dir.path(), &log);
    let server = Server::start(&options, &StopFlag::default()).unwrap();
    let mut client = server.connect().unwrap();
    let loaded = tpch::load(&mut client, SCALE, &StopFlag::default(), |_, _| ()).unwrap();
    // The official generator's counts at this scale factor.
    assert_eq!((loaded.orders, loaded.lineitem), (15_000, 60_175));
    Fixture { server, dir }
}

#[test]
fn query_spills_into_the_place_it_is_told_and_returns_the_same_rows_everywhere() {
    let Fixture { server, dir } = loaded_server();
    let stop = StopFlag::default();
    server.create_tablespace("elsewhere", &dir.path().join("elsewhere")).unwrap();

    let spill = SMALL.explain(&server, TempSpace::DataDirectory, &stop, || ()).unwrap();
    assert!(spill.hash_batches > 1, "{spill:?}");
    let here = SMALL.run(&server, TempSpace::DataDirectory, &stop, || ()).unwrap();
    let there = SMALL.run(&server, TempSpace::Tablespace("elsewhere"), &stop, || ()).unwrap();

    assert_eq!((here.rows, here.rows_hash), (20_000, there.rows_hash));
    assert!(here.temp_bytes > 10_000_000, "{here:?}");
    assert!(there.temp_files > 0 && there.temp_file_bytes > 0, "{there:?}");
}

#[test]
fn query_that_fits_in_memory_is_refused() {
    let Fixture { server, dir: _dir } = loaded_server();
    let roomy = HashSort { work_mem_kib: 1 << 20, ..SMALL };
    let error = roomy.explain(&server, TempSpace::DataDirectory, &StopFlag::default(), || ()).unwrap_err();
    assert!(error.to_string().contains("larger --scale"), "{error:#}");
    let error = roomy.run(&server, TempSpace::DataDirectory, &StopFlag::default(), || ()).unwrap_err();
    assert!(error.to_string().contains("no temporary files"), "{error:#}");
}

#[test]
fn raised_stop_flag_ends_a_query_with_the_server_still_alive() {
    let Fixture { mut server, dir: _dir } = loaded_server();
    let stop = StopFlag::default();
    stop.raise();
    let error = SMALL.run(&server, TempSpace::DataDirectory, &stop, || ()).unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error:#}");
    server.check_alive().unwrap();
    server.stop().unwrap();
}

#[test]
fn server_in_a_folder_that_does_not_exist_is_an_error_that_names_it() {
    let missing = Path::new("/no/such/folder");
    let log = missing.join("log");
    let options = ServerOptions::new(missing, &log);
    let error = Server::start(&options, &StopFlag::default()).unwrap_err();
    assert!(error.to_string().contains("/no/such/folder"), "{error:#}");
}
