//! Moving out: extents in regions that are being taken back are moved elsewhere before the regions end, and
//! so are extents on which a late write may still land. Moving back: extents in the overflow directory are
//! moved to far memory.
//!
//! M1. An extent moves under the locks of all its blocks, and its words move with it: no writer changes it
//!     meanwhile. A writer that has waited for such a lock checks that the extent is still the file's before
//!     it writes.
//! M2. A reader that still has the old extent reads the file's contents as they were when it began, because
//!     no writer uses the old extent any more.
//! M3. An extent that cannot be moved stays where it is. The mover tries again until the region has ended.
//! M4. An extent on which a write in doubt may still land is moved before one of its lost or empty blocks is
//!     written again; in a file with rows, before anything is written there again.
//! M5. Of the extents in regions that are being taken back, those whose loss would lose data move first: all
//!     of a file without redundancy, and of each row all but one, or all if another member is already lost.
//! M6. What lies in the overflow directory moves to far memory once there is room, in the same way (M1, M2),
//!     when nothing has to leave and nothing is to be rebuilt.
//! M7. Moving does not wait for other work of the thread: rebuilding and scrubbing may take hours, but a
//!     region that is being taken back lasts only tens of seconds.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_pool::{EXTENT_BYTES, Extent, LeasedRegion, Pool, SessionCore};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::rules::Rules;
use crate::split::Piece;
use crate::staging::staging;
use crate::store::StoreCore;
use crate::write::Locks;

/// How often the mover checks whether extents have to move, and tries failed moves again. A region that is
/// being taken back lasts tens of seconds.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// After so many failures one after the other, moving back pauses: the disk may hang.
const MAX_MOVE_BACK_FAILURES: u32 = 4;

/// The thread that moves extents out of regions and back from the overflow directory, rebuilds and scrubs. It
/// ends when this is dropped.
pub(crate) struct Mover {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread for a store's files.
    pub(crate) fn start(store: Arc<StoreCore>, pool: Pool) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let run = move || maintain(&store, &pool, &stopped);
        let thread = std::thread::Builder::new().name("file-mover".into()).spawn(run)?;
        Ok(Mover { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the mover of files panicked");
        }
    }
}

fn maintain(store: &StoreCore, pool: &Pool, stopped: &Receiver<()>) {
    let mut session = None;
    let mut complained = false;
    while stopped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        store.maintain_guests();
        complained &= store.stock.is_to_leave() || store.is_to_rebuild();
        let is_to_move = store.stock.is_to_leave() || store.is_move_back_due();
        if !(is_to_move || store.is_rebuild_due() || store.volume.is_scrub_wanted()) {
            session = None;
            continue;
        }
        let guard = session.get_or_insert_with(|| pool.session()).lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        let is_stopped = || !matches!(stopped.try_recv(), Err(TryRecvError::Empty));
        if let Err(error) = guard.block_on(store.maintain(core, is_stopped))
            && !complained
        {
            tracing::warn!(%error, "not all extents can be moved out of regions that are being taken back, or rebuilt; trying again");
            complained = true;
        }
    }
}

impl<R: Rules> StoreCore<R> {
    /// Moves extents that have to leave, rebuilds lost extents, and scrubs if a scrub was requested, as far
    /// as possible now. Returns the first failure.
    pub async fn maintain(&self, core: &SessionCore, stopped: impl Fn() -> bool) -> Result<(), FileError> {
        let moved = if self.stock.is_to_leave() { self.move_out(core, &stopped).await } else { Ok(()) };
        let rebuilt = if self.is_rebuild_due() { self.rebuild(core, &stopped).await } else { Ok(()) };
        let scrubbed =
            if self.volume.take_scrub_wanted() { self.scrub(core, &stopped).await } else { Ok(()) };
        if self.is_move_back_due() {
            let (moved, failure) = self.move_back(core, &stopped).await;
            // Not an error of the mount: what cannot move back stays readable where it is. Failures of the
            // disk are logged where they occur.
            self.move_back_retry.lock().ended(self.stock.now(), failure, moved > 0);
        }
        moved.and(rebuilt).and(scrubbed)
    }

