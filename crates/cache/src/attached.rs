//! A cache that is attached to a door: the daemon's threads.
//!
//! A1. One daemon at a time has a door: it holds the door's lock.
//! A2. A new index is installed only after the door was closed, and after every call on the old index has
//!     ended. Each index has another number.
//! A3. A daemon that ends closes the door, and waits for nobody: the leases of its far memory end, unless
//!     another daemon takes them over (H1), and what processes still store in its index is found by nobody. A
//!     daemon that is killed leaves the door as it is. Processes go on until the leases end, and the next
//!     daemon begins with A2.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::{Mapping, SharedMemory};
use farpool_keep::MemoryJournal;
use farpool_pool::direct::Server;
use farpool_pool::{Adoption, Pool, Stock};
use rustix_futex_sync::Mutex;
use tokio::sync::{Notify, watch};

use crate::advice::Adviser;
use crate::at_once;
use crate::door::DoorFile;
use crate::far::{FarMemory, FarTable, SLOTS_PER_EXTENT};
use crate::ground::PageSink;
use crate::handover::{
    HandoverError, HandoverList, HandoverRequests, Leases, TakeOverResult, TakeOverState, Taker, give,
};
use crate::keeper::{Census, Keeper};
use crate::layout::{Layout, MAX_SLOTS, Shape};
use crate::living::{Living, pid_of, program_of};
use crate::owner::{CacheOwner, socket_name};
use crate::rules::Shipped;
use crate::shared::{Index, Shared, Slots};
use crate::vacating::Vacating;
use crate::words::Door;

/// Time between two rounds of the keeper while there is work.
const ROUND: Duration = Duration::from_millis(10);
/// The same while there is none. A file that is read for the first time is cached after a few of them.
const IDLE_ROUND: Duration = Duration::from_millis(50);
/// How long attaching waits for calls of processes to end.
const VACATE_PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two looks at the places.
const VACATE_LOOK: Duration = Duration::from_millis(1);
/// Pause after the pool had no room.
const NO_ROOM_PAUSE: Duration = Duration::from_secs(1);
/// Pause while all slots have memory.
const COMPLETE_PAUSE: Duration = Duration::from_millis(100);

/// How large a cache is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheConfig {
    /// Pages of 8 KiB for which memory is leased at first; rounded up to whole extents of far memory.
    pub slots: u32,
    /// Pages for which the index has room: to so many the cache can grow. At least `slots`.
    pub max_slots: u32,
    /// Files that are known at a time.
    pub files: u32,
}

/// The reason for which a cache is not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Another daemon has the door.
    #[error("another `farpool cache attach` serves these files: stop it first")]
    InUse,
    /// The daemon would not know which processes live.
    #[error(
        "programs in another namespace of process ids, such as a container, use these files: run the cache there, \
         or stop them and remove the door {}",
        door.display()
    )]
    OtherNamespace {
        /// The door.
        door: PathBuf,
    },
    /// A call of a process does not end, or it keeps the door closed.
    #[error(
        "process {pid} ({program}) has mapped one of these files for writing, or is stopped in the middle of a \
         read or write: end it, or let it go on"
    )]
    Occupied {
        /// The process.
        pid: u32,
        /// Its program, as the kernel names it.
        program: String,
    },
    /// A program announces its changes to one cache only.
    #[error("a cache is attached to {}, which overlaps: detach it first", other.display())]
    Overlaps {
        /// The other directory.
        other: PathBuf,
    },
    /// There are too many slots.
    #[error("{slots} pages of 8 KiB are too many for a cache: at most {MAX_SLOTS}")]
    TooLarge {
        /// How many were asked for.
        slots: u32,
    },
    /// The cache that is taken over had more.
    #[error(
        "the cache that is handed over has room for {slots} pages of 8 KiB: raise --max-memory, or leave it out"
    )]
    TooSmall {
        /// How many slots it has.
        slots: u32,
    },
    /// The operating system refuses something.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// There is not enough memory for the index, all of which is allocated at once.
    #[error(
        "cannot allocate the index, {} MiB for {slots} pages of 8 KiB ({source}): lower --max-memory, or --memory \
         if --max-memory is not given",
        index_bytes.div_ceil(1 << 20)
    )]
    NoIndexMemory {
        /// How many pages it has room for.
        slots: u32,
        /// Its size in bytes.
        index_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
}

/// A cache that serves the files behind a door, until it is dropped.
pub struct AttachedCache {
    control: Arc<Control>,
    threads: Vec<JoinHandle<()>>,
    server: Option<Server>,
    take_over: Option<watch::Receiver<TakeOverState>>,
}

