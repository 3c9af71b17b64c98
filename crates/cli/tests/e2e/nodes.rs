//! `farpool node` and `farpool broker` alone: their state, how they register, and how they end.

use std::time::Duration;

use farpool_fabric::TransportChoice;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::{
    Client, Mount, Pool, PoolOptions, Process, assert_complaint, eventually, farpool, pattern, read_from_far,
    run, run_command, write_new,
};

/// No process listens on port 1 of loopback.
const NODE: [&str; 6] = ["node", "--no-lock", "--broker", "127.0.0.1:1", "--region-size", "1MiB"];

#[test]
fn second_node_on_a_state_folder_is_refused_and_the_first_keeps_its_name() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let pool = Pool::start(PoolOptions { nodes: 0, ..PoolOptions::default() });
    let node = || {
        let mut command = farpool(["node", "--no-lock", "--broker", &pool.address, "--region-size", "1MiB"]);
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
fn second_broker_on_a_store_is_refused_and_the_store_is_named() {
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
    // With a wait, the node reserves its memory before it asks for the broker.
    command
        .args(["--wait", "60", "--memory", "1GiB", "--shm-socket"])
        .arg(&socket)
        .env("FARPOOL_LOG", "farpool_node=debug");
    let mut node = Process::start("the node", command);
    node.await_complaint("regions reserved");
    node.signal(Signal::TERM);
    let output = node.wait();
    assert!(output.status.success(), "{output:?}");
    assert!(!output.stderr.contains("done=1024"), "it reserved all of its memory before it ended");
    assert_eq!(output.stdout, "", "it was never ready");
    assert!(!socket.exists());
}

#[test]
fn node_that_cannot_register_exits_with_the_reason() {
    let output = run(NODE.iter().chain(&["--memory", "1MiB"]));
    assert_complaint(&output, 1, "--wait");
    assert!(output.stderr.contains("refused"), "{output:?}");
}

#[test]
fn a_node_asks_for_its_broker_before_it_reserves_memory() {
    let mut command = farpool(NODE);
    command.args(["--memory", "16MiB"]).env("FARPOOL_LOG", "farpool_node=debug");
    let output = run_command(command);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stderr.contains("refused") && !output.stderr.contains("regions reserved"), "{output:?}");
}

#[test]
fn node_whose_broker_is_on_another_machine_must_be_reachable_from_there() {
    let far =
        ["node", "--no-lock", "--memory", "1MiB", "--region-size", "1MiB", "--broker", "192.0.2.1:7117"];
    assert_complaint(&run(far), 2, "--advertise");
    let output = run(far.iter().chain(&["--listen", "192.0.2.2:7118"]));
    assert_complaint(&output, 2, "--data-listen");
}

#[test]
fn node_is_listed_by_the_name_of_its_host_and_as_it_is_advertised() {
    let mut pool = Pool::start(PoolOptions { nodes: 0, ..PoolOptions::default() });
    let mut command = farpool(["node", "--no-lock", "--broker", &pool.address, "--memory", "4MiB"]);
    command.args(["--region-size", "4MiB", "--advertise", "localhost"]);
    pool.nodes.push(Process::ready("the node", command).0);
    // It has registered when it says that it is ready.
    let node = pool.status()["nodes"][0].clone();
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(node["host_name"], name.trim());
    for port in ["control", "tcp"] {
        assert!(node[port].as_str().unwrap().starts_with("localhost:"), "{node}");
    }
}

#[test]
fn daemons_tell_the_service_manager_when_they_serve_and_when_they_end() {
    let dir = TempDir::new().unwrap();
    let manager = dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&manager).unwrap();
    socket.set_nonblocking(true).unwrap();
    let hears = |word: &str| {
        eventually(&format!("the daemon notifies {word}"), || {
            let mut heard = [0; 64];
            socket.recv(&mut heard).is_ok_and(|bytes| &heard[..bytes] == word.as_bytes())
        });
    };
    let mut command = farpool(["broker", "--listen", "127.0.0.1:0", "--store"]);
    command.arg(dir.path().join("broker.redb")).env("NOTIFY_SOCKET", &manager);
    let (mut broker, ready) = Process::ready("the broker", command);
    hears("READY=1");
    let mut command = farpool(["node", "--no-lock", "--memory", "1MiB", "--region-size", "1MiB", "--broker"]);
    command.arg(ready.strip_prefix("ready ").unwrap()).env("NOTIFY_SOCKET", &manager);
    let (mut node, _) = Process::ready("the node", command);
    hears("READY=1");
    for daemon in [&mut node, &mut broker] {
        daemon.end_well();
        hears("STOPPING=1");
    }
}

