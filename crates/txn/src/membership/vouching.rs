//! Whether a member may send heartbeats. Pure: takes what its parts report of their work, and the time.
//!
//! V1. A heartbeat vouches for all parts of the member: the threads of its duties, their work, and its
//!     commits. While a part makes no progress for too long, the member sends no heartbeats. The others then
//!     evict it as if it had died, and take over its roles.
//! V2. A part that waits for far memory is not stuck. A thread that waits for a node still polls. A part that
//!     is judged by its work gets, in addition, as long as a node may be silent before the node is lost. So
//!     when a node stops, this rule ends no member.
//! V3. Nothing depends on the judgement being right. The member is evicted by a fence; if the part goes on
//!     before that, the member sends heartbeats again as if nothing had happened.
//! V4. A member that has not looked for long has stood still as a whole: its parts get their time anew.
//! V5. Limits are multiples of the other members' patience. These wait one more patience before they evict
//!     the member.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use super::duties::Duties;
use super::rules::SeatRules;
use crate::rules::Shipped;
use crate::slot::SharedSlot;

/// A duty's thread does nothing else. A busy machine may keep it from a processor; the patience allows for
/// that.
const THREAD_PATIENCES: u32 = 1;
/// A thread that commits also runs the program's own code, between two polls of a commit.
const HOLDER_PATIENCES: u32 = 3;
/// Work gets so long, and in addition as long as a node may be silent.
const WORK_PATIENCES: u32 = 3;

/// A part of a member that a heartbeat vouches for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// The thread of a duty.
    Thread(&'static str),
    /// The work of a duty.
    Work(&'static str),
    /// A thread that others wait for, in the middle of a commit or of a change of tables; by its number.
    Holder(u64),
    /// The slot's oldest commit in flight.
    OldestCommit,
}

impl std::fmt::Display for Part {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::Thread(name) => write!(formatter, "the thread of the {name}"),
            Part::Work(name) => write!(formatter, "the {name}"),
            Part::Holder(_) => {
                formatter.write_str("a thread in the middle of a commit, or of a change of tables,")
            }
            Part::OldestCommit => formatter.write_str("a commit"),
        }
    }
}

/// The sign of a part: a number that changes while it makes progress. A part without work has no sign.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sign {
    /// The part.
    pub part: Part,
    /// The number.
    pub progress: u64,
}

/// The present signs of all parts of a member.
pub fn signs_of(duties: &Duties, slot: &SharedSlot) -> Vec<Sign> {
    let mut signs = duties.signs();
    signs.extend(
        slot.holding().into_iter().map(|(number, progress)| Sign { part: Part::Holder(number), progress }),
    );
    signs.extend(slot.oldest_in_flight().map(|progress| Sign { part: Part::OldestCommit, progress }));
    signs
}

/// A member's watch over its own parts.
#[derive(Debug)]
pub struct Vouching<R = Shipped> {
    patience_ns: u64,
    node_silence_ns: u64,
    looked_at_ns: u64,
    /// The last sign of each part, and since when it has been the same.
    seen: BTreeMap<Part, (u64, u64)>,
    rules: PhantomData<R>,
}

impl<R: SeatRules> Vouching<R> {
    /// For a member that the others declare dead after `patience`, with nodes that are lost after a silence
    /// of `node_silence`.
    pub fn new(patience: Duration, node_silence: Duration) -> Self {
        Vouching {
            patience_ns: patience.as_nanos() as u64,
            node_silence_ns: node_silence.as_nanos() as u64,
            looked_at_ns: 0,
            seen: BTreeMap::new(),
            rules: PhantomData,
        }
    }

    /// Looks at all parts. Returns one that has made no progress for too long, if there is one: then the
    /// member must send no heartbeats.
    pub fn look(&mut self, now_ns: u64, signs: &[Sign]) -> Option<Part> {
        if now_ns.saturating_sub(self.looked_at_ns) >= self.patience_ns / 2 {
            self.seen.clear();
        }
        self.looked_at_ns = now_ns;
        self.seen.retain(|part, _| signs.iter().any(|sign| sign.part == *part));
        let mut stuck = None;
        for &Sign { part, progress } in signs {
            let (before, since_ns) = self.seen.entry(part).or_insert((progress, now_ns));
            if *before != progress {
                (*before, *since_ns) = (progress, now_ns);
            }
            let silent_ns = now_ns.saturating_sub(*since_ns);
            if silent_ns >= self.most_silent_ns(part) && vouches::<R>(part) {
                stuck = stuck.or(Some(part));
            }
        }
        stuck
    }

