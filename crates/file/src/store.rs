//! What all files of a process share: the pool, and the table of block words.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_pool::{Capacity, Extent, Pool, Session};

use crate::blocks::BlockWords;
use crate::error::FileError;
use crate::file::FarFile;

/// Makes files of far memory. Clones share it.
#[derive(Clone)]
pub struct FileStore {
    pub(crate) shared: Arc<StoreShared>,
}

pub(crate) struct StoreShared {
    pub(crate) pool: Pool,
    pub(crate) words: BlockWords,
    /// Files start on different nodes, so that many small ones spread as well as a large one.
    next_start: AtomicU64,
}

impl FileStore {
    /// A store on a pool.
    ///
    /// # Errors
    /// When the table of block words cannot be made.
    pub fn new(pool: Pool) -> io::Result<FileStore> {
        let words = BlockWords::create()?;
        Ok(FileStore { shared: Arc::new(StoreShared { pool, words, next_start: AtomicU64::new(0) }) })
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
