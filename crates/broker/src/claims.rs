//! Claims: which peer has registered which node, and for which owners it has asked for leases. They bound how
//! many names one peer can make the broker keep.
//!
//! Owners that hold nothing any more are forgotten from time to time ([`Claims::keep_only`]). A restart
//! forgets all claims.

use std::collections::{BTreeMap, BTreeSet};

use farpool_control::Identity;
use farpool_wire::{NodeId, OwnerId};

/// Most owners per identity (a certificate, or an address where there is no TLS), in two counts: those for
/// which it has asked for leases, and those named by the nodes that it registered, each owner once per node.
/// This allows a thousand nodes with a thousand owners each, and takes some 50 MB in the broker.
pub const MAX_OWNERS_PER_IDENTITY: usize = 1 << 20;

/// Claims to names. An unknown peer (`None`) is one identity, like any other.
#[derive(Debug, Default)]
pub struct Claims {
    nodes: BTreeMap<NodeId, Option<Identity>>,
    owners: BTreeMap<OwnerId, Option<Identity>>,
    owners_of: BTreeMap<Option<Identity>, usize>,
}

impl Claims {
    /// Whether `node` may name `owners` owners: whether all nodes of its identity together stay within the
    /// bound.
    pub fn has_room(
        &self,
        node: NodeId,
        identity: &Option<Identity>,
        owners: usize,
        owners_on: impl Fn(NodeId) -> usize,
    ) -> bool {
        let others = self.nodes.iter().filter(|(id, of)| **id != node && *of == identity);
        others.map(|(id, _)| owners_on(*id)).sum::<usize>() + owners <= MAX_OWNERS_PER_IDENTITY
    }

    /// An identity has registered a node.
    pub fn registered(&mut self, node: NodeId, identity: Option<Identity>) {
        self.nodes.insert(node, identity);
    }

    /// The identity that registered a node.
    pub fn registrar(&self, node: NodeId) -> Option<Identity> {
        self.nodes.get(&node).cloned().flatten()
    }

    /// Forgets a node that the broker has forgotten.
    pub fn forget(&mut self, node: NodeId) {
        self.nodes.remove(&node);
    }

    /// Records that an identity asks for leases of an owner. `false`: it has asked for too many owners.
    #[must_use]
    pub fn asks(&mut self, owner: OwnerId, identity: &Option<Identity>) -> bool {
        if self.owners.contains_key(&owner) {
            return true;
        }
        let count = self.owners_of.entry(identity.clone()).or_default();
        if *count >= MAX_OWNERS_PER_IDENTITY {
            return false;
        }
        *count += 1;
        self.owners.insert(owner, identity.clone());
        true
    }

    /// Forgets all owners but those that hold something.
    pub fn keep_only(&mut self, holding: &BTreeSet<OwnerId>) {
        self.owners.retain(|owner, _| holding.contains(owner));
        self.owners_of.clear();
        for identity in self.owners.values() {
            *self.owners_of.entry(identity.clone()).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(number: u8) -> Option<Identity> {
        Some(Identity::Address([127, 0, 0, number].into()))
    }

    #[test]
    fn an_identity_with_too_many_owners_gets_no_more_until_some_hold_nothing() {
        let mut claims = Claims::default();
        let most = MAX_OWNERS_PER_IDENTITY as u64;
        assert!((0..most).all(|owner| claims.asks(OwnerId(owner), &identity(1))));
        assert!(!claims.asks(OwnerId(most), &identity(1)));
        assert!(claims.asks(OwnerId(0), &identity(1)), "it is known already");
        assert!(claims.asks(OwnerId(most), &identity(2)), "each identity has a bound of its own");
        claims.keep_only(&(1..=most).map(OwnerId).collect());
        assert!(claims.asks(OwnerId(most + 1), &identity(1)));
        assert!(!claims.asks(OwnerId(most + 2), &identity(1)));
    }

    #[test]
    fn owners_on_all_nodes_of_an_identity_count_together() {
        let mut claims = Claims::default();
        claims.registered(NodeId(1), identity(1));
        claims.registered(NodeId(2), identity(2));
        let on = |node: NodeId| if node == NodeId(1) { MAX_OWNERS_PER_IDENTITY - 5 } else { 0 };
        assert!(claims.has_room(NodeId(3), &identity(1), 5, on));
        assert!(!claims.has_room(NodeId(3), &identity(1), 6, on));
        assert!(claims.has_room(NodeId(3), &identity(2), 6, on));
        assert!(
            claims.has_room(NodeId(1), &identity(1), MAX_OWNERS_PER_IDENTITY, on),
            "its own report is replaced"
        );
    }
}
