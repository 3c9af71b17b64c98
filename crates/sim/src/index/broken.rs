//! Rules of ordered indexes that are wrong on purpose.

use farpool_txn::tree::{EntryKind, EntryWord, Purpose, TreeRules};

/// A client that comes to a leaf does not check that the leaf is for its rank.
pub(super) enum BlindForFences {}

impl TreeRules for BlindForFences {
    fn checks_fences() -> bool {
        false
    }
}

/// An entry that a client has reserved is not frozen: it becomes live after its leaf was replaced.
pub(super) enum ReservedSurvives {}

impl TreeRules for ReservedSurvives {
    fn freezes(word: EntryWord) -> bool {
        word.kind() != EntryKind::Reserved
    }
}

/// An entry is live before its key is written.
pub(super) enum LiveFirst {}

impl TreeRules for LiveFirst {
    fn writes_keys_first() -> bool {
        false
    }
}

/// Several clients write their keys to the same empty entry, and the first one makes it live.
pub(super) enum Unreserved {}

impl TreeRules for Unreserved {
    fn reserves() -> bool {
        false
    }
}

/// A client that finds an entry relies on it without changing its word, so a remover may remove it.
pub(super) enum RelianceUncounted {}

impl TreeRules for RelianceUncounted {
    fn counts_reliance() -> bool {
        false
    }
}

/// A new entry is written where another one was removed, whose word it may get.
pub(super) enum PlaceUsedAgain {}

impl TreeRules for PlaceUsedAgain {
    fn is_free(word: EntryWord) -> bool {
        word.kind() == EntryKind::Empty || word.kind() == EntryKind::Gone && !word.is_frozen()
    }
}

/// A client that reads takes a leaf for current that was replaced.
pub(super) enum ReplacedTrusted {}

impl TreeRules for ReplacedTrusted {
    fn goes_to_children(purpose: Purpose) -> bool {
        purpose == Purpose::Change
    }
}

/// The first of two new leaves does not name the second one.
pub(super) enum HalfSplit {}

impl TreeRules for HalfSplit {
    fn links_leaves() -> bool {
        false
    }
}
