//! `farpool node` and `farpool broker` by themselves: what they keep, and how they end.

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::{Process, assert_complaint, farpool, run_command};

/// Nobody listens on port 1 of loopback: a node goes on without its broker.
const NODE: [&str; 6] = ["node", "--no-lock", "--broker", "127.0.0.1:1", "--region-size", "1MiB"];

#[test]
fn second_node_on_a_state_folder_is_refused_and_the_first_keeps_its_name() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let node = || {
        let mut command = farpool(NODE);
        command.args(["--memory", "1MiB", "--state"]).arg(&state);
        command
    };
    let (mut first, _) = Process::ready("the first node", node());
    let identity = std::fs::read_to_string(state.join("node")).unwrap();
    let output = run_command(node());
    assert_complaint(&output, 1, "--state");
    assert!(output.stderr.contains(state.to_str().unwrap()), "{output:?}");
    assert_eq!(std::fs::read_to_string(state.join("node")).unwrap(), identity);
    first.end_well();
    let (mut next, _) = Process::ready("the next node", node());
    next.end_well();
}

#[test]
fn second_broker_on_a_store_is_refused_and_told_which() {
    let dir = TempDir::new().unwrap();
    let store = dir.path().join("broker.redb");
    let broker = || {
        let mut command = farpool(["broker", "--listen", "127.0.0.1:0", "--store"]);
        command.arg(&store);
        command
    };
    let (mut first, _) = Process::ready("the first broker", broker());
    let output = run_command(broker());
    assert_complaint(&output, 1, "--store");
    assert!(output.stderr.contains(store.to_str().unwrap()), "{output:?}");
    first.end_well();
}

#[test]
fn node_that_is_interrupted_while_it_reserves_memory_ends_at_once_and_leaves_no_socket() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("node.sock");
    let mut command = farpool(NODE);
    command.args(["--memory", "1GiB", "--shm-socket"]).arg(&socket).env("FARPOOL_LOG", "farpool_node=debug");
    let mut node = Process::start("the node", command);
    node.await_complaint("regions reserved");
    node.signal(Signal::TERM);
    let output = node.wait();
    assert!(output.status.success(), "{output:?}");
    assert!(!output.stderr.contains("done=1024"), "it has taken all of its memory first");
    assert_eq!(output.stdout, "", "it was never ready");
    assert!(!socket.exists());
}
