//! Several grants of one region: each with its own rights and its own end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_wire::{Epoch, GrantMode, Refusal};
use futures_util::future::join_all;

use super::Carrier;
use super::rig::{
    EPOCH, KEY, Member, REGION_BYTES, Raise, Rig, at, key_of, pattern, refused, region, wait_until,
};
use crate::{AccessKind, Mapping, OpError, Peer, block_on};

/// Words that a sharer writes at once, so that some writes are in flight whenever another sharer is fenced.
const WORDS: u64 = 8;
const SHARERS: u64 = 3;
const FENCED: u64 = 1;
/// Clients that join and are fenced before: each time the memory may move under the operations of all others.
const VISITORS: u64 = 8;

pub fn each_grant_is_opened_by_its_own_key_only(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    rig.host.regions.open_grant(0, Epoch(2), key_of(Epoch(2)), GrantMode::ReadWrite);
    let queue = rig.open();
    let attach = |epoch, key| block_on(&rig.endpoint, queue.attach(region(0), epoch, key));
    assert_eq!(attach(Epoch(2), KEY).unwrap_err(), refused(Refusal::WrongKey));
    assert_eq!(attach(EPOCH, key_of(Epoch(2))).unwrap_err(), refused(Refusal::WrongKey));
    attach(Epoch(2), key_of(Epoch(2))).unwrap();
    assert_eq!(rig.write(&queue, 0, &[1]).unwrap_err(), refused(Refusal::StaleEpoch));
}

pub fn a_read_only_grant_reads_but_neither_writes_nor_swaps(carrier: &dyn Carrier) {
    const READER: Epoch = Epoch(2);
    let rig = Rig::new(carrier);
    rig.host.regions.open_grant(0, READER, key_of(READER), GrantMode::ReadOnly);
    let owner = rig.attached();
    let reader = Member::join(carrier, &rig.peer, READER, key_of(READER));
    let data = pattern(8192, 5);
    for offset in [0, 8192] {
        rig.write(&owner, offset, &data).unwrap();
        assert!(reader.read(offset, 8192).unwrap() == data);
    }
    let read_only = refused(Refusal::ReadOnly);
    assert_eq!(reader.write(0, &[0xFF; 64]).unwrap_err(), read_only);
    reader.attach_again().unwrap();
    let word = u64::from_le_bytes(data[..8].try_into().unwrap());
    let swap = reader.queue.compare_and_swap(at(0), READER, word, 1);
    assert_eq!(block_on(&reader.endpoint, swap).unwrap_err(), read_only);
    reader.attach_again().unwrap();
    let add = reader.queue.fetch_and_add(at(0), READER, 1);
    assert_eq!(block_on(&reader.endpoint, add).unwrap_err(), read_only);
    assert!(rig.read(&owner, 0, 8192).unwrap() == data, "nothing happened");
    reader.attach_again().unwrap();
    assert!(reader.read(0, 8192).unwrap() == data, "reading goes on");
}

