//! The regions of an owner, as one of its direct clients (called *guests* in the code) sees them.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use farpool_fabric::{Clock, Peer};
use farpool_lease::Millis;
use farpool_wire::control;
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};
use rustix_futex_sync::RwLock;

use super::terms::Terms;
use crate::giving_up::Sign;
use crate::overflow::{OVERFLOW_NODE, OverflowRegion, SharedFile};
use crate::region::{LeasedRegion, NodeState};
use crate::space::Extent;
use crate::stock::{LeaseKeeper, NumberedRegion, RetryPolicy};

/// How long an operation is tried again. The last try may have to wait for a connection, which takes less
/// than an owner waits for its direct clients.
const TRY_WITHIN: Millis = Millis(1_000);

/// Most files of the overflow directory that a direct client has open: programs may need many descriptors for
/// themselves.
const MAX_FILES: usize = 64;

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

/// Asks the owner for the region with a number. `None`: the owner does not answer, or gives no such region.
pub type RequestRegion = Box<dyn Fn(u64) -> Option<GuestRegion> + Send + Sync>;

/// The regions that a direct client has used so far.
pub struct GuestRegions {
    terms: Terms,
    extents_per_region: u64,
    clock: Arc<dyn Clock + Send + Sync>,
    met: RwLock<Met>,
    ask: RequestRegion,
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

impl GuestRegions {
    /// The regions whose terms lie in this table. `None`: `extents_per_region` is zero.
    pub fn new(
        terms: Terms,
        extents_per_region: u64,
        clock: Arc<dyn Clock + Send + Sync>,
        ask: RequestRegion,
    ) -> Option<Self> {
        let regions = GuestRegions { terms, extents_per_region, clock, met: RwLock::default(), ask };
        (extents_per_region > 0).then_some(regions)
    }

    /// The extent with this number, if its region may be used now.
    pub fn extent(&self, number: u64) -> Option<Extent> {
        let (region, place) = (number / self.extents_per_region, number % self.extents_per_region);
        // `None`: only the owner can use the region.
        let term = self.terms.find(region)?;
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
        Some(Extent::of_guest(known, place as u32, number))
    }

    /// For the child of a fork: closes its copies of files, and touches nothing that the parent still uses.
    pub fn abandon(&self) {
        // Without waiting: a thread of the parent may have held the lock.
        if let Some(met) = self.met.try_read() {
            met.regions.values().filter_map(|region| region.storage()).for_each(|storage| storage.abandon());
        }
    }

    /// Closes the files of the overflow directory, because the owner has ended: their storage is freed only
    /// when every process has closed them. Not to be called in the child of a fork, which must not drop what
    /// its parent uses.
    pub fn close_files(&self) {
        self.met.write().regions.retain(|_, region| !region.is_overflow());
    }
}

/// Rule D3.
impl LeaseKeeper for GuestRegions {
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

impl GuestRegion {
    /// The region with a number among those held, for a direct client that asks. `None`: there is none, or
    /// direct clients must not use it.
    pub fn find(held: &[NumberedRegion], number: u64) -> Option<Self> {
        let region = &held.iter().find(|held| held.number == number)?.region;
        region.guests_may_use().then(|| GuestRegion {
            id: region.id,
            epoch: region.epoch,
            key: region.key,
            peer: region.node.peer.clone(),
            storage: region.storage().cloned(),
        })
    }

    /// The region as a message. The caller sends the [file](Self::file) of a region of the overflow directory
    /// with it.
    pub fn to_wire(&self) -> control::GuestRegion {
        control::GuestRegion {
            node: self.peer.node.0,
            index: self.id.index,
            epoch: self.epoch.0,
            key: self.key.as_bytes().to_vec(),
            tcp: self.peer.tcp.map(|address| address.to_string()).unwrap_or_default(),
            shm_socket: self
                .peer
                .shm_socket
                .as_ref()
                .map(|path| path.display().to_string())
                .unwrap_or_default(),
        }
    }

    /// The file of a region of the overflow directory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.storage.as_ref()?.file()
    }