    /// Does what cannot wait for the end of long work (M7): publishes until when regions may be used, for
    /// direct clients (called *guests* in the code), and moves extents that have to leave. Long work calls
    /// this between its steps; it acts at most once per [`LOOK_EVERY`].
    pub(crate) async fn in_between(
        &self,
        core: &SessionCore,
        last_ns: &mut u64,
        stopped: &impl Fn() -> bool,
    ) {
        if core.endpoint().now_ns().saturating_sub(*last_ns) < LOOK_EVERY.as_nanos() as u64 {
            return;
        }
        self.maintain_guests();
        if self.stock.is_to_leave() {
            // Failed moves are tried again, here or when the work is done.
            let _ = self.move_out(core, stopped).await;
        }
        *last_ns = core.endpoint().now_ns();
    }

    /// Moves extents out of regions that are being taken back, as far as possible, and returns the last
    /// failure. Ends early when `stopped` says so, or when there is no room for more.
    pub async fn move_out(&self, core: &SessionCore, stopped: impl Fn() -> bool) -> Result<(), FileError> {
        let mut result = Ok(());
        for select in [FileCore::urgent_stripes_to_move, FileCore::stripes_to_move] {
            for file in self.files().iter().filter_map(Weak::upgrade) {
                for stripe in select(&file) {
                    if stopped() {
                        return Ok(());
                    }
                    match file.move_extent(core, stripe).await {
                        Ok(()) => {}
                        Err(error @ FileError::NoSpace) => return Err(error),
                        Err(error) => result = Err(error),
                    }
                }
            }
        }
        result
    }
}

impl<R: Rules> StoreCore<R> {
    /// Whether extents in the overflow directory are to move to far memory now. After a failure, this waits
    /// for the end of a pause.
    fn is_move_back_due(&self) -> bool {
        self.stock.is_to_move_back() && self.move_back_retry.lock().is_due(self.stock.now())
    }

    /// Moves extents from the overflow directory to far memory, while there is room and nothing more urgent
    /// to do. An extent that cannot be moved stays where it is until the next pass. A pass ends early if
    /// there is no room, or after [`MAX_MOVE_BACK_FAILURES`]. Returns how many extents were moved, and the
    /// last failure.
    async fn move_back(&self, core: &SessionCore, stopped: &impl Fn() -> bool) -> (u64, Option<FileError>) {
        let (mut moved, mut last_ns) = (0, core.endpoint().now_ns());
        let (mut failure, mut failures_in_row) = (None, 0);
        for file in self.files().iter().filter_map(Weak::upgrade) {
            for stripe in file.stripes_in_overflow() {
                if stopped() || self.is_rebuild_due() || !self.stock.is_to_move_back() {
                    return (moved, failure);
                }
                match file.move_extent(core, stripe).await {
                    Ok(()) => (moved, failures_in_row) = (moved + 1, 0),
                    // This row has no node for the extent; other files may have one.
                    Err(error @ FileError::TooFewNodes { .. }) => failure = Some(error),
                    Err(error) => (failure, failures_in_row) = (Some(error), failures_in_row + 1),
                }
                if failure == Some(FileError::NoSpace) || failures_in_row == MAX_MOVE_BACK_FAILURES {
                    return (moved, failure);
                }
                self.in_between(core, &mut last_ns, stopped).await;
            }
        }
        (moved, failure)
    }
}

impl<R: Rules> FileCore<R> {
    fn stripes_in_overflow(&self) -> Vec<u64> {
        self.stripes_where(|extent| extent.region().is_overflow())
    }

    fn stripes_to_move(&self) -> Vec<u64> {
        self.stripes_where(is_to_move)
    }

    fn stripes_where(&self, is_it: impl Fn(&Arc<Extent>) -> bool) -> Vec<u64> {
        let map = self.map.read();
        let is_wanted = |stripe: &u64| map.extent(*stripe).is_some_and(|extent| is_it(&extent));
        map.stripes(0, u64::MAX).into_iter().filter(is_wanted).collect()
    }

