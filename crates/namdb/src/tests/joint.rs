//! The leases that the compute servers of a database hold together.

use std::collections::BTreeSet;

use farpool_fabric::TransportChoice;
use farpool_pool::{JointError, JointLeases};

use super::rig::{REGION_BYTES, REGIONS, Rig, until};

/// More regions than a process requests at a time.
const MANY_REGIONS: u32 = 260;
/// As small as nodes allow.
const SMALL_REGION_BYTES: u64 = 1 << 20;

/// Waits until all regions of a rig have been leased anew.
#[track_caller]
fn all_regions_can_be_leased(rig: &Rig) {
    let pool = rig.pool(TransportChoice::Tcp);
    until("all regions can be leased", || JointLeases::acquire(&pool, REGIONS).is_ok());
}

#[test]
fn regions_that_one_holder_releases_are_lost_to_all_and_can_be_leased_anew() {
    let rig = Rig::new();
    let pool = rig.pool(TransportChoice::Tcp);
    let one = JointLeases::acquire(&pool, REGIONS).unwrap();
    let keys = one.keys().clone();
    let regions: BTreeSet<_> = keys.regions().unwrap().into_iter().collect();
    let other = JointLeases::join(keys.clone(), pool.transport, None).unwrap();
    assert_eq!((one.lost(), other.lost()), (vec![], vec![]));
    one.release();
    until("the other holder has lost them", || other.lost().into_iter().eq(regions.iter().copied()));
    let late = JointLeases::join(keys, pool.transport, None).err();
    assert!(matches!(late, Some(JointError::Ended { region }) if regions.contains(&region)), "{late:?}");
    all_regions_can_be_leased(&rig);
}

#[test]
fn a_request_for_more_memory_than_the_pool_has_is_told_both_sizes_and_leases_nothing() {
    let rig = Rig::new();
    let refused = JointLeases::acquire(&rig.pool(TransportChoice::Tcp), REGIONS + 1).err();
    let Some(JointError::NoSpace { wanted_mib, free_mib, .. }) = refused else { panic!("{refused:?}") };
    let mib = |regions: u32| u64::from(regions) * (REGION_BYTES >> 20);
    assert_eq!((wanted_mib, free_mib), (mib(REGIONS + 1), mib(REGIONS)));
    all_regions_can_be_leased(&rig);
}

#[test]
fn a_process_that_needs_several_requests_leases_as_many_regions_as_it_asked_for() {
    let rig = Rig::lending(MANY_REGIONS + 20, SMALL_REGION_BYTES);
    let leases = JointLeases::acquire(&rig.pool(TransportChoice::Tcp), MANY_REGIONS).unwrap();
    let regions: BTreeSet<_> = leases.keys().regions().unwrap().into_iter().collect();
    assert_eq!((regions.len(), leases.keys().addresses().count()), (MANY_REGIONS as usize, regions.len()));
}
