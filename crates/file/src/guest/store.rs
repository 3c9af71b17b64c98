//! A store as a direct client (called *guest* in the code) sees it: the words, the table, and the regions
//! that it has used so far.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use farpool_fabric::{Clock, Peer};
use farpool_lease::Millis;
use farpool_pool::{Extent, LeaseKeeper, LeasedRegion, NodeState, OverflowRegion, RetryPolicy, Sign};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};
use rustix_futex_sync::RwLock;

use super::owner::GuestId;
use super::table::{DirectBytes, Place, Table};
use crate::blocks::BlockWords;
use crate::file_core::FileCore;
use crate::rules::Rules;
use crate::store::StoreCore;

/// How long an operation is tried again. The last try may have to wait for a connection, which takes less
/// than the owner's patience.
const TRY_WITHIN: Millis = Millis(1_000);

/// Most files of the overflow directory that a direct client has open: programs may need many descriptors for
/// themselves.
const MAX_FILES: usize = 64;

/// The memory of a store that a direct client gets, as duplicated descriptors.
pub struct GuestMemory<D> {
    /// The words of all blocks.
    pub words: D,
    /// Which operations are in progress, and until when regions may be used.
    pub table: D,
}

/// The facts about a region that a direct client gets.
#[derive(Clone)]
pub struct GuestRegion {
    /// Its id.
    pub id: RegionId,
    /// The epoch of its lease.
    pub epoch: Epoch,
    /// The key with which it is attached.
    pub key: AccessKey,
    /// How to reach its node.
    pub peer: Peer,
    /// The storage of a region of the overflow directory.
    pub storage: Option<Arc<dyn OverflowRegion>>,
}

/// Asks the owner for a region by its number; `None`: the owner gives no answer.
type AskOwner = Box<dyn Fn(u64) -> Option<GuestRegion> + Send + Sync>;

/// One direct client's view of a store.
pub struct GuestStore {
    pub(super) words: BlockWords,
    pub(super) table: Table,
    guest: GuestId,
    extents_per_region: u64,
    clock: Arc<dyn Clock + Send + Sync>,
    met: RwLock<Met>,
    ask: AskOwner,
}

/// Regions by number, and their nodes.
#[derive(Default)]
struct Met {
    regions: BTreeMap<u64, Arc<LeasedRegion>>,
    nodes: BTreeMap<NodeId, Arc<NodeState>>,
}

impl Met {
    fn add(&mut self, number: u64, told: GuestRegion) -> Arc<LeasedRegion> {
        let id = told.peer.node;
        let same = |known: &&Arc<NodeState>| !known.is_lost() && known.peer == told.peer;
        let node = self.nodes.get(&id).filter(same).cloned();
        let node = node.unwrap_or_else(|| Arc::new(NodeState::new(told.peer, String::new())));
        self.nodes.insert(id, node.clone());
        let region = match told.storage {
            Some(storage) => {
                self.close_one_file_if_full();
                LeasedRegion::overflow(told.id, told.epoch, told.key, node, storage)
            }
            // It may be used once the table says until when.
            None => LeasedRegion::new(told.id, told.epoch, told.key, node, 1),
        };
        let region = Arc::new(region);
        self.regions.insert(number, region.clone());
        region
    }

    /// Closes the file of the region with the lowest number if [`MAX_FILES`] are open. The owner can be asked
    /// for it again.
    fn close_one_file_if_full(&mut self) {
        let in_files = self.regions.iter().filter(|(_, region)| region.is_overflow());
        let open: Vec<u64> = in_files.map(|(number, _)| *number).collect();
        if open.len() >= MAX_FILES {
            self.regions.remove(&open[0]);
        }
    }
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
        ask: AskOwner,
    ) -> io::Result<Self> {
        if extents_per_region == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "regions without extents"));
        }
        Ok(GuestStore {
            words: BlockWords::open(&memory.words, guest.0)?,
            table: Table::open(&memory.table)?,
            guest,
            extents_per_region,
            clock,
            met: RwLock::default(),
            ask,
        })
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
        // Without waiting: a thread of the parent may have held the lock.
        if let Some(met) = self.met.try_read() {
            met.regions.values().filter_map(|region| region.storage()).for_each(|storage| storage.abandon());
        }
    }

    /// Closes the files of the overflow directory, because the owner has ended: their storage is freed only
    /// when every process has closed them. Not in the child of a fork, which must not drop what its parent
    /// uses.
    pub(super) fn close_files(&self) {
        if !self.words.is_abandoned() {
            self.met.write().regions.retain(|_, region| !region.is_overflow());
        }
    }

    /// The extent of a number, if its region may be used now.
    pub(super) fn extent(&self, number: u64) -> Option<Extent> {
        let (region, place) = (number / self.extents_per_region, number % self.extents_per_region);
        // Zero: only the owner can use it (`publish_region`).
        let term = self.table.region(region).filter(|term| term.usable_until_ms > 0)?;
        let is_lease = |id: RegionId, epoch: Epoch| id.node.0 == term.node && epoch.0 == term.epoch;
        let is_it = |known: &&Arc<LeasedRegion>| {
            is_lease(known.id, known.epoch) && !known.has_ended() && known.guests_may_use()
        };
        let known = self.met.read().regions.get(&region).filter(is_it).cloned();
        let known = match known {
            Some(known) => known,
            None => {
                let told = (self.ask)(region).filter(|told| is_lease(told.id, told.epoch))?;
                self.met.write().add(region, told)
            }
        };
        known.extend(term.usable_until_ms);
        known.check(self.now().0).ok()?;
        Some(Extent::of_guest(known, place as u32, number)).filter(|extent| self.words.covers(extent))
    }
}

