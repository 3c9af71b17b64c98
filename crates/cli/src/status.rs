//! `farpool status`: which nodes lend memory, and which owners have borrowed it, as a table or as JSON.

use anyhow::Result;
use farpool_wire::control::{NodeStatus, StatusResponse};
use farpool_wire::{NodeId, OwnerId};
use serde::Serialize;

use crate::output::{tell, tell_json};
use crate::reach::{BrokerAt, runtime, status_of};
use crate::size::ByteSize;

/// Show which nodes lend memory, and which clients hold it
///
/// Asks the broker, which knows what the nodes last told it. Nodes that have been silent for more than a
/// minute are left out unless --all is given. After ten minutes the broker forgets them.
///
/// REGIONS, FREE and LENT count regions, the unit in which memory is lent. WITHDRAWN counts the regions whose
/// memory went back to the node's machine (`farpool node shrink`): REGIONS includes them, the line above the
/// table does not. REJECTED counts the connections
/// that a node has cut off: for malformed input, because the peer sent no greeting in time, or to make room
/// for other peers.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool status
  farpool status --all --json | jq '.nodes[] | select(.alive | not)'
  farpool status --broker db-17:7117 --tls-dir /etc/farpool/tls")]
pub struct StatusArgs {
    #[command(flatten)]
    broker: BrokerAt,

    /// List also the nodes that have been silent for more than a minute
    #[arg(long)]
    all: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A node that has been silent for longer is left out unless `--all` is given: an operator has had time to
/// see it.
const DEAD_FOR_LONG_MS: u64 = 60_000;

/// Asks and prints.
pub fn run(args: StatusArgs) -> Result<()> {
    let broker = args.broker.require()?;
    let mut answer = runtime()?.block_on(status_of(&broker))?;
    let nodes_left_out = if args.all { 0 } else { leave_out_the_long_dead(&mut answer) };
    let status = PoolStatus { nodes_left_out, ..PoolStatus::new(broker.address, &answer) };
    if args.json {
        return tell_json(&status);
    }
    status.table().into_iter().try_for_each(tell)
}

/// Removes nodes that have been silent for long; returns how many.
fn leave_out_the_long_dead(answer: &mut StatusResponse) -> usize {
    let known = answer.nodes.len();
    answer.nodes.retain(|node| node.alive || node.last_seen_ms <= DEAD_FOR_LONG_MS);
    known - answer.nodes.len()
}

/// Facts about a pool. Names and meanings of the fields are stable; fields may be added.
#[derive(Debug, Serialize)]
struct PoolStatus {
    broker: String,
    region_bytes: u64,
    /// Sums over the nodes that are alive.
    regions_total: u64,
    regions_free: u64,
    regions_lent: u64,
    regions_withdrawn: u64,
    /// Connections that the broker cut off for malformed input.
    connections_rejected: u64,
    /// Nodes left out because they have been silent for more than a minute; 0 with `--all`.
    nodes_left_out: usize,
    nodes: Vec<Node>,
    owners: Vec<Owner>,
}

#[derive(Debug, Serialize)]
struct Node {
    id: String,
    incarnation: u32,
    alive: bool,
    last_seen_ms: u64,
    control: String,
    tcp: String,
    shm_socket: String,
    rdma: String,
    host: String,
    host_name: String,
    region_bytes: u64,
    regions_total: u32,
    regions_free: u32,
    regions_lent: u32,
    /// Their memory went back to the node's machine.
    regions_withdrawn: u32,
    frames_rejected: u64,
}

#[derive(Debug, Serialize)]
struct Owner {
    id: String,
    regions: u32,
}

impl PoolStatus {
    fn new(broker: String, answer: &StatusResponse) -> Self {
        let sum = |count: fn(&NodeStatus) -> u32| {
            answer.nodes.iter().filter(|node| node.alive).map(|node| u64::from(count(node))).sum()
        };
        let owner = |owner: &farpool_wire::control::OwnerStatus| Owner {
            id: OwnerId(owner.owner).to_string(),
            regions: owner.regions,
        };
        PoolStatus {
            broker,
            region_bytes: answer.region_bytes,
            regions_total: sum(|node| node.regions_total),
            regions_free: sum(|node| node.regions_free),
            regions_lent: sum(|node| node.regions_lent),
            regions_withdrawn: sum(|node| node.regions_withdrawn),
            connections_rejected: answer.connections_rejected,
            nodes_left_out: 0,
            nodes: answer.nodes.iter().map(Node::new).collect(),
            owners: answer.owners.iter().map(owner).collect(),
        }
    }

    fn table(&self) -> Vec<String> {
        let mut lines = vec![format!("broker {}", self.broker)];
        if self.nodes.is_empty() && self.nodes_left_out == 0 {
            lines.push("no node lends anything yet: start one with `farpool node`".into());
            return lines;
        }
        let alive = self.nodes.iter().filter(|node| node.alive).count();
        lines.push(format!(
            "pool   {} of {} free, {alive} of {} nodes alive",
            self.memory(self.regions_free),
            self.memory(self.regions_total - self.regions_withdrawn.min(self.regions_total)),
            self.nodes.len()
        ));
        if self.nodes_left_out > 0 {
            let count = self.nodes_left_out;
            lines.push(format!(
                "       {count} more silent for over a minute: farpool status --all lists them"
            ));
        }
        let heads = ["NODE", "HOST", "ADDRESS", "ALIVE", "REGIONS", "FREE", "LENT", "WITHDRAWN", "REJECTED"];
        lines.push(String::new());
        lines.extend(align(&heads, self.nodes.iter().map(Node::cells).collect()));
        if !self.owners.is_empty() {
            let row = |owner: &Owner| vec![owner.id.clone(), owner.regions.to_string()];
            lines.push(String::new());
            lines.extend(align(&["OWNER", "REGIONS"], self.owners.iter().map(row).collect()));
        }
        lines
    }

