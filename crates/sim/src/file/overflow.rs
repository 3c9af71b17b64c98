//! The overflow directory of a run: a disk whose transfers take time, and whose writes may hang and land
//! late. If there are successors, regions stay until they are discarded.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use farpool_fabric::sim::{HostId, Random, World};
use farpool_pool::{Overflow, OverflowRegion};
use farpool_wire::BLOCK_BYTES;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, LocalBoxFuture, pending, ready};

use super::broken::{OVERFLOW_EMPTY, OVERFLOW_NOT_FOUND, OVERFLOW_UNRESERVED, OVERFLOW_UNWRITTEN};
use super::worlds::DiskKind;

/// How long a transfer takes, in microseconds.
const TRANSFER_US: std::ops::Range<u64> = 100..30_000;
/// The share of transfers before which a late write lands, in thousandths.
const LANDING_PERMILLE: u32 = 300;

thread_local! {
    /// The world of this thread's run, in which transfers take their time, and the owner's machine. It is not
    /// a field of `Disk`, which must be `Send`, as a world is not.
    static HERE: RefCell<Option<(World, HostId)>> = const { RefCell::new(None) };
}

/// The disk.
#[derive(Debug)]
pub(super) struct Disk(Mutex<State>);

#[derive(Debug)]
struct State {
    kind: DiskKind,
    mutation: Option<&'static str>,
    random: Random,
    /// Regions with storage that could still be given.
    left: u64,
    regions: BTreeMap<u32, Weak<Region>>,
    /// The regions that a successor finds; `None`: there are no successors.
    kept: Option<BTreeMap<u32, Arc<Region>>>,
}

/// A region's memory, and the writes that were given up and have not landed.
#[derive(Debug)]
struct Region {
    disk: Arc<Disk>,
    index: u32,
    is_reserved: bool,
    contents: Mutex<(Vec<u8>, Vec<Landing>)>,
}

/// A write's offset and data.
type Landing = (usize, Vec<u8>);

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    pub(super) fn new(
        (world, host): (&World, HostId),
        kind: DiskKind,
        mutation: Option<&'static str>,
        random: Random,
        has_successors: bool,
    ) -> Arc<Disk> {
        HERE.set(Some((world.clone(), host)));
        let left = kind.regions.unwrap_or(u64::MAX);
        let (regions, kept) = (BTreeMap::new(), has_successors.then(BTreeMap::new));
        Arc::new(Disk(Mutex::new(State { kind, mutation, random, left, regions, kept })))
    }

    /// Drops all kept regions at the end of the run: they refer to the disk, which would never be freed.
    pub(super) fn clear(&self) {
        let kept = locked(&self.0).kept.take();
        drop(kept); // outside of the lock, which dropping a region takes
    }

    /// The indices of the regions that a successor finds.
    pub(super) fn kept(&self) -> Vec<u32> {
        locked(&self.0).kept.iter().flat_map(BTreeMap::keys).copied().collect()
    }

    /// What lies in a block of a region now.
    pub(super) fn contents(&self, region: u32, offset: u64) -> Option<Vec<u8>> {
        let region = locked(&self.0).regions.get(&region)?.upgrade()?;
        let contents = locked(&region.contents);
        Some(contents.0[offset as usize..][..BLOCK_BYTES].to_vec())
    }

    /// The storage of a region, as a direct client has it.
    pub(super) fn shared(&self, region: u32) -> Option<Arc<dyn OverflowRegion>> {
        Some(Arc::new(SharedRegion(locked(&self.0).regions.get(&region)?.clone())))
    }

    fn is(&self, mutation: &str) -> bool {
        locked(&self.0).mutation == Some(mutation)
    }

    /// Lets the time of one transfer pass.
    async fn take_time(&self) {
        let time_us = TRANSFER_US.start + locked(&self.0).random.below(TRANSFER_US.end - TRANSFER_US.start);
        let here = HERE.with_borrow(|here| here.clone());
        if let Some((world, host)) = here {
            world.sleep_by(host, Duration::from_micros(time_us)).await;
        }
    }
}

/// The disk as the pool has it.
#[derive(Debug)]
pub(super) struct Giver(pub(super) Arc<Disk>);

