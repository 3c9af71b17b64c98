//! A process of the database on its way from the door to the index: it asks the daemon, once for each index.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farpool_fabric::{Clock, Endpoint, EndpointConfig, Mapping, MonotonicClock, Protection};
use farpool_pool::direct::{GuestRegions, GuestTransport, Line};
use farpool_wire::GUEST_VERSION;
use farpool_wire::control::{GuestJoin, guest_request::Ask};
use rustix::process::{PidfdFlags, pidfd_open};
use rustix_futex_sync::Mutex;

use crate::advice::Advice;
use crate::ahead::FETCHED_MAX;
use crate::at_once;
use crate::caller::Caller;
use crate::contents::{Contents, FilePages, absent_slots};
use crate::door::DoorFile;
use crate::far::{FarSlots, FarTable, NodePauses, PAGE_BYTES};
use crate::files::FileId;
use crate::ground::Ground;
use crate::layout::{self, Layout, Shape};
use crate::living::this_process;
use crate::outside::change_outside;
use crate::owner::socket_name;
use crate::resuming::Signature;
use crate::rules::Shipped;
use crate::shared::{Index, Shared};
use crate::signatures::{self, Unsettled};
use crate::words::Door;

/// How long a node may take to answer. A call of the program waits for it, and can read the disk instead.
const SLOT_DEADLINE: Duration = Duration::from_millis(500);
/// Room for a page in each direction, and for [`FETCHED_MAX`] fetched pages.
const ARENA_BYTES: usize = (4 + FETCHED_MAX as usize) * PAGE_BYTES;
/// What a process asks the daemon first.
pub(crate) const JOINING: Ask = Ask::Join(GuestJoin { version: GUEST_VERSION });
/// How long a daemon may take to answer: calls of the program wait for it.
const JOIN_PATIENCE: Duration = Duration::from_millis(200);
/// After a daemon could not be joined, it is left in peace for this long, and for twice as long each further
/// time.
const JOIN_PAUSE: Duration = Duration::from_secs(1);
const JOIN_PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long no place is looked for after all were taken.
const FULL_PAUSE: Duration = Duration::from_secs(1);

/// A user of the cache in this process.
pub(crate) type OwnCaller = Caller<Shared<FarSlots>>;

/// A process of the database. Its threads share what it has mapped.
pub struct CacheClient {
    door: Arc<DoorFile>,
    joined: Mutex<Joined>,
    /// All places were taken: until then none is looked for.
    full_until_ns: AtomicU64,
}

/// The index with which the process has to do now.
#[derive(Default)]
struct Joined {
    number: u64,
    /// `None`: it could not be joined.
    index: Option<Arc<Mapped>>,
    /// The last pause after it could not be joined, and its end.
    pause: Duration,
    again_at_ns: u64,
}

/// An index as a process has mapped it, and its far memory.
struct Mapped {
    words: Arc<Mapping>,
    table: FarTable,
    regions: Arc<GuestRegions>,
    pauses: Arc<NodePauses>,
    line: Arc<Line>,
}

impl CacheClient {
    /// A process that uses the files behind this door.
    pub fn new(door: Arc<DoorFile>) -> Arc<CacheClient> {
        Arc::new(CacheClient { door, joined: Mutex::default(), full_until_ns: AtomicU64::new(0) })
    }

    /// The door.
    pub fn door(&self) -> &DoorFile {
        &self.door
    }

    /// A place for one thread. `None`: all are taken.
    pub(crate) fn take_place(self: &Arc<Self>) -> Option<OwnCaller> {
        let now_ns = MonotonicClock.now_ns();
        if now_ns < self.full_until_ns.load(Ordering::Relaxed) {
            return None;
        }
        let holder = this_process().ok()?;
        let join = || at_once(Caller::<_, Shipped>::join(self.ground()?, self.door.places(), holder));
        let caller = join().or_else(|| {
            // Without a daemon nobody else frees the places of processes that have ended.
            self.door.free_dead_places().then(join).flatten()
        });
        if caller.is_none() {
            self.full_until_ns.store(now_ns + FULL_PAUSE.as_nanos() as u64, Ordering::Relaxed);
        }
        caller
    }

