//! The owner's side of direct clients (called *guests* in the code): which exist, which files they see, and
//! what they may still touch.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{Endpoint, SharedMemory, leaves_room};
use farpool_pool::{Extent, LeasedRegion, SessionCore, Stock};
use farpool_wire::BlockWord;
use rustix_futex_sync::Mutex;

use super::layout::Layout;
use super::table::{DirectBytes, Table};
use crate::blocks::BlockWords;
use crate::error::FileError;
use crate::file_core::FileCore;
use crate::rules::Rules;

/// How long the owner waits for direct clients to finish their operations. An operation takes at most a
/// node's deadline and a wait for locks. A direct client that takes longer was stopped.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
const LOOK_INTERVAL: Duration = Duration::from_micros(50);
/// How many times the owner checks before it sleeps between checks: most operations finish within
/// microseconds.
const EAGER_LOOKS: u32 = 200;

/// A direct client's number, by which it holds its locks. Never the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct GuestId(pub(crate) u16);

impl GuestId {
    /// The number as it is sent over a socket.
    pub fn number(self) -> u16 {
        self.0
    }

    /// The direct client with a number that was received over a socket; `None`: the number is out of range.
    pub fn from_number(number: u16) -> Option<Self> {
        (1..=BlockWord::MAX_GUEST).contains(&number).then_some(GuestId(number))
    }
}

/// All numbers of direct clients are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{} processes work on the files directly already; this one has to ask the kernel",
    BlockWord::MAX_GUEST
)]
pub struct TooManyGuests;

/// What direct clients see of a file.
pub(crate) struct Shared {
    pub(crate) layout: Layout,
    memory: SharedMemory,
    pub(crate) guests: Arc<Guests>,
}

impl Shared {
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }
}

/// All direct clients of a store.
pub(crate) struct Guests {
    table: Table,
    memory: SharedMemory,
    words: Arc<BlockWords>,
    /// Dropped extents that direct clients may still use, each with the epoch whose operations have to finish
    /// first.
    limbo: Mutex<Vec<(u64, Arc<Extent>)>>,
    known: Mutex<BTreeSet<GuestId>>,
    /// Held from the look at the regions until the table says what was seen, so that no earlier look
    /// overwrites a later one.
    publishing: Mutex<()>,
}