impl Overflow for Giver {
    fn allocate(&self, index: u32, bytes: u64) -> BoxFuture<'_, Option<Arc<dyn OverflowRegion>>> {
        let unreserved = self.0.is(OVERFLOW_UNRESERVED);
        let mut state = locked(&self.0.0);
        let is_reserved = state.left > 0;
        if !is_reserved && !unreserved {
            return ready(None).boxed();
        }
        state.left = state.left.saturating_sub(1);
        let contents = Mutex::new((vec![0; bytes as usize], Vec::new()));
        let region = Arc::new(Region { disk: self.0.clone(), index, is_reserved, contents });
        state.regions.insert(index, Arc::downgrade(&region));
        let namesake = state.kept.as_mut().and_then(|kept| kept.insert(index, region.clone()));
        drop(state); // dropping a region locks it again
        assert!(namesake.is_none(), "two regions have one name");
        ready(Some(region as _)).boxed()
    }

    fn find(&self, index: u32, _: u64) -> io::Result<Option<Arc<dyn OverflowRegion>>> {
        if self.0.is(OVERFLOW_NOT_FOUND) {
            return Ok(None);
        }
        let found = locked(&self.0.0).kept.as_ref().and_then(|kept| kept.get(&index)).cloned();
        if let Some(region) = found.as_ref().filter(|_| self.0.is(OVERFLOW_EMPTY)) {
            locked(&region.contents).0.fill(0);
        }
        Ok(found.map(|region| region as _))
    }

    fn room_bytes(&self) -> u64 {
        0 // nobody asks for the size of the pool here
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut state = locked(&self.disk.0);
        state.left = state.left.saturating_add(u64::from(self.is_reserved));
    }
}

impl Region {
    /// Lets the oldest late write land, perhaps.
    fn land(&self) {
        if locked(&self.disk.0).random.chance(LANDING_PERMILLE) {
            let mut contents = locked(&self.contents);
            if !contents.1.is_empty() {
                let (at, data) = contents.1.remove(0);
                contents.0[at..at + data.len()].copy_from_slice(&data);
            }
        }
    }
}

/// A write in progress. If it is given up, or its process dies, it may land later.
struct Unfinished<'a> {
    region: &'a Region,
    at: usize,
    data: &'a [u8],
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        locked(&self.region.contents).1.push((self.at, self.data.to_vec()));
    }
}

impl OverflowRegion for Region {
    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            self.disk.take_time().await;
            self.land();
            to.copy_from_slice(&locked(&self.contents).0[offset as usize..][..to.len()]);
            Ok(())
        }
        .boxed_local()
    }

    /// Kept regions are not, as files with names are not.
    fn guests_may_use(&self) -> bool {
        locked(&self.disk.0).kept.is_none()
    }

    fn discard(&self) {
        let discarded = locked(&self.disk.0).kept.as_mut().and_then(|kept| kept.remove(&self.index));
        drop(discarded); // the caller has another reference
    }

    fn log_failure(&self, _: &str) {}

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            let at = offset as usize;
            if self.disk.is(OVERFLOW_UNWRITTEN) {
                locked(&self.contents).1.push((at, data.to_vec()));
                return Ok(());
            }
            if !self.is_reserved {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let hangs = {
                let mut state = locked(&self.disk.0);
                let permille = state.kind.hang_permille;
                state.random.chance(permille)
            };
            let unfinished = Unfinished { region: self, at, data };
            if hangs {
                pending::<()>().await;
            }
            self.disk.take_time().await;
            std::mem::forget(unfinished); // it is carried out here, so nothing lands later
            self.land();
            locked(&self.contents).0[at..at + data.len()].copy_from_slice(data);
            Ok(())
        }
        .boxed_local()
    }
}

/// A region as a direct client has it: its process does the transfers itself, so a write ends with the
/// process, perhaps in the middle. Once the owner has freed the region, nothing is there: what is written is
/// lost.
#[derive(Debug)]
struct SharedRegion(Weak<Region>);

impl SharedRegion {
    /// Lets the time of a transfer pass. Returns whether it was carried out.
    async fn transfer(&self, act: impl FnOnce(&mut [u8])) -> bool {
        let Some(disk) = self.0.upgrade().map(|region| region.disk.clone()) else { return false };
        disk.take_time().await;
        let Some(region) = self.0.upgrade() else { return false };
        act(&mut locked(&region.contents).0);
        true
    }
}

impl OverflowRegion for SharedRegion {
    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            let at = offset as usize..offset as usize + to.len();
            let is_read = self.transfer(|contents| to.copy_from_slice(&contents[at])).await;
            if is_read { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        }
        .boxed_local()
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            let (first, second) = data.split_at(data.len() / 2);
            let middle = offset as usize + first.len();
            for (at, part) in [(offset as usize, first), (middle, second)] {
                self.transfer(|contents| contents[at..at + part.len()].copy_from_slice(part)).await;
            }
            Ok(())
        }
        .boxed_local()
    }

    fn discard(&self) {}

    fn guests_may_use(&self) -> bool {
        true
    }

    fn log_failure(&self, _: &str) {}
}