/// What the daemon's threads share.
struct Control {
    door: Arc<DoorFile>,
    pool: Pool,
    /// Of the leases; `None`: nobody can take them over.
    journal: Option<Arc<MemoryJournal>>,
    handing: Arc<HandoverRequests>,
    memory: FarMemory,
    /// Slots that have got memory, for the keeper.
    grown: Mutex<Vec<Range<u32>>>,
    /// What the keeper has found last.
    census: Mutex<Census>,
    has_ended: AtomicBool,
    ending: Notify,
}

/// Takes pages over in the keeper's rounds, and says how far that is.
type GoingOver = (Taker, watch::Sender<TakeOverState>);

/// Unless the journal was taken out, the pool gives its leases back when it is dropped after this.
struct GivesBack(Option<Arc<MemoryJournal>>);

impl Drop for GivesBack {
    fn drop(&mut self) {
        self.0.iter().for_each(|journal| journal.give_up());
    }
}

/// A cache that was handed over, on its way to the keeper's thread.
struct TakeOverTask {
    list: HandoverList,
    /// The slots that still have their memory.
    slots: Vec<Range<u32>>,
    report: watch::Sender<TakeOverState>,
}

/// The keeper reads and writes no slots.
struct NoSlots;

impl Slots for NoSlots {
    fn read(&self, _: u32, _: &mut PageSink<'_>) -> bool {
        false
    }

    fn write(&self, _: u32, _: &[u8]) -> bool {
        false
    }
}

/// Door and places, without an index.
fn door_of(door: &DoorFile) -> io::Result<Shared<NoSlots>> {
    let none = Box::new(|_, _| None);
    Shared::new(door.words().clone(), door.places(), none).ok_or(io::ErrorKind::InvalidData.into())
}

/// The shape of a cache behind this door.
fn shape_of(door: &DoorFile, config: CacheConfig) -> Result<Shape, AttachError> {
    let slots = config.slots.max(config.max_slots);
    let whole = slots.checked_next_multiple_of(SLOTS_PER_EXTENT).filter(|slots| *slots <= MAX_SLOTS);
    let slots = whole.ok_or(AttachError::TooLarge { slots })?;
    Ok(Shape { places: door.places(), files: config.files, slots })
}

/// Memory for an index, all of it at once: otherwise the first process of the database that touches a page
/// would be charged for it, and killed where memory is short. In large pages, a look at a random bucket
/// hardly misses the TLB.
fn allocate_index(shape: Shape) -> Result<SharedMemory, AttachError> {
    let index_bytes = Layout::new(shape).index_bytes();
    let no_memory = |error: io::Error| match error.kind() {
        io::ErrorKind::OutOfMemory => {
            AttachError::NoIndexMemory { slots: shape.slots, index_bytes, source: error }
        }
        _ => AttachError::Io(error),
    };
    let index = SharedMemory::create("farpool-cache-index", index_bytes).map_err(no_memory)?;
    index.mapping().prefault().map_err(no_memory)?;
    Ok(index)
}

impl AttachedCache {
    /// Attaches a cache to a door. Its slots get memory from the pool, from which nothing else may take any,
    /// or keep that of a cache which was handed over.
    ///
    /// # Errors
    /// If there are too many slots, or too few for the cache that was handed over; another daemon has the
    /// door or that of a directory above or below; the door was made in another namespace of process ids; a
    /// call of a process does not end within ten seconds; or the operating system has no room.
    pub fn new(
        door: DoorFile,
        leases: impl Into<Leases>,
        config: CacheConfig,
    ) -> Result<AttachedCache, AttachError> {
        let Leases { pool, journal, adopted } = leases.into();
        let mut failing = GivesBack(journal.clone()); // dropped before the pool
        let shape = shape_of(&door, config)?;
        if let Some((_, list)) = &adopted
            && list.slots > shape.slots
        {
            return Err(AttachError::TooSmall { slots: list.slots });
        }
        if !door.shares_process_ids() {
            return Err(AttachError::OtherNamespace { door: door.path().to_owned() });
        }
        if !door.lock()? {
            return Err(AttachError::InUse);
        }
        // With the lock: of two that begin at once, one at least sees the other.
        if let Some(other) = door.overlapping() {
            return Err(AttachError::Overlaps { other });
        }
        let vacating = vacate(&door)?;
        let number = getrandom::u64().map_err(io::Error::other)?;
        let index = allocate_index(shape)?;
        let table = SharedMemory::create("farpool-cache-table", FarTable::bytes(shape.slots))?;
        let far = FarTable::new(table.mapping().clone(), shape.slots)
            .ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        let (words, stock) = (index.mapping().clone(), pool.stock().clone());
        let memory = FarMemory::new(stock.clone(), far);
        memory.want(config.slots);
        let handing = Arc::<HandoverRequests>::default();
        let owner =
            CacheOwner { index, table, stock, handing: handing.clone(), trusted_uid: door.owner_uid() };
        let server = Server::start(&socket_name(number), owner)?;
        door.want_slots(config.slots);
        at_once(vacating.install_index(&door, number, shape));
        let door = Arc::new(door);
        let (to_take, take_over) = adopted.map(|adopted| adopt(&memory, pool.stock(), adopted)).unzip();
        let control = Arc::new(Control {
            door,
            pool,
            journal,
            handing,
            memory,
            grown: Mutex::default(),
            census: Mutex::default(),
            has_ended: AtomicBool::new(false),
            ending: Notify::new(),
        });
        failing.0 = None;
        let (threads, server) = (Vec::new(), Some(server));
        let mut attached = AttachedCache { control, threads, server, take_over };
        attached.start_keeper(words, shape, number, to_take)?;
        attached.start_growth()?;
        Ok(attached)
    }

