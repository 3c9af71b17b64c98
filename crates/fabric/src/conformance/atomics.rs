//! Atomics are atomic, whatever other clients do.

use super::Carrier;
use super::rig::{DEADLINE, EPOCH, KEY, Rig, at, endpoint, region};
use crate::block_on;

pub fn compare_and_swap_swaps_only_on_equality(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let swap = |expected, new| {
        block_on(&rig.endpoint, queue.compare_and_swap(at(4096), EPOCH, expected, new)).unwrap()
    };
    assert_eq!(swap(0, 10), 0);
    assert_eq!(swap(0, 11), 10);
    assert_eq!(swap(10, u64::MAX), 10);
    let add = block_on(&rig.endpoint, queue.fetch_and_add(at(4096), EPOCH, 2)).unwrap();
    assert_eq!(add, u64::MAX);
    assert_eq!(rig.read(&queue, 4096, 8).unwrap(), 1u64.to_le_bytes());
}

pub fn fetch_and_add_loses_no_addition_under_contention(carrier: &dyn Carrier) {
    const THREADS: u64 = 3;
    const ADDITIONS: u64 = 500;
    let rig = Rig::new(carrier);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let peer = rig.peer.clone();
            scope.spawn(move || {
                let endpoint = endpoint(carrier, DEADLINE);
                let queue = endpoint.open(peer).unwrap();
                block_on(&endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
                for _ in 0..ADDITIONS {
                    block_on(&endpoint, queue.fetch_and_add(at(8), EPOCH, 1)).unwrap();
                }
            });
        }
    });
    let queue = rig.attached();
    assert_eq!(rig.read(&queue, 8, 8).unwrap(), (THREADS * ADDITIONS).to_le_bytes());
}
