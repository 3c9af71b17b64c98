//! The state of a store's redundant data: losses, rebuilds, and the results of scrubs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use farpool_lease::Millis;
use farpool_pool::EXTENT_BYTES;
use rustix_futex_sync::Mutex;

use crate::error::FileError;
use crate::guest::DirectBytes;
use crate::retry::Retry;

/// Default limit of rebuilding: other traffic uses the network as well.
pub const DEFAULT_REBUILD_BYTES_PER_S: u64 = 200 << 20;

// The counters are for people: they guard nothing, hence `Relaxed`.

/// Progress of a piece of work, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Progress {
    /// Whether the work is in progress.
    pub running: bool,
    /// Blocks to do when the work began.
    pub total: u64,
    /// Blocks done.
    pub done: u64,
    /// How many times such work ended with all blocks done, since the store began.
    pub finished: u64,
    /// How many times such work ended, with all blocks done or not, since the store began.
    pub attempts: u64,
}

/// The state of a store's redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VolumeStatus {
    /// Files.
    pub files: u64,
    /// Those of them that survive the loss of a node.
    pub redundant_files: u64,
    /// Extents of redundant files.
    pub extents: u64,
    /// Extents of redundant files that are missing, since their node or lease is lost. Their contents are
    /// reconstructed from the other members, unless another member is lost, too.
    pub missing_extents: u64,
    /// Extents of all files, with or without redundancy, that are missing and had contents that cannot be
    /// reconstructed. Reading these is an error.
    pub lost_extents: u64,
    /// Whether some extents have to be rebuilt, or may have to be.
    pub to_rebuild: bool,
    /// The rebuild in progress, or the last one.
    pub rebuild: Progress,
    /// Why the last rebuild did not finish; it is tried again. `None`: it finished.
    pub rebuild_waits_for: Option<FileError>,
    /// The scrub in progress, or the last one.
    pub scrub: Progress,
    /// Blocks that this scrub has passed without reading them: they are missing, or cannot be read for now.
    pub unread_blocks: u64,
    /// Blocks that did not hold the data that were written there, since the store began.
    pub wrong_blocks: u64,
    /// Blocks that were repaired in place, since the store began.
    pub repaired_blocks: u64,
    /// Blocks that could not be repaired: there is no redundancy, or more is lost than it survives. Each
    /// scrub counts those that it finds again.
    pub lost_blocks: u64,
    /// Reads for which a node took so long that other nodes were asked, since the store began.
    pub hedged_reads: u64,
    /// What direct clients (called *guests* in the code) have read and written, since the store began.
    pub direct: DirectBytes,
    /// Bytes of extents in the overflow directory; `None`: there is none.
    pub overflow_bytes: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Counter {
    running: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
    finished: AtomicU64,
    attempts: AtomicU64,
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

    /// The work has ended. `whole`: everything was done.
    pub(crate) fn end(&self, whole: bool) {
        self.finished.fetch_add(u64::from(whole), Ordering::Relaxed);
        self.attempts.fetch_add(1, Ordering::Relaxed);
        self.running.store(false, Ordering::Relaxed);
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            running: self.running.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            finished: self.finished.load(Ordering::Relaxed),
            attempts: self.attempts.load(Ordering::Relaxed),
        }
    }
}

/// What a store records about its redundant data.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) rebuild: Counter,
    pub(crate) scrub: Counter,
    wrong: AtomicU64,
    repaired: AtomicU64,
    lost: AtomicU64,
    hedged: AtomicU64,
    /// Blocks that the scrub in progress, or the last one, could not read.
    unread: AtomicU64,
    /// Says when a failed rebuild is tried again.
    retry: Mutex<Retry>,
    /// Some parity is lost, or some extent in doubt.
    to_repair: AtomicBool,
    /// A scrub was asked for.
    scrub_wanted: AtomicBool,
    /// How many of the stock's losses had occurred when everything was last rebuilt.
    rebuilt_up_to: AtomicU64,
    rebuild_bytes_per_s: AtomicU64,
}