    fn most_silent_ns(&self, part: Part) -> u64 {
        let patiences = |count: u32| self.patience_ns.saturating_mul(u64::from(count));
        match part {
            Part::Thread(_) => patiences(THREAD_PATIENCES),
            Part::Holder(_) => patiences(HOLDER_PATIENCES),
            Part::Work(_) | Part::OldestCommit => {
                patiences(WORK_PATIENCES).saturating_add(self.node_silence_ns)
            }
        }
    }
}

fn vouches<R: SeatRules>(part: Part) -> bool {
    match part {
        Part::Thread(_) | Part::Work(_) => R::vouches_for_duties(),
        Part::Holder(_) | Part::OldestCommit => R::vouches_for_commits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: u64 = 10;
    const NODE_SILENCE: u64 = 50;
    /// Between two looks.
    const STEP: u64 = 1;

    fn vouching() -> Vouching {
        Vouching::new(Duration::from_nanos(PATIENCE), Duration::from_nanos(NODE_SILENCE))
    }

    /// When a member stops sending heartbeats if `part` has reported its last progress at time 0; `None`:
    /// never.
    fn silent_after(part: Part, others: &[Part]) -> Option<u64> {
        let mut vouching = vouching();
        for now_ns in (0..1_000).step_by(STEP as usize) {
            let mut signs: Vec<Sign> = others.iter().map(|&part| Sign { part, progress: now_ns }).collect();
            signs.push(Sign { part, progress: 7 });
            if let Some(stuck) = vouching.look(now_ns, &signs) {
                assert_eq!(stuck, part);
                return Some(now_ns);
            }
        }
        None
    }

    #[test]
    fn a_member_is_silent_once_one_part_of_it_has_made_no_progress_for_too_long() {
        let others = [Part::Thread("recoverer"), Part::Work("recoverer"), Part::Holder(1)];
        assert_eq!(silent_after(Part::Thread("publisher"), &others), Some(PATIENCE));
        assert_eq!(silent_after(Part::Holder(2), &others), Some(3 * PATIENCE));
        let behind_a_silent_node = Some(3 * PATIENCE + NODE_SILENCE);
        assert_eq!(silent_after(Part::Work("publisher"), &others), behind_a_silent_node);
        assert_eq!(silent_after(Part::OldestCommit, &others), behind_a_silent_node);
    }

    #[test]
    fn a_part_that_goes_on_before_the_member_is_evicted_lets_it_send_heartbeats_again() {
        let mut vouching = vouching();
        let part = Part::Thread("publisher");
        for now_ns in 0..40 {
            let progress = if now_ns < 25 { 1 } else { now_ns };
            let stuck = vouching.look(now_ns, &[Sign { part, progress }]);
            assert_eq!(stuck.is_some(), (10..25).contains(&now_ns), "{now_ns}");
        }
    }

    #[test]
    fn a_commit_that_ends_and_another_that_begins_are_not_taken_for_one() {
        let mut vouching = vouching();
        let holder = |progress| Sign { part: Part::Holder(1), progress };
        for now_ns in 0..200 {
            // It stands still, holding nothing for a moment now and then.
            let signs = if now_ns % 20 == 0 { vec![] } else { vec![holder(3)] };
            assert_eq!(vouching.look(now_ns, &signs), None);
        }
    }

    #[test]
    fn a_member_that_has_stood_still_as_a_whole_gives_its_parts_time() {
        let mut vouching = vouching();
        let signs = [Sign { part: Part::Thread("publisher"), progress: 1 }];
        assert_eq!(vouching.look(0, &signs), None);
        for now_ns in 1_000..1_010 {
            assert_eq!(vouching.look(now_ns, &signs), None);
        }
        assert_eq!(vouching.look(1_010, &signs), Some(Part::Thread("publisher")));
    }
}
