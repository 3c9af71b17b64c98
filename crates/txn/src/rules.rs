//! The rules on which snapshot isolation rests, apart from the code that follows them.
//!
//! They are a type parameter of [`Worker`](crate::Worker), so that a simulation can put a wrong rule in the place of a right one and
//! see that the judge notices. Production is compiled with [`Shipped`] alone.

use farpool_wire::{RecordHeader, Version};

use crate::cut::Cut;

/// What decides what a transaction sees and whether it may commit.
pub trait Rules: 'static {
    /// The cut from which a session begins whose last commit is `own`; `None`: it has to wait for a later one.
    fn begin(published: Cut, own: Option<Version>) -> Option<Cut> {
        own.is_none_or(|own| published.sees(own)).then_some(published)
    }

    /// Whether a transaction takes the slots' words themselves for its cut, not what was published.
    fn begins_from_words() -> bool {
        false
    }

    /// Whether a cut of several parts is one only if a second look at all of them finds them unchanged.
    fn looks_twice() -> bool {
        true
    }

    /// Whether a transaction has locked a record that it has seen with one header and the compare-and-swap has found with another.
    fn has_locked(seen: RecordHeader, found: RecordHeader) -> bool {
        found == seen
    }

    /// Whether data are taken whose checksum is right, or is not.
    fn takes(checksum_is_right: bool) -> bool {
        checksum_is_right
    }

    /// Whether a record may be locked that was found with one header, and with data that say they are the version of another: they
    /// differ where somebody has locked it, or where they are of different times.
    fn may_be_locked(seen: RecordHeader, data: RecordHeader) -> bool {
        !seen.is_locked() && seen.lasting() == data
    }

    /// Whether a commit's intents are in its log before it locks anything.
    fn logs_first() -> bool {
        true
    }

    /// Whether a commit is shown only once all of it is installed.
    fn installs_first() -> bool {
        true
    }

    /// The next cut, from the last one and the slots' words.
    fn next_counts(last: &[u64], words: &[u64]) -> Vec<u64> {
        words.iter().zip(last).map(|(&word, &count)| word.max(count)).collect()
    }
}

/// The rules as they ship.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}