impl Guests {
    pub(crate) fn new(words: Arc<BlockWords>) -> io::Result<Self> {
        let (table, memory) = Table::create()?;
        Ok(Guests {
            table,
            memory,
            words,
            limbo: Mutex::default(),
            known: Mutex::default(),
            publishing: Mutex::default(),
        })
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// How many bytes direct clients have read and written without the kernel.
    pub(crate) fn moved(&self) -> DirectBytes {
        self.table.moved()
    }

    /// The memory that a file needs so that direct clients can be admitted to it.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for it.
    pub(crate) fn layout(self: &Arc<Self>) -> io::Result<Shared> {
        let (layout, memory) = Layout::create()?;
        if !leaves_room(memory.fd()) {
            return Err(rustix::io::Errno::MFILE.into());
        }
        Ok(Shared { layout, memory, guests: self.clone() })
    }

    pub(crate) fn add(&self) -> Result<GuestId, TooManyGuests> {
        let mut known = self.known.lock();
        let free = (1..=BlockWord::MAX_GUEST).map(GuestId).find(|guest| !known.contains(guest));
        let guest = free.ok_or(TooManyGuests)?;
        known.insert(guest);
        Ok(guest)
    }

    /// Forgets a dead direct client that has no lock in any file any more.
    pub(crate) fn remove(&self, guest: GuestId) {
        self.known.lock().remove(&guest);
    }

    /// Frees the places of a dead direct client, whose operations have ended.
    pub(crate) fn free_places_of(&self, guest: GuestId) {
        self.table.free_places_of(guest.0);
    }

    /// Keeps an extent until no direct client can be using it (G2).
    pub(crate) fn retire(&self, extent: Arc<Extent>) {
        // The epoch begins first: an operation that begins later does not find the extent, because the layout
        // no longer names it or the file is closed to direct clients.
        let epoch = self.table.begin_waiting();
        if !self.table.has_finished(epoch) {
            self.limbo.lock().push((epoch, extent));
            return;
        }
        self.let_go(&extent);
    }

    fn let_go(&self, extent: &Extent) {
        if self.words.is_doubted(extent) {
            extent.doubt();
        }
    }

    /// Frees the extents that no direct client can be using any more.
    pub(crate) fn collect(&self) {
        let has_finished = |(epoch, _): &mut (u64, Arc<Extent>)| self.table.has_finished(*epoch);
        let unused: Vec<_> = self.limbo.lock().extract_if(.., has_finished).collect();
        unused.iter().for_each(|(_, extent)| self.let_go(extent)); // and then dropped, without the lock
    }

    /// Waits until every operation of direct clients that is now in progress has finished.
    pub(crate) async fn quiesce(&self, endpoint: &Endpoint) -> Result<(), FileError> {
        let epoch = self.table.begin_waiting();
        let give_up_at = endpoint.now_ns() + PATIENCE.as_nanos() as u64;
        let mut looks = 0;
        while !self.table.has_finished(epoch) {
            if endpoint.now_ns() > give_up_at {
                return Err(FileError::GuestAtWork);
            }
            looks += 1;
            if looks < EAGER_LOOKS { endpoint.yield_now().await } else { endpoint.sleep(LOOK_INTERVAL).await }
        }
        Ok(())
    }

    /// Tells direct clients until when regions may be used.
    pub(crate) fn publish(&self, stock: &Stock) {
        let _publishing = self.publishing.lock();
        stock.numbered_regions().iter().for_each(|held| self.table.publish_region(held.number, &held.region));
    }

    /// Tells direct clients until when this region may be used: never if they must not use it.
    pub(crate) fn publish_region(&self, number: u64, region: &LeasedRegion) {
        let _publishing = self.publishing.lock();
        self.table.publish_region(number, region);
    }
}

/// Keeps direct clients out of a file; lets them in again when dropped.
pub(crate) struct Alone(Arc<Shared>);

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.layout.resume();
    }
}

impl<R: Rules> FileCore<R> {
    /// Creates the layout that direct clients see. The file stays closed to them until it is
    /// [opened](Self::open_to_guests).
    ///
    /// # Errors
    /// When there is no memory or no descriptor for it.
    pub(crate) fn share(&self) -> io::Result<Arc<Shared>> {
        if let Some(shared) = self.map.read().shared() {
            return Ok(shared.clone());
        }
        let fresh = Arc::new(self.store.guests.layout()?);
        let mut map = self.map.write();
        if map.shared().is_none() {
            map.share(fresh);
        }
        Ok(map.shared().expect("shared just now, or by another task").clone())
    }

    /// Opens the file to direct clients.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for what they share.
    pub fn open_to_guests(&self) -> io::Result<()> {
        let shared = self.share()?;
        if !self.is_open.swap(true, std::sync::atomic::Ordering::SeqCst) {
            shared.layout.set_open(true);
        }
        Ok(())
    }

    /// Closes the file to direct clients: when this returns, none of their operations is in progress, and
    /// none begins.
    ///
    /// # Errors
    /// When a direct client does not finish its operation; the file is closed to direct clients all the same.
    pub async fn close_to_guests(&self, core: &SessionCore) -> Result<(), FileError> {
        let Some(shared) = self.map.read().shared().cloned() else { return Ok(()) };
        if self.is_open.swap(false, std::sync::atomic::Ordering::SeqCst) {
            shared.layout.set_open(false);
        }
        shared.guests.quiesce(core.endpoint()).await
    }