pub fn fencing_one_of_three_sharers_ends_its_access_and_costs_the_others_nothing(carrier: &dyn Carrier) {
    for round in 0..3 {
        let rig = Rig::new(carrier);
        for sharer in 1..SHARERS {
            rig.host.regions.open_grant(0, epoch_of(sharer), key_of(epoch_of(sharer)), GrantMode::ReadWrite);
        }
        let acknowledged: [AtomicU64; SHARERS as usize] = Default::default();
        let stop = AtomicBool::new(false);
        let stop = &stop;
        let counter = |sharer: u64| acknowledged[sharer as usize].load(Ordering::Acquire);
        std::thread::scope(|scope| {
            let _stops_if_the_check_fails = Raise(stop);
            let running: Vec<_> = (0..SHARERS)
                .map(|sharer| {
                    let (peer, acknowledged) = (&rig.peer, &acknowledged[sharer as usize]);
                    scope.spawn(move || count_up(carrier, peer, sharer, acknowledged, stop))
                })
                .collect();
            wait_until(|| (0..SHARERS).all(|sharer| counter(sharer) > 50));
            for epoch in (100..100 + VISITORS).map(Epoch) {
                rig.host.regions.open_grant(0, epoch, key_of(epoch), GrantMode::ReadWrite);
                let visitor = Member::join(carrier, &rig.peer, epoch, key_of(epoch));
                rig.host.regions.fence_grant(0, epoch).expect("memory to move to");
                visitor.write(REGION_BYTES - 8, &[1; 8]).expect_err("its grant has ended");
            }
            let acknowledged_before = counter(FENCED);
            rig.host.regions.fence_grant(0, epoch_of(FENCED)).expect("memory to move to");
            let left_behind = words_of(&rig, FENCED);
            assert!(
                left_behind.iter().all(|&word| word >= acknowledged_before),
                "an acknowledged write is gone"
            );
            let goal = [counter(0) + 50, 0, counter(2) + 50];
            wait_until(|| counter(0) > goal[0] && counter(2) > goal[2]);
            wait_until(|| running[FENCED as usize].is_finished());
            stop.store(true, Ordering::Relaxed); // only asks the sharers to end: pairs with nothing
            for (sharer, thread) in running.into_iter().enumerate() {
                let ended = thread.join().expect("a sharer ends");
                let wanted = if sharer as u64 == FENCED { Err(refused(Refusal::StaleEpoch)) } else { Ok(()) };
                assert_eq!(ended, wanted, "sharer {sharer} in round {round}");
            }
            assert_eq!(words_of(&rig, FENCED), left_behind, "something took effect after the fence");
        });
        for sharer in [0, 2] {
            assert_eq!(words_of(&rig, sharer), [counter(sharer); WORDS as usize], "sharer {sharer}");
        }
    }
}

/// The owner is the first sharer.
fn epoch_of(sharer: u64) -> Epoch {
    Epoch(EPOCH.0 + sharer)
}

fn place(sharer: u64, word: u64) -> u64 {
    (sharer * WORDS + word) * 8
}

fn words_of(rig: &Rig, sharer: u64) -> Vec<u64> {
    let mut words = vec![0; WORDS as usize];
    let look = &mut |memory: &Mapping| {
        for (place_of, word) in (0..).zip(&mut words) {
            *word = memory.load(place(sharer, place_of))?;
        }
        Ok(())
    };
    rig.host.regions.with_region(0, EPOCH, AccessKind::Read, look).expect("the lease goes on");
    words
}

/// Writes 1, 2, 3 … to all of the sharer's words at once, until told to stop or its grant ends. What was
/// acknowledged must be there after every interruption.
fn count_up(
    carrier: &dyn Carrier,
    peer: &Peer,
    sharer: u64,
    acknowledged: &AtomicU64,
    stop: &AtomicBool,
) -> Result<(), OpError> {
    let epoch = epoch_of(sharer);
    let key = if sharer == 0 { KEY } else { key_of(epoch) };
    let member = Member::join(carrier, peer, epoch, key);
    let mut counter = 1u64;
    while !stop.load(Ordering::Relaxed) {
        let writes = join_all((0..WORDS).map(|word| {
            let mut buffer = member.endpoint.arena().take(8).expect("buffers came back");
            buffer.copy_from_slice(&counter.to_le_bytes());
            member.queue.write(at(place(sharer, word)), epoch, buffer)
        }));
        let ended = block_on(&member.endpoint, writes);
        if ended.iter().all(|(_, result)| result.is_ok()) {
            acknowledged.store(counter, Ordering::Release); // pairs with the loads that look for progress
            counter += 1;
            continue;
        }
        drop(ended);
        member.attach_again()?;
        for word in 0..WORDS {
            let Ok(found) = member.read(place(sharer, word), 8) else { break };
            let found = u64::from_le_bytes(found.try_into().expect("eight bytes"));
            assert!(
                found == counter - 1 || found == counter,
                "{found} where {} was acknowledged",
                counter - 1
            );
        }
    }
    Ok(())
}
