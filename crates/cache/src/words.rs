//! What the words in shared memory hold. All are 64 bits.
//!
//! ```text
//! header      version:44 | writers:20
//! key         id:32 | block:32
//! entry       generation:29 | visited:1 | state:2 | slot:32
//! file        unused:14 | open:1 | asked for:1 | content id:32 | changes in progress:16
//! slot        sequence:30 | state:2 | owner:32    a place if taken, an entry if used
//! door        generation:62 | state:2
//! ```
//!
//! Arithmetic on words that were loaded wraps or saturates: a process with an error may have stored anything
//! there, and no other process may panic because of it.

use crate::caller::MAX_BLOCKS;
use crate::layout::MAX_PLACES;

/// Enough if each place writes as many blocks as one write may have, all of them with one home bucket.
const WRITER_BITS: u32 = 20;
const _: () = assert!(MAX_PLACES * MAX_BLOCKS < 1 << WRITER_BITS);

/// A bucket's header: how many writers work on the blocks whose home bucket it is, and how often one has
/// begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header(pub(crate) u64);

impl Header {
    /// Added by a writer that begins.
    pub(crate) const BEGIN: u64 = (1 << WRITER_BITS) | 1;
    /// Subtracted by a writer that ends: only the count.
    pub(crate) const END: u64 = 1;

    pub(crate) fn writers(self) -> u64 {
        self.0 & ((1 << WRITER_BITS) - 1)
    }

    /// The next version, with no writers.
    pub(crate) fn cleared(self) -> Header {
        Header(((self.0 >> WRITER_BITS) + 1) << WRITER_BITS)
    }
}

/// The block that an entry is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key(pub(crate) u64);

impl Key {
    pub(crate) fn new(id: u32, block: u32) -> Key {
        Key(u64::from(id) << 32 | u64::from(block))
    }

