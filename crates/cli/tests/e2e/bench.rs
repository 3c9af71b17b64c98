//! `farpool bench`: its figures are complete and checked, and it leaves nothing behind. No test asserts a
//! speed.

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{
    Pool, PoolOptions, Process, assert_complaint, children_of, eventually, farpool, is_running, root, run,
    run_command, tied,
};

const SMALL: [&str; 5] = ["--footprint", "64MiB", "--seconds", "1", "--json"];

#[track_caller]
fn report(args: &[&str]) -> Value {
    let output = run(["bench", "io"].iter().chain(args).chain(&SMALL));
    assert!(output.status.success(), "{}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}

#[track_caller]
fn assert_figures(report: &Value) {
    for field in ["iops", "mib_s", "p50_us", "p99_us", "p999_us"] {
        assert!(report[field].as_f64().unwrap() > 0.0, "{field}: {report}");
    }
    assert!([4, 2048].contains(&report["page_size_kib"].as_u64().unwrap()), "{report}");
    assert_eq!(report["footprint_bytes"], 64 << 20);
    assert!(report["checked"].as_u64().unwrap() > 0, "{report}");
    assert!(report["machine"]["kernel"].is_string());
}

#[track_caller]
fn assert_floor(report: &Value, kind: &str) {
    assert_figures(report);
    assert_eq!(report["floor"]["kind"], kind);
    for figure in [&report["floor"]["p50_us"], &report["floor"]["iops"]] {
        assert!(figure.as_f64().unwrap() > 0.0, "{report}");
    }
    for figure in [&report["ratio_p50"], &report["ratio_iops"]] {
        assert!(figure.as_f64().unwrap() > 0.0, "{report}");
    }
}

#[test]
fn shared_memory_is_measured_beside_bare_accesses() {
    let shm = ["--transport", "shm", "--floor", "--op"];
    let with = |more: &[&str]| report(&[&shm, more].concat());
    assert_floor(&with(&["read"]), "memcpy");
    assert_floor(&with(&["read", "--block", "64", "--batch", "16"]), "bare loads");
    assert_floor(&with(&["cas"]), "lock cmpxchg");
    assert_floor(&with(&["faa", "--threads", "2"]), "lock xadd");
    assert_floor(&with(&["call"]), "polling ping-pong over two cache lines");
}

#[test]
fn tcp_is_measured_beside_a_bare_server() {
    let tcp = ["--transport", "tcp", "--floor", "--op"];
    let with = |more: &[&str]| report(&[&tcp, more].concat());
    let kind = "polling TCP request and response";
    assert_floor(&with(&["read", "--pattern", "random"]), kind);
    assert_floor(&with(&["write", "--pattern", "sequential", "--block", "64KiB", "--depth", "4"]), kind);
    assert_floor(&with(&["faa", "--batch", "4", "--depth", "2"]), kind);
}

#[test]
fn a_running_pool_of_two_nodes_is_measured_when_it_is_named() {
    // Enough for one run only: the next run needs the regions that the one before has given back.
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "32MiB", region_size: "8MiB" });
    for transport in ["shm", "tcp", "shm"] {
        let args = ["--op", "read", "--batch", "4", "--broker", &pool.address, "--transport", transport];
        let report = report(&args);
        assert!(report["floor"].is_null() && report["ratio_p50"].is_null(), "{report}");
        assert!(report["checked"].as_u64().unwrap() > 0, "{report}");
    }
}

