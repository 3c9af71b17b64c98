//! The rules that make an ordered index correct, apart from the code that follows them.
//!
//! They are a type parameter of [`Tree`](super::Tree), like [`crate::Rules`] of workers. A simulation
//! replaces one rule by a wrong one, and verifies that its judge notices. Production is compiled with
//! [`Shipped`] alone.

use super::entry::{EntryKind, EntryWord};
use super::level::Purpose;
use crate::rules::Shipped;

/// Decides where an entry goes, and when a leaf may be replaced.
pub trait TreeRules: 'static {
    /// Whether a client that comes to a leaf checks that the leaf is for its rank (T5).
    fn checks_fences() -> bool {
        true
    }

    /// Whether an entry is frozen before its leaf is replaced (T3).
    fn freezes(_word: EntryWord) -> bool {
        true
    }

    /// Whether a key is written before its entry is live (T2).
    fn writes_keys_first() -> bool {
        true
    }

    /// Whether the first of two new leaves names the second one as the next leaf.
    fn links_leaves() -> bool {
        true
    }

    /// Whether a client reserves an entry before it writes there (T2).
    fn reserves() -> bool {
        true
    }

    /// Whether a place can be used: it is empty (T4).
    fn is_free(word: EntryWord) -> bool {
        word.kind() == EntryKind::Empty
    }

    /// Whether a client that finds an entry there counts that it relies on it (T4).
    fn counts_reliance() -> bool {
        true
    }

    /// Whether a client that comes to a leaf uses the leaves that have replaced it.
    fn goes_to_children(_purpose: Purpose) -> bool {
        true
    }
}

impl TreeRules for Shipped {}
