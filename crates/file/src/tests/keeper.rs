//! What a pool does while no thread uses it.

use farpool_fabric::TransportChoice;
use farpool_pool::Extent;

use super::{Rig, wait_until};

fn a_node_that_ends_is_noticed_by_a_pool_that_nobody_uses_over(transport: TransportChoice) {
    let mut rig = Rig::new(2, 2);
    let pool = rig.pool(transport);
    let take = |place| rig.runtime.block_on(pool.take_extent(place)).unwrap();
    let extents: Vec<Extent> = (0..16).map(take).collect();
    rig.kill_node(0);
    let lost = || extents.iter().filter(|extent| extent.region().node.is_lost()).count();
    wait_until(|| lost() > 0);
    assert_eq!(lost(), 8, "the other node lives");
    wait_until(|| pool.stock().regions().len() == 2);
    let nodes = pool.stock().nodes();
    assert!(nodes.len() == 1 && !nodes[0].is_lost());
}

#[test]
fn a_node_that_ends_is_noticed_by_a_pool_that_nobody_uses_over_shared_memory() {
    a_node_that_ends_is_noticed_by_a_pool_that_nobody_uses_over(TransportChoice::Shm);
}

#[test]
fn a_node_that_ends_is_noticed_by_a_pool_that_nobody_uses_over_tcp() {
    a_node_that_ends_is_noticed_by_a_pool_that_nobody_uses_over(TransportChoice::Tcp);
}
