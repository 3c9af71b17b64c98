//! A lease that ends: what was acknowledged stays, and nothing follows.

use std::sync::atomic::{AtomicU64, Ordering};

use farpool_wire::{Epoch, Refusal};

use super::Carrier;
use super::rig::{DEADLINE, EPOCH, KEY, Rig, at, endpoint, refused, region, wait_until};
use crate::{AccessKind, Mapping, OpError, Peer, block_on};

pub fn what_was_acknowledged_before_a_fence_stays_and_nothing_follows_it(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let acknowledged = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_counters_until_refused(carrier, &rig.peer, &acknowledged));
        wait_until(|| acknowledged.load(Ordering::Acquire) > 100);
        let before = acknowledged.load(Ordering::Acquire);
        let mut found = 0;
        let look = &mut |memory: &Mapping| memory.load(0).map(|word| found = word);
        rig.host.regions.with_region(0, EPOCH, AccessKind::Read, look).unwrap();
        rig.host.regions.fence(0);
        let at_fence = acknowledged.load(Ordering::Acquire);
        let error = writer.join().expect("the writer ends");
        assert!(found >= before, "an acknowledged write is gone");
        // One acknowledgement may have been on its way while the fence was raised; no second one follows.
        assert!(
            acknowledged.load(Ordering::Acquire) <= at_fence + 1,
            "a write was acknowledged after the fence"
        );
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

/// Writes 1, 2, 3 … to a word until an operation fails; returns that failure.
fn write_counters_until_refused(carrier: &dyn Carrier, peer: &Peer, acknowledged: &AtomicU64) -> OpError {
    let endpoint = endpoint(carrier, DEADLINE);
    let queue = endpoint.open(peer.clone()).expect("the node listens");
    block_on(&endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the key is right");
    let mut buffer = endpoint.arena().take(8).expect("an empty arena");
    for counter in 1u64.. {
        buffer.copy_from_slice(&counter.to_le_bytes());
        let (returned, result) = block_on(&endpoint, queue.write(at(0), EPOCH, buffer));
        buffer = returned;
        match result {
            Ok(()) => acknowledged.store(counter, Ordering::Release),
            Err(error) => return error,
        }
    }
    unreachable!("a u64 does not run out")
}
