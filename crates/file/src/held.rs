//! Locks on blocks of a row's members.
//!
//! L1. Every operation takes the locks in one order: members with data ascending, then the parity; each
//!     member's blocks ascending. So no two operations can wait for each other. It releases them in the same
//!     order: a lock that a dead process has left beside an unlocked parity is of an operation that had
//!     stored nothing (D2 of `adopting.rs`).
//! L2. The lock of a parity block protects its whole column: an operation stores nothing in any member of the
//!     column without that lock.

use std::ops::Range;

use farpool_pool::{Extent, SessionCore};
use farpool_wire::BlockWord;

use crate::blocks::BlockPlace;
use crate::error::FileError;
use crate::redundancy::is_parity;
use crate::rules::Rules;
use crate::store::StoreCore;

/// Locks of a row. Dropping them gives each block the word that was set for it. Without one, the block keeps
/// its old word, or becomes lost if a write to it was given up halfway.
pub(crate) struct Held<'a, R: Rules> {
    store: &'a StoreCore<R>,
    /// A write was posted and its outcome is not known yet.
    pub(crate) in_doubt: bool,
    /// As `in_doubt`, for a write of contents that the words describe already.
    pub(crate) repairing: bool,
    /// In the order of locking: by member, then by block.
    held: Vec<Hold>,
}

struct Hold {
    at: (u64, u64),
    place: BlockPlace,
    word: BlockWord,
    next: Option<BlockWord>,
}

impl<'a, R: Rules> Held<'a, R> {
    /// Takes the locks of these blocks of these members, which are given in the order of locking. Errors name
    /// `offset`.
    pub(crate) async fn take(
        store: &'a StoreCore<R>,
        core: &SessionCore,
        members: impl IntoIterator<Item = (u64, &Extent, Range<u64>)>,
        offset: u64,
    ) -> Result<Held<'a, R>, FileError> {
        let mut held = Held { store, in_doubt: false, repairing: false, held: Vec::new() };
        for (stripe, extent, blocks) in members {
            for block in blocks {
                let place = store.words.place(extent, block);
                let word = store.words.lock(core.endpoint(), place).await;
                let word = word.map_err(|_| FileError::Unavailable { offset })?;
                held.held.push(Hold { at: (stripe, block), place, word, next: None });
            }
        }
        debug_assert!(held.held.is_sorted_by_key(|hold| hold.at), "all operations lock in one order");
        Ok(held)
    }

    fn find(&self, stripe: u64, block: u64) -> Option<usize> {
        self.held.binary_search_by_key(&(stripe, block), |hold| hold.at).ok()
    }

    /// The word of a block as it was when it was locked; `None` if the block is not among the locked ones.
    pub(crate) fn word(&self, stripe: u64, block: u64) -> Option<BlockWord> {
        self.find(stripe, block).map(|at| self.held[at].word)
    }

    /// Sets the word that a block gets when the locks are dropped.
    pub(crate) fn set(&mut self, stripe: u64, block: u64, next: BlockWord) {
        if let Some(at) = self.find(stripe, block) {
            self.held[at].next = Some(next);
        }
    }
}

impl<R: Rules> Drop for Held<'_, R> {
    fn drop(&mut self) {
        let mut to_repair = self.repairing;
        for hold in self.held.drain(..) {
            let otherwise = if self.in_doubt { R::in_doubt(hold.word) } else { hold.word };
            let given_up = self.in_doubt && hold.next.is_none();
            let word = hold.next.unwrap_or(otherwise);
            let newly_lost = word.is_lost() && !hold.word.is_lost();
            to_repair |= given_up || newly_lost && is_parity(hold.at.0);
            self.store.words.store(hold.place, word);
        }
        // Noted last, so that a rebuilder that finds the note also finds the new words.
        if to_repair {
            self.store.volume.ask_for_repair();
        }
    }
}