/// A direct client neither leases regions nor gives them back. What it learns about nodes and leases stays in
/// the client.
impl LeaseKeeper for GuestStore {
    fn now(&self) -> Millis {
        Millis(self.clock.now_ns() / 1_000_000)
    }

    fn node_failed(&self, node: &NodeState, sign: Sign) -> bool {
        if sign != Sign::Closed {
            node.give_up();
        }
        node.is_lost()
    }

    fn node_answered(&self, _: &NodeState) {}

    /// Giving a node up costs nothing here: the direct client can ask the owner for the node again.
    fn patience_ended(&self, node: &NodeState) -> bool {
        node.give_up();
        true
    }

    fn lease_lost(&self, _: RegionId, _: Epoch) {}

    /// Few retries: the client can ask the owner instead, and the owner may be waiting for the operation.
    fn retries(&self) -> RetryPolicy {
        RetryPolicy { try_within: TRY_WITHIN, while_moved: Millis(0) }
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
        self.stock.region_bytes() / farpool_pool::EXTENT_BYTES
    }

    /// The region with a number, for a direct client that asks.
    pub fn region_of(&self, number: u64) -> Option<GuestRegion> {
        self.guests.publish(&self.stock);
        let held = self.stock.numbered_regions().into_iter().find(|held| held.number == number)?;
        if !held.region.guests_may_use() {
            return None;
        }
        let LeasedRegion { id, epoch, key, ref node, .. } = *held.region;
        Some(GuestRegion { id, epoch, key, peer: node.peer.clone(), storage: held.region.storage().cloned() })
    }

    /// How to reach a node that direct clients have learnt of; `None`: the store has no such node, or no
    /// longer.
    pub fn peer_of_guests(&self, node: NodeId, shm_socket: &Path) -> Option<Peer> {
        let is_it = |peer: &&Peer| peer.node == node && peer.shm_socket.as_deref() == Some(shm_socket);
        let regions = self.stock.numbered_regions();
        regions.iter().map(|held| &held.region.node.peer).find(is_it).cloned()
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

#[cfg(test)]
mod tests {
    use farpool_pool::{OVERFLOW_NODE, SharedFile};

    use super::*;

    #[test]
    fn at_most_max_files_of_the_overflow_directory_are_open_at_a_time() {
        let peer = Peer { node: OVERFLOW_NODE, tcp: None, verbs: None, shm_socket: None };
        let told = |index| {
            let file = std::fs::File::open("/dev/null").unwrap();
            GuestRegion {
                id: RegionId { node: OVERFLOW_NODE, index },
                epoch: Epoch(1),
                key: AccessKey::from_bytes([0; AccessKey::BYTES]),
                peer: peer.clone(),
                storage: Some(Arc::new(SharedFile::new(file.into()))),
            }
        };
        let far = GuestRegion { storage: None, ..told(0) };
        let mut met = Met::default();
        met.add(0, far);
        for number in 1..=3 * MAX_FILES as u64 {
            met.add(number, told(number as u32));
            assert!(met.regions.len() <= 1 + MAX_FILES && met.regions.contains_key(&number), "{number}");
        }
        assert!(met.regions.contains_key(&0), "far memory needs no file");
        assert_eq!(met.regions.len(), 1 + MAX_FILES);
    }
}
