//! Connections that break, nodes that die or fall silent, and queues that come and go.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farpool_wire::{Epoch, Refusal};
use futures_util::future::{join, join_all};

use super::Carrier;
use super::rig::{EPOCH, KEY, Member, Rig, at, key_of, refused, region, wait_until};
use crate::{AccessKind, Mapping, OpError, Peer, Queue, block_on};

/// Writes in flight together when the node dies.
const WIDTH: u64 = 16;
const DELAYED: u64 = 12;
const DELAYED_BYTES: usize = 256 << 10;
const LOOKS: usize = 2000;

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
    if queue.reconnect().is_ok() {
        let call = block_on(&rig.endpoint, queue.call(rig.buffer(b"echo x"), 6));
        assert!(matches!(call, Err(OpError::Unknown { .. } | OpError::NotSent { .. })), "no node is there");
    }
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
    // The call's buffer is free again: the late answer must not write into the one that is taken now.
    let mine = rig.buffer(&[0x77; 8192]);
    rig.host.stalled.store(false, Ordering::Relaxed);
    queue.reconnect().unwrap();
    attach_when_answered(&rig, &queue);
    assert!(rig.read(&queue, 0, 8).is_ok());
    assert!(mine.iter().all(|&byte| byte == 0x77), "a late answer went into another's buffer");
}

pub fn what_was_acknowledged_before_the_node_died_is_in_its_memory(carrier: &dyn Carrier) {
    let mut rig = Rig::with_deadline(carrier, Duration::from_secs(5));
    let acknowledged = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_until_the_node_dies(carrier, &rig.peer, &acknowledged));
        wait_until(|| acknowledged.load(Ordering::Acquire) > 20 || writer.is_finished());
        assert!(!writer.is_finished(), "an operation failed while the node lived");
        drop(rig.guard.take());
        writer.join().expect("every operation ended, one way or another");
    });
    for place in 0..WIDTH {
        let mut found = 0;
        let look = &mut |memory: &Mapping| memory.load(place * 8).map(|word| found = word);
        rig.host.regions.with_region(0, EPOCH, AccessKind::Read, look).expect("open");
        let round = acknowledged.load(Ordering::Acquire);
        assert!(found >= round, "word {place} holds {found}, {round} was acknowledged");
    }
}

/// Writes 1, 2, 3 … to several words at once, so that some are always in flight.
fn write_until_the_node_dies(carrier: &dyn Carrier, peer: &Peer, acknowledged: &AtomicU64) {
    let member = Member::join(carrier, peer, EPOCH, KEY);
    for round in 1u64.. {
        let writes = join_all((0..WIDTH).map(|place| {
            let mut buffer = member.endpoint.arena().take(8).expect("buffers came back");
            buffer.copy_from_slice(&round.to_le_bytes());
            member.queue.write(at(place * 8), EPOCH, buffer)
        }));
        let ended = block_on(&member.endpoint, writes);
        if let Some(error) = ended.iter().find_map(|(_, result)| result.err()) {
            assert!(matches!(error, OpError::Unknown { .. } | OpError::NotSent { .. }), "{error}");
            return;
        }
        acknowledged.store(round, Ordering::Release); // pairs with the loads of the check
    }
}

pub fn what_was_delayed_past_unknown_takes_no_effect_after_a_new_incarnation(carrier: &dyn Carrier) {
    let rig = Rig::with_deadline(carrier, Duration::from_millis(300));
    let queue = rig.attached();
    for round in 0..5 {
        // Writes more than the sockets hold, behind a call that the node does not answer.
        rig.host.stalled.store(true, Ordering::Relaxed);
        carrier.hold_back(true);
        let call = queue.call(rig.buffer(b"echo x"), 6);
        let writes = join_all((0..DELAYED).map(|place| {
            let buffer = rig.buffer(&[0xDD; DELAYED_BYTES]);
            queue.write(at(place * DELAYED_BYTES as u64), EPOCH, buffer)
        }));
        let (call, _) = block_on(&rig.endpoint, join(call, writes));
        assert!(matches!(call, Err(OpError::Unknown { .. })), "{call:?}");
        queue.reconnect().unwrap();
        rig.host.stalled.store(false, Ordering::Relaxed);
        attach_when_answered(&rig, &queue);
        for place in 0..DELAYED {
            rig.write(&queue, place * DELAYED_BYTES as u64, &[round; DELAYED_BYTES]).unwrap();
        }
        carrier.hold_back(false);
        for _ in 0..LOOKS {
            for place in 0..DELAYED {
                let last = (place + 1) * DELAYED_BYTES as u64 - 1;
                assert_eq!(rig.far_byte(last), round, "a write of an older incarnation took effect");
            }
            std::thread::yield_now();
        }
    }
}

/// Attaches to the first region, over as many new incarnations as a busy machine needs.
fn attach_when_answered(rig: &Rig, queue: &Queue) {
    wait_until(|| match block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)) {
        Ok(()) => true,
        Err(OpError::Unknown { .. } | OpError::NotSent { .. }) => {
            queue.reconnect().expect("the node listens");
            false
        }
        Err(other) => panic!("{other}"),
    });
}

pub fn a_restarted_node_is_reached_again_and_knows_no_older_grant(carrier: &dyn Carrier) {
    const AFTER: Epoch = Epoch(EPOCH.0 + 1);
    let mut rig = Rig::with_deadline(carrier, Duration::from_secs(5));
    let queue = rig.attached();
    rig.write(&queue, 0, &[0xAA; 8192]).unwrap();
    rig.restart(carrier);
    rig.host.regions.fence(0); // epochs never repeat, so the new process has none of the old one's
    rig.host.regions.open(0, AFTER, key_of(AFTER));
    let ended = rig.write(&queue, 0, &[0xBB; 8192]);
    // In shared memory the write may have gone to the old process's memory, before the end of its connection
    // was noticed.
    assert!(!matches!(ended, Err(OpError::Refused(Refusal::WrongKey))), "{ended:?}");
    wait_until(|| rig.write(&queue, 0, &[0xBB; 8192]).is_err());
    wait_until(|| {
        queue.reconnect().is_ok() && {
            let stale = block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY));
            stale == Err(refused(Refusal::StaleEpoch))
        }
    });
    block_on(&rig.endpoint, queue.attach(region(0), AFTER, key_of(AFTER))).unwrap();
    let buffer = rig.endpoint.arena().take(8192).unwrap();
    let (buffer, result) = block_on(&rig.endpoint, queue.read(at(0), AFTER, buffer));
    result.unwrap();
    assert!(buffer.iter().all(|&byte| byte == 0), "the new process's memory is new");
}

pub fn thousands_of_queues_come_and_go(carrier: &dyn Carrier) {
    /// Open at a time.
    const TOGETHER: usize = 50;
    let rig = Rig::new(carrier);
    let count = |what: &str| std::fs::read_dir(what).map(Iterator::count).unwrap_or(0);
    let held = || {
        let mappings = std::fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count());
        (count("/proc/self/fd"), count("/proc/self/task"), mappings)
    };
    drop(rig.attached());
    let before = held();
    for _ in 0..carrier.queues_to_open().div_ceil(TOGETHER) {
        let queues: Vec<_> = (0..TOGETHER).map(|_| rig.attached()).collect();
        for queue in &queues {
            rig.write(queue, 0, &[1; 8]).unwrap();
        }
    }
    // The node notices a closed connection a little later; other tests of this process open things too.
    let slack = 200;
    wait_until(|| {
        let now = held();
        now.0 < before.0 + slack && now.1 < before.1 + slack && now.2 < before.2 + slack
    });
}
