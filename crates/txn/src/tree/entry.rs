//! What changes of a leaf: the words of its entries, and its state. Pure.

/// Bits of an entry's word for the record's number plus one.
const NUMBER_BITS: u32 = 43;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;
/// Bits for how often the entry was relied upon. Between them and the number, one bit is reserved: *on all
/// copies*.
const COUNT_AT: u32 = NUMBER_BITS + 1;
const COUNT_BITS: u32 = 17;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// Where the two bits begin that say what the entry is.
const KIND_AT: u32 = 61;
/// The entry stays as it is for ever.
const FROZEN: u64 = 1 << 63;
/// Of the state: the leaf was replaced by one leaf, not by two.
const ALONE: u64 = 1 << NUMBER_BITS;

/// The word of an entry: everything of it that changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EntryWord(pub(super) u64);

/// What an entry is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryKind {
    /// Nothing yet, or nothing any more: the rest of its word counts on, so that no word comes twice.
    Empty,
    /// A client is about to write it, and nobody else.
    Reserved,
    /// A record's.
    Live,
    /// It was a record's, or became of no use before it was one.
    Gone,
}

impl EntryKind {
    fn bits(self) -> u64 {
        (self as u64) << KIND_AT
    }
}

impl EntryWord {
    /// An entry that a client has reserved. No two clients use the same token at the same time.
    pub(super) fn reserved(token: u64) -> EntryWord {
        EntryWord(EntryKind::Reserved.bits() | token & ((1 << KIND_AT) - 1))
    }

    /// The entry of a record, in an entry that was empty.
    pub(super) fn live(self, number: u64) -> EntryWord {
        debug_assert!(number < NUMBER, "no record has such a number");
        let count = if self.0 == 0 { 0 } else { self.next_count() };
        EntryWord(EntryKind::Live.bits() | count << COUNT_AT | (number + 1))
    }

    fn next_count(self) -> u64 {
        (self.0 >> COUNT_AT).wrapping_add(1) & COUNT
    }

    /// What it is.
    pub fn kind(self) -> EntryKind {
        match self.0 >> KIND_AT & 3 {
            0 => EntryKind::Empty,
            1 => EntryKind::Reserved,
            2 => EntryKind::Live,
            _ => EntryKind::Gone,
        }
    }

    /// The record of a live entry. `None`: no client writes such a word.
    pub fn number(self) -> Option<u64> {
        (self.0 & NUMBER).checked_sub(1)
    }

    /// Whether it stays as it is for ever.
    pub fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// The word after a client has relied on the live entry once more. A remover that has seen the
    /// earlier word then fails.
    pub(super) fn relied_on(self) -> EntryWord {
        EntryWord(self.0 & !(COUNT << COUNT_AT) | self.next_count() << COUNT_AT)
    }

    /// The word of the entry that takes the place of two of the same record: it differs from both.
    pub(super) fn relied_on_as_both(self, other: EntryWord) -> EntryWord {
        let count = |word: EntryWord| word.0 >> COUNT_AT & COUNT;
        let both = (count(self) + count(other) + 1) & COUNT;
        EntryWord(self.0 & !(COUNT << COUNT_AT) | both << COUNT_AT)
    }

    /// The word of a live entry that is removed.
    pub(super) fn removed(self) -> EntryWord {
        self.turned_into(EntryKind::Gone)
    }

    /// The word of an entry that was removed, and is empty now.
    pub(super) fn emptied(self) -> EntryWord {
        self.turned_into(EntryKind::Empty)
    }

    /// The same record and count.
    fn turned_into(self, kind: EntryKind) -> EntryWord {
        debug_assert!(!self.is_frozen(), "a frozen leaf does not change");
        EntryWord(kind.bits() | self.0 & (NUMBER | COUNT << COUNT_AT))
    }

    /// The word that stays for ever: an entry that is not live never becomes so.
    pub(super) fn frozen(self) -> EntryWord {
        match self.kind() {
            EntryKind::Live | EntryKind::Gone => EntryWord(self.0 | FROZEN),
            EntryKind::Empty | EntryKind::Reserved => EntryWord(EntryKind::Gone.bits() | FROZEN),
        }
    }

    /// The same in a leaf that is not frozen.
    pub(super) fn thawed(self) -> EntryWord {
        EntryWord(self.0 & !FROZEN)
    }
}

/// The leaves that have replaced a leaf: one or two with consecutive numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Children {
    /// The first one.
    pub first: u64,
    /// There is a second one.
    pub are_two: bool,
}

impl Children {
    /// The state of the leaf that they replace.
    pub(super) fn word(self) -> u64 {
        (self.first + 1) | if self.are_two { 0 } else { ALONE }
    }

    /// The children that a state names. `None`: no client writes such a word. `Some(None)`: there are none.
    pub(super) fn decode(word: u64) -> Option<Option<Children>> {
        if word & !(NUMBER | ALONE) != 0 || word == ALONE {
            return None;
        }
        let first = (word & NUMBER).checked_sub(1);
        Some(first.map(|first| Children { first, are_two: word & ALONE == 0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_fixed() {
        let live = EntryWord(0).live(4);
        assert_eq!((live.0, live.kind(), live.number()), (0x4000_0000_0000_0005, EntryKind::Live, Some(4)));
        assert_eq!(live.relied_on().0, 0x4000_1000_0000_0005);
        assert_eq!((live.removed().0, live.frozen().0), (0x6000_0000_0000_0005, 0xC000_0000_0000_0005));
        let emptied = live.relied_on().removed().emptied();
        assert_eq!((emptied.0, emptied.kind()), (0x0000_1000_0000_0005, EntryKind::Empty));
        assert_eq!(emptied.live(4).0, 0x4000_2000_0000_0005);
        assert_eq!(EntryWord::reserved(9).0, 0x2000_0000_0000_0009);
        assert_eq!(
            (EntryWord(0).frozen(), EntryWord::reserved(9).frozen()),
            (EntryWord(0xE << 60), EntryWord(0xE << 60))
        );
        assert_eq!(Children { first: 6, are_two: true }.word(), 7);
        assert_eq!(Children { first: 6, are_two: false }.word(), 7 | 1 << 43);
    }

    #[test]
    fn words_of_states_and_entries_are_found_again() {
        for children in [Children { first: 0, are_two: true }, Children { first: 77, are_two: false }] {
            assert_eq!(Children::decode(children.word()), Some(Some(children)));
        }
        assert_eq!(
            (Children::decode(0), Children::decode(ALONE), Children::decode(1 << 50)),
            (Some(None), None, None)
        );
        let mut word = EntryWord(0).live(NUMBER - 1);
        for _ in 0..1 << 18 {
            let next = word.relied_on();
            assert!(next != word && (next.kind(), next.number()) == (EntryKind::Live, Some(NUMBER - 1)));
            word = next;
        }
        assert!(word.frozen().is_frozen() && word.frozen().thawed() == word);
    }
}
