//! The judge: holds a history against what the contract promises, word by word.
//!
//! J1. What an older incarnation may still do ends when a newer one is answered; what a grant may do ends with its
//!     fence. An operation's end is the first of these and of its own return.
//! J2. What was acknowledged took effect in its time; what was refused never did; what is unknown did or did not.
//! J3. When a lease is fenced, what the region holds is the last read of all.
//! J4. Each lease starts from zeros: a value of an earlier one is a value that nobody wrote.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{Access, End, History, LeaseName, What};
use super::layout::{ADDED, SWAPPED};
use crate::register::{self, NEVER, Touch};

/// Violations that are told: the first ones are the useful ones.
const TOLD: usize = 8;

pub(super) fn judge(history: History) -> Vec<String> {
    let mut found = history.complaints.clone();
    let mut words: BTreeMap<(LeaseName, u64), Vec<Access>> = BTreeMap::new();
    for access in &history.accesses {
        words.entry((access.actor.lease, access.word)).or_default().push(*access);
        found.extend(acknowledged_after_fence(&history, access));
    }
    // Words that nobody touched are still read by the fence.
    for (&lease, ended) in history.leases.iter().filter_map(|(lease, of)| Some((lease, of.ended.as_ref()?))) {
        for word in 0..ended.1.len() as u64 {
            words.entry((lease, word)).or_default();
        }
    }
    for (&(lease, word), accesses) in &words {
        let verdict = if ADDED.contains(&word) {
            additions(&history, lease, word, accesses)
        } else {
            swaps(word, accesses).and_then(|()| register::check(0, &touches(&history, lease, word, accesses)))
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

/// J1.
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

/// What a register checker needs to know; additions aside.
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
        let (value, time) = (words[word as usize], at + 1); // J3: after all that the fence has cut off
        touches.push(Touch { value, writes: false, start: time, end: time, certain: true });
    }
    touches
}

/// Each value is followed by at most one that was swapped in for it.
fn swaps(word: u64, accesses: &[Access]) -> Result<(), String> {
    if !SWAPPED.contains(&word) {
        return Ok(());
    }
    let mut followed = BTreeSet::new();
    for access in accesses.iter().filter(|access| access.end == End::Done) {
        if let What::Swap { expected, .. } = access.what
            && access.found == expected
            && !followed.insert(expected)
        {
            return Err(format!("two swaps both found {expected:#x} and replaced it"));
        }
    }
    Ok(())
}

/// Additions of one: each acknowledged one found another number, later ones found greater numbers, and the sum lies
/// between what was acknowledged and what may have happened.
fn additions(history: &History, lease: LeaseName, word: u64, accesses: &[Access]) -> Result<(), String> {
    let acknowledged = |access: &&Access| access.end == End::Done && access.what == What::Add;
    let mut done: Vec<&Access> = accesses.iter().filter(acknowledged).collect();
    done.sort_by_key(|access| access.found);
    if let Some([one, _]) = done.array_windows().find(|[one, other]| one.found == other.found) {
        return Err(format!("two additions both found {}", one.found));
    }
    let unknown = accesses
        .iter()
        .filter(|access| access.what == What::Add && matches!(access.end, End::Open | End::Unknown));
    let most = (done.len() + unknown.count()) as u64;
    // In the order of what they found, none may start after a later one has ended.
    let mut earliest_end = NEVER;
    for access in done.iter().rev() {
        if access.start > earliest_end {
            return Err(format!("an addition found {}, and an earlier one more", access.found));
        }
        if access.found >= most {
            return Err(format!("an addition found {}, and only {most} were ever made", access.found));
        }
        earliest_end = earliest_end.min(end_of(history, access));
    }
    let Some((_, words)) = history.leases.get(&lease).and_then(|lease| lease.ended.as_ref()) else {
        return Ok(());
    };
    let sum = words[word as usize];
    let least = done.last().map_or(0, |access| access.found + 1).max(done.len() as u64);
    if sum < least || sum > most {
        return Err(format!("the sum is {sum} after {} additions and {most} at most", done.len()));
    }
    Ok(())
}
