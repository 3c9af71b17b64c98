//! The commits of one slot of the timestamp vector, of which several may be under way.
//!
//! S1. Each commit gets a count of its own; counts only grow, also where clients of the slot come and go.
//! S2. A slot is said to have come as far as its commits are over *without a gap*: a later one that is over already is seen
//!     only with all before it. One that fails counts as over once nothing of it is left (design, section 9).

mod shared;

use std::collections::VecDeque;

use farpool_wire::{Slot, Version};

pub use shared::SharedSlot;
pub(crate) use shared::{Turn, Writing};

/// Commits of one slot that may be under way at a time: what lies behind the slowest waits for it, and so do the sessions whose
/// commits these are.
pub const MAX_COMMITS_UNDER_WAY: usize = 64;

/// Numbers a slot's commits, and knows how far they are over.
#[derive(Debug)]
pub struct SlotCommits {
    slot: Slot,
    /// All up to this count are over.
    over: u64,
    /// Of the counts behind it: whether they are.
    later: VecDeque<bool>,
}

impl SlotCommits {
    /// Of a slot whose last commit is `last`, with nothing under way: what the client before began has ended, too.
    pub fn after(slot: Slot, last: u64) -> SlotCommits {
        SlotCommits { slot, over: last, later: VecDeque::with_capacity(MAX_COMMITS_UNDER_WAY) }
    }

    /// Whether one more may be under way.
    pub fn has_room(&self) -> bool {
        let next = self.over + self.later.len() as u64 + 1;
        self.later.len() < MAX_COMMITS_UNDER_WAY && Version::new(self.slot, next).is_some()
    }

    /// Begins a commit. `None`: as many are under way as may be, or the slot's counts are used up for good.
    pub fn begin(&mut self) -> Option<Version> {
        if self.later.len() == MAX_COMMITS_UNDER_WAY {
            return None;
        }
        let version = Version::new(self.slot, self.over + self.later.len() as u64 + 1)?;
        self.later.push_back(false);
        Some(version)
    }

    /// A commit that was begun here is over: installed whole, or nothing of it is left. Says how far the slot has come by that, if
    /// it has: to be written to its word.
    pub fn end(&mut self, version: Version) -> Option<u64> {
        let place = version.count().checked_sub(self.over + 1).and_then(|place| usize::try_from(place).ok());
        let is_over = place.and_then(|place| self.later.get_mut(place));
        *is_over.expect("a commit ends once, after it has begun") = true;
        let before = self.over;
        self.go_on();
        (self.over > before).then_some(self.over)
    }

    /// Leaves no commit at the front that is over.
    fn go_on(&mut self) {
        while self.later.front() == Some(&true) {
            self.later.pop_front();
            self.over += 1;
        }
    }

    /// All commits up to a count are over, whether they were said to be or not.
    pub fn end_up_to(&mut self, count: u64) {
        while self.over < count && self.later.pop_front().is_some() {
            self.over += 1;
        }
        self.go_on();
    }

    /// Whether all that was begun is over.
    pub fn is_quiet(&self) -> bool {
        self.later.is_empty()
    }

    /// How far the slot has come.
    pub fn over(&self) -> u64 {
        self.over
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot() -> Slot {
        Slot::new(3).unwrap()
    }

    #[test]
    fn a_commit_that_is_over_is_shown_with_those_before_it_only() {
        let mut commits = SlotCommits::after(slot(), 10);
        let [first, second, third] = std::array::from_fn(|_| commits.begin().unwrap());
        assert_eq!([first, second, third].map(Version::count), [11, 12, 13]);
        assert_eq!(commits.end(second), None);
        assert_eq!(commits.end(first), Some(12));
        assert_eq!(commits.end(third), Some(13));
    }

    #[test]
    fn the_last_count_of_a_slot_is_followed_by_none() {
        let last = (1 << 49) - 2;
        let mut commits = SlotCommits::after(slot(), last);
        let version = commits.begin().unwrap();
        assert_eq!(commits.begin(), None, "used up");
        assert_eq!(commits.end(version), Some(last + 1));
        assert_eq!(commits.begin(), None);
    }

    #[test]
    fn all_up_to_a_count_are_over_and_those_behind_it_that_were_before() {
        let mut commits = SlotCommits::after(slot(), 0);
        let [_, _, third, _] = std::array::from_fn(|_| commits.begin().unwrap());
        assert_eq!(commits.end(third), None);
        commits.end_up_to(2);
        assert_eq!(commits.over(), 3);
        commits.end_up_to(9);
        assert_eq!(commits.over(), 4, "no more were begun");
    }

    proptest! {
        /// Against a model that knows of every commit whether it is over.
        #[test]
        fn a_slot_comes_as_far_as_its_commits_are_over_without_a_gap(steps in prop::collection::vec(any::<prop::sample::Index>(), 0..400)) {
            let mut commits = SlotCommits::after(slot(), 0);
            let (mut under_way, mut is_over) = (Vec::new(), Vec::new());
            for (number, step) in steps.iter().enumerate() {
                if number % 2 == 0 && let Some(version) = commits.begin() {
                    prop_assert_eq!(version.count(), is_over.len() as u64 + 1);
                    under_way.push(version);
                    is_over.push(false);
                } else if !under_way.is_empty() {
                    let version: Version = under_way.swap_remove(step.index(under_way.len()));
                    is_over[version.count() as usize - 1] = true;
                    let before = commits.over();
                    let shown = commits.end(version);
                    prop_assert_eq!(shown, (commits.over() > before).then_some(commits.over()));
                }
                let without_a_gap = is_over.iter().take_while(|over| **over).count() as u64;
                prop_assert_eq!(commits.over(), without_a_gap);
                prop_assert!(under_way.len() <= MAX_COMMITS_UNDER_WAY);
            }
        }
    }
}
