//! Connections that break, nodes that die or fall silent, and queues that come and go.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_wire::Refusal;

use super::Carrier;
use super::rig::{EPOCH, KEY, Rig, refused, region, wait_until};
use crate::{OpError, block_on};

pub fn an_older_incarnation_is_dead_once_a_newer_one_is_answered(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    queue.reconnect().unwrap();
    assert_eq!(rig.read(&queue, 0, 8).unwrap_err(), refused(Refusal::NotAttached), "attachments end with it");
    block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
    assert!(rig.write(&queue, 0, &[1; 8]).is_ok());
}

pub fn the_death_of_the_node_ends_every_operation(carrier: &dyn Carrier) {
    let mut rig = Rig::with_deadline(carrier, Duration::from_secs(5));
    let queue = rig.attached();
    rig.guard = None;
    let started = Instant::now();
    let message = rig.buffer(b"echo x");
    let call = block_on(&rig.endpoint, queue.call(message, 6));
    assert!(matches!(call, Err(OpError::Unknown { .. } | OpError::NotSent { .. })), "{call:?}");
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(!queue.is_open());
    let write = rig.write(&queue, 0, &[1; 8]);
    assert!(matches!(write, Err(OpError::NotSent { .. })), "{write:?}");
    let reconnected = queue.reconnect().is_ok() && rig.read(&queue, 0, 8).is_ok();
    assert!(!reconnected, "nobody is there");
}

pub fn a_silent_node_ends_operations_by_their_deadline(carrier: &dyn Carrier) {
    let rig = Rig::with_deadline(carrier, Duration::from_millis(300));
    let queue = rig.attached();
    rig.host.stalled.store(true, Ordering::Relaxed);
    let started_ns = rig.endpoint.now_ns();
    let message = rig.buffer(b"echo x");
    let call = block_on(&rig.endpoint, queue.call(message, 6));
    assert!(matches!(call, Err(OpError::Unknown { .. })), "{call:?}");
    let waited = Duration::from_nanos(rig.endpoint.now_ns() - started_ns);
    assert!(waited >= Duration::from_millis(300));
    assert!(waited < Duration::from_secs(10));
    rig.host.stalled.store(false, Ordering::Relaxed);
    queue.reconnect().unwrap();
    block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).unwrap();
    assert!(rig.read(&queue, 0, 8).is_ok());
}

pub fn hundreds_of_queues_come_and_go(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let descriptors = || std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    drop(rig.attached());
    let before = descriptors();
    for _ in 0..300 {
        let queue = rig.attached();
        rig.write(&queue, 0, &[1; 8]).unwrap();
    }
    // The node notices a closed connection a little later; other tests of this process open files too.
    wait_until(|| descriptors() < before + 100);
}
