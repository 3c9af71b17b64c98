//! A refused operation changes nothing, and is distinguished from one whose outcome is unknown.

use farpool_wire::{AccessKey, Epoch, Refusal};

use super::Carrier;
use super::rig::{EPOCH, KEY, REGION_BYTES, Rig, at, pattern, refused, region};
use crate::block_on;

pub fn out_of_bounds_is_refused_and_changes_nothing(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let data = pattern(8192, 1);
    for offset in [REGION_BYTES - 8191, REGION_BYTES, u64::MAX - 100] {
        assert_eq!(rig.write(&queue, offset, &data).unwrap_err(), refused(Refusal::OutOfBounds));
        assert_eq!(rig.read(&queue, offset, 8192).unwrap_err(), refused(Refusal::OutOfBounds));
    }
    let swap = queue.compare_and_swap(at(REGION_BYTES), EPOCH, 0, 1);
    assert_eq!(block_on(&rig.endpoint, swap).unwrap_err(), refused(Refusal::OutOfBounds));
    let changed = (REGION_BYTES - 8192..REGION_BYTES).find(|&offset| rig.far_byte(offset) != 0);
    assert_eq!(changed, None, "a part of a refused operation took effect");
    assert!(rig.write(&queue, REGION_BYTES - 8192, &data).is_ok(), "the queue goes on");
}

pub fn misaligned_atomics_are_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let swap = block_on(&rig.endpoint, queue.compare_and_swap(at(4), EPOCH, 0, 1));
    assert_eq!(swap.unwrap_err(), refused(Refusal::Misaligned));
    let add = block_on(&rig.endpoint, queue.fetch_and_add(at(9), EPOCH, 1));
    assert_eq!(add.unwrap_err(), refused(Refusal::Misaligned));
    assert_eq!((0..24).find(|&offset| rig.far_byte(offset) != 0), None);
}

pub fn a_region_that_was_not_attached_is_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.open();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
    assert_eq!(rig.write(&queue, 0, &[1; 8]).unwrap_err(), refused(Refusal::NotAttached));
    let other = rig.attached();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
    assert!(rig.read(&other, 0, 8).is_ok());
}

pub fn a_wrong_key_is_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.open();
    let wrong = AccessKey::from_bytes([0x5B; 16]);
    let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, wrong));
    assert_eq!(attach.unwrap_err(), refused(Refusal::WrongKey));
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
}

pub fn an_old_epoch_is_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    rig.host.regions.fence(0);
    rig.host.regions.scrub(0).unwrap();
    rig.host.regions.open(0, Epoch(2), KEY);
    let queue = rig.open();
    let attach = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY));
    assert_eq!(attach.unwrap_err(), refused(Refusal::StaleEpoch));
    block_on(&rig.endpoint, queue.attach(region(0), Epoch(2), KEY)).unwrap();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::StaleEpoch));
}

pub fn a_detached_region_is_refused(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    block_on(&rig.endpoint, queue.detach(region(0), EPOCH)).unwrap();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached));
}