    /// The content id of its file.
    pub(crate) fn id(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(crate) fn block(self) -> u32 {
        self.0 as u32
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EntryState {
    Empty = 0,
    /// A process is admitting a page, and its key is there.
    Pending = 1,
    Valid = 2,
    /// A process has taken the entry, and has not stored the key yet. No other process changes the entry
    /// meanwhile. If one emptied it, a third process could take it, and this process would then overwrite the
    /// third one's key.
    Claimed = 3,
}

/// An entry without its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry(pub(crate) u64);

const STATE_SHIFT: u32 = 32;
const VISITED: u64 = 1 << 34;
const GENERATION_SHIFT: u32 = 35;

impl Entry {
    pub(crate) fn state(self) -> EntryState {
        match self.0 >> STATE_SHIFT & 3 {
            1 => EntryState::Pending,
            2 => EntryState::Valid,
            3 => EntryState::Claimed,
            _ => EntryState::Empty,
        }
    }

    /// Whether a process that holds no right to it may empty it.
    pub(crate) fn may_be_emptied(self) -> bool {
        matches!(self.state(), EntryState::Pending | EntryState::Valid)
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 as u32
    }

    fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    /// Holds a page in this slot.
    pub(crate) fn holds(self, slot: u32) -> bool {
        self.state() != EntryState::Empty && self.slot() == slot
    }

    /// Taken for a page in `slot`. `mask`: which bits of the generation are counted.
    pub(crate) fn claimed(self, slot: u32, mask: u64) -> Entry {
        let generation = (self.generation() + 1) & mask;
        Entry(generation << GENERATION_SHIFT | u64::from(slot)).with(EntryState::Claimed)
    }

    /// With its key stored.
    pub(crate) fn pending(self) -> Entry {
        self.with(EntryState::Pending)
    }

    pub(crate) fn validated(self) -> Entry {
        self.with(EntryState::Valid)
    }

    fn with(self, state: EntryState) -> Entry {
        Entry(self.0 & !(3 << STATE_SHIFT) | (state as u64) << STATE_SHIFT)
    }

    pub(crate) fn emptied(self) -> Entry {
        Entry(self.generation() << GENERATION_SHIFT)
    }

    pub(crate) fn is_visited(self) -> bool {
        self.0 & VISITED != 0
    }

    pub(crate) fn visited(self) -> Entry {
        Entry(self.0 | VISITED)
    }

    pub(crate) fn unvisited(self) -> Entry {
        Entry(self.0 & !VISITED)
    }
}

/// Each place closes a file at most once.
const CHANGE_BITS: u32 = 16;
const _: () = assert!(MAX_PLACES < 1 << CHANGE_BITS);
const ASKED_FOR: u64 = 1 << 48;
const OPEN: u64 = 1 << 49;

/// A file that is known here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileWord(pub(crate) u64);

impl FileWord {
    pub(crate) fn open(id: u32) -> FileWord {
        FileWord(u64::from(id) << CHANGE_BITS | OPEN)
    }

    /// A file is open from when the keeper opens it until it is retired. Only then are its pages found.
    pub(crate) fn is_open(self) -> bool {
        self.0 & OPEN != 0
    }

    /// It changes with each change of the file, also if the file is not open: so words do not repeat.
    pub(crate) fn content_id(self) -> u32 {
        (self.0 >> CHANGE_BITS) as u32
    }

    /// How many calls are changing the file as a whole.
    pub(crate) fn changes(self) -> u64 {
        self.0 & ((1 << CHANGE_BITS) - 1)
    }

    /// The id under which pages may be found and admitted now.
    pub(crate) fn usable_id(self) -> Option<u32> {
        (self.changes() == 0 && self.is_open() && self.content_id() != 0).then_some(self.content_id())
    }

    /// A process wants to find pages of this file, which the keeper has to open first.
    pub(crate) fn asked_for(self) -> FileWord {
        FileWord(self.0 | ASKED_FOR)
    }

    pub(crate) fn is_asked_for(self) -> bool {
        self.0 & ASKED_FOR != 0
    }

    /// Whether it was asked for, and not retired.
    pub(crate) fn is_live(self) -> bool {
        self.0 & (OPEN | ASKED_FOR) != 0
    }

    /// One change more in progress.
    pub(crate) fn change_begun(self) -> FileWord {
        FileWord(self.0.wrapping_add(1))
    }

    /// One change less in progress. The file gets another id.
    pub(crate) fn change_ended(self, fresh: u32) -> FileWord {
        FileWord(self.without_changes(fresh).0 | self.changes().saturating_sub(1))
    }

    pub(crate) fn retired(self) -> FileWord {
        FileWord(self.0 & !(OPEN | ASKED_FOR))
    }

    /// No change is in progress. The file gets another id.
    pub(crate) fn without_changes(self, fresh: u32) -> FileWord {
        FileWord(u64::from(fresh) << CHANGE_BITS | self.0 & (OPEN | ASKED_FOR))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlotState {
    Free = 0,
    /// A place has it, to admit a page.
    Taken = 1,
    /// An entry has it, or had it until it was emptied.
    Used = 2,
    /// Its memory is not there.
    Absent = 3,
}

/// The state of a slot, and the place or entry that owns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlotWord(pub(crate) u64);

impl SlotWord {
    pub(crate) fn state(self) -> SlotState {
        match self.0 >> 32 & 3 {
            1 => SlotState::Taken,
            2 => SlotState::Used,
            3 => SlotState::Absent,
            _ => SlotState::Free,
        }
    }

    /// The place or the entry that has it.
    pub(crate) fn owner(self) -> u32 {
        self.0 as u32
    }

    /// With another state. The words of a slot repeat only after 2^30 changes.
    pub(crate) fn next(self, state: SlotState, owner: u32) -> SlotWord {
        SlotWord(((self.0 >> 34) + 1) << 34 | (state as u64) << 32 | u64::from(owner))
    }
}

/// What may be done now (C5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Door {
    /// Processes use their files as if there were no cache.
    #[default]
    Closed = 0,
    /// Writers invalidate; nobody admits or finds a page.
    Invalidating = 1,
    /// All of it.
    Open = 2,
}

impl Door {
    pub(crate) fn of(word: u64) -> Door {
        match word & 3 {
            1 => Door::Invalidating,
            2 => Door::Open,
            _ => Door::Closed,
        }
    }

    /// The next state on the way to `to`.
    pub(crate) fn towards(self, to: Door) -> Door {
        if self == to || self == Door::Invalidating { to } else { Door::Invalidating }
    }

    /// The word for another state. The words of the door repeat only after 2^62 changes.
    pub(crate) fn next_word(self, word: u64) -> u64 {
        (Self::turns(word) + 1) << 2 | self as u64
    }

    /// How often the state has changed.
    pub(crate) fn turns(word: u64) -> u64 {
        word >> 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_counts_writers_and_never_repeats() {
        let idle = Header(5 << WRITER_BITS);
        let busy = Header(idle.0 + 2 * Header::BEGIN);
        assert_eq!((busy.writers(), Header(busy.0 - Header::END).writers()), (2, 1));
        assert_ne!(Header(idle.0 + Header::BEGIN - Header::END), idle);
        assert_eq!((busy.cleared().writers(), busy.cleared().0 > busy.0), (0, true));
    }

    #[test]
    fn an_entry_is_claimed_then_pending_then_valid_and_has_another_generation_next_time() {
        let claimed = Entry(0).claimed(7, u64::MAX);
        assert!(claimed.state() == EntryState::Claimed && claimed.holds(7) && !claimed.may_be_emptied());
        let pending = claimed.pending();
        let valid = pending.validated();
        assert_eq!((pending.state(), pending.slot()), (EntryState::Pending, 7));
        assert_eq!((valid.state(), valid.slot(), valid.is_visited()), (EntryState::Valid, 7, false));
        assert_eq!(valid.visited().unvisited(), valid);
        assert!(valid.visited().is_visited() && valid.visited().holds(7) && !valid.holds(8));
        let emptied = valid.visited().emptied();
        assert!(emptied.state() == EntryState::Empty && !emptied.holds(7));
        assert_ne!(emptied.claimed(7, u64::MAX), claimed);
        assert_eq!(emptied.claimed(7, 1).emptied().claimed(7, 1), claimed, "one bit counts to two");
    }

    #[test]
    fn a_file_is_usable_while_nobody_closes_it_and_has_another_id_afterwards() {
        let file = FileWord::open(3);
        assert_eq!(file.usable_id(), Some(3));
        let closed = file.change_begun().change_begun();
        assert_eq!((closed.content_id(), closed.usable_id()), (3, None));
        assert_eq!(closed.change_ended(4).usable_id(), None);
        assert_eq!(closed.change_ended(4).change_ended(5).usable_id(), Some(5));
        assert_eq!(closed.without_changes(6).usable_id(), Some(6));
        let retired = closed.retired();
        assert_eq!(
            (retired.change_ended(7).change_ended(8).usable_id(), retired.without_changes(9).usable_id()),
            (None, None)
        );
    }

    #[test]
    fn words_of_slots_and_doors_do_not_repeat() {
        let free = SlotWord(0);
        let taken = free.next(SlotState::Taken, 9);
        assert_eq!((taken.state(), taken.owner()), (SlotState::Taken, 9));
        assert_ne!(taken.next(SlotState::Free, 0), free);
        let open = Door::Open.next_word(0);
        assert_eq!(Door::of(open), Door::Open);
        assert_ne!(Door::Open.next_word(Door::Closed.next_word(open)), open);
    }
}
