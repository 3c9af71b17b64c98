//! A lease that ends: what was acknowledged stays, and nothing takes effect afterwards.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_wire::{Epoch, Refusal};

use super::Carrier;
use super::rig::{EPOCH, KEY, Member, Raise, Rig, at, refused, region, wait_until};
use crate::{AccessKind, Mapping, OpError, Peer, block_on};

pub fn what_was_acknowledged_before_a_fence_stays_and_nothing_follows_it(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let (acknowledged, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stops_if_the_check_fails = Raise(&stop);
        let writer = scope.spawn(|| write_counters_until_refused(carrier, &rig.peer, &acknowledged, &stop));
        wait_until(|| acknowledged.load(Ordering::Acquire) > 100);
        let before = acknowledged.load(Ordering::Acquire);
        let mut found = 0;
        let look = &mut |memory: &Mapping| memory.load(0).map(|word| found = word);
        rig.host.regions.with_region(0, EPOCH, AccessKind::Read, look).unwrap();
        rig.host.regions.fence(0);
        let at_fence = acknowledged.load(Ordering::Acquire);
        assert!(found >= before, "an acknowledged write is gone");
        // One acknowledgement may have been on its way when the fence was raised; no second one may follow.
        let is_broken = || acknowledged.load(Ordering::Acquire) > at_fence + 1;
        wait_until(|| writer.is_finished() || is_broken());
        assert!(!is_broken(), "a write was acknowledged after the fence");
        let error = writer.join().expect("the writer ends").expect("it ends by a failure");
        let ended = matches!(
            error,
            OpError::Refused(Refusal::StaleEpoch | Refusal::NotAttached) | OpError::Unknown { .. }
        );
        assert!(ended, "{error}");
    });
    let queue = rig.open();
    let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY));
    assert_eq!(attach.unwrap_err(), refused(Refusal::StaleEpoch));
}

pub fn a_lent_again_region_shows_nothing_of_its_last_holder(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let old = rig.attached();
    rig.write(&old, 0, &[0xAA; 8192]).unwrap();
    rig.host.regions.fence(0);
    assert!(rig.write(&old, 0, &[0xBB; 8192]).is_err());
    drop(old);
    wait_until(|| rig.host.regions.scrub(0).unwrap() == crate::Scrubbed::Clean);
    rig.host.regions.open(0, Epoch(2), KEY);
    let queue = rig.open();
    block_on(&rig.endpoint, queue.attach(region(0), Epoch(2), KEY)).unwrap();
    let buffer = rig.endpoint.arena().take(8192).unwrap();
    let (buffer, result) = block_on(&rig.endpoint, queue.read(at(0), Epoch(2), buffer));
    result.unwrap();
    assert!(buffer.iter().all(|&byte| byte == 0));
}

/// Writes 1, 2, 3 … to a word until an operation fails, and returns that failure; `None` when told to stop.
fn write_counters_until_refused(
    carrier: &dyn Carrier,
    peer: &Peer,
    acknowledged: &AtomicU64,
    stop: &AtomicBool,
) -> Option<OpError> {
    let writer = Member::join(carrier, peer, EPOCH, KEY);
    (1u64..).take_while(|_| !stop.load(Ordering::Relaxed)).find_map(|counter| {
        let result = writer.write(0, &counter.to_le_bytes());
        if result.is_ok() {
            acknowledged.store(counter, Ordering::Release); // pairs with the loads of the check
        }
        result.err()
    })
}
