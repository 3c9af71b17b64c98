//! Bad input: the error is one or two lines that name the fix, the exit status is 2 (usage) or 1, and nothing
//! is left behind.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use tempfile::TempDir;

use crate::support::{
    Mount, Pool, PoolOptions, assert_complaint, farpool, farpool_that_may_lock, is_mounted, root, run,
    run_command, tied,
};

/// No process listens on port 1 of loopback: only root could.
const NOBODY: &str = "127.0.0.1:1";

fn small_pool() -> Pool {
    Pool::start(PoolOptions { nodes: 1, memory: "16MiB", ..PoolOptions::default() })
}

fn mount_args<'a>(dir: &'a Path, broker: &'a str) -> [&'a str; 4] {
    ["mount", dir.to_str().unwrap(), "--broker", broker]
}

#[test]
fn unknown_flags_are_usage_errors_with_a_tip() {
    let output = run(["up", "--node", "2"]);
    assert_complaint(&output, 2, "--nodes");
    assert_complaint(&run(["status", "--yaml"]), 2, "farpool status --help");
    assert_complaint(&run(["lend"]), 2, "farpool --help");
    assert_complaint(&run(["db", "bank", "bank.far", "--acounts", "2"]), 2, "farpool db bank --help");
    assert_complaint(&run(["mount"]), 2, "<DIR>");
}

#[test]
fn impossible_sizes_are_usage_errors_with_an_example() {
    assert_complaint(&run(["up", "--memory", "0"]), 2, "for instance");
    assert_complaint(&run(["up", "--memory", "lots"]), 2, "for instance");
    assert_complaint(&run(["up", "--memory", "64MB"]), 2, "64MiB");
    assert_complaint(&run(["up", "--nodes", "0"]), 2, "1..=64");
    assert_complaint(&run(["up", "--nodes", "-1"]), 2, "1..=64");
    assert_complaint(&run(["up", "--memory", "16EiB"]), 2, "too large");
    assert_complaint(&run(["sim", "pool", "--seeds", "0"]), 2, "at least 1");
    assert_complaint(&run(["mount", "x", "--wait", "-1"]), 2, "not below zero");
    assert_complaint(&run(["up", "--memory", "1MiB"]), 2, "raise --memory");
    assert_complaint(&run(["up", "--memory", "999TiB"]), 2, "lower --memory");
    let node = ["node", "--broker", NOBODY];
    assert_complaint(&run(node.iter().chain(&["--memory", "0GiB"])), 2, "for instance");
    assert_complaint(&run(node.iter().chain(&["--memory", "999TiB"])), 2, "--memory auto");
    assert_complaint(&run(node.iter().chain(&["--region-size", "3MiB"])), 2, "powers of two");
}

#[test]
fn memory_that_is_no_multiple_of_the_region_size_is_rounded_down_with_a_remark() {
    let dir = TempDir::new().unwrap();
    let run_dir = dir.path().join("pool");
    let mut command =
        farpool(["up", "--no-lock", "--nodes", "1", "--memory", "7MiB", "--region-size", "4MiB"]);
    command.args(["--listen", "127.0.0.1:0", "--dir"]).arg(run_dir);
    let (mut up, ready) = crate::support::Process::ready("farpool up", command);
    assert!(ready.ends_with("4 MiB"), "{ready}");
    up.await_complaint("rounded down");
    up.end_well();
}

#[test]
fn unreachable_broker_is_an_error_that_says_how_to_start_one() {
    let dir = TempDir::new().unwrap();
    assert_complaint(&run(["status", "--broker", NOBODY]), 1, "farpool up");
    assert_complaint(&run(["status"]), 1, "farpool up");
    assert_complaint(&run(mount_args(dir.path(), NOBODY)), 1, "farpool up");
    assert!(!is_mounted(dir.path()));
}

