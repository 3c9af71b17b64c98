//! Batches: operations are posted together, and each takes effect as if posted alone.

use std::sync::atomic::Ordering;

use farpool_wire::{MAX_TRANSFER_BYTES, Refusal};
use futures_util::future::join_all;

use super::Carrier;
use super::rig::{EPOCH, KEY, REGION_BYTES, Rig, at, pattern, refused, region};
use crate::{Batch, MAX_BATCH, OpError, block_on};

/// Blocks large enough to be received straight into their place.
const BLOCK: usize = 8192;

pub fn a_batch_does_what_its_operations_do_one_by_one(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut batch = Batch::new(rig.endpoint.arena().take(3 * BLOCK).unwrap());
    for round in 0..20 {
        let data = pattern(BLOCK, round);
        batch.clear();
        batch.buffer_mut()[..BLOCK].copy_from_slice(&data);
        batch.buffer_mut()[BLOCK..].fill(0);
        batch.write(at(0), EPOCH, 0..BLOCK);
        batch.fetch_and_add(at(16 << 10), EPOCH, 3);
        batch.compare_and_swap(at(17 << 10), EPOCH, u64::from(round), u64::from(round) + 1);
        batch.fence();
        batch.read(at(0), EPOCH, BLOCK..2 * BLOCK);
        batch.read(at(16 << 10), EPOCH, 2 * BLOCK..2 * BLOCK + 8);
        batch = block_on(&rig.endpoint, queue.run(batch));
        let words = [Ok(0), Ok(3 * u64::from(round)), Ok(u64::from(round)), Ok(0), Ok(0)];
        assert_eq!(batch.results(), words, "round {round}");
        assert!(batch.buffer()[BLOCK..2 * BLOCK] == data, "round {round}");
        let sum = (3 * u64::from(round) + 3).to_le_bytes();
        assert_eq!(batch.buffer()[2 * BLOCK..2 * BLOCK + 8], sum, "round {round}");
    }
}

pub fn a_refusal_within_a_batch_spoils_no_neighbour(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let blocks: Vec<_> = (0..6u8).map(|block| pattern(BLOCK, block)).collect();
    for (block, data) in (0..).zip(&blocks) {
        rig.write(&queue, block * BLOCK as u64, data).unwrap();
    }
    let buffer = rig.endpoint.arena().take(MAX_TRANSFER_BYTES + 1).unwrap();
    let mut batch = Batch::new(buffer);
    let into = |place: usize| place * BLOCK..(place + 1) * BLOCK;
    batch.read(at(0), EPOCH, into(0));
    batch.read(at(REGION_BYTES - 8), EPOCH, into(1));
    batch.read(at(BLOCK as u64), EPOCH, into(2));
    batch.read(at(0), EPOCH, 0..MAX_TRANSFER_BYTES + 1);
    batch.fetch_and_add(at(4), EPOCH, 1);
    batch.read(at(2 * BLOCK as u64), EPOCH, into(3));
    batch.read(at(u64::MAX - 8), EPOCH, into(4));
    batch.read(at(3 * BLOCK as u64), EPOCH, 5 * BLOCK..5 * BLOCK + 100);
    batch.read(at(4 * BLOCK as u64), EPOCH, into(6));
    let batch = block_on(&rig.endpoint, queue.run(batch));
    let expected = [
        Ok(0),
        Err(refused(Refusal::OutOfBounds)),
        Ok(0),
        Err(refused(Refusal::TooLong)),
        Err(refused(Refusal::Misaligned)),
        Ok(0),
        Err(refused(Refusal::OutOfBounds)),
        Ok(0),
        Ok(0),
    ];
    assert_eq!(batch.results(), expected);
    for (block, place) in [(0, 0), (1, 2), (2, 3), (4, 6)] {
        assert!(batch.buffer()[into(place)] == blocks[block], "block {block}");
    }
    assert_eq!(batch.buffer()[5 * BLOCK..5 * BLOCK + 100], blocks[3][..100]);
}

pub fn operations_that_are_too_long_are_refused_wherever_they_stand(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut batch = Batch::new(rig.endpoint.arena().take(MAX_TRANSFER_BYTES + 1).unwrap());
    for bits in 0..1 << 4 {
        let is_long: Vec<bool> = (0..4).map(|place| bits >> place & 1 == 1).collect();
        batch.clear();
        for &is_long in &is_long {
            let length = if is_long { MAX_TRANSFER_BYTES + 1 } else { 8 };
            batch.read(at(0), EPOCH, 0..length);
        }
        for run in 0..2 {
            batch = block_on(&rig.endpoint, queue.run(batch));
            let too_long = Err(refused(Refusal::TooLong));
            let expected = is_long.iter().map(|is_long| if *is_long { too_long } else { Ok(0) });
            assert!(batch.results().iter().copied().eq(expected), "{is_long:?}, run {run}");
        }
    }
}

