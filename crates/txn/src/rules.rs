//! The rules on which snapshot isolation rests, apart from the code that follows them.
//!
//! They are a type parameter of [`Worker`](crate::Worker), so that a simulation can put a wrong rule in the
//! place of a right one and see that the judge notices. Production is compiled with [`Shipped`] alone.

use farpool_wire::{RecordHeader, Version, next_generation};

use crate::cut::Cut;
use crate::slot::MAX_COUNTS_AHEAD;

/// The step that a commit has reached, for tests that end a process there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing of it was written yet.
    Prepared,
    /// Its intents are in its log.
    Logged,
    /// Its records are locked.
    Locked,
    /// They are installed.
    Installed,
    /// The watermark has reached it.
    Reached,
}

/// The rules that decide what a transaction sees and whether it may commit.
pub trait Rules: 'static {
    /// The cut from which a session begins whose last commit is `own`. `None`: it has to wait for a later
    /// cut.
    fn begin(published: Cut, own: Option<Version>) -> Option<Cut> {
        own.is_none_or(|own| published.sees(own)).then_some(published)
    }

    /// Whether a transaction takes the slots' words themselves as its cut, not a published one.
    fn begins_from_words() -> bool {
        false
    }

    /// Whether a cut of several parts is used only if a second look finds all parts unchanged.
    fn looks_twice() -> bool {
        true
    }

    /// Whether a worker announces itself before it reads its first cut.
    fn announces_first() -> bool {
        true
    }

    /// The least number of a cut that a worker's transactions may have. The oldest open transaction, if there
    /// is one, has `oldest`, and later ones begin from `latest` or a later cut.
    fn least_needed(oldest: Option<u64>, latest: u64) -> u64 {
        oldest.map_or(latest, |oldest| oldest.min(latest))
    }

    /// Whether a worker waits until none of its in-flight writes can land any more, before it announces that
    /// it no longer needs something.
    fn settles_first() -> bool {
        true
    }

    /// The highest number of a cut that may be the horizon, if workers may have cuts with the number `least`
    /// or a higher one.
    fn horizon_up_to(least: u64) -> u64 {
        least
    }

    /// The highest count up to which no snapshot needs the intents of a slot's commits, given the highest
    /// that all snapshots see. `None`: workers announce no snapshots, and old ones fail.
    fn intents_unneeded_up_to(seen_by_all: Option<u64>) -> u64 {
        seen_by_all.unwrap_or(u64::MAX)
    }

    /// Whether the next client of a recovered slot leaves what its log has, until no snapshot needs it.
    fn keeps_log_of_predecessor() -> bool {
        true
    }

    /// Whether a block is free whose version was replaced. `is_behind_the_horizon`: the horizon sees a later
    /// version, so no snapshot needs the block.
    fn frees_block(is_behind_the_horizon: bool) -> bool {
        is_behind_the_horizon
    }

    /// Whether a payload is in its block before the commit that points to it begins.
    fn writes_payloads_first() -> bool {
        true
    }

    /// Whether a payload is accepted, given whether its checksum is right.
    fn takes_payload(checksum_is_right: bool) -> bool {
        checksum_is_right
    }

    /// Whether a chunk is taken over, given whether its owner has no seat any more.
    fn takes_over(owner_is_gone: bool) -> bool {
        owner_is_gone
    }

    /// Whether a transaction has locked a record, given the header that it had seen and the one that its
    /// compare-and-swap has found.
    fn has_locked(seen: RecordHeader, found: RecordHeader) -> bool {
        found == seen
    }

    /// Whether data are accepted, given whether their checksum is right.
    fn takes(checksum_is_right: bool) -> bool {
        checksum_is_right
    }

    /// Whether a record may be locked, given its header and the header that its data name. They differ if a
    /// commit has locked the record, or if they are of different times.
    fn may_be_locked(seen: RecordHeader, data: RecordHeader) -> bool {
        !seen.is_locked() && seen == data
    }

    /// Whether a commit's intents are in its log before it locks anything.
    fn logs_first() -> bool {
        true
    }

    /// To how many of the two copies of its log a commit writes its intents.
    fn copies_logged() -> usize {
        2
    }

    /// The version by which the commit with this number is known.
    fn numbered(version: Version) -> Version {
        version
    }

    /// Whether the watermark reaches a commit only once all of it is installed.
    fn installs_first() -> bool {
        true
    }

    /// Whether a commit counts as settled, so that its head and intents may be overwritten, as soon as it is
    /// installed, and not only once the watermark has reached it.
    fn frees_log_when_finished() -> bool {
        false
    }

    /// Whether a recoverer writes the head of a commit together with its verdict on it.
    fn verdicts_have_heads() -> bool {
        true
    }

    /// Whether a recoverer puts a record's data back before its header.
    fn data_first() -> bool {
        true
    }

    /// The count after which a slot's next client begins, given the slot's word when its last client died:
    /// the start of the generation after the last count that may have been given out. `None`: there is none
    /// left.
    fn start_after_recovery(word: u64) -> Option<u64> {
        next_generation(word.saturating_add(MAX_COUNTS_AHEAD))
    }

    /// A commit has reached a step.
    fn passes(_: Step) {}

    /// The next cut, from the last one and the slots' words.
    fn next_counts(last: &[u64], words: &[u64]) -> Vec<u64> {
        words.iter().zip(last).map(|(&word, &count)| word.max(count)).collect()
    }
}

/// The rules as they ship.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_goes_on_after_all_counts_that_may_have_been_given_out_also_in_the_next_generation() {
        const GENERATION: u64 = 1 << 32;
        let behind = |word| Shipped::start_after_recovery(word);
        assert_eq!(behind(0), Some(GENERATION));
        assert_eq!(behind(GENERATION - 1 - MAX_COUNTS_AHEAD), Some(GENERATION));
        for ahead in [1, 100, MAX_COUNTS_AHEAD] {
            assert_eq!(behind(GENERATION - ahead), Some(2 * GENERATION), "{ahead} before the edge");
        }
        assert_eq!(behind(GENERATION), Some(2 * GENERATION), "its next client has used none");
        assert_eq!([(1 << 49) - MAX_COUNTS_AHEAD, u64::MAX].map(behind), [None; 2]);
    }
}