#[test]
fn timestamp_transactions_are_measured_and_all_of_them_are_published_in_the_end() {
    let with = |more: &[&str]| {
        let usual = ["bench", "oracle", "--clients", "2", "--seconds", "0.3", "--json"];
        let output = run(usual.iter().chain(more));
        assert!(output.status.success(), "{more:?}: {}", output.stderr);
        let report: Value = serde_json::from_str(&output.stdout).unwrap();
        for field in ["t_trx_s", "ns_per_t_trx", "operations_per_t_trx", "publication_p50_us"] {
            assert!(report[field].as_f64().unwrap() > 0.0, "{more:?}, {field}: {report}");
        }
        assert!(report["checked"].as_u64().unwrap() > 0, "{report}");
        report
    };
    for transport in ["shm", "tcp"] {
        let vector = with(&["--transport", transport]);
        let operations = vector["operations_per_t_trx"].as_f64().unwrap();
        assert!((2.0..3.0).contains(&operations), "a READ to begin, a WRITE of the watermark: {vector}");
        let naive = with(&["--transport", transport, "--oracle", "naive"]);
        assert!(naive["operations_per_t_trx"].as_f64().unwrap() >= 3.0, "{naive}");
        let split = with(&["--transport", transport, "--partitions", "2"]);
        assert!(split["operations_per_t_trx"].as_f64().unwrap() >= 5.0, "both parts are read twice: {split}");
        let all = ["--transport", transport, "--fetch-thread", "--compress", "--partitions", "2"];
        let all = with(&all);
        let operations = all["operations_per_t_trx"].as_f64().unwrap();
        assert!(operations <= 1.1, "only a WRITE of the slot's word: {all}");
    }
}

#[test]
fn transactions_of_each_mix_are_measured_and_no_increment_is_lost() {
    let with = |more: &[&str]| {
        let usual = ["bench", "kv", "--records", "2000", "--seconds", "0.2", "--warm-up", "0.05", "--json"];
        let output = run(usual.iter().chain(more));
        assert!(output.status.success(), "{more:?}: {}", output.stderr);
        let report: Value = serde_json::from_str(&output.stdout).unwrap();
        for field in ["trx_s", "ns_per_trx", "p50_us", "p99_us", "bytes_per_trx", "far_bytes"] {
            assert!(report[field].as_f64().unwrap() > 0.0, "{more:?}, {field}: {report}");
        }
        assert!(report["committed"].as_u64().unwrap() > 0, "{report}");
        report
    };
    for transport in ["shm", "tcp"] {
        let read = with(&["--transport", transport, "--mix", "read"]);
        let operations = read["operations_per_trx"].as_f64().unwrap();
        assert!((5.0..7.0).contains(&operations), "a READ to begin, and four of records: {read}");
        with(&["--transport", transport, "--mix", "update", "--in-flight", "4"]);
        with(&["--transport", transport, "--mix", "rmw", "--announce", "--threads", "2", "--in-flight", "2"]);
        let skewed = ["--transport", transport, "--mix", "rmw", "--threads", "2", "--in-flight", "4"];
        let skewed = with(&[&skewed[..], &["--skew", "1.2"]].concat());
        assert!(skewed["aborted"].as_u64().unwrap() > 0, "transactions conflict: {skewed}");
    }
}

#[test]
fn interrupted_measurement_leaves_no_process() {
    let args = ["bench", "io", "--transport", "tcp", "--op", "read", "--footprint", "16MiB"];
    let mut command = farpool(args);
    command.args(["--seconds", "600", "--floor"]);
    let mut bench = Process::start("farpool bench io", command);
    eventually("broker, node and floor run", || children_of(bench.id()).len() == 3);
    let children = children_of(bench.id());
    bench.signal(Signal::INT);
    let output = bench.wait();
    assert_complaint(&output, 1, "interrupted");
    assert!(children.iter().all(|&id| !is_running(id)));
}

#[test]
fn too_little_address_space_is_an_error_that_says_what_to_lower_and_leaves_no_folder() {
    for (transport, op, threads) in [("shm", "read", "16"), ("tcp", "read", "16"), ("shm", "call", "128")] {
        let temporary = tempfile::tempdir().unwrap();
        let mut command = tied("prlimit", ["--as=600000000:600000000", "--", env!("CARGO_BIN_EXE_farpool")]);
        command.args(["bench", "io", "--transport", transport, "--op", op, "--threads", threads]);
        command.args(["--footprint", "32MiB", "--seconds", "0.1", "--floor"]).env("TMPDIR", temporary.path());
        assert_complaint(&run_command(command), 2, "lower --threads");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
    }
}

