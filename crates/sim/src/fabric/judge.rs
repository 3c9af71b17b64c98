//! The judge: checks a history against the contract, word by word.
//!
//! J1. Operations of an older incarnation take effect only until a newer one is answered; operations under a
//!     grant only until its fence. An operation's end is the earliest of these times and its own return.
//! J2. An acknowledged operation took effect between its start and its end. A refused operation never took
//!     effect. An operation with an unknown outcome may or may not have taken effect before its end.
//! J3. The contents of a region when its lease is fenced count as the last read of all.
//! J4. Each lease starts from zeros: a value of an earlier lease counts as a value that was never written.

use std::collections::{BTreeMap, BTreeSet};

#[cfg(test)]
use super::history::Actor;
use super::history::{Access, End, History, LeaseName, What};
use super::layout::{ADDED, SWAPPED};
use crate::register::{self, NEVER, Touch};

/// The most violations that are reported: the first ones are the useful ones.
const TOLD: usize = 8;

pub(super) fn judge(history: History) -> Vec<String> {
    let mut found = history.complaints.clone();
    let mut words: BTreeMap<(LeaseName, u64), Vec<Access>> = BTreeMap::new();
    for access in &history.accesses {
        words.entry((access.actor.lease, access.word)).or_default().push(*access);
        found.extend(acknowledged_after_fence(&history, access));
    }
    // The fence reads every word, including those that no client accessed.
    for (&lease, ended) in history.leases.iter().filter_map(|(lease, of)| Some((lease, of.ended.as_ref()?))) {
        for word in 0..ended.1.len() as u64 {
            words.entry((lease, word)).or_default();
        }
    }
    for (&(lease, word), accesses) in &words {
        let verdict = if ADDED.contains(&word) {
            additions(&history, lease, word, accesses)
        } else {
            swaps(&history, lease, word, accesses)
                .and_then(|()| register::check(0, &touches(&history, lease, word, accesses)))
        };
        if let Err(what) = verdict {
            found.push(format!("lease {}, word {word}: {what}", lease.0));
        }
    }
    found.truncate(TOLD);
    found
}

fn fence_of(history: &History, access: &Access) -> u64 {
    let lease = history.leases.get(&access.actor.lease);
    let grant = lease.and_then(|lease| lease.fenced.get(&access.actor.grant)).copied().unwrap_or(NEVER);
    let all = lease.and_then(|lease| lease.ended.as_ref()).map_or(NEVER, |(at, _)| *at);
    grant.min(all)
}

/// The end of an operation (J1).
fn end_of(history: &History, access: &Access) -> u64 {
    let fence = fence_of(history, access);
    let own = match access.end {
        End::Done | End::Refused => access.returned,
        End::Open | End::Unknown => {
            let answers = history.answered.get(&access.actor.session).map_or(&[][..], Vec::as_slice);
            let newer = answers.iter().find(|(incarnation, _)| *incarnation > access.actor.incarnation);
            newer.map_or(NEVER, |&(_, at)| at)
        }
    };
    own.min(fence)
}

fn acknowledged_after_fence(history: &History, access: &Access) -> Option<String> {
    let fence = fence_of(history, access);
    (access.end == End::Done && access.start > fence).then(|| {
        let (lease, grant) = (access.actor.lease.0, access.actor.grant);
        format!("lease {lease}: acknowledged under grant {grant}, which had been fenced: {:?}", access.what)
    })
}

