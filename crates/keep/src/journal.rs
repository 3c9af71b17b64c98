//! The journal: it records changes that must survive the death of the process.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix_futex_sync::Mutex;

use crate::change::Change;
use crate::kept::Kept;

/// Changes per record in [`Journal::append_in_parts`]. Even with the longest keys, so many fit in one record.
const CHANGES_AT_ONCE: usize = 4_096;

/// Records changes that must be found again after this process was killed.
pub trait Journal: Send + Sync + fmt::Debug {
    /// Once this has returned, all of these changes will be found again. If the process is killed before, all
    /// or none of them will be found.
    fn append(&self, changes: &[Change]);

    /// Like [`append`](Self::append), for any number of changes without large values. If the process is
    /// killed meanwhile, some of the changes may be found and others not.
    fn append_in_parts(&self, changes: &[Change]) {
        changes.chunks(CHANGES_AT_ONCE).for_each(|changes| self.append(changes));
    }

    /// Whether everything appended so far will be found again. Once a change could not be written, nothing
    /// will be found.
    fn is_whole(&self) -> bool;
}

/// A journal in memory. Its contents can be sent to another process ([`kept`](Self::kept)). In simulations,
/// it outlives its writers: [successors](Self::successor) share its state, and each writer
/// [dies](Self::abandon) alone.
#[derive(Debug, Default)]
pub struct MemoryJournal {
    kept: Arc<Mutex<Kept>>,
    dead: AtomicBool,
    given_up: AtomicBool,
}

impl MemoryJournal {
    /// Another writer of the same state.
    pub fn successor(&self) -> Self {
        MemoryJournal { kept: self.kept.clone(), ..MemoryJournal::default() }
    }

    /// From now on, changes that this writer appends are ignored, as those of a dead process would be.
    pub fn abandon(&self) {
        self.dead.store(true, Ordering::Relaxed); // pairs with nothing: a simulation runs on one thread
    }

    /// Nobody will go on with this state: [`is_whole`](Journal::is_whole) is false from now on, so a pool
    /// gives its leases back when it is dropped.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed); // guards no other memory
    }

    /// The state as it is now.
    pub fn kept(&self) -> Kept {
        self.kept.lock().clone()
    }
}

impl Journal for MemoryJournal {
    fn append(&self, changes: &[Change]) {
        if !self.dead.load(Ordering::Relaxed) {
            self.kept.lock().apply(changes.iter().cloned());
        }
    }

    fn is_whole(&self) -> bool {
        !self.given_up.load(Ordering::Relaxed)
    }
}
