//! A pool and its clients, started in any order; and a pool in the background.

use std::fs;
use std::net::TcpListener;

use tempfile::TempDir;

use crate::support::{Process, eventually, farpool, is_mounted, is_running, run_command};

#[test]
fn mount_database_and_node_wait_for_a_broker_that_is_started_last() {
    let dir = TempDir::new().unwrap();
    let far = dir.path().join("far");
    fs::create_dir(&far).unwrap();
    // The port was free a moment ago, and the kernel does not reuse it soon.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let waiting = |args: &[&str]| {
        let mut command = farpool(args);
        command.args(["--broker", &address, "--wait", "120"]);
        command
    };
    let mut mount = Process::start("the mount", waiting(&["mount", far.to_str().unwrap()]));
    let file = dir.path().join("bank.far");
    let mut database =
        Process::start("the database", waiting(&["db", "up", file.to_str().unwrap(), "--memory", "24MiB"]));
    let sized = ["node", "--no-lock", "--memory", "64MiB", "--region-size", "4MiB"];
    let mut node = Process::start("the node", waiting(&sized));
    node.await_complaint("not registered");
    for process in [&mut mount, &mut database, &mut node] {
        process.assert_running();
    }
    assert!(!is_mounted(&far) && !file.exists());
    let mut command = farpool(["broker", "--listen", &address, "--store"]);
    command.arg(dir.path().join("broker.redb"));
    let (mut broker, _) = Process::ready("the broker", command);
    for process in [&mut node, &mut mount, &mut database] {
        process.await_line("ready");
    }
    assert!(is_mounted(&far));
    for process in [&mut mount, &mut database, &mut node, &mut broker] {
        process.end_well();
    }
}

#[test]
fn mount_that_waits_for_a_pool_ends_on_sigterm() {
    let dir = TempDir::new().unwrap();
    let mut command = farpool(["mount", "--broker", "127.0.0.1:1", "--wait", "120"]);
    command.arg(dir.path());
    let mut mount = Process::start("the mount", command);
    mount.signal(rustix::process::Signal::TERM);
    mount.wait();
}

#[test]
fn detached_pool_is_ready_when_the_command_returns_and_leaves_nothing_when_it_ends() {
    let dir = TempDir::new().unwrap();
    let mine = |args: &[&str]| {
        let mut command = farpool(args);
        command.env("XDG_RUNTIME_DIR", dir.path());
        command
    };
    let up = [
        "up",
        "--detach",
        "--no-lock",
        "--memory",
        "16MiB",
        "--region-size",
        "4MiB",
        "--listen",
        "127.0.0.1:0",
    ];
    let output = run_command(mine(&up));
    assert!(output.status.success(), "{output:?}");
    let end = output.stdout.lines().find_map(|line| line.strip_prefix("end it:   kill "));
    let pool: u32 = end.unwrap_or_else(|| panic!("{output:?}")).parse().unwrap();
    let status = run_command(mine(&["status"]));
    let second = run_command(mine(&up));
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pool as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    assert!(status.stdout.contains("2 of 2 nodes alive"), "{status:?}");
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    assert!(second.stderr.contains(&format!("process {pool}")), "{second:?}");
    eventually("the pool ends", || !is_running(pool));
    assert!(!dir.path().join("farpool").exists());
}

#[test]
fn mount_finds_a_pool_of_the_same_user_that_is_started_later() {
    let dir = TempDir::new().unwrap();
    let far = dir.path().join("far");
    fs::create_dir(&far).unwrap();
    let run = TempDir::new().unwrap();
    let mut command = farpool(["mount", "--wait", "120"]);
    command.arg(&far).env("XDG_RUNTIME_DIR", run.path());
    let mut waiting = Process::start("the mount", command);
    let mut command =
        farpool(["up", "--no-lock", "--memory", "16MiB", "--region-size", "4MiB", "--listen", "127.0.0.1:0"]);
    command.env("XDG_RUNTIME_DIR", run.path());
    let (_up, _) = Process::ready("farpool up", command);
    waiting.await_line("ready");
    waiting.end_well();
    assert!(!is_mounted(&far));
}