    /// Keeps direct clients out for the caller's operation (G3).
    pub(crate) async fn without_guests(&self, core: &SessionCore) -> Result<Option<Alone>, FileError> {
        let Some(shared) = self.map.read().shared().cloned() else { return Ok(None) };
        shared.layout.pause();
        let alone = Alone(shared);
        alone.0.guests.quiesce(core.endpoint()).await?;
        Ok(Some(alone))
    }

    /// Allows direct clients to make the file longer (G7). The file is already open to them.
    pub fn let_guests_grow(&self) {
        if let Some(shared) = self.map.read().shared() {
            shared.layout.let_grow(true);
        }
    }

    /// Ends the growth by direct clients: from now on only the owner changes the size. This does not wait for
    /// direct clients: a client whose write is too late to raise the size has not acknowledged that write,
    /// and asks the owner.
    pub fn end_growth_by_guests(&self) {
        if let Some(shared) = self.map.read().shared()
            && R::takes_growth_back()
        {
            shared.layout.let_grow(false);
        }
    }

    /// When a direct client last wrote, in nanoseconds since 1970; `None`: not since the last call.
    pub fn take_guests_written_ns(&self) -> Option<u64> {
        let written = self.map.read().shared().map(|shared| shared.layout.take_written());
        written.filter(|&ns| ns != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use farpool_fabric::{Peer, block_on};
    use farpool_pool::NodeState;
    use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};
    use futures_util::poll;

    use super::*;
    use crate::tests::{Stopped, endpoint};

    fn extent(number: u64) -> Arc<Extent> {
        let peer = Peer { node: NodeId(1), tcp: None, verbs: None, shm_socket: None };
        let id = RegionId { node: NodeId(1), index: 0 };
        let node = Arc::new(NodeState::new(peer, String::new()));
        let region =
            Arc::new(LeasedRegion::new(id, Epoch(1), AccessKey::from_bytes([0; 16]), node, u64::MAX));
        Arc::new(Extent::of_guest(region, 0, number))
    }

    #[test]
    fn a_dropped_extent_is_kept_while_a_guest_may_be_using_it() {
        let (words, _memory) = BlockWords::create().unwrap();
        let guests = Guests::new(Arc::new(words)).unwrap();
        let place = guests.table.take_place(1).unwrap();
        let (one, other) = (extent(1), extent(2));
        guests.table.enter(place);
        guests.retire(one.clone());
        guests.collect();
        assert_eq!(Arc::strong_count(&one), 2, "an operation that began before is in progress");
        guests.table.leave(place);
        guests.table.enter(place);
        guests.retire(other.clone());
        guests.collect();
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&other)), (1, 2));
        guests.free_places_of(GuestId(1));
        guests.collect();
        assert_eq!(Arc::strong_count(&other), 1, "the dead are not waited for");
    }

    #[test]
    fn an_operation_that_ends_soon_is_waited_for_without_a_sleep() {
        let (words, _memory) = BlockWords::create().unwrap();
        let guests = Guests::new(Arc::new(words)).unwrap();
        let place = guests.table.take_place(1).unwrap();
        let endpoint = endpoint(Stopped);
        guests.table.enter(place);
        block_on(&endpoint, async {
            let mut waiting = pin!(guests.quiesce(&endpoint));
            assert!(poll!(&mut waiting).is_pending());
            guests.table.leave(place);
            assert!(poll!(&mut waiting).is_ready());
        });
    }

    #[test]
    fn numbers_of_guests_are_given_out_once_at_a_time() {
        let (words, _memory) = BlockWords::create().unwrap();
        let guests = Guests::new(Arc::new(words)).unwrap();
        let all: BTreeSet<_> = (0..BlockWord::MAX_GUEST).map(|_| guests.add().unwrap()).collect();
        assert_eq!(all.len(), usize::from(BlockWord::MAX_GUEST));
        assert_eq!(guests.add(), Err(TooManyGuests));
        guests.remove(GuestId(7));
        assert_eq!(guests.add(), Ok(GuestId(7)));
    }
}