    /// The shared memory, for one thread. `None`: the door's memory cannot be changed.
    pub fn ground(self: &Arc<Self>) -> Option<Shared<FarSlots>> {
        let client = self.clone();
        let find = Box::new(move |number, shape| client.find(number, shape));
        Shared::new(self.door.words().clone(), self.door.places(), find)
    }

    /// What is in the cache. `None`: the door is closed, or its daemon does not answer.
    pub fn contents(self: &Arc<Self>) -> Option<Contents> {
        let (ground, layout) = self.index()?;
        Some(Contents::of(&ground, &layout))
    }

    /// The cached files that have a name in the door's directory, by their paths from there. `None`: as for
    /// [`contents`](Self::contents).
    pub fn named_files(self: &Arc<Self>) -> Option<Vec<(PathBuf, FilePages)>> {
        let cached = self.contents()?.files;
        let ids: Vec<FileId> = cached.iter().map(|file| file.id).collect();
        let by_id: BTreeMap<FileId, FilePages> = cached.into_iter().map(|file| (file.id, file)).collect();
        let named = signatures::paths_of(&self.door, &ids);
        let named = named.filter_map(|(id, path)| Some((path, *by_id.get(&id)?)));
        Some(named.collect())
    }

    /// How many slots have memory, and how many there are. `None`: as for [`contents`](Self::contents).
    pub fn slots(self: &Arc<Self>) -> Option<(u32, u32)> {
        let (ground, layout) = self.index()?;
        let slots = layout.shape().slots;
        Some((slots - absent_slots(&ground, &layout), slots))
    }

    /// How often pages would be found if the cache had another size. `None`: as for
    /// [`contents`](Self::contents), or too little was read since the cache was attached.
    pub fn advice(self: &Arc<Self>) -> Option<Advice> {
        let (ground, layout) = self.index()?;
        at_once(Advice::load(&ground, &layout))
    }

    /// Unpins all files, also those that have no name any more. `false`: as for [`contents`](Self::contents).
    pub fn unpin_all(self: &Arc<Self>) -> bool {
        let Some((ground, layout)) = self.index() else { return false };
        (0..layout.shape().files).for_each(|file| at_once(ground.store(layout.file_pinned(file), 0)));
        true
    }

    /// Signs the files of which pages are cached, for [`resume_files`](Self::resume_files). The database has
    /// ended, all that its processes have written is on the disk, and none of them uses a file any more.
    /// Returns how many files were signed. Files that were changed within the last tick are left out (R2).
    pub fn sign_files(self: &Arc<Self>) -> usize {
        if self.index().is_none() {
            return 0;
        }
        std::thread::sleep(signatures::TICK); // so that the last changes of the database have settled
        let sign = async |caller: &mut OwnCaller, found: &_| caller.sign_files(found).await;
        self.with_signatures(Unsettled::LeftOut, sign).unwrap_or(0)
    }

    /// Keeps the pages of the files that are as they were signed, and lets the cache lose all others. The
    /// database starts, and none of its processes uses a file yet. Returns how many files keep their pages.
    pub fn resume_files(self: &Arc<Self>) -> usize {
        let resume = async |caller: &mut OwnCaller, found: &_| caller.resume_files(found).await;
        let kept = self.with_signatures(Unsettled::Signed, resume).flatten().unwrap_or(0);
        if kept == 0 {
            // Also if the index could not be used: its keeper empties it once the door was closed.
            at_once(change_outside(&*self.door, async || ()));
        }
        kept
    }

    /// Runs an operation with the signatures of the files of which pages are cached. `None`: this
    /// process has no place, there is no index, or this process cannot use it.
    fn with_signatures<T>(
        self: &Arc<Self>,
        unsettled: Unsettled,
        operation: impl AsyncFnOnce(&mut OwnCaller, &BTreeMap<FileId, Signature>) -> T,
    ) -> Option<T> {
        if !self.door.shares_process_ids() {
            return None; // the keeper would take this process for a dead one
        }
        let mut caller = self.take_place()?;
        let files = at_once(caller.open_files());
        let found = files.map(|files| signatures::of_files(&self.door, &files, unsettled));
        let done = found.map(|found| at_once(operation(&mut caller, &found)));
        at_once(caller.leave());
        done
    }

