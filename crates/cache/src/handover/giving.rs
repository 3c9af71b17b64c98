//! The old daemon's side: the command `farpool cache handover` asks for the list, over the socket at which
//! processes join, and the keeper's thread makes it (H1).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use farpool_fabric::create_sealed;
use farpool_keep::MemoryJournal;
use farpool_wire::control::{GuestOpen, guest_request::Ask};
use rustix::io::Errno;
use rustix_futex_sync::Mutex;
use tokio::sync::Notify;

use super::{HandoverList, ServerEnd, close_and_list};
use crate::at_once;
use crate::client::{JOINING, line_to};
use crate::door::DoorFile;
use crate::far::FarMemory;
use crate::files::FileId;
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::living::{Living, pid_of, program_of};
use crate::places::Place;
use crate::postgres::{ControlFile, ServerState, may_be_handed_over};
use crate::rules::Shipped;
use crate::signatures::{self, Unsettled};
use crate::words::FileWord;

/// What the command shows instead of a ticket.
const TICKET: &[u8] = b"handover";
/// How long the keeper may take to make the list. It looks at each page.
const GIVE_PATIENCE: Duration = Duration::from_secs(60);
/// How long the command waits for the daemon, which may wait for its keeper for `GIVE_PATIENCE`.
const ASK_PATIENCE: Duration = Duration::from_secs(120);
/// How long the command may take to pass the list on. The leases are extended meanwhile.
const PASS_ON_PATIENCE: Duration = Duration::from_secs(60);
/// The first byte of the answer.
const LIST: u8 = 1;
const REFUSAL: u8 = 0;