    /// Extents in regions that are being taken back whose loss would lose data (M5).
    fn urgent_stripes_to_move(&self) -> Vec<u64> {
        let map = self.map.read();
        let is = |member: u64, is_it: fn(&LeasedRegion) -> bool| {
            map.extent(member).is_some_and(|extent| is_it(extent.region()))
        };
        let is_leaving = |region: &LeasedRegion| region.is_leaving() && !region.has_ended();
        let mut leaving = map.stripes(0, u64::MAX);
        leaving.retain(|member| is(*member, is_leaving));
        match map.redundancy().rows() {
            None => leaving,
            Some(rows) => rows.members_to_save_first(&leaving, |member| is(member, LeasedRegion::has_ended)),
        }
    }

    fn can_move_back(&self, extent: &Extent) -> bool {
        extent.region().is_overflow() && self.store.stock.is_to_move_back()
    }

    /// Moves one extent if it has to leave, if a late write may land on it, or if it can move back.
    pub(crate) async fn move_extent(&self, core: &SessionCore, stripe: u64) -> Result<(), FileError> {
        let may_move = |extent: &Arc<Extent>| is_to_move(extent) || self.can_move_back(extent);
        let Some(old) = self.map.read().extent(stripe).filter(may_move) else {
            return Ok(());
        };
        if let Some(rows) = self.rows() {
            return self.rebuild_extent(core, rows, stripe).await;
        }
        let fresh = match self.take_extent(stripe, Some(&old)).await {
            Err(FileError::NoSpace) if self.was_replaced(stripe, &old) => return Ok(()),
            taken => taken?,
        };
        let whole = Piece { stripe, start: 0, end: EXTENT_BYTES };
        let words = &self.store.words;
        let locks = Locks::<R>::take(words, core, &old, whole, 0..BLOCKS_PER_EXTENT).await?;
        let mut kept = [BlockWord::EMPTY; BLOCKS_PER_EXTENT as usize];
        for (block, word) in (0..).zip(&mut kept) {
            *word = locks.word(block);
        }
        let locks = R::move_keeps_locks().then_some(locks);
        if kept.iter().any(|word| !word.is_empty()) {
            self.copy(core, whole, &old, &fresh, &mut kept).await?;
        }
        for (block, word) in (0..).zip(kept) {
            words.store(words.place(&fresh, block), word);
        }
        // Unless the file was truncated meanwhile: then there is nothing to move.
        let _in_place = self.map.write().replace(stripe, &old, fresh);
        drop(locks); // last, so that a task that waits for one of them finds the new extent
        Ok(())
    }

    /// Copies the contents of an extent whose locks the caller holds. Blocks that do not match their words
    /// become lost.
    async fn copy(
        &self,
        core: &SessionCore,
        whole: Piece,
        old: &Extent,
        fresh: &Extent,
        kept: &mut [BlockWord],
    ) -> Result<(), FileError> {
        let start = whole.file_offset(0);
        let buffer = staging(core, EXTENT_BYTES as usize)?;
        let (buffer, read) = core.read(old, 0, buffer).await;
        read.map_err(|error| FileError::from_access(error, start))?;
        for (block, (word, data)) in (0..).zip(kept.iter_mut().zip(buffer.chunks_exact(BLOCK_BYTES))) {
            if !word.is_empty() && !word.is_lost() && !word.matches(R::checksum(data)) {
                let _logged = self.damaged(old, whole.file_offset(block * BLOCK_BYTES as u64));
                *word = word.lost();
            }
        }
        // No other task knows the fresh extent yet. If this process is killed now, its successor must not
        // reuse it.
        self.store.words.doubt(fresh);
        let (_, written) = core.write(fresh, 0, buffer).await;
        written.map_err(|error| FileError::from_access(error, start))?;
        self.store.words.clear(fresh);
        Ok(())
    }
}

fn is_to_move(extent: &Arc<Extent>) -> bool {
    let region = extent.region();
    (region.is_leaving() || extent.is_in_doubt()) && !region.has_ended()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_of_failures_is_reported_once() {
        assert_eq!(crate::tests::mover::warnings_of_three_failures(maintain), 1);
    }
}
