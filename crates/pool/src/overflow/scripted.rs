//! Overflow in memory, which tests can make full, broken, or mute.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, LocalBoxFuture, pending, ready};
use rustix_futex_sync::Mutex;

use super::{Overflow, OverflowRegion};

/// What the storage does with transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mood {
    Works,
    Fails,
    Hangs,
    /// The process no longer has the storage.
    IsGone,
}

/// A giver of regions in memory.
#[derive(Debug)]
pub(crate) struct Scripted {
    /// Regions that it still gives.
    pub(crate) left: Arc<AtomicU64>,
    pub(crate) mood: Arc<Mutex<Mood>>,
    bytes: u64,
}

#[derive(Debug)]
struct InMemory {
    memory: Mutex<Vec<u8>>,
    left: Arc<AtomicU64>,
    mood: Arc<Mutex<Mood>>,
}

impl Scripted {
    /// It gives so many regions of `bytes` each.
    pub(crate) fn new(regions: u64, bytes: u64) -> Arc<Self> {
        let left = Arc::new(AtomicU64::new(regions));
        Arc::new(Scripted { left, mood: Arc::new(Mutex::new(Mood::Works)), bytes })
    }
}

impl Overflow for Scripted {
    fn allocate(&self, _: u32, bytes: u64) -> BoxFuture<'_, Option<Arc<dyn OverflowRegion>>> {
        if self.left.load(Ordering::Relaxed) == 0 {
            return ready(None).boxed();
        }
        self.left.fetch_sub(1, Ordering::Relaxed); // tests run on one thread
        let memory = Mutex::new(vec![0; bytes as usize]);
        let region = InMemory { memory, left: self.left.clone(), mood: self.mood.clone() };
        ready(Some(Arc::new(region) as _)).boxed()
    }

    fn find(&self, _: u32, _: u64) -> io::Result<Option<Arc<dyn OverflowRegion>>> {
        Ok(None)
    }

    fn room_bytes(&self) -> u64 {
        self.left.load(Ordering::Relaxed) * self.bytes
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }
}

impl InMemory {
    fn transfer<'a>(&'a self, move_bytes: impl FnOnce() + 'a) -> LocalBoxFuture<'a, io::Result<()>> {
        match *self.mood.lock() {
            Mood::Works => {
                move_bytes();
                ready(Ok(())).boxed_local()
            }
            Mood::Fails => ready(Err(io::ErrorKind::Other.into())).boxed_local(),
            Mood::Hangs => pending().boxed_local(),
            Mood::IsGone => ready(Err(io::ErrorKind::NotConnected.into())).boxed_local(),
        }
    }
}

impl OverflowRegion for InMemory {
    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        let from = offset as usize..offset as usize + to.len();
        self.transfer(move || to.copy_from_slice(&self.memory.lock()[from]))
    }

    fn discard(&self) {}

    fn guests_may_use(&self) -> bool {
        true
    }

    fn log_failure(&self, _: &str) {}

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        let at = offset as usize..offset as usize + data.len();
        self.transfer(move || self.memory.lock()[at].copy_from_slice(data))
    }
}
