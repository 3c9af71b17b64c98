//! The state that all files of a process share: its part of the pool, and the table of block words.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use farpool_fabric::SharedMemory;
use farpool_keep::Kept;
use farpool_pool::{Adoption, Capacity, Extent, Pool, Session, Stock, Where};
use farpool_wire::NodeId;
use rustix_futex_sync::Mutex;

use crate::blocks::BlockWords;
use crate::error::FileError;
use crate::file::FarFile;
use crate::file_core::FileCore;
use crate::guest::{GuestId, Guests};
use crate::keeping::Keeping;
use crate::moving::Mover;
use crate::redundancy::Redundancy;
use crate::retry::Retry;
use crate::rules::{Rules, Shipped};
use crate::volume::{Volume, VolumeStatus};

/// Creates files in far memory. Clones are the same store.
#[derive(Clone)]
pub struct FileStore {
    // Dropped first: it refers to the rest.
    _mover: Arc<Mover>,
    core: Arc<StoreCore>,
    pub(crate) pool: Pool,
}

/// Creates files in the process's part of the pool, for `async` code.
pub struct StoreCore<R: Rules = Shipped> {
    pub(crate) stock: Arc<Stock>,
    pub(crate) words: Arc<BlockWords>,
    /// The words' memory, for direct clients (called *guests* in the code).
    pub(crate) words_memory: Arc<SharedMemory>,
    /// The records of files for a successor, if files are kept.
    pub(crate) keeping: Option<Arc<Keeping>>,
    /// Numbers of the regions for whose words memory is reserved.
    has_words: Mutex<BTreeSet<u64>>,
    pub(crate) guests: Arc<Guests>,
    /// Files start on different nodes, so that many small ones spread as well as a large one.
    next_start: AtomicU64,
    /// Every file that exists, and some that were dropped.
    files: Mutex<Vec<Weak<FileCore<R>>>>,
    pub(crate) volume: Volume,
    /// Says when extents that could not be moved back from the overflow directory are tried again.
    pub(crate) move_back_retry: Mutex<Retry>,
}

impl FileStore {
    /// A store on a pool. While it lives, its files are moved out of regions that are being taken back.
    ///
    /// # Errors
    /// When the table of block words or the thread cannot be made.
    pub fn new(pool: Pool) -> io::Result<FileStore> {
        let core = Arc::new(StoreCore::new(pool.stock().clone())?);
        let mover = Arc::new(Mover::start(core.clone(), pool.clone())?);
        Ok(FileStore { _mover: mover, core, pool })
    }

    /// A store whose files a successor finds again. It takes over the wanted files of a predecessor, by the
    /// numbers under which they are kept. The pool was connected with a journal; `words` has
    /// [`KEPT_WORDS_BYTES`](crate::KEPT_WORDS_BYTES).
    ///
    /// # Errors
    /// When there is not enough memory, or the thread cannot be started.
    pub fn keeping(
        pool: Pool,
        words: OwnedFd,
        kept: &Kept,
        adoption: Adoption,
        wanted: impl Fn(u64) -> bool,
    ) -> io::Result<(FileStore, BTreeMap<u64, FarFile>)> {
        let memory = SharedMemory::of_file(words, crate::KEPT_WORDS_BYTES)?;
        let core = Arc::new(StoreCore::keeping(pool.stock().clone(), memory)?);
        let adopted = core.adopt(kept, adoption, wanted);
        let session = pool.session();
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let session_core = unsafe { guard.core() };
        guard.block_on(core.settle(session_core, &adopted));
        drop(guard);
        let files = adopted.into_iter().map(|(id, file)| (id, FarFile::new(file, pool.clone())));
        let files = files.collect();
        // Without a mover the store ends here, and a successor must still find the files.
        let mover = Mover::start(core.clone(), pool.clone()).inspect_err(|_| core.abandon())?;
        let mover = Arc::new(mover);
        Ok((FileStore { _mover: mover, core, pool }, files))
    }

