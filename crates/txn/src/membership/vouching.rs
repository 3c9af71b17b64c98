//! Whether a member may say that it lives. Pure: takes what its parts show of their work, and the time.
//!
//! V1. A beat vouches for all parts of the member: the threads of its duties, the work of these, and its commits. While one of them makes
//!     no progress for too long, the member says nothing; so the others shut it out, like one that has died, and take its roles over.
//! V2. A part that waits for far memory is not stuck: a thread that waits for a node turns all the same, and what is judged by its work is
//!     given as long as a node may be silent before it is lost. So a node that stands still ends no member by this rule.
//! V3. Nothing depends on the judgement being right: the member is shut out by a fence, and if the part goes on before that, the member
//!     speaks again, as if nothing had been.
//! V4. A member that has not looked for long has stood still itself, and its parts with it: they are given time anew.
//! V5. How long is too long is counted in patiences of the others with this member, who wait for one more before they shut it out.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use super::duties::Duties;
use super::rules::SeatRules;
use crate::rules::Shipped;
use crate::slot::SharedSlot;

/// A duty's thread does nothing but its duty: it stands still for no longer than a busy machine keeps any thread from its processor, which
/// is what the patience was chosen by.
const THREAD_PATIENCES: u32 = 1;
/// A thread that commits runs the program's own code as well, between two polls of a commit.
const HOLDER_PATIENCES: u32 = 3;
/// Work is waited for so long, and in addition as long as a node may be silent.
const WORK_PATIENCES: u32 = 3;

/// A part of a member that a beat vouches for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// The thread of a duty.
    Thread(&'static str),
    /// What a duty's thread does.
    Work(&'static str),
    /// A thread with a commit for which others wait, by a number of its own.
    Holder(u64),
    /// The oldest commit that is under way.
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

/// What a part shows: a number that changes while it makes progress. A part without work shows nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sign {
    /// Whose it is.
    pub part: Part,
    /// The number.
    pub progress: u64,
}

/// What all parts of a member show at present.
pub fn signs_of(duties: &Duties, slot: &SharedSlot) -> Vec<Sign> {
    let mut signs = duties.signs();
    signs.extend(
        slot.holding().into_iter().map(|(number, progress)| Sign { part: Part::Holder(number), progress }),
    );
    signs.extend(slot.oldest_under_way().map(|progress| Sign { part: Part::OldestCommit, progress }));
    signs
}

/// A member's eyes on its own parts.
#[derive(Debug)]
pub struct Vouching<R = Shipped> {
    patience_ns: u64,
    node_silence_ns: u64,
    looked_at_ns: u64,
    /// What each part has shown last, and since when.
    seen: BTreeMap<Part, (u64, u64)>,
    rules: PhantomData<R>,
}

impl<R: SeatRules> Vouching<R> {
    /// Of a member that the others take for dead after `patience`, and whose nodes are lost when they are silent for `node_silence`.
    pub fn new(patience: Duration, node_silence: Duration) -> Self {
        Vouching {
            patience_ns: patience.as_nanos() as u64,
            node_silence_ns: node_silence.as_nanos() as u64,
            looked_at_ns: 0,
            seen: BTreeMap::new(),
            rules: PhantomData,
        }
    }

    /// Looks at all parts; says which has made no progress for too long, if one has: then the member must not say that it lives.
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

    /// For how long a member goes on saying that it lives after `part` has shown its last progress; `None`: for good.
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
        let others = [Part::Thread("carer"), Part::Work("carer"), Part::Holder(1)];
        assert_eq!(silent_after(Part::Thread("publisher"), &others), Some(PATIENCE));
        assert_eq!(silent_after(Part::Holder(2), &others), Some(3 * PATIENCE));
        let behind_a_silent_node = Some(3 * PATIENCE + NODE_SILENCE);
        assert_eq!(silent_after(Part::Work("publisher"), &others), behind_a_silent_node);
        assert_eq!(silent_after(Part::OldestCommit, &others), behind_a_silent_node);
    }

    #[test]
    fn a_part_that_goes_on_before_the_member_was_shut_out_lets_it_speak_again() {
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