    /// The region in a message, with the file that came with it; `None`: the message is invalid.
    pub fn from_wire(wire: &control::GuestRegion, file: Option<OwnedFd>) -> Option<Self> {
        let node = NodeId(wire.node);
        let storage: Option<Arc<dyn OverflowRegion>> = match (node == OVERFLOW_NODE, file) {
            (true, Some(file)) => Some(Arc::new(SharedFile::new(file))),
            (false, None) => None,
            _ => return None,
        };
        let peer = Peer {
            node,
            tcp: wire.tcp.parse().ok(),
            verbs: None,
            shm_socket: (!wire.shm_socket.is_empty()).then(|| PathBuf::from(&wire.shm_socket)),
        };
        let id = RegionId { node, index: wire.index };
        let key = AccessKey::from_slice(&wire.key)?;
        Some(GuestRegion { id, epoch: Epoch(wire.epoch), key, peer, storage })
    }
}

#[cfg(test)]
mod tests {
    use farpool_fabric::{MonotonicClock, SharedMemory};

    use super::*;
    use crate::session::scripted::{self, World};

    /// What the owner tells of a region in far memory, on a node that is reached like this.
    fn told(peer: &Peer, index: u32) -> GuestRegion {
        GuestRegion {
            id: RegionId { node: peer.node, index },
            epoch: Epoch(1),
            key: AccessKey::from_bytes([0; AccessKey::BYTES]),
            peer: peer.clone(),
            storage: None,
        }
    }

    #[test]
    fn a_direct_client_uses_a_region_until_its_time_ends_by_the_clock() {
        let memory = SharedMemory::create("terms", Terms::bytes(1)).unwrap();
        let terms = || Terms::new(memory.mapping().clone(), 0, 1);
        let node = scripted::node(1);
        let of_owner = told(&node.peer, 0);
        let usable_until_ms = 1_234;
        terms()
            .publish(0, &LeasedRegion::new(of_owner.id, of_owner.epoch, of_owner.key, node, usable_until_ms));
        let clock = World::new();
        let request = Box::new(move |_| Some(of_owner.clone()));
        let regions = GuestRegions::new(terms(), 1, Arc::new(clock.clone()), request).unwrap();
        clock.advance_to(Millis(usable_until_ms - 1));
        assert!(regions.extent(0).is_some());
        clock.advance_to(Millis(usable_until_ms));
        assert!(regions.extent(0).is_none());
    }

    #[test]
    fn at_most_max_files_of_the_overflow_directory_are_open_at_a_time() {
        let peer = Peer { node: OVERFLOW_NODE, tcp: None, verbs: None, shm_socket: None };
        let in_file = |index| {
            let file = std::fs::File::open("/dev/null").unwrap();
            GuestRegion { storage: Some(Arc::new(SharedFile::new(file.into()))), ..told(&peer, index) }
        };
        let mut met = Met::default();
        met.add(0, told(&peer, 0));
        for number in 1..=3 * MAX_FILES as u64 {
            met.add(number, in_file(number as u32));
            assert!(met.regions.len() <= 1 + MAX_FILES && met.regions.contains_key(&number), "{number}");
        }
        assert!(met.regions.contains_key(&0), "far memory needs no file");
        assert_eq!(met.regions.len(), 1 + MAX_FILES);
    }

    #[test]
    fn regions_of_a_node_share_what_is_known_of_it_until_it_is_given_up_or_reached_elsewhere() {
        let here = scripted::node(1).peer.clone();
        let elsewhere = Peer { shm_socket: Some("/run/node".into()), ..here.clone() };
        let mut met = Met::default();
        let first = met.add(0, told(&here, 0)).node.clone();
        assert!(Arc::ptr_eq(&first, &met.add(1, told(&here, 1)).node));
        let second = met.add(2, told(&elsewhere, 2)).node.clone();
        assert_eq!((&first.peer, &second.peer), (&here, &elsewhere));
        second.give_up();
        let third = met.add(3, told(&elsewhere, 3)).node.clone();
        assert!(!third.is_lost(), "the owner has named the node since it was given up");
        assert!(Arc::ptr_eq(&third, &met.add(4, told(&elsewhere, 4)).node));
    }

    #[test]
    fn a_direct_client_gives_a_node_up_unless_only_a_connection_has_ended() {
        let memory = SharedMemory::create("terms", Terms::bytes(1)).unwrap();
        let terms = Terms::new(memory.mapping().clone(), 0, 1);
        let regions = GuestRegions::new(terms, 1, Arc::new(MonotonicClock), Box::new(|_| None)).unwrap();
        for (sign, is_given_up) in [(Sign::Closed, false), (Sign::Silent, true), (Sign::NotListening, true)] {
            let node = scripted::node(1);
            assert_eq!((regions.node_failed(&node, sign), node.is_lost()), (is_given_up, is_given_up));
        }
        let lost = scripted::node(1);
        lost.give_up();
        assert!(regions.node_failed(&lost, Sign::Closed), "it was given up before");
    }
}
