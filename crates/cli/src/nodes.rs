//! The nodes of a pool as commands reach them: which there are, and what they answer.

use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use farpool_control::{Located, ask, dial, explain};
use farpool_wire::NodeId;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{NodeAddress, RegionsRequest, RegionsResponse, ResizeRequest, ResizeResponse};
use tonic::transport::Channel;

use crate::reach::status_of;

/// Longest wait for a node's answer, which it gives from memory.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// A node that a command asks.
pub struct Node {
    address: NodeAddress,
    client: NodeClient<Channel>,
}

/// The addresses of the pool's nodes that are alive.
pub async fn living(broker: &Located) -> Result<Vec<NodeAddress>> {
    let known = status_of(broker).await?.nodes;
    Ok(known.into_iter().filter(|node| node.alive).filter_map(|node| node.address).collect())
}

/// The node that a user has named by its id, its host's name or its address, or the only one of the pool.
pub fn choose(nodes: Vec<NodeAddress>, named: Option<&str>) -> Result<NodeAddress> {
    ensure!(!nodes.is_empty(), "no node of the pool is alive: start one with `farpool node`");
    let is_named = |node: &NodeAddress| {
        named.is_none_or(|name| {
            [&NodeId(node.node).to_string(), &node.control, &node.host_name]
                .into_iter()
                .any(|known| known == name)
        })
    };
    let mut found: Vec<NodeAddress> = nodes.iter().filter(|node| is_named(node)).cloned().collect();
    match (found.len(), named) {
        (1, _) => Ok(found.remove(0)),
        (0, Some(name)) => bail!("no node called {name} is alive; the pool has {}", names(&nodes)),
        (_, Some(name)) => bail!("several nodes run on {name}: give the id of one of {}", names(&found)),
        (_, None) => bail!("the pool has several nodes: give --node with one of {}", names(&nodes)),
    }
}

fn names(nodes: &[NodeAddress]) -> String {
    let name = |node: &NodeAddress| format!("{} ({})", NodeId(node.node), node.host_name);
    nodes.iter().map(name).collect::<Vec<_>>().join(", ")
}

impl Node {
    /// A node of the broker's pool.
    pub fn new(broker: &Located, address: NodeAddress) -> Result<Self> {
        let client = NodeClient::new(dial(&address.control, broker.tls.as_ref())?);
        Ok(Node { address, client })
    }

    /// Its id.
    pub fn id(&self) -> NodeId {
        NodeId(self.address.node)
    }

    /// Its table.
    pub async fn regions(&self) -> Result<RegionsResponse> {
        let asked = ask(ANSWER_DEADLINE, || {
            let mut client = self.client.clone();
            async move { client.regions(RegionsRequest {}).await }
        });
        asked.await.map_err(|status| self.failed(&status))
    }

    /// Sets how much it lends.
    pub async fn resize(&self, request: ResizeRequest) -> Result<ResizeResponse> {
        let asked = ask(ANSWER_DEADLINE, || {
            let mut client = self.client.clone();
            async move { client.resize(request).await }
        });
        asked.await.map_err(|status| self.failed(&status))
    }

    fn failed(&self, status: &tonic::Status) -> anyhow::Error {
        anyhow!("cannot ask node {} at {}: {}", self.id(), self.address.control, explain(status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u64, host_name: &str) -> NodeAddress {
        let control = format!("{host_name}:{id}");
        NodeAddress { node: id, control, host_name: host_name.to_owned(), ..NodeAddress::default() }
    }

    #[test]
    fn a_node_is_named_by_its_id_host_or_address_and_need_not_be_named_if_it_is_the_only_one() {
        let nodes = vec![node(1, "a"), node(2, "b"), node(3, "b")];
        let chosen = |named: Option<&str>| {
            choose(nodes.clone(), named).map(|node| node.node).map_err(|error| error.to_string())
        };
        assert_eq!(chosen(Some("a")), Ok(1));
        assert_eq!(chosen(Some("b:3")), Ok(3));
        let id = |node| NodeId(node).to_string();
        assert_eq!(chosen(Some(id(2).as_str())), Ok(2));
        assert!(chosen(Some("b")).unwrap_err().contains(id(3).as_str()));
        assert!(chosen(Some("c")).unwrap_err().contains("(a)"));
        assert!(chosen(None).unwrap_err().contains("--node"));
        assert_eq!(choose(vec![node(1, "a")], None).unwrap().node, 1);
        assert!(choose(Vec::new(), None).unwrap_err().to_string().contains("farpool node"));
    }
}