    fn start_keeper(
        &mut self,
        words: Arc<Mapping>,
        shape: Shape,
        number: u64,
        to_take: Option<TakeOverTask>,
    ) -> io::Result<()> {
        let control = self.control.clone();
        self.spawn("cache-keeper", move || {
            let index = Index::new(words, shape, NoSlots).expect("it has just been made for this shape");
            let ground = door_of(&control.door).expect("it was usable before").with_index(number, index);
            let layout = Layout::new(shape);
            let taking = to_take.map(|TakeOverTask { list, slots, report }| {
                (Taker::begin(&control.door, &list, shape.slots, &slots), report)
            });
            control.keep(&mut at_once(Keeper::start(ground, layout, |_| false)), &layout, taking);
            control.handing.end();
        })
    }

    fn start_growth(&mut self) -> io::Result<()> {
        let control = self.control.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        self.spawn("cache-growth", move || runtime.block_on(control.grow()))
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(std::thread::Builder::new().name(name.into()).spawn(work)?);
        Ok(())
    }

    /// What the keeper has found last.
    pub fn census(&self) -> Census {
        *self.control.census.lock()
    }

    /// Waits until the server may be promoted: pages are taken over from now on, or it is known that none is.
    /// Returns at once if no cache was handed over.
    pub async fn may_be_promoted(&self) {
        if let Some(take_over) = &self.take_over {
            let mut take_over = take_over.clone();
            let _ended = take_over.wait_for(|now| *now != TakeOverState::Waiting).await;
        }
    }

    /// Waits until the cache that was handed over has been taken over, and says what became of it. `None`:
    /// there was none, or this cache ends before.
    pub async fn taken_over(&self) -> Option<TakeOverResult> {
        let mut take_over = self.take_over.clone()?;
        match &*take_over.wait_for(|now| matches!(now, TakeOverState::Ended(_))).await.ok()? {
            TakeOverState::Ended(taken) => Some(taken.clone()),
            TakeOverState::Waiting | TakeOverState::Going => None,
        }
    }

    /// Waits until this cache has been handed over. It should then be dropped.
    pub async fn handed_over(&self) {
        self.control.handing.passed_on().await;
    }

    /// The pool from which its memory comes.
    pub fn pool(&self) -> &Pool {
        &self.control.pool
    }
}

impl Drop for AttachedCache {
    fn drop(&mut self) {
        // Relaxed: the flag guards nothing.
        self.control.has_ended.store(true, Ordering::Relaxed);
        self.control.ending.notify_one();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a thread of the cache panicked");
            }
        }
        // After the keeper, which would open it again (A3).
        at_once(Vacating::begin(&*self.control.door));
        self.server = None;
        if !self.control.handing.is_given() {
            drop(GivesBack(self.control.journal.clone()));
        }
    }
}

/// Gives slots the memory that they had in the cache that is taken over.
fn adopt(
    memory: &FarMemory,
    stock: &Stock,
    (mut adoption, list): (Adoption, HandoverList),
) -> (TakeOverTask, watch::Receiver<TakeOverState>) {
    let slots = memory.adopt(&list.groups, &mut adoption);
    stock.finish_adoption(adoption);
    let (report, take_over) = watch::channel(TakeOverState::Waiting);
    (TakeOverTask { list, slots, report }, take_over)
}

