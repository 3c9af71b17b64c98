use std::cmp::Reverse;
use std::collections::BinaryHeap;

use farpool_wire::NodeId;

/// A node that could lend, as one owner sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Regions it could lend now.
    pub free: u32,
    /// Regions of it that the owner holds already.
    pub held: u32,
}

/// How many regions to ask of which node, `count` in all or as many as are free.
///
/// Each region comes from the node of which the owner holds fewest regions. So files stripe over all nodes,
/// and the loss of one node costs least. Among equals it comes from the node with most free regions, so that
/// nodes fill evenly.
pub fn place(candidates: &[Candidate], count: u32) -> Vec<(NodeId, u32)> {
    // The largest key is next. The last field makes the order total, so that equal pools give equal answers.
    let next = |c: &Candidate, given: u32| (Reverse(c.held + given), c.free - given, Reverse(c.node));
    let mut given = vec![0u32; candidates.len()];
    let with_room = candidates.iter().enumerate().filter(|(_, c)| c.free > 0);
    let mut queue: BinaryHeap<_> = with_room.map(|(at, c)| (next(c, 0), at)).collect();
    for _ in 0..count {
        let Some((_, at)) = queue.pop() else { break };
        given[at] += 1;
        if given[at] < candidates[at].free {
            queue.push((next(&candidates[at], given[at]), at));
        }
    }
    candidates.iter().zip(given).filter(|(_, given)| *given > 0).map(|(c, given)| (c.node, given)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(node: u64, free: u32, held: u32) -> Candidate {
        Candidate { node: NodeId(node), free, held }
    }

    #[test]
    fn regions_are_spread_evenly_over_nodes() {
        let nodes = [candidate(1, 10, 0), candidate(2, 10, 0), candidate(3, 10, 0)];
        assert_eq!(place(&nodes, 6), [(NodeId(1), 2), (NodeId(2), 2), (NodeId(3), 2)]);
    }

    #[test]
    fn regions_that_the_owner_already_holds_count() {
        let nodes = [candidate(1, 10, 3), candidate(2, 10, 0)];
        assert_eq!(place(&nodes, 3), [(NodeId(2), 3)]);
        assert_eq!(place(&nodes, 5), [(NodeId(1), 1), (NodeId(2), 4)]);
    }

    #[test]
    fn among_equals_the_emptiest_node_is_first() {
        let nodes = [candidate(1, 2, 0), candidate(2, 9, 0)];
        assert_eq!(place(&nodes, 1), [(NodeId(2), 1)]);
    }

    #[test]
    fn a_full_node_is_passed_over_and_a_full_pool_gives_what_it_has() {
        let nodes = [candidate(1, 0, 0), candidate(2, 2, 0)];
        assert_eq!(place(&nodes, 5), [(NodeId(2), 2)]);
        assert_eq!(place(&[], 5), []);
        assert_eq!(place(&nodes, 0), []);
    }

    proptest! {
        #[test]
        fn no_node_is_asked_for_more_than_it_has_and_no_free_region_is_overlooked(
            rooms in prop::collection::vec((0u32..20, 0u32..20), 0..8),
            count in 0u32..100,
        ) {
            let nodes: Vec<_> = (0..).zip(&rooms).map(|(id, room)| candidate(id, room.0, room.1)).collect();
            let placed = place(&nodes, count);
            for (node, given) in &placed {
                prop_assert!(*given <= nodes[node.0 as usize].free);
            }
            let total: u32 = placed.iter().map(|(_, given)| given).sum();
            prop_assert_eq!(total, count.min(nodes.iter().map(|c| c.free).sum()));
        }

        #[test]
        fn no_region_comes_from_a_node_with_two_more_of_the_owner_than_another_with_room(
            rooms in prop::collection::vec((0u32..20, 0u32..20), 1..8),
            count in 0u32..100,
        ) {
            let nodes: Vec<_> = (0..).zip(&rooms).map(|(id, room)| candidate(id, room.0, room.1)).collect();
            let placed = place(&nodes, count);
            let given = |c: &Candidate| placed.iter().find(|(node, _)| *node == c.node).map_or(0, |(_, n)| *n);
            let fullest = nodes.iter().filter(|c| given(c) > 0).map(|c| c.held + given(c)).max();
            for c in nodes.iter().filter(|c| given(c) < c.free) {
                prop_assert!(fullest.is_none_or(|most| most <= c.held + given(c) + 1));
            }
        }
    }
}
