//! What all files of a process share: what is held of the pool, and the table of block words.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use farpool_fabric::{SharedMemory, ShmTransport};
use farpool_keep::Kept;
use farpool_pool::{Adoption, Capacity, Extent, Pool, Session, Stock, Where};
use farpool_wire::NodeId;
use parking_lot::Mutex;

use crate::blocks::BlockWords;
use crate::error::FileError;
use crate::file::FarFile;
use crate::file_core::FileCore;
use crate::guest::{GuestId, Guests};
use crate::keeping::Keeping;
use crate::moving::Mover;
use crate::redundancy::Redundancy;
use crate::rules::{Rules, Shipped};
use crate::volume::{Volume, VolumeStatus};

/// Makes files of far memory. Clones share it.
#[derive(Clone)]
pub struct FileStore {
    // Dropped first: it has a share of the rest.
    _mover: Arc<Mover>,
    core: Arc<StoreCore>,
    pub(crate) pool: Pool,
}

/// Makes files of what a process holds of the pool, for `async` code.
pub struct StoreCore<R: Rules = Shipped> {
    pub(crate) stock: Arc<Stock>,
    pub(crate) words: Arc<BlockWords>,
    /// The words' memory, for guests.
    pub(crate) words_memory: Arc<SharedMemory>,
    /// Where files are written down for a successor, if they are.
    pub(crate) keeping: Option<Arc<Keeping>>,
    /// Regions, by number, for whose words there is room.
    has_words: Mutex<BTreeSet<u64>>,
    pub(crate) guests: Arc<Guests>,
    /// Files start on different nodes, so that many small ones spread as well as a large one.
    next_start: AtomicU64,
    /// Every file that there is, and some that were.
    files: Mutex<Vec<Weak<FileCore<R>>>>,
    pub(crate) volume: Volume,
}

impl FileStore {
    /// A store on a pool. While it lives, its files are moved out of regions that are being taken back.
    ///
    /// # Errors
    /// When the table of block words cannot be made, or no thread.
    pub fn new(pool: Pool) -> io::Result<FileStore> {
        let core = Arc::new(StoreCore::new(pool.stock().clone())?);
        let mover = Arc::new(Mover::start(core.clone(), pool.clone())?);
        Ok(FileStore { _mover: mover, core, pool })
    }

