//! The words by which processes that map a region learn that their grant has ended or that the memory has
//! moved.
//!
//! One word per region and place of a grant. It holds a *stamp* while the grant may use the memory it was
//! handed, and anything else afterwards. Stamps never repeat, so that a client which missed several grants
//! cannot take a later one's stamp for its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_wire::MAX_GRANTS_PER_REGION;

use crate::memory::{MappedWord, SharedMemory, reopen_read_only};
use crate::stamp;

/// The value of a word that belongs to no grant; never a stamp.
const CLOSED: u64 = 0;

#[derive(Debug)]
pub(super) struct Words {
    page: SharedMemory,
    read_only: OwnedFd,
    last_stamp: AtomicU64,
}

impl Words {
    pub(super) fn create(regions: u32) -> io::Result<Self> {
        let bytes = Self::offset(regions.max(1), 0);
        let page = SharedMemory::create("farpool-words", bytes)?;
        page.mapping().prefault()?;
        let read_only = reopen_read_only(page.fd())?;
        Ok(Words { page, read_only, last_stamp: AtomicU64::new(CLOSED) })
    }

    /// Where a word lies, in bytes.
    pub(super) fn offset(region: u32, place: usize) -> u64 {
        (region as u64 * MAX_GRANTS_PER_REGION as u64 + place as u64) * 8
    }

    /// Puts a new stamp into a word: accesses under an older stamp no longer count.
    pub(super) fn stamp(&self, region: u32, place: usize) -> u64 {
        // Relaxed: it only has to be unique, and 2^64 stamps do not run out.
        let stamp = self.last_stamp.fetch_add(1, Ordering::Relaxed) + 1;
        self.set(region, place, stamp);
        stamp
    }

    pub(super) fn close(&self, region: u32, place: usize) {
        self.set(region, place, CLOSED);
    }

    /// To be passed after words were changed, and before the memory is read or anyone is told. Pairs with the
    /// barrier of a shared-memory client between its access and its check of the word: either the client sees
    /// the change, or all of its access is seen here.
    pub(super) fn barrier() {
        stamp::barrier::<MappedWord<'_>>();
    }

    /// A descriptor of the page, to hand out.
    pub(super) fn share(&self) -> io::Result<OwnedFd> {
        self.read_only.as_fd().try_clone_to_owned()
    }

    fn set(&self, region: u32, place: usize, value: u64) {
        stamp::change(&MappedWord { words: self.page.mapping(), offset: Self::offset(region, place) }, value);
    }
}
