use super::*;
use crate::keeping::regions_of;
use crate::region::NodeState;
use farpool_fabric::Peer;
use farpool_keep::MemoryJournal;
use farpool_wire::control::NodeAddress;
use farpool_wire::{AccessKey, Epoch};
use proptest::prelude::*;
use std::collections::HashSet;

const REGION_BYTES: u64 = 4 * EXTENT_BYTES;

fn region(node: u64, index: u32) -> Arc<LeasedRegion> {
    let peer = Peer { node: NodeId(node), tcp: None, verbs: None, shm_socket: None };
    let state = Arc::new(NodeState::new(peer, String::new()));
    let id = RegionId { node: NodeId(node), index };
    Arc::new(LeasedRegion::new(id, Epoch(1), AccessKey::from_bytes([0; 16]), state, u64::MAX))
}

fn space(nodes: u64, regions: u32) -> Arc<Mutex<Space>> {
    let space = Arc::new(Mutex::new(Space::default()));
    for node in 0..nodes {
        for index in 0..regions {
            space.lock().add(region(node, index), REGION_BYTES, 0, &Lease::default());
        }
    }
    space
}

fn take(space: &Arc<Mutex<Space>>, place: u64) -> Option<Extent> {
    space.lock().take(place, &Where::Anywhere, space)
}

#[test]
fn consecutive_places_go_to_consecutive_nodes() {
    let space = space(3, 2);
    let extents: Vec<_> = (0..6).map(|place| take(&space, place).unwrap()).collect();
    let nodes: Vec<u64> = extents.iter().map(|extent| extent.region().id.node.0).collect();
    assert_eq!(nodes, [0, 1, 2, 0, 1, 2]);
    assert_eq!(extents[5].address(5).offset, EXTENT_BYTES + 5, "the second of its region");
}

#[test]
fn a_node_to_avoid_gives_nothing_though_it_alone_has_room() {
    let space = space(2, 1);
    let not_on_0 = Where::NotOn(vec![NodeId(0)]);
    let take = |within: &Where| space.lock().take(0, within, &space);
    let all: Vec<_> = (0..4).map(|_| take(&not_on_0).unwrap()).collect();
    assert!(all.iter().all(|extent| extent.region().id.node == NodeId(1)));
    assert!(take(&not_on_0).is_none() && take(&Where::On(NodeId(1))).is_none());
    assert_eq!(take(&Where::On(NodeId(0))).unwrap().region().id.node, NodeId(0));
}

#[test]
fn a_full_node_leaves_its_share_to_the_others() {
    let space = space(2, 1);
    let all: Vec<_> = (0..8).map(|_| take(&space, 0).unwrap()).collect();
    assert!(take(&space, 0).is_none());
    drop(all);
    assert_eq!(space.lock().free(), 8);
}

#[test]
fn empty_regions_are_let_go_after_a_while_and_used_ones_stay() {
    let space = space(1, 3);
    let kept = take(&space, 0).unwrap();
    assert!(space.lock().shrink(1_000, 2_000, 0).is_empty());
    let gone = space.lock().shrink(2_000, 2_000, 4);
    assert_eq!(gone.len(), 1, "four free extents are kept");
    assert!(!gone.iter().any(|region| Arc::ptr_eq(region, kept.region())));
    drop(kept);
    assert_eq!(space.lock().shrink(2_100, 2_000, 4).len(), 1, "the region that was never used");
    assert_eq!(space.lock().shrink(2_200, 2_000, 0).len(), 0, "the other has only just become empty");
    assert_eq!(space.lock().shrink(4_200, 2_000, 0).len(), 1);
}

#[test]
fn a_region_to_leave_gets_nothing_new_and_goes_as_soon_as_it_is_empty() {
    let space = space(1, 2);
    let kept = take(&space, 0).unwrap();
    space.lock().leave(kept.region().id);
    assert_eq!(space.lock().free(), 4);
    let others: Vec<_> = (0..4).map(|_| take(&space, 0).unwrap()).collect();
    assert!(others.iter().all(|extent| extent.region().id != kept.region().id));
    assert!(take(&space, 0).is_none());
    assert!(space.lock().shrink(1, 2_000, 0).is_empty());
    drop(kept);
    assert_eq!(space.lock().free(), 0);
    assert_eq!(space.lock().shrink(1, 2_000, 100).len(), 1);
}

