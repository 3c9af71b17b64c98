//! What all files of a process share: the pool, and the table of block words.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use farpool_pool::{Capacity, Extent, Pool, Session};
use parking_lot::Mutex;

use crate::blocks::BlockWords;
use crate::error::FileError;
use crate::file::{FarFile, FileInner};
use crate::moving::Mover;

/// Makes files of far memory. Clones share it.
#[derive(Clone)]
pub struct FileStore {
    // Dropped first: it has a share of the rest.
    _mover: Arc<Mover>,
    pub(crate) shared: Arc<StoreShared>,
}

pub(crate) struct StoreShared {
    pub(crate) pool: Pool,
    pub(crate) words: BlockWords,
    /// Files start on different nodes, so that many small ones spread as well as a large one.
    next_start: AtomicU64,
    /// Every file that there is, and some that were.
    files: Mutex<Vec<Weak<FileInner>>>,
}

impl FileStore {
    /// A store on a pool. While it lives, its files are moved out of regions that are being taken back.
    ///
    /// # Errors
    /// When the table of block words cannot be made, or no thread.
    pub fn new(pool: Pool) -> io::Result<FileStore> {
        let words = BlockWords::create()?;
        let (next_start, files) = (AtomicU64::new(0), Mutex::default());
        let shared = Arc::new(StoreShared { pool, words, next_start, files });
        let mover = Arc::new(Mover::start(shared.clone())?);
        Ok(FileStore { _mover: mover, shared })
    }

    /// An empty file; it takes far memory as it is written. Dropping its last handle gives all back.
    pub fn create(&self) -> FarFile {
        let start = self.shared.next_start.fetch_add(1, Ordering::Relaxed); // only spreads: pairs with nothing
        FarFile::new(self.shared.clone(), start)
    }

    /// Size of the pool for this owner.
    pub fn capacity(&self) -> Capacity {
        self.shared.pool.capacity()
    }

    /// A session for one thread at a time.
    pub fn session(&self) -> Session {
        self.shared.pool.session()
    }
}

impl StoreShared {
    pub(crate) fn register(&self, file: &Arc<FileInner>) {
        let mut files = self.files.lock();
        if files.len() == files.capacity() {
            files.retain(|file| file.strong_count() > 0); // once for each doubling
        }
        files.push(Arc::downgrade(file));
    }

    /// The files that there are now, without keeping them.
    pub(crate) fn files(&self) -> Vec<Weak<FileInner>> {
        self.files.lock().clone()
    }

    /// A fresh extent whose blocks are all empty.
    pub(crate) async fn take_extent(&self, place: u64) -> Result<Extent, FileError> {
        let extent = self.pool.take_extent(place).await?;
        if !self.words.covers(&extent) {
            return Err(FileError::NoSpace);
        }
        self.words.clear(&extent);
        Ok(extent)
    }
}
