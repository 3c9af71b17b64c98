//! The judge of ordered indexes: it uses only what clients asked and were answered, and nothing from the
//! index itself.
//!
//! O1. A record that was entered is found by every search of its place that begins later, unless it may have
//!     been removed. A removal for which the remover looked before the record was entered again does not
//!     count (T4).
//! O2. If a record is found, it was being entered before.
//! O3. A record that was removed is not found later, unless it was being entered again.

use std::collections::BTreeMap;
use std::ops::Bound;

use farpool_txn::tree::Rank;

/// Complaints of a run: the first ones say enough.
const MOST_COMPLAINTS: usize = 8;

/// The range of a search.
pub(super) type Range = (Bound<Rank>, Bound<Rank>);

/// A question, with its beginning and its end. The begins and ends of all questions are numbered in one
/// sequence: times are these numbers.
#[derive(Clone, Copy, Debug)]
struct Asked<A> {
    begun: u64,
    /// If it was answered: when, and what.
    answered: Option<(u64, A)>,
}

#[derive(Default)]
pub(super) struct History {
    entered: BTreeMap<Rank, Vec<Asked<()>>>,
    removed: BTreeMap<Rank, Vec<Removal>>,
    searched: Vec<Search>,
    now: u64,
}

/// A search that was answered.
struct Search {
    range: Range,
    begun: u64,
    ended: u64,
    found: Vec<Rank>,
}

/// The removal of a record.
#[derive(Clone, Copy, Debug)]
struct Removal {
    /// When the remover had looked.
    looked: u64,
    asked: Asked<bool>,
}

/// A question that has begun.
pub(super) struct Begun(usize);

impl History {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// The present time.
    pub(super) fn now(&mut self) -> u64 {
        self.tick()
    }

    pub(super) fn begin_enter(&mut self, rank: &Rank) -> Begun {
        let begun = self.tick();
        let of_rank = self.entered.entry(rank.clone()).or_default();
        of_rank.push(Asked { begun, answered: None });
        Begun(of_rank.len() - 1)
    }

    pub(super) fn end_enter(&mut self, rank: &Rank, begun: Begun) {
        let now = self.tick();
        self.entered.get_mut(rank).expect("it has begun")[begun.0].answered = Some((now, ()));
    }

    /// The remover had looked at the time `looked`.
    pub(super) fn begin_removal(&mut self, rank: &Rank, looked: u64) -> Begun {
        let begun = self.tick();
        let of_rank = self.removed.entry(rank.clone()).or_default();
        of_rank.push(Removal { looked, asked: Asked { begun, answered: None } });
        Begun(of_rank.len() - 1)
    }

    pub(super) fn end_removal(&mut self, rank: &Rank, begun: Begun, is_removed: bool) {
        let now = self.tick();
        self.removed.get_mut(rank).expect("it has begun")[begun.0].asked.answered = Some((now, is_removed));
    }

    /// A search of this range, which began at that time, has found these records.
    pub(super) fn note_search(&mut self, range: Range, begun: u64, found: Vec<Rank>) {
        let ended = self.tick();
        self.searched.push(Search { range, begun, ended, found });
    }

    pub(super) fn operations(&self) -> u64 {
        let removals = self.removed.values().map(Vec::len).sum::<usize>();
        (self.entered.values().map(Vec::len).sum::<usize>() + removals + self.searched.len()) as u64
    }

    /// Returns the first violations of O1 to O3.
    pub(super) fn judge(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for Search { range, begun, ended, found } in &self.searched {
            for rank in found.iter().filter(|rank| !self.was_being_entered(rank, *ended)) {
                complaints.push(format!("{rank:?} was found before it was entered"));
            }
            for rank in found.iter().filter(|rank| self.must_be_gone(rank, *begun, *ended)) {
                complaints.push(format!("{rank:?} was removed and was found"));
            }
            for rank in self.entered.range(range.clone()).map(|(rank, _)| rank) {
                if !found.contains(rank) && self.must_be_there(rank, *begun, *ended) {
                    complaints.push(format!("{rank:?} was entered and was not found"));
                }
            }
        }
        complaints.truncate(MOST_COMPLAINTS);
        complaints
    }

    fn entries(&self, rank: &Rank) -> &[Asked<()>] {
        self.entered.get(rank).map_or(&[], Vec::as_slice)
    }

    fn removals(&self, rank: &Rank) -> &[Removal] {
        self.removed.get(rank).map_or(&[], Vec::as_slice)
    }