/// The reason for which a cache is not handed over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// The directory is not that of a server.
    #[error("only the cache of a PostgreSQL server can be handed over")]
    NotPostgres,
    /// Its state is unknown.
    #[error("cannot read global/pg_control of the server: {0}")]
    NoControlFile(#[source] io::Error),
    /// It runs, has crashed, or is a standby.
    #[error("the server runs, has crashed, or is a standby: stop the primary first, by `pg_ctl stop`")]
    NotShutDown,
    /// A process uses the cache.
    #[error("process {pid} ({program}) uses the cache: end it first")]
    InUse {
        /// The process.
        pid: u32,
        /// Its program, as the kernel names it.
        program: String,
    },
    /// It has lost its pages, or loses them.
    #[error("the cache is not open, so it has no pages to hand over: see `farpool cache status`")]
    NotOpen,
    /// It is still taking over another one.
    #[error("the cache is still taking over the pages of another one: try again")]
    TakingOver,
    /// The list has no room.
    #[error("no memory for the list of pages: {0}")]
    NoMemory(#[source] io::Error),
    /// The leases were not recorded.
    #[error("the leases of this cache cannot be handed over")]
    NotRecorded,
}

/// Memory with the answer: [`LIST`] or [`REFUSAL`], and what follows.
type Answer = Result<OwnedFd, Errno>;

/// Where the command, which asks on the server's thread, and the keeper's thread meet.
#[derive(Default)]
pub(crate) struct HandoverRequests {
    asked: Mutex<Asked>,
    is_given: AtomicBool,
    given: Notify,
    command_ended: Notify,
}

/// What the keeper's thread has to answer.
#[derive(Default)]
enum Asked {
    #[default]
    Nothing,
    ForTheList(SyncSender<Answer>),
    /// The keeper has ended, and answers nothing any more.
    TooLate,
}

impl HandoverRequests {
    /// Asks the keeper's thread. Returns the memory with the answer.
    pub(crate) fn ask(&self, ticket: &[u8]) -> Answer {
        if ticket != TICKET {
            return Err(Errno::STALE);
        }
        let (sender, answer) = sync_channel(1);
        match &mut *self.asked.lock() {
            Asked::TooLate => return Err(Errno::STALE),
            asked => *asked = Asked::ForTheList(sender),
        }
        answer.recv_timeout(GIVE_PATIENCE).unwrap_or_else(|_| {
            // If the keeper is answering, it finds that nobody waits. Otherwise it must not find the question
            // any more.
            self.take_question();
            Err(Errno::TIMEDOUT)
        })
    }

    fn take_question(&self) -> Option<SyncSender<Answer>> {
        let asked = &mut *self.asked.lock();
        match std::mem::take(asked) {
            Asked::ForTheList(asker) => Some(asker),
            before => {
                *asked = before;
                None
            }
        }
    }

    /// Answers the command, if it asks. Returns whether the cache has been handed over: it then ends.
    pub(crate) fn answer(&self, list: impl FnOnce() -> Result<HandoverList, HandoverError>) -> bool {
        let Some(asker) = self.take_question() else { return false };
        let list = list().and_then(|list| in_memory(LIST, &list.encode()).map_err(HandoverError::NoMemory));
        let is_given = list.is_ok();
        let answer = list
            .or_else(|refusal| in_memory(REFUSAL, refusal.to_string().as_bytes()).map_err(|_| Errno::NOMEM));
        // Before the command has the list: it may end at once, and `process_ended` must know then. Pairs with
        // the load in `is_given`.
        self.is_given.store(is_given, Ordering::Release);
        if asker.send(answer).is_err() {
            // The command waits no longer. The keeper opens the door again, and the cache begins empty.
            self.is_given.store(false, Ordering::Release);
            return false;
        }
        if is_given {
            self.given.notify_one();
        }
        is_given
    }

    /// The keeper has ended: nothing is answered any more.
    pub(crate) fn end(&self) {
        *self.asked.lock() = Asked::TooLate;
    }

    /// Whether the list was given.
    pub(crate) fn is_given(&self) -> bool {
        self.is_given.load(Ordering::Acquire) // pairs with the stores in `answer`
    }

    /// A process that had joined has ended. Once the list was given, that is taken for the end of the
    /// command. (If it was another process, the leases are extended no longer, and last for some seconds
    /// more.)
    pub(crate) fn process_ended(&self) {
        if self.is_given() {
            self.command_ended.notify_one();
        }
    }

    /// Waits until the command has the list, has passed it on, and has ended.
    pub(crate) async fn passed_on(&self) {
        self.given.notified().await;
        let _late = tokio::time::timeout(PASS_ON_PATIENCE, self.command_ended.notified()).await;
    }
}

fn in_memory(kind: u8, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = File::from(create_sealed("farpool-handover", 1 + bytes.len() as u64)?);
    // The position stays at the beginning, for the reader.
    file.write_all_at(&[kind], 0)?;
    file.write_all_at(bytes, 1)?;
    Ok(file.into())
}

/// Asks the daemon of a cache to hand it over. Returns the list, as bytes. The cache is closed then, and the
/// daemon extends the leases until this process has ended, for a minute at most.
///
/// # Errors
/// If the daemon does not answer, or this process does not trust it; if it refuses, with its reason.
pub fn ask_for_handover(door: &DoorFile) -> io::Result<Vec<u8>> {
    let line = line_to(door, at_once(door.load(layout::INDEX)), ASK_PATIENCE)?;
    line.ask(JOINING)?;
    let asked = line.ask(Ask::Open(GuestOpen { ticket: TICKET.to_vec() }));
    let (_, memory) = asked.map_err(|error| match error.raw_os_error() {
        Some(libc::ESTALE) => io::Error::other("`farpool cache attach` is ending, or of an older version"),
        _ => error,
    })?;
    let mut answer = Vec::new();
    let memory = memory.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
    File::from(memory).read_to_end(&mut answer)?;
    match answer.split_first() {
        Some((&LIST, list)) => Ok(list.to_vec()),
        Some((&REFUSAL, why)) => Err(io::Error::other(String::from_utf8_lossy(why))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Closes the door, and lists what the cache has. The keeper makes no further round if this succeeds.
pub(crate) fn give(
    door: &DoorFile,
    ground: &impl Ground,
    layout: &Layout,
    memory: &FarMemory,
    journal: Option<&MemoryJournal>,
) -> Result<HandoverList, HandoverError> {
    let journal = journal.ok_or(HandoverError::NotRecorded)?;
    let server = control_after_shutdown(door)?;
    check_users(door)?;
    let files = usable_files(ground, layout);
    let paths = standbys_paths_of(door, &files);
    let signatures = signatures::of_files(door, &files, Unsettled::Signed);
    let handed =
        at_once(close_and_list::<_, Shipped>(ground, layout, &signatures)).ok_or(HandoverError::NotOpen)?;
    // If the server or a program was started meanwhile, it may have changed files before the door was closed.
    check_users(door)?;
    if control_after_shutdown(door)? != server {
        return Err(HandoverError::NotShutDown);
    }
    let groups = memory.extents();
    let extents = groups.iter().map(|(_, extent)| *extent);
    let mut list = HandoverList {
        server: ServerEnd {
            system: server.system,
            checkpoint: server.checkpoint,
            checksums: server.checksums,
        },
        slots: layout.shape().slots,
        wanted_slots: door.wanted_slots(),
        max_files: layout.shape().files,
        leases: memory.kept_regions(&journal.kept(), extents),
        groups,
        files: Vec::new(),
    };
    list.set_pages(handed, |id| paths.get(&id).cloned());
    Ok(list)
}

/// What the server says of itself, if it has shut down as a primary.
fn control_after_shutdown(door: &DoorFile) -> Result<ControlFile, HandoverError> {
    if !door.is_postgres() {
        return Err(HandoverError::NotPostgres);
    }
    let server = ControlFile::read(door.data()).map_err(HandoverError::NoControlFile)?;
    // The server signs its files after it has noted that it has shut down.
    let has_ended = !door.data().join("postmaster.pid").exists();
    (has_ended && server.state == ServerState::ShutDown).then_some(server).ok_or(HandoverError::NotShutDown)
}

/// Refuses while a living process has a place.
fn check_users(door: &DoorFile) -> Result<(), HandoverError> {
    let living = Living::default();
    let mut holders = (0..door.places()).map(|place| at_once(Place::new(door, place).holder()));
    match holders.find(|holder| *holder != 0 && living.is_alive(*holder)).map(pid_of) {
        Some(pid) => Err(HandoverError::InUse { pid, program: program_of(pid) }),
        None => Ok(()),
    }
}

fn usable_files(ground: &impl Ground, layout: &Layout) -> Vec<FileId> {
    let is_usable = |file: &u32| FileWord(at_once(ground.load(layout.file(*file)))).usable_id().is_some();
    let files = (0..layout.shape().files).filter(is_usable);
    files.map(|file| at_once(crate::files::load_id(ground, layout, file))).collect()
}

/// The paths of those of these files that a standby has, too, from the server's data directory.
fn standbys_paths_of(door: &DoorFile, files: &[FileId]) -> BTreeMap<FileId, PathBuf> {
    let on_standby = |(_, path): &(_, PathBuf)| may_be_handed_over(&door.data().join(path));
    signatures::paths_of(door, files).filter(on_standby).collect()
}
