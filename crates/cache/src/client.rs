//! A process of the database on its way from the door to the index: it asks the daemon, once for each index.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{Clock, Endpoint, EndpointConfig, Mapping, MonotonicClock, Protection};
use farpool_pool::NODE_DEADLINE;
use farpool_pool::direct::{GuestRegions, GuestTransport, Line};
use farpool_wire::GUEST_VERSION;
use farpool_wire::control::{GuestJoin, guest_request::Ask};
use rustix_futex_sync::Mutex;

use crate::door::DoorFile;
use crate::far::{FarSlots, FarTable, PAGE_BYTES};
use crate::layout::{Layout, Shape};
use crate::owner::socket_name;
use crate::shared::{Index, Shared};

/// Files that databases write as streams, and read once if at all: the journal, the log and the index of the
/// log (a mapping) of SQLite, and the log of DuckDB.
const UNCACHED_SUFFIXES: [&[u8]; 4] = [b"-journal", b"-wal", b"-shm", b".wal"];
/// Room for a page in each direction.
const ARENA_BYTES: usize = 4 * PAGE_BYTES;
/// How long a daemon may take to answer: calls of the program wait for it.
const JOIN_PATIENCE: Duration = Duration::from_millis(200);
/// After a daemon could not be joined, it is left in peace for this long, and for twice as long each further
/// time.
const JOIN_PAUSE: Duration = Duration::from_secs(1);
const JOIN_PAUSE_MAX: Duration = Duration::from_secs(60);

/// A process of the database. Its threads share what it has mapped.
pub struct CacheClient {
    door: Arc<DoorFile>,
    /// Whether the directory is that of a PostgreSQL server.
    is_postgres: bool,
    joined: Mutex<Joined>,
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
    line: Arc<Line>,
}

impl CacheClient {
    /// A process that uses the files behind this door.
    pub fn new(door: Arc<DoorFile>) -> Arc<CacheClient> {
        let is_postgres = door.data().join("PG_VERSION").exists();
        Arc::new(CacheClient { door, is_postgres, joined: Mutex::default() })
    }

    /// Whether pages of the file with this path are to be cached: it lies in the directory, and holds data
    /// that a database reads by pages. Changes of all files are announced, whatever their names.
    pub(crate) fn is_cacheable(&self, path: &Path) -> bool {
        let Ok(within) = path.strip_prefix(self.door.data()) else { return false };
        let name = within.file_name().unwrap_or_default().as_encoded_bytes();
        if self.is_postgres {
            // Tables and indexes, without maps of free space and what the server writes as streams.
            within.starts_with("base")
                && name.first().is_some_and(u8::is_ascii_digit)
                && !name.ends_with(b"_fsm")
        } else {
            !UNCACHED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
        }
    }

    /// The door.
    pub fn door(&self) -> &DoorFile {
        &self.door
    }

    /// The shared memory, for one thread. `None`: the door's memory cannot be changed.
    pub fn ground(self: &Arc<Self>) -> Option<Shared<FarSlots>> {
        let client = self.clone();
        let find = Box::new(move |number, shape| client.find(number, shape));
        Shared::new(self.door.words().clone(), self.door.places(), find)
    }

    fn find(&self, number: u64, shape: Shape) -> Option<Index<FarSlots>> {
        let index = self.mapped(number, shape)?;
        let transport = Rc::new(GuestTransport::new(index.line.clone()));
        let endpoint = Endpoint::new(EndpointConfig::real(transport, ARENA_BYTES, NODE_DEADLINE));
        let slots = FarSlots::new(index.table.clone(), index.regions.clone(), endpoint);
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
        let line = Line::open_within(&socket_name(number), JOIN_PATIENCE)?;
        // Any user may listen on a name of the abstract namespace once the daemon has died.
        if !self.door.trusts(line.peer_uid()?) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let (answer, descriptors) = line.ask(Ask::Join(GuestJoin { version: GUEST_VERSION }))?;
        let [words, table] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| invalid())?;
        let map = |fd: &OwnedFd, bytes| Mapping::new(fd.as_fd(), bytes, Protection::ReadWrite).map(Arc::new);
        let words = map(&words, Layout::new(shape).index_bytes())?;
        let table = map(&table, FarTable::bytes(shape.slots))?;
        let table = FarTable::new(table, shape.slots).ok_or_else(invalid)?;
        let asking = line.clone();
        let ask = Box::new(move |number| asking.region(number));
        let regions = table.regions(answer.extents_per_region, Arc::new(MonotonicClock), ask);
        Ok(Mapped { words, table, regions: regions.ok_or_else(invalid)?, line })
    }
}