/// The operations on a word in the form that the register checker needs, without additions.
fn touches(history: &History, lease: LeaseName, word: u64, accesses: &[Access]) -> Vec<Touch> {
    let mut touches = Vec::new();
    for access in accesses.iter().filter(|access| access.end != End::Refused) {
        let (start, end) = (access.start, end_of(history, access));
        let done = access.end == End::Done;
        let mut touch = |value, writes, certain| {
            touches.push(Touch {
                value,
                writes,
                start,
                end: if certain { end.max(start) } else { end },
                certain,
            });
        };
        match access.what {
            What::Read if done => touch(access.found, false, true),
            What::Read | What::Add => {}
            What::Write(value) => touch(value, true, done),
            What::Swap { expected, new } if done => {
                touch(access.found, false, true);
                if access.found == expected {
                    touch(new, true, true);
                }
            }
            What::Swap { new, .. } => touch(new, true, false),
        }
    }
    if let Some((at, words)) = history.leases.get(&lease).and_then(|lease| lease.ended.as_ref()) {
        // J3: one tick after the fence, which is after every operation that the fence has ended.
        let (value, time) = (words[word as usize], at + 1);
        touches.push(Touch { value, writes: false, start: time, end: time, certain: true });
    }
    touches
}

/// The value of a word when its lease was fenced.
fn word_at_end(history: &History, lease: LeaseName, word: u64) -> Option<u64> {
    let (_, words) = history.leases.get(&lease)?.ended.as_ref()?;
    Some(words[word as usize])
}

/// Checks that at most one swap replaced each value. A swap with an unknown outcome took place if its new
/// value was seen.
fn swaps(history: &History, lease: LeaseName, word: u64, accesses: &[Access]) -> Result<(), String> {
    if !SWAPPED.contains(&word) {
        return Ok(());
    }
    let done = accesses.iter().filter(|access| access.end == End::Done);
    let seen: BTreeSet<u64> =
        done.map(|access| access.found).chain(word_at_end(history, lease, word)).collect();
    let mut followed = BTreeSet::new();
    for access in accesses {
        let What::Swap { expected, new } = access.what else { continue };
        let took_place = match access.end {
            End::Done => access.found == expected,
            End::Open | End::Unknown => seen.contains(&new),
            End::Refused => false,
        };
        if took_place && !followed.insert(expected) {
            return Err(format!("two swaps both found {expected:#x} and replaced it"));
        }
    }
    Ok(())
}