#[test]
fn malformed_addresses_are_usage_errors_with_an_example() {
    for address in ["nonsense", "127.0.0.1", "127.0.0.1:99999", ""] {
        assert_complaint(&run(["status", "--broker", address]), 2, "write HOST:PORT");
    }
    assert_complaint(&run(["node", "--broker", "nonsense"]), 2, "write HOST:PORT");
    for address in ["here", "localhost:7117", ":7117"] {
        assert_complaint(&run(["up", "--listen", address]), 2, "for instance 127.0.0.1:7117");
    }
    assert_complaint(&run(["up", "--listen", "here"]), 2, "farpool up --help");
    for address in ["0.0.0.0:7117", "[::]:7117"] {
        assert_complaint(&run(["up", "--listen", address]), 2, "such as 127.0.0.1:7117");
    }
}

#[test]
fn plain_text_beyond_loopback_is_refused_with_the_fix() {
    assert_complaint(&run(["status", "--broker", "192.0.2.1:7117"]), 1, "--tls-dir");
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    assert_complaint(
        &run(["broker", "--listen", "0.0.0.0:0", "--store", store.to_str().unwrap()]),
        1,
        "--tls-dir",
    );
}

#[test]
fn missing_certificates_are_an_error_that_names_the_files() {
    let dir = TempDir::new().unwrap();
    let output = run(["status", "--broker", NOBODY, "--tls-dir", dir.path().to_str().unwrap()]);
    assert_complaint(&output, 1, "ca.pem");
}

#[test]
fn taken_port_is_an_error_that_names_the_option() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("store");
    let output = run(["broker", "--listen", &address, "--store", store.to_str().unwrap()]);
    assert_complaint(&output, 1, "--listen");
    let run_dir = dir.path().join("pool");
    let output = run(["up", "--listen", &address, "--memory", "64MiB", "--dir", run_dir.to_str().unwrap()]);
    assert_complaint(&output, 1, "--listen");
    assert!(!run_dir.exists(), "nothing is left behind");
}

#[test]
fn store_that_is_no_store_is_an_error_that_names_it() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("letter");
    fs::write(&store, "Dear Ann, this is no database.").unwrap();
    let output = run(["broker", "--listen", "127.0.0.1:0", "--store", store.to_str().unwrap()]);
    assert_complaint(&output, 1, "move it away");
    assert!(output.stderr.contains("letter"), "{output:?}");
}

#[test]
fn mount_point_that_does_not_exist_is_refused_with_the_fix() {
    let pool = small_pool();
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing");
    assert_complaint(&run(mount_args(&missing, &pool.address)), 1, "mkdir");
    assert!(!missing.exists());
}

#[test]
fn mount_point_that_is_a_file_or_not_empty_is_refused() {
    let pool = small_pool();
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "mine").unwrap();
    assert_complaint(&run(mount_args(&file, &pool.address)), 1, "directory");
    assert_complaint(&run(mount_args(dir.path(), &pool.address)), 1, "empty");
    assert!(!is_mounted(dir.path()));
    assert_eq!(fs::read_to_string(file).unwrap(), "mine");
}

#[test]
fn second_mount_on_the_same_directory_is_refused_and_the_first_goes_on() {
    let pool = small_pool();
    let mut first = Mount::of(&pool, &[]);
    let output = run(mount_args(first.path(), &pool.address));
    assert_complaint(&output, 1, "umount");
    fs::write(first.file("note"), "still here").unwrap();
    assert_eq!(fs::read_to_string(first.file("note")).unwrap(), "still here");
    first.unmount();
}

#[test]
fn missing_fuse_device_is_an_error_that_says_how_to_get_it() {
    let pool = small_pool();
    let dir = TempDir::new().unwrap();
    // In a mount namespace of its own, with an empty /dev.
    let script = r#"mount -t tmpfs none /dev && exec "$@""#;
    let own_namespace: &[&str] = if root() { &["--mount"] } else { &["--mount", "--map-root-user"] };
    let mut command = tied("unshare", own_namespace);
    command.args(["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_farpool")]);
    command.args(mount_args(dir.path(), &pool.address));
    let output = run_command(command);
    assert_complaint(&output, 1, "/dev/fuse");
    assert!(output.stderr.contains("modprobe fuse"), "{output:?}");
}

