//! A cache that is attached to a door: the daemon's threads.
//!
//! A1. One daemon at a time has a door: it holds the door's lock.
//! A2. A new index is installed only after the door was closed, and after every call on the old index has
//!     ended. Each index has another number.
//! A3. A daemon that ends closes the door, and waits for nobody: the leases of its far memory end, and what
//!     processes still store in its index is found by nobody. A daemon that is killed leaves the door as it
//!     is. Processes go on until the leases end, and the next daemon begins with A2.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::{Mapping, SharedMemory};
use farpool_pool::Pool;
use farpool_pool::direct::Server;
use rustix_futex_sync::Mutex;
use tokio::sync::Notify;

use crate::at_once;
use crate::door::DoorFile;
use crate::far::{FarMemory, FarTable, SLOTS_PER_EXTENT};
use crate::keeper::{Census, Keeper};
use crate::layout::{Layout, MAX_SLOTS, Shape};
use crate::living::{Living, pid_of};
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
    /// The operating system refuses something.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A cache that serves the files behind a door, until it is dropped.
pub struct AttachedCache {
    control: Arc<Control>,
    threads: Vec<JoinHandle<()>>,
    server: Option<Server>,
}

/// What the daemon's threads share.
struct Control {
    door: DoorFile,
    pool: Pool,
    memory: FarMemory,
    /// Slots that have got memory, for the keeper.
    grown: Mutex<Vec<Range<u32>>>,
    /// What the keeper has found last.
    census: Mutex<Census>,
    has_ended: AtomicBool,
    ending: Notify,
}

/// The keeper reads and writes no slots.
struct NoSlots;

impl Slots for NoSlots {
    type Page = Vec<u8>;

    fn read(&self, _: u32) -> Option<Vec<u8>> {
        None
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

impl AttachedCache {
    /// Attaches a cache to a door. Its slots get memory from the pool, from which nothing else may take any.
    ///
    /// # Errors
    /// If there are too many slots, another daemon has the door or that of a directory above or
    /// below, the door was made in another namespace of process ids, a call of a process does not end within
    /// ten seconds, or the operating system has no room.
    pub fn new(door: DoorFile, pool: Pool, config: CacheConfig) -> Result<AttachedCache, AttachError> {
        let shape = shape_of(&door, config)?;
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
        let index = SharedMemory::create("farpool-cache-index", Layout::new(shape).index_bytes())?;
        let table = SharedMemory::create("farpool-cache-table", FarTable::bytes(shape.slots))?;
        let far = FarTable::new(table.mapping().clone(), shape.slots)
            .ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        let (words, stock) = (index.mapping().clone(), pool.stock().clone());
        let memory = FarMemory::new(stock.clone(), far);
        memory.want(config.slots);
        let owner = CacheOwner { index, table, stock, trusted_uid: door.owner_uid() };
        let server = Server::start(&socket_name(number), owner)?;
        door.want_slots(config.slots);
        at_once(vacating.install_index(&door, number, shape));
        let control = Arc::new(Control {
            door,
            pool,
            memory,
            grown: Mutex::default(),
            census: Mutex::default(),
            has_ended: AtomicBool::new(false),
            ending: Notify::new(),
        });
        let mut attached = AttachedCache { control, threads: Vec::new(), server: Some(server) };
        attached.start_keeper(words, shape, number)?;
        attached.start_growth()?;
        Ok(attached)
    }

    fn start_keeper(&mut self, words: Arc<Mapping>, shape: Shape, number: u64) -> io::Result<()> {
        let control = self.control.clone();
        self.spawn("cache-keeper", move || {
            let index = Index::new(words, shape, NoSlots).expect("it has just been made for this shape");
            let ground = door_of(&control.door).expect("it was usable before").with_index(number, index);
            control.keep(&mut at_once(Keeper::start(ground, Layout::new(shape), |_| false)));
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
        at_once(Vacating::begin(&self.control.door));
        self.server = None;
    }
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
                let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                return Err(AttachError::Occupied { pid, program: program.trim_end().to_owned() });
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
    fn keep(&self, keeper: &mut Keeper<Shared<NoSlots>, Shipped>) {
        let living = Living::default();
        // Rounds until a lap over all slots has found nothing to do.
        let mut until_idle = 0;
        while !self.has_ended() {
            at_once(keeper.clear_dead(|holder| living.is_alive(holder)));
            // Before the memory that has gone: that may have got memory before.
            let grown = std::mem::take(&mut *self.grown.lock());
            self.memory.want(self.door.wanted_slots());
            let gone = self.memory.update();
            let has_changed = !(grown.is_empty() && gone.is_empty());
            grown.into_iter().for_each(|slots| keeper.restore_slots(slots));
            gone.into_iter().for_each(|slots| keeper.withdraw_slots(slots));
            // Processes that start from now on do not find a door that was removed.
            let wanted = if self.door.is_there() { Door::Open } else { Door::Closed };
            let is_turned = at_once(keeper.turn_door(wanted));
            at_once(keeper.maintain_files());
            *self.census.lock() = at_once(keeper.sweep());
            let is_busy = has_changed || !is_turned || keeper.has_work();
            until_idle = if is_busy { keeper.sweeps_per_lap() } else { until_idle.saturating_sub(1) };
            std::thread::park_timeout(if until_idle > 0 { ROUND } else { IDLE_ROUND });
        }
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