#[test]
fn node_that_is_emptied_loses_no_file_while_another_has_room() {
    let pool = Pool::start(PoolOptions { nodes: 2, memory: "16MiB", region_size: "1MiB" });
    let mount = Mount::of(&pool, &[]);
    let data = pattern(6 << 20, 1);
    write_new(&mount.file("data"), &data).unwrap();
    let status = pool.status();
    let nodes = status["nodes"].as_array().unwrap();
    assert!(nodes.iter().all(|node| node["regions_lent"] != 0), "{status}");
    let id = nodes[0]["id"].as_str().unwrap();
    let resize = |command: &str, size: &[&str]| {
        run([&["node", command, "--broker", &pool.address, "--node", id, "--json"], size].concat())
    };
    let emptied = resize("shrink", &["--to", "0"]);
    assert!(emptied.status.success(), "{emptied:?}");
    assert!(emptied.stdout.contains("\"memory_bytes\": 0"), "{emptied:?}");
    assert!(emptied.stderr.contains("being taken back"), "{emptied:?}");
    assert_eq!(read_from_far(&mount.file("data")).unwrap(), data);
    let withdrawn = || {
        pool.status()["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| it["regions_withdrawn"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(withdrawn(), 16, "the broker knows it");
    assert_complaint(&resize("grow", &["--to", "32MiB"]), 2, "--memory");
    assert_complaint(&resize("shrink", &["--to", "1MiB"]), 2, "farpool node grow");
    assert!(resize("grow", &["16MiB"]).status.success());
    assert_eq!(withdrawn(), 0, "the broker knows it");
}

#[test]
fn node_keeps_memory_that_a_database_has_leased_and_says_so() {
    let pool = Pool::start(PoolOptions { nodes: 1, memory: "4MiB", region_size: "1MiB" });
    let client = Client::new(&pool.address, 1, TransportChoice::Tcp);
    let lease = client.acquire_pinned();
    let output = run(["node", "shrink", "--to", "0", "--broker", &pool.address]);
    assert_complaint(&output, 1, "only their owners (databases) can give them back");
    assert!(output.stderr.contains("lends 1 MiB of the 4 MiB"), "{output:?}");
    client.release(&lease);
    eventually("the rest went back when the owner gave it up", || pool.status()["regions_withdrawn"] == 4);
}

#[test]
fn node_that_is_asked_again_to_shrink_waits_for_the_leases_that_are_ending() {
    let pool = Pool::start(PoolOptions { nodes: 1, memory: "4MiB", region_size: "1MiB" });
    let client = Client::new(&pool.address, 1, TransportChoice::Tcp);
    let lease = client.acquire(1).remove(0);
    client.take_back(1, 60_000);
    let mut command = farpool(["node", "shrink", "--to", "0"]);
    command.env("FARPOOL_BROKER", &pool.address); // `node` itself reads it, too
    let mut shrinking = Process::start("farpool node shrink", command);
    let started = std::time::Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        assert!(client.renew(&lease).revoked);
        shrinking.assert_running();
        std::thread::sleep(Duration::from_millis(500));
    }
    client.release(&lease);
    let output = shrinking.wait();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.contains("lends nothing of the 4 MiB"), "{output:?}");
}

#[test]
fn node_whose_machine_has_less_memory_than_the_reserve_gives_back_all_regions_and_says_so() {
    let pool = Pool::start(PoolOptions { nodes: 0, ..PoolOptions::default() });
    let lending = |more: &[&str]| {
        let mut command = farpool(["node", "--no-lock", "--broker", &pool.address, "--region-size", "1MiB"]);
        command.args(more);
        command
    };
    let withdrawn = || pool.status()["nodes"][0]["regions_withdrawn"].as_u64();
    // No machine has as much memory as is to be left available.
    let (mut node, _) = Process::ready("the node", lending(&["--memory", "8MiB", "--reserve", "1EiB"]));
    node.await_complaint("lower --memory or --reserve");
    node.await_complaint("the machine needs memory: regions go back");
    eventually("all regions have gone back", || withdrawn() == Some(8));
    node.end_well();

    let output = run_command(lending(&["--memory", "auto", "--reserve", "1EiB"]));
    assert_complaint(&output, 1, "give --memory");
}