pub fn what_is_behind_an_operation_refused_as_busy_waits_for_an_attachment(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut batch = Batch::new(rig.buffer(&[1; 16]));
    batch.write(at(0), EPOCH, 0..8);
    batch.write(at(8), EPOCH, 8..16);
    rig.host.moving.store(1, Ordering::Relaxed); // nothing is in flight
    let batch = block_on(&rig.endpoint, queue.run(batch));
    let results = batch.results();
    if rig.host.moving.swap(0, Ordering::Relaxed) == 1 {
        assert_eq!(results, [Ok(0), Ok(0)], "the client accesses the memory itself: the host was not asked");
        return;
    }
    assert_eq!(results, [Err(refused(Refusal::Busy)), Err(refused(Refusal::NotAttached))]);
    assert_eq!((rig.far_byte(0), rig.far_byte(8)), (0, 0));
    assert_eq!(rig.write(&queue, 8, &[2; 8]).unwrap_err(), refused(Refusal::NotAttached));
    block_on(&rig.endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the move has ended");
    assert!(rig.write(&queue, 8, &[3; 8]).is_ok());
    assert_eq!(rig.far_byte(8), 3);
}

pub fn batches_wait_for_places_and_all_come_through(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let adding = |place: u64| {
        let (rig, queue) = (&rig, &queue);
        async move {
            let mut batch = Batch::new(rig.endpoint.arena().take(64).unwrap());
            for _ in 0..5 {
                batch.clear();
                for _ in 0..MAX_BATCH {
                    batch.fetch_and_add(at(8 * place), EPOCH, 1);
                }
                batch = queue.run(batch).await;
                assert!(batch.results().iter().all(Result::is_ok));
            }
        }
    };
    let single = |place: u64| {
        let queue = &queue;
        async move {
            for _ in 0..50 {
                queue.fetch_and_add(at(8 * place), EPOCH, 1).await.unwrap();
            }
        }
    };
    let all = async { futures_util::join!(join_all((0..5).map(adding)), join_all((5..25).map(single))) };
    block_on(&rig.endpoint, all);
    for place in 0..25 {
        let count = if place < 5 { 5 * MAX_BATCH as u64 } else { 50 };
        assert_eq!(rig.read(&queue, 8 * place, 8).unwrap(), count.to_le_bytes(), "place {place}");
    }
}

pub fn a_dropped_batch_does_not_free_its_buffer_early(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    rig.write(&queue, 0, &pattern(BLOCK, 9)).unwrap();
    for _ in 0..50 {
        let mut batch = Batch::new(rig.endpoint.arena().take(2 * BLOCK).unwrap());
        batch.read(at(0), EPOCH, 0..BLOCK);
        batch.read(at(0), EPOCH, BLOCK..2 * BLOCK);
        block_on(&rig.endpoint, async {
            let given_up = queue.run(batch);
            futures_util::pin_mut!(given_up);
            let _ = futures_util::poll!(given_up.as_mut());
        });
        // A late answer must not write into the buffer that is taken next.
        let mut next = rig.endpoint.arena().take(2 * BLOCK).unwrap();
        next.fill(0xEE);
        for _ in 0..20 {
            rig.endpoint.poll();
        }
        assert!(next.iter().all(|&byte| byte == 0xEE), "a late answer went into another's buffer");
    }
    assert!(rig.read(&queue, 0, BLOCK).unwrap() == pattern(BLOCK, 9), "the places came back");
}

pub fn a_batch_on_a_closed_queue_is_not_sent(carrier: &dyn Carrier) {
    let mut rig = Rig::new(carrier);
    let queue = rig.attached();
    drop(rig.guard.take());
    // A call needs the node's answer, so the loss is noticed on every transport.
    let buffer = rig.buffer(b"echo");
    assert!(block_on(&rig.endpoint, queue.call(buffer, 4)).is_err());
    assert!(!queue.is_open());
    let mut batch = Batch::new(rig.buffer(&[0; 64]));
    batch.write(at(0), EPOCH, 0..64);
    batch.fetch_and_add(at(64), EPOCH, 1);
    let batch = block_on(&rig.endpoint, queue.run(batch));
    let not_sent = |result: &Result<u64, OpError>| matches!(result, Err(OpError::NotSent { .. }));
    assert!(batch.results().len() == 2 && batch.results().iter().all(not_sent));
}