    /// A store whose files a successor finds again, with the files of a predecessor that are wanted, by the numbers that they
    /// are kept under. The pool was connected with a journal; `words` has [`KEPT_WORDS_BYTES`](crate::KEPT_WORDS_BYTES).
    ///
    /// # Errors
    /// When memory cannot be had, or no thread.
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
        // SAFETY: all buffers and futures end in `block_on`.
        let session_core = unsafe { guard.core() };
        guard.block_on(core.settle(session_core, &adopted));
        drop(guard);
        let files = adopted.into_iter().map(|(id, file)| (id, FarFile::new(file, pool.clone())));
        let files = files.collect();
        // Without it the files end here, and a successor is to find them.
        let mover = Mover::start(core.clone(), pool.clone()).inspect_err(|_| core.abandon())?;
        let mover = Arc::new(mover);
        Ok((FileStore { _mover: mover, core, pool }, files))
    }

    /// An empty file; it takes far memory as it is written. Dropping its last handle gives all back.
    pub fn create(&self) -> FarFile {
        FarFile::new(self.core.create(), self.pool.clone())
    }

    /// What the store is made of, for `async` code and for guests.
    pub fn core(&self) -> &Arc<StoreCore> {
        &self.core
    }

    /// As [`StoreCore::bury_guest`].
    pub fn bury_guest(&self, session: &Session, guest: GuestId) {
        let guard = session.lock();
        // SAFETY: all buffers and futures end in `block_on`.
        let core = unsafe { guard.core() };
        guard.block_on(self.core.bury_guest(core, guest));
    }

    /// A connection to a node of this host, for a guest that may not go to its socket itself.
    ///
    /// # Errors
    /// When no region of such a node is held, or its socket is out of reach for this process, too.
    pub fn connect_guest(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        let peer = self.core.peer_of_guests(node, shm_socket).ok_or(io::ErrorKind::NotFound)?;
        ShmTransport::connect(&peer)
    }

    /// An empty file that bears the loss of a node so. A pool with too few nodes for it shows when it is written
    /// ([`FileError::TooFewNodes`]): nodes may come until then.
    pub fn create_as(&self, redundancy: Redundancy) -> FarFile {
        FarFile::new(self.core.create_as(redundancy), self.pool.clone())
    }

    /// What is known of the redundancy of all files.
    pub fn volume_status(&self) -> VolumeStatus {
        self.core.volume_status()
    }

    /// Has every block read and what is wrong mended, in the background; a scrub under way begins anew when it ends.
    pub fn start_scrub(&self) {
        self.core.volume.want_scrub();
    }

    /// Has everything looked at for what was lost, in the background and now. What is known to be lost is rebuilt without,
    /// but what failed is tried again only after a pause.
    pub fn start_rebuild(&self) {
        self.core.volume.ask_rebuild();
    }

    /// Has rebuilding take no more of the network than this, instead of [`DEFAULT_REBUILD_BYTES_PER_S`](crate::DEFAULT_REBUILD_BYTES_PER_S).
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
    /// A store on what is held of the pool. Who holds it looks after its leases, and moves its files out of regions that are
    /// being taken back ([`StoreCore::move_out`]).
    ///
    /// # Errors
    /// When the table of block words cannot be made.
    pub fn new(stock: Arc<Stock>) -> io::Result<Self> {
        let (words, words_memory) = BlockWords::create()?;
        Self::of(stock, Arc::new(words), Arc::new(words_memory), None)
    }

    /// As [`new`](Self::new), with words in memory of [`KEPT_WORDS_BYTES`](crate::KEPT_WORDS_BYTES) that outlives this process, and
    /// files that a successor finds again, where the stock's journal is.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn keeping(stock: Arc<Stock>, memory: SharedMemory) -> io::Result<Self> {
        let memory = Arc::new(memory);
        let words = Arc::new(BlockWords::kept(&memory));
        let keeping = stock.journal().map(|journal| Keeping::new(journal.clone(), words.clone()));
        Self::of(stock, words, memory, keeping)
    }

    /// From now on nothing of this store changes what a successor finds: it ends, or stands for one that was killed.
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
        })
    }

    /// An empty file. Dropping it gives all back.
    pub fn create(self: &Arc<Self>) -> Arc<FileCore<R>> {
        self.create_as(Redundancy::default())
    }

    /// An empty file that bears the loss of a node so.
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

    /// What is known of the redundancy of all files. Looks at every extent.
    pub fn volume_status(&self) -> VolumeStatus {
        let mut status = VolumeStatus {
            to_rebuild: self.is_to_rebuild(),
            direct: self.guests.moved(),
            ..VolumeStatus::default()
        };
        self.volume.tell(&mut status);
        for file in self.files().iter().filter_map(Weak::upgrade) {
            file.count_in(&mut status);
        }
        status
    }

    /// Why a row finds no room: too few nodes, or too little memory.
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

    /// The files that there are now, without keeping them.
    pub(crate) fn files(&self) -> Vec<Weak<FileCore<R>>> {
        self.files.lock().clone()
    }

    /// Sees to it that the words of an extent's region can be touched.
    fn has_room_for_words(&self, extent: &Extent) -> Result<(), FileError> {
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
                self.guests.collect(); // what guests were at work on may be free by now
                self.stock.take_extent_within(place, within).await?
            }
        };
        if !self.words.covers(&extent) {
            return Err(FileError::NoSpace);
        }
        self.has_room_for_words(&extent)?;
        self.words.clear(&extent);
        if self.words.is_abandoned() {
            return Err(FileError::NoSpace); // its words are as an earlier file left them
        }
        // Known to guests before the extent is.
        self.guests.publish_region(extent.number() / self.extents_per_region(), extent.region());
        Ok(extent)
    }
}