#[test]
fn an_extent_on_which_a_write_may_still_land_is_not_used_again() {
    let space = space(1, 1);
    let (doubtful, other) = (take(&space, 0).unwrap(), take(&space, 0).unwrap());
    doubtful.doubt();
    drop((doubtful, other));
    assert_eq!(space.lock().free(), 3);
    assert!(space.lock().shrink(1_000_000, 0, 0).is_empty(), "nor is its region taken for empty");
    assert_eq!(space.lock().remove(|_| true).len(), 1, "but it can be removed");
}

#[test]
fn extents_of_a_removed_region_do_not_become_free_again() {
    let space = space(1, 1);
    let extent = take(&space, 0).unwrap();
    assert_eq!(space.lock().remove(|_| true).len(), 1);
    drop(extent);
    assert_eq!(space.lock().free(), 0);
    assert!(take(&space, 0).is_none());
}

#[test]
fn the_share_of_a_full_node_goes_to_the_others_in_turn() {
    let space = space(3, 1);
    let _full: Vec<_> =
        (0..4).map(|_| space.lock().take(0, &Where::On(NodeId(0)), &space).unwrap()).collect();
    let others: Vec<_> = (0..6).map(|_| take(&space, 0).unwrap()).collect();
    let nodes: Vec<u64> = others.iter().map(|extent| extent.region().id.node.0).collect();
    assert_eq!(nodes, [1, 2, 1, 2, 1, 2]);
}

#[test]
fn all_idle_regions_go_at_once_but_those_whose_extents_are_to_stay_free() {
    let space = space(1, 4);
    assert_eq!(space.lock().shrink(2_000, 2_000, 4).len(), 3);
    assert_eq!(space.lock().free(), 4);
}

#[test]
fn numbers_of_removed_regions_are_used_again_once_no_extent_of_theirs_is_in_use() {
    let space = space(1, 3);
    let number = |extent: &Extent| extent.number() / 4;
    let kept = take(&space, 0).unwrap();
    assert!(!space.lock().is_unused());
    assert_eq!(space.lock().remove(|_| true).len(), 3);
    let free: Vec<u64> = (0..3).filter(|of| *of != number(&kept)).collect();
    let mut anew: Vec<u64> =
        (0..3).map(|index| space.lock().add(region(1, index), REGION_BYTES, 0, &Lease::default())).collect();
    anew.sort_unstable();
    assert_eq!(anew, [free, vec![3]].concat());
    assert!(space.lock().is_unused());
}

#[test]
fn regions_of_an_earlier_process_keep_their_numbers_and_doubted_places_their_holders() {
    let space = Arc::new(Mutex::new(Space::default()));
    space.lock().numbers_in_use([1, 3].into_iter());
    space.lock().adopt(1, region(0, 0), REGION_BYTES, 0, &BTreeSet::from([2, 9]));
    assert_eq!(space.lock().free(), 3, "place 9 is none of this region");
    let at = |number, place| space.lock().take_at(number, place, &space);
    let (doubted, sound) = (at(1, 2).unwrap(), at(1, 1).unwrap());
    assert_eq!((doubted.number(), doubted.is_in_doubt()), (6, true));
    assert_eq!((sound.number(), sound.is_in_doubt()), (5, false));
    assert_eq!(space.lock().free(), 2);
    assert!(at(1, 2).is_none() && at(1, 1).is_none() && at(2, 0).is_none(), "taken, or not there");
    space.lock().adopt(3, region(0, 1), REGION_BYTES, 0, &BTreeSet::new());
    assert!(space.lock().shrink(1_000_000, 0, 0).is_empty(), "its holders may still come");
    space.lock().mark_adopted();
    assert_eq!(space.lock().shrink(1_000_000, 0, 0).len(), 1);
    let add = |index| space.lock().add(region(5, index), REGION_BYTES, 0, &Lease::default());
    assert_eq!([add(0), add(1), add(2), add(3)], [3, 0, 2, 4]);
    space.lock().free_number(7);
    assert_eq!(add(4), 7);
}