/// Checks a word that is only incremented by one. Each acknowledged addition finds a different number, and
/// later ones find greater numbers. A read returns at least the additions that ended before it began, and at
/// most those that began before it returned. The final sum lies between the acknowledged additions and all
/// that were made.
fn additions(history: &History, lease: LeaseName, word: u64, accesses: &[Access]) -> Result<(), String> {
    let is_addition = |access: &&Access| access.what == What::Add;
    let mut done: Vec<&Access> =
        accesses.iter().filter(is_addition).filter(|access| access.end == End::Done).collect();
    done.sort_by_key(|access| access.found);
    if let Some([one, _]) = done.array_windows().find(|[one, other]| one.found == other.found) {
        return Err(format!("two additions both found {}", one.found));
    }
    // Additions with an unknown outcome that began after their grant's fence do not count.
    let unknown: Vec<&Access> = accesses
        .iter()
        .filter(is_addition)
        .filter(|access| matches!(access.end, End::Open | End::Unknown))
        .filter(|access| access.start <= end_of(history, access))
        .collect();
    let most = (done.len() + unknown.len()) as u64;
    // No addition may start after an addition that found a greater number has ended.
    let mut earliest_end = NEVER;
    for access in done.iter().rev() {
        if access.start > earliest_end {
            return Err(format!("an addition found {}, though an earlier one found more", access.found));
        }
        if access.found >= most {
            return Err(format!("an addition found {}, though only {most} were ever made", access.found));
        }
        earliest_end = earliest_end.min(end_of(history, access));
    }
    for read in accesses.iter().filter(|access| access.what == What::Read && access.end == End::Done) {
        let before = done.iter().filter(|addition| end_of(history, addition) < read.start);
        let least = before.map(|addition| addition.found + 1).max().unwrap_or(0);
        let by_then = done.iter().chain(&unknown).filter(|addition| addition.start < read.returned).count();
        if read.found < least || read.found > by_then as u64 {
            return Err(format!("{} was read, where {least} to {by_then} were possible", read.found));
        }
    }
    let Some(sum) = word_at_end(history, lease, word) else { return Ok(()) };
    let least = done.last().map_or(0, |access| access.found + 1).max(done.len() as u64);
    if sum < least || sum > most {
        return Err(format!(
            "the sum is {sum}; {} additions were acknowledged, at most {most} made",
            done.len()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use farpool_wire::Epoch;

    use super::*;

    const LEASE: LeaseName = LeaseName(1);
    const OWNER: Epoch = Epoch(1);
    const OTHER: Epoch = Epoch(2);
    const SWAP_WORD: u64 = SWAPPED.start;
    const COUNTER: u64 = ADDED.start;
    const PLAIN_WORD: u64 = 0;

    fn actor(grant: Epoch) -> Actor {
        Actor { lease: LEASE, grant, session: grant.0, incarnation: 1 }
    }

    /// Sequential operations.
    fn history(operations: &[(Epoch, u64, What, End, u64)]) -> History {
        let mut history = History::new(0);
        add(&mut history, operations);
        history
    }

    fn add(history: &mut History, operations: &[(Epoch, u64, What, End, u64)]) {
        for &(grant, word, what, end, found) in operations {
            let records = history.begin(actor(grant), [(word, what)]);
            history.end(&records, end, &[found]);
        }
    }

    fn said(history: History) -> String {
        judge(history).join("; ")
    }

    #[test]
    fn a_seen_swap_with_an_unknown_outcome_is_the_only_one_of_its_value() {
        let swap = |new| What::Swap { expected: 0, new };
        let operations = [
            (OTHER, SWAP_WORD, swap(7), End::Unknown, 0),
            (OWNER, SWAP_WORD, swap(8), End::Done, 0),
            (OWNER, SWAP_WORD, What::Read, End::Done, 8),
            (OWNER, SWAP_WORD, What::Read, End::Done, 7),
        ];
        assert_eq!(said(history(&operations[..3])), "");
        assert!(said(history(&operations)).contains("two swaps both found"));
    }

    #[test]
    fn a_counter_counts_the_additions_that_ended_and_none_that_never_began() {
        let read = |found| (OWNER, COUNTER, What::Read, End::Done, found);
        let added = |found| (OWNER, COUNTER, What::Add, End::Done, found);
        let unknown = (OTHER, COUNTER, What::Add, End::Unknown, 0);
        assert_eq!(said(history(&[added(0), read(1), added(1), read(2)])), "");
        assert_eq!(said(history(&[added(0), unknown, read(1), read(2)])), "");
        assert!(said(history(&[added(0), read(0)])).contains("0 was read"));
        assert!(said(history(&[added(0), read(2), added(1)])).contains("2 was read"));
    }

    #[test]
    fn an_effect_of_an_operation_that_began_after_its_grants_fence_is_noticed() {
        let mut fenced = history(&[(OTHER, COUNTER, What::Add, End::Done, 0)]);
        fenced.fenced(LEASE, OTHER);
        add(&mut fenced, &[(OTHER, PLAIN_WORD, What::Write(9), End::Unknown, 0)]);
        add(&mut fenced, &[(OTHER, COUNTER, What::Add, End::Unknown, 0)]);
        add(&mut fenced, &[(OWNER, PLAIN_WORD, What::Read, End::Done, 9)]);
        add(&mut fenced, &[(OWNER, COUNTER, What::Read, End::Done, 2)]);
        let said = said(fenced);
        assert!(said.contains("could no longer take effect") && said.contains("2 was read"), "{said}");
    }

    #[test]
    fn a_refusal_that_had_an_effect_is_noticed() {
        let written = (OWNER, PLAIN_WORD, What::Write(9), End::Refused, 0);
        assert_eq!(said(history(&[written, (OWNER, PLAIN_WORD, What::Read, End::Done, 0)])), "");
        let seen = history(&[written, (OWNER, PLAIN_WORD, What::Read, End::Done, 9)]);
        assert!(said(seen).contains("which was never written"));
    }
}