    fn index(self: &Arc<Self>) -> Option<(Shared<FarSlots>, Layout)> {
        let ground = self.ground()?;
        let is_closed = Door::of(at_once(ground.load(layout::DOOR))) == Door::Closed;
        let layout = if is_closed { None } else { at_once(ground.layout()) };
        Some((ground, layout?))
    }

    fn find(&self, number: u64, shape: Shape) -> Option<Index<FarSlots>> {
        let index = self.mapped(number, shape)?;
        let transport = Rc::new(GuestTransport::new(index.line.clone()));
        let endpoint = Endpoint::new(EndpointConfig::real(transport, ARENA_BYTES, SLOT_DEADLINE));
        let slots = FarSlots::new(index.table.clone(), index.regions.clone(), index.pauses.clone(), endpoint);
        Index::new(index.words.clone(), shape, slots)
    }

    fn mapped(&self, number: u64, shape: Shape) -> Option<Arc<Mapped>> {
        let mut joined = self.joined.lock();
        if joined.number != number {
            *joined = Joined { number, ..Joined::default() };
        }
        if joined.index.is_none() && MonotonicClock.now_ns() >= joined.again_at_ns {
            // An error is the daemon's end, or a shortage in this process. Calls then work without the index
            // (C8).
            joined.index = self.join(number, shape).ok().map(Arc::new);
            joined.pause = (joined.pause * 2).clamp(JOIN_PAUSE, JOIN_PAUSE_MAX);
            joined.again_at_ns = MonotonicClock.now_ns() + joined.pause.as_nanos() as u64;
        }
        joined.index.clone()
    }

    /// Asks the daemon for the index with this number.
    fn join(&self, number: u64, shape: Shape) -> io::Result<Mapped> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the daemon's answer is invalid");
        let line = line_to(&self.door, number, JOIN_PATIENCE)?;
        let (answer, descriptors) = line.ask(JOINING)?;
        let [words, table] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| invalid())?;
        let map = |fd: &OwnedFd, bytes| Mapping::new(fd.as_fd(), bytes, Protection::ReadWrite).map(Arc::new);
        let words = map(&words, Layout::new(shape).index_bytes())?;
        let table = map(&table, FarTable::bytes(shape.slots))?;
        let table = FarTable::new(table, shape.slots).ok_or_else(invalid)?;
        let asking = line.clone();
        let ask = Box::new(move |number| asking.region(number));
        let regions = table.regions(answer.extents_per_region, Arc::new(MonotonicClock), ask);
        let (regions, pauses) = (regions.ok_or_else(invalid)?, Arc::default());
        Ok(Mapped { words, table, regions, pauses, line })
    }
}

/// A connection to the daemon of the index with this number.
pub(crate) fn line_to(door: &DoorFile, number: u64, patience: Duration) -> io::Result<Arc<Line>> {
    let line = Line::open_within(&socket_name(number), patience)?;
    // Any user may listen on a name of the abstract namespace once the daemon has died.
    if !door.trusts(line.peer()?.uid.as_raw()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(line)
}

/// Whether the daemon of the index with this number hands it out.
pub(crate) fn daemon_answers(door: &DoorFile, number: u64) -> bool {
    line_to(door, number, JOIN_PATIENCE).and_then(|line| line.ask(JOINING)).is_ok()
}

/// The process of the daemon that serves these files, as a descriptor (`pidfd`).
///
/// # Errors
/// If there is none, or it does not accept a connection.
pub fn daemon_process(door: &DoorFile) -> io::Result<OwnedFd> {
    let line = line_to(door, at_once(door.load(layout::INDEX)), JOIN_PATIENCE)?;
    let process = pidfd_open(line.peer()?.pid, PidfdFlags::empty())?;
    // If the daemon ended before `pidfd_open`, another process may have its number.
    if line.has_ended() { Err(io::ErrorKind::NotConnected.into()) } else { Ok(process) }
}