#[test]
fn a_region_lost_during_an_adoption_leaves_its_number_to_its_holders() {
    let space = Arc::new(Mutex::new(Space::default()));
    space.lock().numbers_in_use([0].into_iter());
    space.lock().adopt(0, region(0, 0), REGION_BYTES, 0, &BTreeSet::new());
    assert_eq!(space.lock().remove(|_| true).len(), 1);
    assert_eq!(space.lock().add(region(0, 1), REGION_BYTES, 0, &Lease::default()), 1);
}

#[test]
fn taking_an_adopted_extent_of_a_region_to_leave_does_not_count_it_as_free() {
    let space = Arc::new(Mutex::new(Space::default()));
    space.lock().numbers_in_use([0].into_iter());
    space.lock().adopt(0, region(0, 0), REGION_BYTES, 0, &BTreeSet::new());
    space.lock().leave(RegionId { node: NodeId(0), index: 0 });
    let taken = space.lock().take_at(0, 3, &space).unwrap();
    assert_eq!(space.lock().free(), 0);
    drop(taken);
    assert_eq!(space.lock().free(), 0);
}

#[test]
fn a_doubt_is_kept_once_for_a_later_process() {
    let journal = Arc::new(MemoryJournal::default());
    let keeping = Keeping::new(journal.clone());
    let space = Arc::new(Mutex::new(Space::keeping(Some(keeping))));
    let lease = Lease { address: Some(NodeAddress::default()), key: vec![1; 16], ..Lease::default() };
    let number = space.lock().add(region(0, 0), REGION_BYTES, 0, &lease);
    let extent = take(&space, 0).unwrap();
    extent.doubt();
    let doubts = |journal: &MemoryJournal| {
        regions_of(&journal.kept()).get(&number).map(|region| (region.is_gone, region.doubts.clone()))
    };
    assert_eq!(doubts(&journal), Some((false, BTreeSet::from([0]))));
    space.lock().remove(|_| true);
    assert_eq!(doubts(&journal), Some((true, BTreeSet::from([0]))), "its number is still in use");
    space.lock().free_number(number);
    assert_eq!(doubts(&journal), None);
    let unused = space.lock().add(region(0, 1), REGION_BYTES, 0, &lease);
    space.lock().remove(|_| true);
    assert!(!regions_of(&journal.kept()).contains_key(&unused), "its number may be used again");
    space.lock().add(region(0, 2), REGION_BYTES, 0, &lease);
    space.lock().gone(unused);
    assert!(regions_of(&journal.kept())[&unused].is_gone);
}

proptest! {
    #[test]
    fn no_extent_has_two_holders(steps in proptest::collection::vec((0u8..10, 0u64..7), 1..200)) {
        let space = space(2, 2);
        let mut taken: Vec<Extent> = Vec::new();
        let mut index = 10;
        for (step, place) in steps {
            match step {
                0..=4 => taken.extend(take(&space, place)),
                5..=6 if !taken.is_empty() => drop(taken.swap_remove(place as usize % taken.len())),
                7 => space.lock().leave(RegionId { node: NodeId(place % 2), index: place as u32 % 2 }),
                8 => {
                    index += 1;
                    space.lock().add(region(place % 3, index), REGION_BYTES, 0, &Lease::default());
                }
                _ => drop(space.lock().remove(|region| region.id.node.0 == place)),
            }
            let places: HashSet<_> = taken.iter().map(|extent| extent.address(0)).collect();
            let numbers: HashSet<_> = taken.iter().map(Extent::number).collect();
            prop_assert_eq!(places.len(), taken.len());
            prop_assert_eq!(numbers.len(), taken.len());
            let counted: u64 = {
                let space = space.lock();
                let usable = space.nodes.values().flatten().filter(|held| !held.leaving);
                usable.map(|held| held.free.len() as u64).sum()
            };
            prop_assert_eq!(space.lock().free(), counted);
        }
    }
}

#[test]
fn a_caller_that_leaves_the_directory_out_gets_nothing_there() {
    assert!(Where::Anywhere.allows_overflow() && Where::NotOn(vec![NodeId(1)]).allows_overflow());
    assert!(!Where::NotOn(vec![OVERFLOW_NODE]).allows_overflow());
    assert!(!Where::On(NodeId(1)).allows_overflow());
}
