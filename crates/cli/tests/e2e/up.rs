//! `farpool up`: how a pool starts, and that nothing is left when it ends.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{
    Mount, Process, Up, assert_complaint, eventually, farpool, farpool_that_may_lock, is_running, run_command,
};

fn kill(id: u32) {
    kill_process(Pid::from_raw(id as i32).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn interrupted_pool_leaves_no_process_and_no_file() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut up = Up::start();
        let children = up.children();
        assert_eq!(children.len(), 3, "a broker and two nodes");
        up.process.signal(signal);
        let output = up.process.wait();
        assert!(output.status.success(), "{output:?}");
        assert!(children.iter().all(|&id| !is_running(id)));
        assert!(!up.run_dir().exists());
    }
}

#[test]
fn killed_pool_leaves_no_process_and_another_pool_can_use_its_folder() {
    let mut up = Up::start();
    let children = up.children();
    up.process.kill();
    eventually("broker and nodes end", || children.iter().all(|&id| !is_running(id)));
    let command = up.farpool(&[
        "up",
        "--listen",
        "127.0.0.1:0",
        "--memory",
        "16MiB",
        "--region-size",
        "4MiB",
        "--no-lock",
    ]);
    let (mut next, _) = Process::ready("the next pool", command);
    next.end_well();
}

#[test]
fn pool_that_is_interrupted_while_it_starts_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let run_dir = dir.path().join("pool");
    let mut command = farpool(["up", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--no-lock", "--dir"]);
    command.arg(&run_dir);
    let mut up = Process::start("farpool up", command);
    up.await_line("broker ");
    let children = crate::support::children_of(up.id());
    up.end_well();
    assert!(children.iter().all(|&id| !is_running(id)));
    assert!(!run_dir.exists());
}

#[test]
fn pool_of_a_user_with_a_low_memlock_limit_warns_and_locks_what_is_allowed() {
    const MIB: u64 = 1 << 20;
    let dir = TempDir::new().unwrap();
    let mut command = farpool_that_may_lock(8 * MIB);
    command.args(["up", "--listen", "127.0.0.1:0", "--nodes", "1", "--memory", "16MiB", "--region-size"]);
    command.arg("4MiB").env("XDG_RUNTIME_DIR", dir.path());
    let (mut up, _) = Process::ready("farpool up", command);
    up.await_complaint("can lock 8 MiB of its 20 MiB");
    up.await_complaint("--no-lock");
    let locked = crate::support::children_of(up.id()).into_iter().map(locked_bytes).max();
    assert!(locked.is_some_and(|bytes| bytes > 0 && bytes <= 8 * MIB), "{locked:?}");
    up.end_well();
}

/// How much memory a process has locked (proc(5)).
fn locked_bytes(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn other_subcommands_of_the_user_find_the_pool_by_themselves() {
    let mut up = Up::start();
    let status = up.status();
    assert_eq!(status["broker"], up.address.as_str());
    assert_eq!(status["regions_total"], 8);
    let address = fs::read_to_string(up.run_dir().join("broker.addr")).unwrap();
    assert_eq!(address.trim(), up.address);

    let dir = up.runtime_dir().join("far");
    fs::create_dir(&dir).unwrap();
    let mut mount = Mount::with(up.farpool(&["mount", dir.to_str().unwrap()]), dir);
    fs::write(mount.file("note"), "far away").unwrap();
    assert_eq!(fs::read_to_string(mount.file("note")).unwrap(), "far away");
    assert_eq!(up.status()["owners"].as_array().unwrap().len(), 1);
    mount.unmount();
    up.process.end_well();
}

#[test]
fn stranger_without_certificates_is_not_let_in() {
    let up = Up::start();
    let output = run_command(farpool(["status", "--broker", &up.address]));
    assert_complaint(&output, 1, "--tls-dir");
}

#[test]
fn broker_that_dies_is_restarted_at_its_address() {
    let up = Up::start();
    kill(up.child("broker"));
    up.process.await_complaint("the broker has ended");
    up.process.await_complaint(&format!("the broker is back at {}", up.address));
    eventually("both nodes are known again", || {
        let status = up.status();
        status["nodes"].as_array().unwrap().iter().filter(|node| node["alive"] == true).count() == 2
    });
}

#[test]
fn node_that_dies_is_reported_and_without_nodes_the_pool_ends() {
    let mut up = Up::start();
    kill(up.child("node"));
    up.process.await_complaint("its data are lost, 1 left");
    assert!(up.process.is_running());
    kill(up.child("node"));
    let output = up.process.wait();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stderr.contains("the last node has ended"), "{output:?}");
    assert!(!up.run_dir().exists());
}

#[test]
fn pool_with_a_closed_standard_error_goes_on_and_ends_in_order() {
    let mut up = Up::start_unheard();
    let broker = up.child("broker");
    kill(broker);
    let is_another = |id: u32| id != broker;
    eventually("the broker is started again", || up.running_child("broker").is_some_and(is_another));
    kill(up.child("node"));
    eventually("one node is left", || up.children().len() == 2);
    let children = up.children();
    up.process.end_well();
    assert!(children.iter().all(|&id| !is_running(id)));
    assert!(!up.run_dir().exists());
}

#[test]
fn table_of_status_shows_nodes_and_free_memory() {
    let up = Up::start();
    let output = run_command(up.farpool(&["status"]));
    assert!(output.stdout.contains("32 MiB of 32 MiB free, 2 of 2 nodes alive"), "{output:?}");
}