#[test]
fn folder_for_temporary_files_that_is_too_deep_for_a_socket_is_an_error_that_names_the_variable() {
    let temporary = tempfile::tempdir().unwrap();
    let deep = temporary.path().join("d".repeat(90));
    std::fs::create_dir(&deep).unwrap();
    let mut command = farpool(["bench", "io", "--transport", "shm", "--op", "read", "--seconds", "1"]);
    command.args(["--footprint", "4MiB"]).env("TMPDIR", &deep);
    let output = run_command(command);
    assert_complaint(&output, 1, "TMPDIR");
    assert!(output.stderr.contains("107"), "{output:?}");
    assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0);
}

#[test]
fn an_impossible_measurement_is_a_usage_error_with_the_fix() {
    let bad = |args: &[&str], fix: &str| {
        let usual = ["bench", "io", "--seconds", "1"];
        assert_complaint(&run(usual.iter().chain(args)), 2, fix);
    };
    bad(&["--transport", "carrier-pigeon", "--op", "read"], "shm, tcp or verbs");
    bad(&["--transport", "shm", "--op", "append"], "read, write, cas, faa or call");
    bad(&["--transport", "shm", "--op", "read", "--block", "12"], "--block");
    bad(&["--transport", "shm", "--op", "read", "--depth", "64", "--batch", "64"], "--batch");
    bad(&["--transport", "shm", "--op", "read", "--batch", "65"], "--batch");
    bad(&["--transport", "shm", "--op", "read", "--threads", "0"], "--threads");
    bad(&["--transport", "shm", "--op", "read", "--footprint", "999TiB"], "--footprint");
    bad(&["--op", "read"], "--transport");
    bad(&["--transport", "tcp", "--op", "read", "--broker", "nonsense"], "write HOST:PORT");
    let output = run(["bench", "oracle", "--clients", "0"]);
    assert_complaint(&output, 2, "--clients");
    let output = run(["bench", "oracle", "--oracle", "naive", "--compress"]);
    assert_complaint(&output, 2, "leave --compress out");
    let output = run(["bench", "oracle", "--oracle", "hybrid"]);
    assert_complaint(&output, 2, "vector or naive");
    let output = run(["bench", "kv", "--mix", "append"]);
    assert_complaint(&output, 2, "read, update, rmw, new-order, insert or scan");
    let output = run(["bench", "kv", "--mix", "scan"]);
    assert_complaint(&output, 2, "--index btree");
    let output = run(["bench", "kv", "--mix", "rmw", "--in-flight", "65"]);
    assert_complaint(&output, 2, "--in-flight");
    let output = run(["bench", "kv", "--mix", "rmw", "--records", "2000000000"]);
    assert_complaint(&output, 2, "lower --records");
    let output = run(["bench", "io-table", "--out", "/nonexistent", "--rounds", "0"]);
    assert_complaint(&output, 2, "--rounds");
    let output = run(["bench", "io", "--transport", "tcp", "--op", "read", "--seconds", "0"]);
    assert_complaint(&output, 2, "for instance 5");
    let output = run([
        "bench",
        "io",
        "--transport",
        "tcp",
        "--op",
        "read",
        "--seconds",
        "1",
        "--broker",
        "127.0.0.1:1",
    ]);
    assert_complaint(&output, 1, "farpool up");
}

#[test]
fn memory_that_is_demanded_of_a_node_comes_back_and_its_client_sees_no_error() {
    let output = run(["bench", "reclaim", "--runs", "2", "--demand", "16MiB", "--json"]);
    if !root() {
        return assert!(output.stderr.contains("takes root"), "{output:?}");
    }
    assert!(output.status.success(), "{}", output.stderr);
    let report: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((report["client_errors"].as_u64(), report["runs"].as_u64()), (Some(0), Some(2)));
    assert!(report["client_operations"].as_u64() > Some(0));
    assert!(report["p50_ms"].as_f64() <= report["p99_ms"].as_f64() && report["p50_ms"].as_f64() > Some(0.0));
}