impl Default for Volume {
    fn default() -> Self {
        Volume {
            rebuild: Counter::default(),
            scrub: Counter::default(),
            wrong: AtomicU64::default(),
            repaired: AtomicU64::default(),
            lost: AtomicU64::default(),
            hedged: AtomicU64::default(),
            unread: AtomicU64::default(),
            retry: Mutex::default(),
            to_repair: AtomicBool::default(),
            scrub_wanted: AtomicBool::default(),
            rebuilt_up_to: AtomicU64::default(),
            rebuild_bytes_per_s: AtomicU64::new(DEFAULT_REBUILD_BYTES_PER_S),
        }
    }
}

impl Volume {
    pub(crate) fn found_wrong(&self) {
        self.wrong.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn repaired(&self) {
        self.repaired.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn beyond_repair(&self, blocks: u64) {
        self.lost.fetch_add(blocks, Ordering::Relaxed);
    }

    pub(crate) fn hedged(&self) {
        self.hedged.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn begin_scrub(&self, blocks: u64) {
        self.unread.store(0, Ordering::Relaxed);
        self.scrub.begin(blocks);
    }

    /// The scrub could not read some blocks.
    pub(crate) fn unread(&self, blocks: u64) {
        self.unread.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Makes the next rebuild due at once, because an operator or program has requested it.
    pub(crate) fn ask_rebuild(&self) {
        self.retry.lock().now();
        self.ask_for_repair();
    }

    /// Whether a rebuild that failed before may be tried again at `now`.
    pub(crate) fn may_rebuild(&self, now: Millis) -> bool {
        self.retry.lock().is_due(now)
    }

    /// An extent could not be rebuilt.
    pub(crate) fn rebuild_fails(&self, failure: FileError) {
        self.retry.lock().waits_for(failure);
    }

    /// A rebuild has ended, with all, some or none of the work done.
    pub(crate) fn rebuild_ended(&self, now: Millis, failure: Option<FileError>) {
        self.retry.lock().ended(now, failure, self.rebuild.done.load(Ordering::Relaxed) > 0);
        self.rebuild.end(failure.is_none() && !self.is_to_repair());
    }

    /// Writes the counts and records since the store began into `status`.
    pub(crate) fn tell(&self, status: &mut VolumeStatus) {
        status.rebuild = self.rebuild.progress();
        status.scrub = self.scrub.progress();
        status.rebuild_waits_for = self.retry.lock().failure();
        status.unread_blocks = self.unread.load(Ordering::Relaxed);
        status.wrong_blocks = self.wrong.load(Ordering::Relaxed);
        status.repaired_blocks = self.repaired.load(Ordering::Relaxed);
        status.lost_blocks = self.lost.load(Ordering::Relaxed);
        status.hedged_reads = self.hedged.load(Ordering::Relaxed);
    }

    /// Requests a rebuild: some data have less redundancy than they should.
    pub(crate) fn ask_for_repair(&self) {
        // Release: pairs with the acquiring swap and load below. A rebuilder that takes the request finds the
        // words that caused it.
        self.to_repair.store(true, Ordering::Release);
    }

    pub(crate) fn take_to_repair(&self) -> bool {
        self.to_repair.swap(false, Ordering::Acquire)
    }

    pub(crate) fn is_to_repair(&self) -> bool {
        self.to_repair.load(Ordering::Acquire)
    }

    pub(crate) fn rebuilt_up_to(&self) -> u64 {
        self.rebuilt_up_to.load(Ordering::Relaxed)
    }

    pub(crate) fn note_rebuilt_up_to(&self, losses: u64) {
        self.rebuilt_up_to.store(losses, Ordering::Relaxed);
    }

    pub(crate) fn limit_rebuild(&self, bytes_per_s: u64) {
        self.rebuild_bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    /// The pause after each rebuilt extent.
    pub(crate) fn rebuild_pause(&self) -> Duration {
        let bytes_per_s = self.rebuild_bytes_per_s.load(Ordering::Relaxed).max(1);
        Duration::from_micros(EXTENT_BYTES * 1_000_000 / bytes_per_s)
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