/// Closes the door, and waits until nobody uses the index behind it.
fn vacate(door: &DoorFile) -> Result<Vacating, AttachError> {
    let living = Living::default();
    let vacating = at_once(Vacating::begin(door));
    let give_up_at = Instant::now() + VACATE_PATIENCE;
    loop {
        match at_once(vacating.occupant(door, door.places(), |holder| living.is_alive(holder))) {
            None => return Ok(vacating),
            Some(holder) if Instant::now() >= give_up_at => {
                let pid = pid_of(holder);
                return Err(AttachError::Occupied { pid, program: program_of(pid) });
            }
            Some(_) => std::thread::sleep(VACATE_LOOK),
        }
    }
}

impl Control {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// The keeper's rounds, until the cache ends.
    fn keep(
        &self,
        keeper: &mut Keeper<Shared<NoSlots>, Shipped>,
        layout: &Layout,
        mut taking: Option<GoingOver>,
    ) {
        let living = Living::default();
        // Rounds until a whole lap over all slots has found nothing to do.
        let mut until_idle = 0;
        let mut adviser = at_once(Adviser::new(keeper.ground(), layout, Instant::now()));
        while !self.has_ended() {
            at_once(keeper.clear_dead(|holder| living.is_alive(holder)));
            // Before the memory that has gone: that may have got memory before.
            let grown = std::mem::take(&mut *self.grown.lock());
            self.memory.want(self.door.wanted_slots());
            let gone = self.memory.update();
            let has_changed = !(grown.is_empty() && gone.is_empty());
            grown.into_iter().for_each(|slots| keeper.restore_slots(slots));
            for slots in gone {
                taking.iter_mut().for_each(|(taking, _)| taking.forget(&slots));
                keeper.withdraw_slots(slots);
            }
            // Processes that start from now on do not find a door that was removed.
            let wanted = if self.door.is_there() { Door::Open } else { Door::Closed };
            let is_turned = at_once(keeper.turn_door(wanted));
            at_once(keeper.maintain_files());
            if self.hand_or_take_over(keeper, layout, &mut taking) {
                // Another daemon has the slots now.
                self.has_ended.store(true, Ordering::Relaxed);
                self.ending.notify_one();
                return;
            }
            let census = if until_idle > 0 { at_once(keeper.sweep()) } else { at_once(keeper.sweep_idly()) };
            *self.census.lock() = census;
            let memory = layout.shape().slots - census.absent;
            at_once(adviser.go_on(keeper.ground(), layout, (census.pages, memory), Instant::now()));
            let is_busy = has_changed || !is_turned || keeper.has_work() || taking.is_some();
            // Two laps, since idle sweeps stop anywhere: the first one may cover only the rest of a lap.
            until_idle = if is_busy { 2 * keeper.sweeps_per_lap() } else { until_idle.saturating_sub(1) };
            // While pages are taken over, that takes up the round.
            if taking.as_ref().is_none_or(|(taking, _)| !taking.has_begun()) {
                std::thread::park_timeout(if until_idle > 0 { ROUND } else { IDLE_ROUND });
            }
        }
        if let Some((mut taking, _)) = taking {
            taking.end(keeper, None);
        }
    }

    /// Takes pages over, or answers `farpool cache handover`. Returns whether the cache was handed over.
    fn hand_or_take_over(
        &self,
        keeper: &mut Keeper<Shared<NoSlots>, Shipped>,
        layout: &Layout,
        taking: &mut Option<GoingOver>,
    ) -> bool {
        let Some((going, report)) = taking else {
            return self.handing.answer(|| self.give(keeper, layout));
        };
        self.handing.answer(|| Err(HandoverError::TakingOver));
        let ended = going.step(keeper);
        let has_ended = ended.is_some();
        let now = if going.has_begun() { TakeOverState::Going } else { TakeOverState::Waiting };
        report.send_replace(ended.map_or(now, TakeOverState::Ended));
        taking.take_if(|_| has_ended);
        false
    }

    fn give(
        &self,
        keeper: &Keeper<Shared<NoSlots>, Shipped>,
        layout: &Layout,
    ) -> Result<HandoverList, HandoverError> {
        give(&self.door, keeper.ground(), layout, &self.memory, self.journal.as_deref())
    }

    /// Takes memory from the pool for slots that have none, until the cache ends.
    async fn grow(&self) {
        while !self.has_ended() {
            let pause = if self.memory.is_complete() {
                COMPLETE_PAUSE
            } else {
                let grown = tokio::select! {
                    grown = self.memory.grow() => grown,
                    () = self.ending.notified() => return,
                };
                match grown {
                    Some(slots) => {
                        self.grown.lock().push(slots);
                        continue;
                    }
                    None => NO_ROOM_PAUSE,
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.ending.notified() => return,
            }
        }
    }
}
