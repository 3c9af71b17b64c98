//! Sizes and times of kept files, beside the words.
//!
//! A size is stored twice, on two pages, one copy after the other. Each copy carries a check that is bound to
//! its place, and a count of stores. A kill between the two stores leaves the second copy one store behind;
//! by the count, an older copy is recognised as damaged. So one damaged page costs nothing. If both
//! pages are damaged, the file gives errors until it is emptied, since its end is not guessed.

use super::{BlockWords, ECHOES, KEPT_FILES, SLOTS, WORD_BYTES};
use crate::file_core::MAX_FILE_BYTES;
use crate::seal::{open, seal};

/// A size and a time.
pub(super) const SLOT_BYTES: u64 = 16;
/// Slots for which kept memory is reserved at a time.
const SLOTS_AT_ONCE: u64 = 4_096;
/// Bits of the size in a copy.
const SIZE_BITS: u32 = 43;
/// The flag of a copy: blocks beyond the size are not cleared yet.
const CUT: u64 = 1 << SIZE_BITS;
/// Where the count of stores begins in a copy; it is modulo 16.
const COUNT_SHIFT: u32 = SIZE_BITS + 1;
const COUNT_MASK: u64 = 15;
const SAID_BITS: u32 = COUNT_SHIFT + 4;

/// Where a kept file ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KeptSize {
    pub(crate) bytes: u64,
    /// The file was being truncated to it.
    pub(crate) is_being_cut: bool,
}

fn size_of(said: u64) -> KeptSize {
    KeptSize { bytes: (said & (CUT - 1)).min(MAX_FILE_BYTES), is_being_cut: said & CUT != 0 }
}

fn count_of(said: u64) -> u64 {
    said >> COUNT_SHIFT & COUNT_MASK
}

fn size_at(slot: u64) -> u64 {
    SLOTS + slot * SLOT_BYTES
}

fn echo_at(slot: u64) -> u64 {
    ECHOES + slot * WORD_BYTES
}

/// The size on which two copies agree. The first one is stored first.
fn agreed(first: Option<u64>, second: Option<u64>) -> Option<KeptSize> {
    match (first, second) {
        // A kill between the two stores leaves the first one ahead by one.
        (Some(first), Some(second)) => {
            let ahead = count_of(first).wrapping_sub(count_of(second)) & COUNT_MASK;
            (first == second || ahead == 1).then(|| size_of(first))
        }
        (Some(one), None) | (None, Some(one)) => Some(size_of(one)),
        (None, None) => None,
    }
}

impl BlockWords {
    /// Reserves memory for the size and the time of a file, so that writing them cannot fail.
    pub(crate) fn reserve_slot(&self, slot: u64) -> bool {
        let Some(memory) = &self.memory else { return true };
        let first = slot / SLOTS_AT_ONCE * SLOTS_AT_ONCE;
        let echoes = (echo_at(first), SLOTS_AT_ONCE * WORD_BYTES);
        [(size_at(first), SLOTS_AT_ONCE * SLOT_BYTES), echoes]
            .iter()
            .all(|(from, bytes)| memory.reserve(*from, *bytes).is_ok())
    }

    /// Where a kept file ends; `None`: the copies of its size are damaged.
    pub(crate) fn file_size(&self, slot: u64) -> Option<KeptSize> {
        let said = |at: u64| open(at, self.table.load(at).ok()?, SAID_BITS);
        agreed(said(size_at(slot)), said(echo_at(slot)))
    }

    /// Stores where a kept file ends. Only one process at a time does so for a file.
    pub(crate) fn set_file_size(&self, slot: u64, size: KeptSize) {
        let before = self.table.load(size_at(slot)).unwrap_or(0);
        let count = (count_of(before) + 1) & COUNT_MASK;
        let said = size.bytes | if size.is_being_cut { CUT } else { 0 } | count << COUNT_SHIFT;
        self.store_in_slot(size_at(slot), seal(size_at(slot), said, SAID_BITS));
        self.store_in_slot(echo_at(slot), seal(echo_at(slot), said, SAID_BITS));
    }

    /// When a kept file was written to.
    pub(crate) fn file_written_ns(&self, slot: u64) -> u64 {
        self.table.load(size_at(slot) + WORD_BYTES).unwrap_or(0)
    }

    pub(crate) fn set_file_written_ns(&self, slot: u64, ns: u64) {
        self.store_in_slot(size_at(slot) + WORD_BYTES, ns);
    }

    fn store_in_slot(&self, at: u64, value: u64) {
        if !self.is_abandoned() && self.memory.is_some() {
            self.table.store(at, value).expect("a slot has its place in kept memory");
        }
    }
}

const _: () = assert!(MAX_FILE_BYTES < 1 << SIZE_BITS && KEPT_FILES.is_multiple_of(SLOTS_AT_ONCE));

#[cfg(test)]
mod tests {
    use super::super::tests::kept;
    use super::*;
    use crate::tests::taken_blocks;

    fn said(bytes: u64, count: u64) -> u64 {
        bytes | (count & COUNT_MASK) << COUNT_SHIFT
    }

    #[test]
    fn a_damaged_copy_costs_nothing_and_copies_that_contradict_each_other_are_not_believed() {
        let size = |bytes| Some(KeptSize { bytes, is_being_cut: false });
        let (old, new) = (said(1000, 15), said(2000, 16));
        assert_eq!(agreed(Some(new), Some(new)), size(2000));
        assert_eq!(agreed(Some(new), None), size(2000));
        assert_eq!(agreed(None, Some(new)), size(2000));
        assert_eq!(agreed(Some(new), Some(old)), size(2000), "killed between the two");
        assert_eq!(
            agreed(Some(old), Some(new)),
            None,
            "the first copy is the older one, which no kill explains"
        );
        assert_eq!(
            agreed(Some(said(1000, 3)), Some(said(2000, 1))),
            None,
            "the second copy is older than a kill explains"
        );
        assert_eq!(agreed(None, None), None);
        assert!(agreed(Some(said(7, 1) | CUT), Some(said(7, 1) | CUT)).unwrap().is_being_cut);
    }

    #[test]
    fn a_kill_before_the_second_copy_of_a_size_is_stored_leaves_the_new_size() {
        let (words, memory) = kept();
        let (slot, new) = (5, KeptSize { bytes: 2000, is_being_cut: true });
        words.set_file_size(slot, KeptSize { bytes: 1000, is_being_cut: false });
        let old = memory.mapping().load(echo_at(slot)).unwrap();
        words.set_file_size(slot, new);
        assert_eq!(words.file_size(slot), Some(new));
        memory.mapping().store(echo_at(slot), old).unwrap();
        assert_eq!(words.file_size(slot), Some(new));
    }

    #[test]
    fn storing_sizes_and_times_in_slots_that_are_reserved_takes_no_more_memory() {
        let (words, memory) = kept();
        assert!(words.reserve_slot(SLOTS_AT_ONCE + 1_000));
        let before = taken_blocks(memory.fd());
        for slot in [SLOTS_AT_ONCE, SLOTS_AT_ONCE + 1_000, 2 * SLOTS_AT_ONCE - 1] {
            words.set_file_size(slot, KeptSize { bytes: 1000, is_being_cut: false });
            words.set_file_written_ns(slot, 7);
        }
        assert_eq!(taken_blocks(memory.fd()), before);
    }
}
