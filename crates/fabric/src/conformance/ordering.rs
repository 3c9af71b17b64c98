//! In which order a queue's operations take effect, with the fence flag and without.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::Carrier;
use super::rig::{DEADLINE, EPOCH, KEY, Member, Raise, Rig, at};
use crate::{Batch, block_on};

/// More than one word, so that a transport that tears has something to tear.
const DATA_BYTES: usize = 512;
const DATA_AT: u64 = 8192;
/// Far from the data: another page, another cache line.
const FLAG_AT: u64 = 64 << 10;
/// The writer publishes at least this many rounds, and continues until the reader has looked often enough: on
/// a fast transport it would finish before the reader has begun.
const PUBLISHED: u64 = 500;
const LOOKS: u64 = 200;
const ROUNDS: u64 = 300;

pub fn a_reader_of_a_later_write_sees_the_earlier_ones(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let (stop, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let reader = Member::join(carrier, &rig.peer, EPOCH, KEY);
            let mut seen = 0;
            while !stop.load(Ordering::Relaxed) {
                let flag = word(&reader.read(FLAG_AT, 8).expect("the grant is not fenced"));
                let data = reader.read(DATA_AT, DATA_BYTES).expect("the grant is not fenced");
                let oldest = data.chunks(8).map(word).min().expect("not empty");
                assert!(oldest >= flag, "{oldest} was read after {flag} had been announced");
                assert!(flag >= seen, "{flag} was read after {seen}");
                seen = flag;
                looks.fetch_add(1, Ordering::Relaxed); // a count that orders nothing
            }
        });
        let _stops_if_the_check_fails = Raise(&stop);
        let writer = Member::join(carrier, &rig.peer, EPOCH, KEY);
        let mut batch = Batch::new(writer.endpoint.arena().take(DATA_BYTES + 8).expect("an empty arena"));
        let started = Instant::now();
        for round in 1.. {
            if reader.is_finished() || round > PUBLISHED && looks.load(Ordering::Relaxed) >= LOOKS {
                break;
            }
            assert!(
                started.elapsed() < DEADLINE,
                "{} looks in {round} rounds",
                looks.load(Ordering::Relaxed)
            );
            batch.clear();
            batch.buffer_mut().chunks_mut(8).for_each(|word| word.copy_from_slice(&round.to_le_bytes()));
            batch.write(at(DATA_AT), EPOCH, 0..DATA_BYTES);
            batch.write(at(FLAG_AT), EPOCH, DATA_BYTES..DATA_BYTES + 8);
            batch = block_on(&writer.endpoint, writer.queue.run(batch));
            assert_eq!(batch.results(), [Ok(0), Ok(0)], "round {round}");
        }
        stop.store(true, Ordering::Relaxed); // only asks the reader to end: pairs with nothing
        reader.join().expect("the reader saw order");
    });
}

pub fn what_is_fenced_takes_effect_after_the_reads_and_atomics_before_it(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut batch = Batch::new(rig.endpoint.arena().take(2 * DATA_BYTES + 8).expect("an empty arena"));
    let (old, new, sum) = (0..DATA_BYTES, DATA_BYTES..2 * DATA_BYTES, 2 * DATA_BYTES..2 * DATA_BYTES + 8);
    for round in 1..=ROUNDS {
        batch.clear();
        batch.buffer_mut()[new.clone()]
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&round.to_le_bytes()));
        batch.read(at(DATA_AT), EPOCH, old.clone());
        batch.fence();
        batch.write(at(DATA_AT), EPOCH, new.clone());
        batch.fetch_and_add(at(FLAG_AT), EPOCH, 1);
        batch.fence();
        batch.read(at(FLAG_AT), EPOCH, sum.clone());
        batch = block_on(&rig.endpoint, queue.run(batch));
        assert_eq!(batch.results(), [Ok(0), Ok(0), Ok(round - 1), Ok(0)]);
        let overtaken = batch.buffer()[old.clone()].chunks(8).map(word).any(|found| found != round - 1);
        assert!(!overtaken, "the write of round {round} passed the read before its fence");
        assert_eq!(
            word(&batch.buffer()[sum.clone()]),
            round,
            "the read passed the addition before its fence"
        );
    }
}

pub fn without_a_fence_a_read_gives_each_word_as_it_was_or_as_it_became(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    let queue = rig.attached();
    let mut batch = Batch::new(rig.endpoint.arena().take(2 * DATA_BYTES).expect("an empty arena"));
    for round in 1..=ROUNDS {
        batch.clear();
        batch.buffer_mut()[DATA_BYTES..]
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&round.to_le_bytes()));
        batch.read(at(DATA_AT), EPOCH, 0..DATA_BYTES);
        batch.write(at(DATA_AT), EPOCH, DATA_BYTES..2 * DATA_BYTES);
        batch = block_on(&rig.endpoint, queue.run(batch));
        assert_eq!(batch.results(), [Ok(0), Ok(0)]);
        for found in batch.buffer()[..DATA_BYTES].chunks(8).map(word) {
            assert!(found == round - 1 || found == round, "{found} in round {round}");
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}