    /// An empty file. It takes far memory as it is written. Dropping its last handle frees all of it.
    pub fn create(&self) -> FarFile {
        FarFile::new(self.core.create(), self.pool.clone())
    }

    /// The store itself, for `async` code and for direct clients.
    pub fn core(&self) -> &Arc<StoreCore> {
        &self.core
    }

    /// As [`StoreCore::recover_guest`].
    pub fn recover_guest(&self, session: &Session, guest: GuestId) {
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`, before the guard.
        let core = unsafe { guard.core() };
        guard.block_on(self.core.recover_guest(core, guest));
    }

    /// As [`Stock::connect_guest`].
    ///
    /// # Errors
    /// The same.
    pub fn connect_guest(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        self.core.stock.connect_guest(node, shm_socket)
    }

    /// An empty file with this redundancy. If the pool has too few nodes for it, writing the file fails
    /// ([`FileError::TooFewNodes`]): nodes may join until then.
    pub fn create_as(&self, redundancy: Redundancy) -> FarFile {
        FarFile::new(self.core.create_as(redundancy), self.pool.clone())
    }

    /// The state of the redundancy of all files.
    pub fn volume_status(&self) -> VolumeStatus {
        self.core.volume_status()
    }

    /// Reads every block and repairs wrong ones, in the background. If a scrub is in progress, another one
    /// follows it.
    pub fn start_scrub(&self) {
        self.core.volume.want_scrub();
    }

    /// Checks all files for losses and rebuilds what was lost, in the background and at once. Known losses
    /// are rebuilt without this call, but after a failed attempt only after a pause.
    pub fn start_rebuild(&self) {
        self.core.volume.ask_rebuild();
    }

    /// Limits rebuilding to this rate, instead of
    /// [`DEFAULT_REBUILD_BYTES_PER_S`](crate::DEFAULT_REBUILD_BYTES_PER_S).
    pub fn limit_rebuild(&self, bytes_per_s: u64) {
        self.core.volume.limit_rebuild(bytes_per_s);
    }

    /// Size of the pool for this owner.
    pub fn capacity(&self) -> Capacity {
        self.pool.capacity()
    }

    /// A session for one thread at a time.
    pub fn session(&self) -> Session {
        self.pool.session()
    }
}

impl<R: Rules> StoreCore<R> {
    /// A store on the process's part of the pool. The caller maintains the leases, and moves files out of
    /// regions that are being taken back ([`StoreCore::move_out`]).
    ///
    /// # Errors
    /// When the table of block words cannot be made.
    pub fn new(stock: Arc<Stock>) -> io::Result<Self> {
        let (words, words_memory) = BlockWords::create()?;
        Self::of(stock, Arc::new(words), Arc::new(words_memory), None)
    }

    /// As [`new`](Self::new), with words in memory of [`KEPT_WORDS_BYTES`](crate::KEPT_WORDS_BYTES) that
    /// outlives this process. If the stock has a journal, a successor finds the files again.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn keeping(stock: Arc<Stock>, memory: SharedMemory) -> io::Result<Self> {
        let memory = Arc::new(memory);
        let words = Arc::new(BlockWords::kept(&memory));
        let keeping = stock.journal().map(|journal| Keeping::new(journal.clone(), words.clone()));
        Self::of(stock, words, memory, keeping)
    }

    /// From now on this store changes nothing that a successor finds: the store ends, or it simulates a
    /// process that was killed.
    pub fn abandon(&self) {
        self.words.abandon();
    }

    fn of(
        stock: Arc<Stock>,
        words: Arc<BlockWords>,
        words_memory: Arc<SharedMemory>,
        keeping: Option<Arc<Keeping>>,
    ) -> io::Result<Self> {
        let guests = Arc::new(Guests::new(words.clone())?);
        let (next_start, files) = (AtomicU64::new(0), Mutex::default());
        Ok(StoreCore {
            stock,
            words,
            words_memory,
            keeping,
            has_words: Mutex::default(),
            guests,
            next_start,
            files,
            volume: Volume::default(),
            move_back_retry: Mutex::default(),
        })
    }

    /// An empty file. Dropping it frees all of its memory.
    pub fn create(self: &Arc<Self>) -> Arc<FileCore<R>> {
        self.create_as(Redundancy::default())
    }

    /// An empty file with this redundancy.
    pub fn create_as(self: &Arc<Self>, redundancy: Redundancy) -> Arc<FileCore<R>> {
        let start = self.next_start.fetch_add(1, Ordering::Relaxed); // only spreads: pairs with nothing
        let place =
            self.keeping.as_ref().and_then(|keeping| keeping.file(start, redundancy, R::journals_frees()));
        let file = match place {
            Some(place) => FileCore::kept(self.clone(), start, place, redundancy),
            None => {
                let file = FileCore::new(self.clone(), start);
                file.map.write().set_redundancy(redundancy);
                file
            }
        };
        let file = Arc::new(file);
        self.register(&file);
        file
    }

    /// The state of the redundancy of all files. Checks every extent.
    pub fn volume_status(&self) -> VolumeStatus {
        let mut status = VolumeStatus {
            to_rebuild: self.is_to_rebuild(),
            direct: self.guests.moved(),
            overflow_bytes: self.stock.overflow_used_bytes(),
            ..VolumeStatus::default()
        };
        self.volume.tell(&mut status);
        for file in self.files().iter().filter_map(Weak::upgrade) {
            file.count_in(&mut status);
        }
        status
    }

    /// Why there is no room for a row: too few nodes, or too little memory.
    pub(crate) fn why_no_space(&self, wanted: u64) -> FileError {
        let mut nodes: Vec<_> = self.stock.regions().iter().map(|region| region.id.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let found = nodes.len() as u64;
        if found < wanted { FileError::TooFewNodes { wanted, found } } else { FileError::NoSpace }
    }

    pub(crate) fn register(&self, file: &Arc<FileCore<R>>) {
        let mut files = self.files.lock();
        if files.len() == files.capacity() {
            files.retain(|file| file.strong_count() > 0); // once for each doubling
        }
        files.push(Arc::downgrade(file));
    }

    /// The files that exist now, without keeping them alive.
    pub(crate) fn files(&self) -> Vec<Weak<FileCore<R>>> {
        self.files.lock().clone()
    }

    /// Makes sure that the words of an extent's region can be touched.
    pub(crate) fn make_room_for_words(&self, extent: &Extent) -> Result<(), FileError> {
        let per_region = self.extents_per_region();
        let number = extent.number() / per_region;
        let mut has_words = self.has_words.lock();
        if !has_words.contains(&number) {
            if let Err(error) = self.words.reserve(number * per_region..(number + 1) * per_region) {
                tracing::error!(%error, "no room for the words of a region: make room where --keep points to");
                return Err(FileError::NoSpace);
            }
            has_words.insert(number);
        }
        Ok(())
    }

    /// A fresh extent whose blocks are all empty.
    pub(crate) async fn take_extent(&self, place: u64, within: &Where) -> Result<Extent, FileError> {
        let extent = match self.stock.take_extent_within(place, within).await {
            Ok(extent) => extent,
            Err(_) => {
                self.guests.collect(); // extents that direct clients used may be free by now
                self.stock.take_extent_within(place, within).await?
            }
        };
        if !self.words.covers(&extent) {
            return Err(FileError::NoSpace);
        }
        self.make_room_for_words(&extent)?;
        self.words.clear(&extent);
        if self.words.is_abandoned() {
            return Err(FileError::NoSpace); // its words are still those of an earlier file
        }
        // Publish the region before direct clients can see the extent.
        self.guests.publish_region(extent.number() / self.extents_per_region(), extent.region());
        Ok(extent)
    }
}
