//! A store as a direct client (called *guest* in the code) sees it: the words, the table, and the
//! regions.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use farpool_fabric::Clock;
use farpool_pool::Extent;
use farpool_pool::direct::{GuestRegion, GuestRegions, RequestRegion};

use super::owner::GuestId;
use super::table::{DirectBytes, Place, Table};
use crate::blocks::BlockWords;
use crate::file_core::FileCore;
use crate::rules::Rules;
use crate::store::StoreCore;

/// The memory of a store that a direct client gets, as duplicated descriptors.
pub struct GuestMemory<D> {
    /// The words of all blocks.
    pub words: D,
    /// Which operations are in progress, and until when regions may be used.
    pub table: D,
}

/// One direct client's view of a store.
pub struct GuestStore {
    pub(super) words: BlockWords,
    pub(super) table: Table,
    guest: GuestId,
    regions: Arc<GuestRegions>,
}

/// A place in the table for one thread of a direct client; freed when dropped.
pub struct GuestPlace {
    store: Arc<GuestStore>,
    pub(super) place: Place,
}

/// An operation in progress. The owner waits for it.
pub(super) struct AtWork<'a> {
    place: &'a GuestPlace,
}

impl GuestStore {
    /// A store as `guest` sees it.
    ///
    /// # Errors
    /// When the memory cannot be mapped or is not what it should be.
    pub fn new(
        guest: GuestId,
        memory: &GuestMemory<OwnedFd>,
        extents_per_region: u64,
        clock: Arc<dyn Clock + Send + Sync>,
        ask: RequestRegion,
    ) -> io::Result<Self> {
        let (words, table) = (BlockWords::open(&memory.words, guest.0)?, Table::open(&memory.table)?);
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "regions without extents");
        let regions = GuestRegions::new(table.terms(), extents_per_region, clock, ask).ok_or_else(invalid)?;
        Ok(GuestStore { words, table, guest, regions: Arc::new(regions) })
    }

    /// The regions that this client has used so far. Its sessions ask them whether nodes and leases still
    /// hold.
    pub fn regions(&self) -> &Arc<GuestRegions> {
        &self.regions
    }

    /// A place for the calling thread; `None`: there are too many threads.
    pub fn place(self: &Arc<Self>) -> Option<GuestPlace> {
        let place = self.table.take_place(self.guest.0)?;
        Some(GuestPlace { store: self.clone(), place })
    }

    /// From now on this view of the store changes no shared memory: this is the child of a fork, or the view
    /// simulates a process that died.
    pub fn abandon(&self) {
        self.words.abandon();
        self.table.abandon();
        self.regions.abandon();
    }

    /// Closes the files of the overflow directory, because the owner has ended: their storage is freed only
    /// when every process has closed them. Does nothing in the child of a fork, which must not drop what its
    /// parent uses.
    pub(super) fn close_files(&self) {
        if !self.words.is_abandoned() {
            self.regions.close_files();
        }
    }

    /// The extent of a number, if its region may be used now.
    pub(super) fn extent(&self, number: u64) -> Option<Extent> {
        self.regions.extent(number).filter(|extent| self.words.covers(extent))
    }
}

impl GuestPlace {
    pub(super) fn enter(&self) -> AtWork<'_> {
        self.store.table.enter(self.place);
        AtWork { place: self }
    }
}

impl AtWork<'_> {
    /// Counts the bytes that the operation has moved.
    pub(super) fn note(&self, moved: DirectBytes) {
        self.place.store.table.note(self.place.place, moved);
    }
}

impl Drop for GuestPlace {
    fn drop(&mut self) {
        self.store.table.free_place(self.place);
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.place.store.table.leave(self.place.place);
    }
}

impl<R: Rules> StoreCore<R> {
    /// Admits a direct client, which then gets [`guest_memory`](Self::guest_memory).
    ///
    /// # Errors
    /// When there are too many.
    pub fn add_guest(&self) -> Result<GuestId, super::TooManyGuests> {
        self.guests.publish(&self.stock);
        self.guests.add()
    }

    /// The memory that direct clients get.
    pub fn guest_memory(&self) -> GuestMemory<BorrowedFd<'_>> {
        GuestMemory { words: self.words_memory.fd(), table: self.guests.memory() }
    }

    /// Extents of a region, as direct clients count them.
    pub fn extents_per_region(&self) -> u64 {
        self.stock.extents_per_region()
    }

    /// The region with a number, for a direct client that asks.
    pub fn region_of(&self, number: u64) -> Option<GuestRegion> {
        self.guests.publish(&self.stock);
        GuestRegion::find(&self.stock.numbered_regions(), number)
    }

    /// Publishes until when regions may be used, and frees extents that direct clients no longer use. Call it
    /// several times in the term of a lease.
    pub fn maintain_guests(&self) {
        self.guests.publish(&self.stock);
        self.guests.collect();
    }
}

impl<R: Rules> FileCore<R> {
    /// The memory through which direct clients see the file, to be handed to one of them.
    ///
    /// # Errors
    /// When there is no memory or no descriptor for it.
    pub fn guest_memory(&self) -> io::Result<OwnedFd> {
        self.share()?.memory().try_clone_to_owned()
    }
}
