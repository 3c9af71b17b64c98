//! What is known of all redundant data of a store: what was lost, what is being made anew, what a scrub found.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::guest::DirectBytes;

// The counters are for people: they guard nothing, hence `Relaxed`.

/// Progress of a piece of work, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Progress {
    /// Whether it is under way.
    pub running: bool,
    /// Blocks there were to do when it began, and that came since.
    pub total: u64,
    /// Blocks done.
    pub done: u64,
    /// How often such work has ended, since the store began.
    pub finished: u64,
}

/// What there is to say of a store's redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VolumeStatus {
    /// Files.
    pub files: u64,
    /// Those of them that bear the loss of a node.
    pub redundant_files: u64,
    /// Extents of redundant files.
    pub extents: u64,
    /// Extents of redundant files that lie nowhere any more: what they held is made from the others.
    pub missing_extents: u64,
    /// Whether something is known that is to be made anew, or may be.
    pub to_rebuild: bool,
    /// The rebuild under way, or the last.
    pub rebuild: Progress,
    /// The scrub under way, or the last.
    pub scrub: Progress,
    /// Blocks that were not what was written there, since the store began.
    pub wrong_blocks: u64,
    /// Blocks that were made anew where they lie, since the store began.
    pub mended_blocks: u64,
    /// Blocks that could not be: no redundancy, or more lost than it bears.
    pub lost_blocks: u64,
    /// What guests have read and written by themselves, since the store began.
    pub direct: DirectBytes,
}

#[derive(Debug, Default)]
pub(crate) struct Counter {
    running: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
    finished: AtomicU64,
}

impl Counter {
    pub(crate) fn begin(&self, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.running.store(true, Ordering::Relaxed);
    }

    pub(crate) fn step(&self, blocks: u64) {
        self.done.fetch_add(blocks, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        self.running.store(false, Ordering::Relaxed);
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            running: self.running.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            finished: self.finished.load(Ordering::Relaxed),
        }
    }
}

/// What a store notes of its redundant data.
#[derive(Debug, Default)]
pub(crate) struct Volume {
    pub(crate) rebuild: Counter,
    pub(crate) scrub: Counter,
    wrong: AtomicU64,
    mended: AtomicU64,
    lost: AtomicU64,
    /// Some parity is lost, or some extent in doubt.
    to_mend: AtomicBool,
    /// Somebody asked for a scrub.
    scrub_wanted: AtomicBool,
    /// The stock's losses up to which everything was made anew.
    rebuilt_up_to: AtomicU64,
}

impl Volume {
    pub(crate) fn found_wrong(&self) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn mended(&self) {
        self.mended.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn beyond_mending(&self, blocks: u64) {
        self.lost.fetch_add(blocks, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.wrong), load(&self.mended), load(&self.lost))
    }

    /// Something is not as redundant as it should be.
    pub(crate) fn has_to_mend(&self) {
        // Release: pairs with the acquire below; whoever takes the note finds the words that it is about.
        self.to_mend.store(true, Ordering::Release);
    }

    pub(crate) fn take_to_mend(&self) -> bool {
        self.to_mend.swap(false, Ordering::Acquire)
    }

    pub(crate) fn is_to_mend(&self) -> bool {
        self.to_mend.load(Ordering::Acquire)
    }

    pub(crate) fn rebuilt_up_to(&self) -> u64 {
        self.rebuilt_up_to.load(Ordering::Relaxed)
    }

    pub(crate) fn is_rebuilt_up_to(&self, losses: u64) {
        self.rebuilt_up_to.store(losses, Ordering::Relaxed);
    }

    pub(crate) fn want_scrub(&self) {
        self.scrub_wanted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn take_scrub_wanted(&self) -> bool {
        self.scrub_wanted.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn is_scrub_wanted(&self) -> bool {
        self.scrub_wanted.load(Ordering::Relaxed)
    }
}