    fn memory(&self, regions: u64) -> ByteSize {
        ByteSize(regions.saturating_mul(self.region_bytes))
    }
}

impl Node {
    fn new(node: &NodeStatus) -> Self {
        let address = node.address.clone().unwrap_or_default();
        Node {
            id: NodeId(address.node).to_string(),
            incarnation: address.incarnation,
            alive: node.alive,
            last_seen_ms: node.last_seen_ms,
            control: address.control,
            tcp: address.tcp,
            shm_socket: address.shm_socket,
            rdma: address.rdma,
            host: address.host,
            host_name: address.host_name,
            region_bytes: node.region_bytes,
            regions_total: node.regions_total,
            regions_free: node.regions_free,
            regions_lent: node.regions_lent,
            regions_withdrawn: node.regions_withdrawn,
            frames_rejected: node.frames_rejected,
        }
    }

    fn cells(&self) -> Vec<String> {
        let alive = if self.alive { "yes".into() } else { format!("no, for {} s", self.last_seen_ms / 1000) };
        vec![
            self.id.clone(),
            self.host_name.clone(),
            self.control.clone(),
            alive,
            self.regions_total.to_string(),
            self.regions_free.to_string(),
            self.regions_lent.to_string(),
            self.regions_withdrawn.to_string(),
            self.frames_rejected.to_string(),
        ]
    }
}

/// Columns as wide as their widest cell, two blanks apart.
pub fn align(heads: &[&str], rows: Vec<Vec<String>>) -> Vec<String> {
    let heads = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_wire::control::{NodeAddress, OwnerStatus};

    fn node(id: u64, alive: bool, free: u32) -> NodeStatus {
        let (control, host_name) = ("127.0.0.1:9".into(), format!("db-{id}"));
        let address = NodeAddress { node: id, control, host_name, ..NodeAddress::default() };
        let (region_bytes, regions_total, regions_lent, regions_withdrawn) = (64 << 20, 5, 4 - free, 1);
        let address = Some(address);
        let (last_seen_ms, frames_rejected) = (9_500, 3);
        NodeStatus {
            address,
            alive,
            last_seen_ms,
            region_bytes,
            regions_total,
            regions_free: free,
            regions_lent,
            regions_withdrawn,
            frames_rejected,
        }
    }

    fn pool() -> PoolStatus {
        let nodes = vec![node(1, true, 1), node(2, false, 4)];
        let owners = vec![OwnerStatus { owner: 7, regions: 3 }];
        PoolStatus::new(
            "127.0.0.1:7117".into(),
            &StatusResponse {
                region_bytes: 64 << 20,
                nodes,
                owners,
                connections_rejected: 1,
                ..StatusResponse::default()
            },
        )
    }

    #[test]
    fn table_counts_the_living_and_lists_all() {
        let table = pool().table();
        assert_eq!(table[1], "pool   64 MiB of 256 MiB free, 1 of 2 nodes alive");
        assert!(
            table
                .iter()
                .any(|line| line.starts_with("0000000000000002  db-2") && line.contains("no, for 9 s"))
        );
        assert!(table.contains(&"0000000000000007  3".to_owned()), "{table:?}");
    }

    #[test]
    fn nodes_dead_for_over_a_minute_are_left_out_and_counted() {
        let dead_for = |id, last_seen_ms| NodeStatus { last_seen_ms, ..node(id, false, 0) };
        let nodes = vec![node(1, true, 1), dead_for(2, 59_000), dead_for(3, 61_000)];
        let mut answer = StatusResponse { nodes, ..StatusResponse::default() };
        let nodes_left_out = leave_out_the_long_dead(&mut answer);
        let table = PoolStatus { nodes_left_out, ..PoolStatus::new("b:1".into(), &answer) }.table();
        assert_eq!((answer.nodes.len(), nodes_left_out), (2, 1));
        assert!(table.iter().any(|line| line.contains("1 more") && line.contains("--all")), "{table:?}");
    }

    #[test]
    fn json_fields_are_stable() {
        let json = serde_json::to_value(pool()).unwrap();
        let names = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            names(&json),
            "broker connections_rejected nodes nodes_left_out owners region_bytes regions_free regions_lent regions_total \
             regions_withdrawn"
        );
        assert_eq!(
            names(&json["nodes"][0]),
            "alive control frames_rejected host host_name id incarnation last_seen_ms rdma region_bytes regions_free regions_lent \
             regions_total regions_withdrawn shm_socket tcp"
        );
        assert_eq!(names(&json["owners"][0]), "id regions");
    }

    #[test]
    fn empty_pool_says_what_to_do() {
        let table = PoolStatus::new("b:1".into(), &StatusResponse::default()).table();
        assert!(table[1].contains("farpool node"));
    }
}