#[test]
fn too_little_lockable_memory_is_an_error_that_says_how_to_raise_it() {
    let pool = small_pool();
    let args = ["node", "--broker", &pool.address, "--memory", "64MiB", "--region-size", "4MiB"];
    let mut command = farpool_that_may_lock(1 << 20);
    command.args(args);
    let output = run_command(command);
    assert_complaint(&output, 1, "ulimit -l");
    assert!(output.stderr.contains("--no-lock"), "{output:?}");
    assert_eq!(pool.status()["nodes"].as_array().unwrap().len(), 1, "it never registered");
}

#[test]
fn a_limit_on_file_sizes_is_an_error_that_says_how_to_raise_it() {
    let mut command = tied("prlimit", ["--fsize=4194304:4194304", "--", env!("CARGO_BIN_EXE_farpool")]);
    command.args([
        "node",
        "--broker",
        "127.0.0.1:1",
        "--memory",
        "64MiB",
        "--region-size",
        "8MiB",
        "--no-lock",
        "--wait", // the memory is reserved before the broker is there
        "1",
    ]);
    assert_complaint(&run_command(command), 1, "ulimit -f");
}

#[test]
fn second_pool_in_the_same_folder_is_refused_and_names_the_process_of_the_first() {
    let mut up = crate::support::Up::start();
    let output = run_command(up.farpool(&["up", "--listen", "127.0.0.1:0", "--memory", "64MiB"]));
    assert_complaint(&output, 1, &format!("process {}", up.process.id()));
    assert!(output.stderr.contains("--dir"), "{output:?}");
    assert_eq!(up.status()["nodes"].as_array().unwrap().len(), 2, "the first goes on");
    up.process.end_well();
}

#[test]
fn folder_of_another_user_is_refused() {
    let output = if root() {
        let dir = TempDir::new().unwrap();
        let run_dir = dir.path().join("pool");
        fs::create_dir(&run_dir).unwrap();
        std::os::unix::fs::chown(&run_dir, Some(65_534), None).unwrap();
        run(["up", "--dir", run_dir.to_str().unwrap()])
    } else {
        run(["up", "--dir", "/"])
    };
    assert_complaint(&output, 1, "--dir");
}

#[test]
fn malformed_log_filter_is_a_usage_error() {
    let mut command = farpool(["status"]);
    command.env("FARPOOL_LOG", "farpool=loud");
    assert_complaint(&run_command(command), 2, "FARPOOL_LOG");
}

/// Runs `farpool ARGS` with a standard output to which all writes fail.
fn run_on_a_full_disk(args: &[&str]) -> crate::support::Output {
    let mut command = tied("sh", ["-c", r#"exec "$@" >/dev/full"#, "sh", env!("CARGO_BIN_EXE_farpool")]);
    command.args(args);
    run_command(command)
}

#[test]
fn results_that_cannot_be_written_are_an_error_but_a_closed_pipe_is_not() {
    let pool = small_pool();
    let io = ["bench", "io", "--transport", "shm", "--op", "read", "--footprint", "4MiB", "--seconds", "0.1"];
    let cases: [&[&str]; 6] = [
        &io,
        &["status", "--broker", &pool.address],
        &["status", "--json", "--broker", &pool.address],
        &["sim", "fabric", "--seeds", "1"],
        &["doctor", "--json", "--broker", &pool.address],
        &["--help"],
    ];
    for args in cases {
        assert_complaint(&run_on_a_full_disk(args), 1, "standard output");
    }
    let mut command = tied("sh", ["-c", r#"{ "$@"; echo "status $?" >&2; } | true"#, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_farpool")).args(["status", "--broker", &pool.address]);
    let output = run_command(command);
    assert_eq!(output.stderr, "status 0");
}

#[test]
fn help_is_not_an_error_and_ends_with_examples() {
    for subcommand in ["up", "broker", "node", "mount", "status", "doctor", "demo"] {
        let output = run([subcommand, "--help"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        assert!(output.stdout.contains("\nExamples:\n"), "{output:?}");
    }
    assert!(run(["--help"]).stdout.contains("FARPOOL_LOG"));
    assert!(run(["--version"]).stdout.starts_with("farpool "));
}
