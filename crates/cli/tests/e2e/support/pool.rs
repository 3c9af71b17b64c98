//! A pool of separate processes, so that each can be killed and restarted alone.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::{Process, eventually, farpool, run, tied};

/// What a pool is made of.
pub struct PoolOptions {
    pub nodes: u32,
    pub memory: &'static str,
    pub region_size: &'static str,
}

impl Default for PoolOptions {
    fn default() -> Self {
        PoolOptions { nodes: 2, memory: "64MiB", region_size: "4MiB" }
    }
}

/// A broker and nodes on loopback, without TLS.
pub struct Pool {
    // Nodes end before the broker: otherwise they would log warnings.
    pub nodes: Vec<Process>,
    pub broker: Process,
    pub address: String,
    options: PoolOptions,
    dir: TempDir,
}

impl Pool {
    /// Starts it and waits until all nodes have registered.
    #[track_caller]
    pub fn start(options: PoolOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("broker.redb");
        let (broker, said) = start_broker("127.0.0.1:0", store);
        let address = said.strip_prefix("ready ").unwrap().to_owned();
        let mut pool = Pool { nodes: Vec::new(), broker, address, options, dir };
        for _ in 0..pool.options.nodes {
            pool.add_node();
        }
        pool
    }

    /// Adds a node, and waits until it has registered.
    #[track_caller]
    pub fn add_node(&mut self) {
        self.add_node_started(|args| farpool(args));
    }

    /// Adds a node with at most this many descriptors, so that it serves fewer connections.
    #[track_caller]
    pub fn add_node_with_descriptors(&mut self, most: u64) {
        let limit = format!("--nofile={most}:{most}");
        self.add_node_started(|args| {
            let limited = [limit.as_str(), env!("CARGO_BIN_EXE_farpool")];
            tied("prlimit", limited.iter().chain(args))
        });
    }

    #[track_caller]
    fn add_node_started(&mut self, start: impl FnOnce(&[&str]) -> Command) {
        let number = self.nodes.len() + 1;
        let socket = self.node_socket(number);
        let args = ["node", "--no-lock", "--broker", &self.address, "--memory", self.options.memory];
        let mut command = start(&args);
        command.args(["--region-size", self.options.region_size, "--shm-socket"]).arg(socket);
        self.nodes.push(Process::ready(format!("node {number}"), command).0);
        let running = self.nodes.iter_mut().filter_map(|node| node.is_running().then_some(())).count();
        eventually("the node has registered", || self.alive() >= running);
    }

    /// The socket of the `number`-th node.
    pub fn node_socket(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("node-{number}.sock"))
    }

    /// Kills the broker.
    pub fn kill_broker(&mut self) {
        self.broker.kill();
    }

    /// Restarts a killed broker at the same address with the same store.
    #[track_caller]
    pub fn restart_broker(&mut self) {
        self.broker = start_broker(&self.address, self.dir.path().join("broker.redb")).0;
    }

    /// The answer of `farpool status --json`.
    #[track_caller]
    pub fn status(&self) -> Value {
        let output = run(["status", "--json", "--broker", &self.address]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_str(&output.stdout).unwrap()
    }

    fn alive(&self) -> usize {
        self.status()["nodes"].as_array().unwrap().iter().filter(|node| node["alive"] == true).count()
    }

    /// Regions that no owner has.
    #[track_caller]
    pub fn regions_free(&self) -> u64 {
        self.status()["regions_free"].as_u64().unwrap()
    }

    /// Regions of all nodes.
    #[track_caller]
    pub fn regions_total(&self) -> u64 {
        self.status()["regions_total"].as_u64().unwrap()
    }
}

fn start_broker(listen: &str, store: PathBuf) -> (Process, String) {
    let mut command = farpool(["broker", "--listen", listen, "--store"]);
    command.arg(store);
    Process::ready("the broker", command)
}