    fn was_being_entered(&self, rank: &Rank, ended: u64) -> bool {
        self.entries(rank).iter().any(|enter| enter.begun < ended)
    }

    /// Whether a search that lasted so long has to find a record.
    fn must_be_there(&self, rank: &Rank, begun: u64, ended: u64) -> bool {
        self.entries(rank).iter().any(|enter| {
            let is_entered = enter.answered.is_some_and(|(at, ())| at < begun);
            let may_undo = |removal: &Removal| {
                let may_be_late =
                    removal.asked.answered.is_none_or(|(at, is_removed)| is_removed && at > enter.begun);
                removal.asked.begun < ended && may_be_late && removal.looked > enter.begun
            };
            is_entered && !self.removals(rank).iter().any(may_undo)
        })
    }

    /// Whether a search that lasted so long must not find a record. Two clients that enter a record at the
    /// same time may make two entries, of which a remover sees one.
    fn must_be_gone(&self, rank: &Rank, begun: u64, ended: u64) -> bool {
        let enters = self.entries(rank);
        let overlap = |one: &Asked<()>, other: &Asked<()>| {
            one.answered.is_none_or(|(at, ())| at > other.begun)
                && other.answered.is_none_or(|(at, ())| at > one.begun)
        };
        let are_apart = enters
            .iter()
            .enumerate()
            .all(|(place, one)| enters[..place].iter().all(|other| !overlap(one, other)));
        are_apart
            && self.removals(rank).iter().any(|removal| {
                let is_done = matches!(removal.asked.answered, Some((at, true)) if at < begun);
                let may_be_later = |enter: &Asked<()>| {
                    enter.begun < ended && enter.answered.is_none_or(|(at, ())| at > removal.asked.begun)
                };
                is_done && !enters.iter().any(may_be_later)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Range = (Bound::Unbounded, Bound::Unbounded);

    fn rank(number: u64) -> Rank {
        Rank::new(b"k", number)
    }

    fn enter(history: &mut History, number: u64) {
        let begun = history.begin_enter(&rank(number));
        history.end_enter(&rank(number), begun);
    }

    fn remove(history: &mut History, number: u64, looked: u64) {
        let begun = history.begin_removal(&rank(number), looked);
        history.end_removal(&rank(number), begun, true);
    }

    fn search(history: &mut History, found: &[u64]) {
        let begun = history.now();
        history.note_search(ALL, begun, found.iter().map(|number| rank(*number)).collect());
    }

    #[test]
    fn what_is_entered_is_found_until_it_is_removed() {
        let mut history = History::default();
        search(&mut history, &[]);
        enter(&mut history, 1);
        enter(&mut history, 2);
        search(&mut history, &[1, 2]);
        let looked = history.now();
        remove(&mut history, 1, looked);
        search(&mut history, &[2]);
        enter(&mut history, 1);
        search(&mut history, &[1, 2]);
        assert_eq!(history.judge(), [""; 0]);
    }

    #[test]
    fn each_kind_of_violation_is_found() {
        let mut missed = History::default();
        enter(&mut missed, 1);
        search(&mut missed, &[]);
        assert!(missed.judge()[0].ends_with("was entered and was not found"), "{:?}", missed.judge());
        let mut early = History::default();
        search(&mut early, &[1]);
        enter(&mut early, 1);
        assert!(early.judge()[0].ends_with("was found before it was entered"));
        let mut gone = History::default();
        enter(&mut gone, 1);
        let looked = gone.now();
        remove(&mut gone, 1, looked);
        search(&mut gone, &[1]);
        assert!(gone.judge()[0].ends_with("was removed and was found"));
    }

    #[test]
    fn a_removal_that_was_decided_before_a_record_was_relied_upon_does_not_count() {
        let mut history = History::default();
        enter(&mut history, 1);
        let looked = history.now();
        enter(&mut history, 1);
        remove(&mut history, 1, looked);
        search(&mut history, &[]);
        assert_eq!(history.judge().len(), 1);
    }

    #[test]
    fn what_is_in_doubt_may_have_happened_or_not() {
        let mut history = History::default();
        let _in_doubt = history.begin_enter(&rank(1));
        search(&mut history, &[1]);
        search(&mut history, &[]);
        enter(&mut history, 2);
        let looked = history.now();
        let _in_doubt = history.begin_removal(&rank(2), looked);
        search(&mut history, &[]);
        search(&mut history, &[2]);
        assert_eq!(history.judge(), [""; 0]);
    }
}
