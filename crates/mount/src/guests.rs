//! Direct clients: processes that work on files of the mount without the kernel (called *guests* in the code,
//! and in crate `file`). This module decides which files are open to them, and which processes are admitted.
//!
//! H1. A file is open to direct clients only while every handle on it is registered. A handle that is not
//!     registered, whichever process opens it, is given out only once no operation of a direct client is in
//!     flight on the file.
//! H2. Before a file is opened to direct clients, the kernel forgets its pages, and no handle that is not
//!     registered has been opened since. Registered handles bypass the kernel's pages; the process that
//!     registers a handle must ensure that.
//! H3. Direct clients share the memory that holds all files of the mount. So only processes that are trusted
//!     with all of them are admitted: those of root, of the user that mounted, and of the users that it
//!     named.
//! H4. What a direct client leaves behind is recovered once its process is dead, according to its process
//!     descriptor (pidfd): the end of its connection proves nothing.
//! H5. A read by the kernel that began before its file description was registered may leave pages in the
//!     kernel after H2. So when a file was closed to direct clients, the kernel forgets its pages again
//!     before the daemon answers the call for which the file was closed.

mod growth;
mod reaper;
mod registry;
mod server;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fuser::{Errno, INodeNo, ReplyIoctl};
use parking_lot::Mutex;

use farpool_file::FileError;
use farpool_wire::{GUEST_VERSION, REGISTER, Registered, UNREGISTER};

use crate::body::Body;
use crate::errno::Failure;
use crate::fs::{FarFs, Outcome, Repeating};
use crate::handles::{Handle, Standing};
use crate::namespace::Ino;
use crate::worker::with_session;

pub(crate) use growth::Growth;
use growth::Until;
pub(crate) use registry::{Growing, Opener, Registry};
pub(crate) use server::serve_guests;

/// Mode bits that a write by another user clears: only writes through the kernel clear them.
const PRIVILEGES: u32 = 0o6000;

/// The open handles of one file.
#[derive(Default)]
pub(crate) struct Openings {
    /// The number of handles, and how many of them are registered.
    all: u32,
    registered: u32,
    /// The file is open to direct clients.
    is_open: bool,
    /// Counts all handles ever opened, so that a new one is noticed.
    made: u64,
}

impl Openings {
    /// Whether direct clients may work on the file (H1).
    fn all_registered(&self) -> bool {
        self.all > 0 && self.registered == self.all
    }
}

/// Whether a file is to be opened to direct clients: one has asked for its layout, and all handles are
/// registered.
fn wants_opening(body: &Body, doors: &Openings) -> bool {
    // Relaxed: if a client asks after this load, the opener checks the doors once more.
    doors.all_registered() && !doors.is_open && body.wanted_by_guests.load(Ordering::Relaxed)
}

/// The open handles of a file, under a lock, in its body.
pub(crate) type Doors = Mutex<Openings>;

impl FarFs {
    /// Prepares for a new handle on the file, which is not registered yet (H1).
    pub(crate) fn admit(&self, body: &Body) -> Outcome<()> {
        if self.registry.is_none() {
            return Ok(());
        }
        // The lock is held while direct clients finish their operations: other calls that open the file have
        // to wait for that as well.
        let mut doors = body.doors.lock();
        doors.made += 1;
        body.growth.end(&body.far, Until::Allowed);
        self.close_to_guests(body, &mut doors)?;
        doors.all += 1;
        Ok(())
    }

    /// Notes that a handle was closed.
    pub(crate) fn dismiss(&self, ino: Ino, body: &Arc<Body>, standing: Standing) {
        let Some(registry) = &self.registry else { return };
        let mut doors = body.doors.lock();
        doors.all = doors.all.saturating_sub(1);
        if standing == Standing::Registered {
            doors.registered = doors.registered.saturating_sub(1);
        }
        if doors.all == 0 {
            body.growth.end(&body.far, Until::Allowed);
            // An error is ignored: no request depends on direct clients having finished here. Extents that
            // they may still use are kept for them.
            let _ = self.close_to_guests(body, &mut doors);
            body.wanted_by_guests.store(false, Ordering::Relaxed);
        } else if wants_opening(body, &doors) {
            registry.wants_open(ino, body);
        }
    }

    /// Calls `answer` once the kernel knows the size of the file and holds no page of it that direct clients
    /// have written since (H5): at once if that is so, otherwise after the flusher has done it (S2, S3). If
    /// `answer` is dropped uncalled, its reply says EIO.
    pub(crate) fn once_kernel_is_up_to_date(
        &self,
        node: INodeNo,
        body: &Arc<Body>,
        answer: impl FnOnce() + Send + 'static,
    ) -> Outcome<()> {
        match &self.flusher {
            Some(flusher) if !body.growth.is_known() || body.pages.are_doubtful() => {
                flusher.tell(node, body.clone(), answer).map_err(|_| {
                    if let Some(left_out) = self.warnings.occurs(Repeating::Sizes, Instant::now()) {
                        tracing::warn!(
                            left_out,
                            "too many files wait until the kernel has learnt their sizes"
                        );
                    }
                    Errno::EIO.into()
                })
            }
            _ => {
                answer();
                Ok(())
            }
        }
    }

    /// Ends growth by direct clients for good: the kernel is about to use its own size of an open file, or to
    /// set it.
    pub(crate) fn end_growth(&self, body: &Body) {
        body.growth.end(&body.far, Until::Ever);
    }

    fn close_to_guests(&self, body: &Body, doors: &mut Openings) -> Outcome<()> {
        if !doors.is_open {
            return Ok(());
        }
        let closed: Result<(), FileError> =
            with_session(&self.store, |session| body.far.close_to_guests(session));
        // After an error the next `open` waits again.
        doors.is_open = closed.is_err();
        body.pages.doubt();
        closed.map_err(|error| {
            tracing::error!(%error, "a process that works on a file directly does not end its operation");
            Failure::from(Errno::EIO)
        })
    }

    pub(crate) fn answer_ioctl(&self, handle: u64, command: u32, uid: u32, reply: ReplyIoctl) {
        let answered = match command {
            REGISTER => self.register(handle, uid).map(|registered| registered.encode().to_vec()),
            UNREGISTER => match self.unregister(handle) {
                Ok(Handle { ino, body, .. }) => {
                    // On an error the request is answered already: the dropped reply says EIO.
                    let _ =
                        self.once_kernel_is_up_to_date(INodeNo(ino.0), &body, move || reply.ioctl(0, &[]));
                    return;
                }
                Err(failure) => Err(failure),
            },
            _ => Err(Errno::ENOTTY.into()),
        };
        match answered {
            Ok(bytes) => reply.ioctl(0, &bytes),
            Err(Failure(errno)) => reply.error(errno),
        }
    }

    /// Registers a handle: it follows the rules of direct clients.
    fn register(&self, number: u64, uid: u32) -> Outcome<Registered> {
        let registry = self.registry.as_ref().ok_or(Errno::ENOTTY)?;
        if !registry.trusts(uid) {
            return Err(Errno::EACCES.into());
        }
        let handle = self.handles.handle(number).ok_or(Errno::EBADF)?;
        if self.names()?.attributes(handle.ino)?.ownership.mode & PRIVILEGES != 0 {
            return Err(Errno::EPERM.into());
        }
        // The ticket comes first, so that every registered handle has one.
        let ticket = registry.ticket(handle.ino, &handle.body)?;
        let mut doors = handle.body.doors.lock();
        match self.handles.change_standing(number, Standing::Registered) {
            Some(Standing::Plain) => doors.registered += 1,
            Some(Standing::Registered) => {}
            Some(Standing::Barred) | None => return Err(Errno::EPERM.into()),
        }
        if wants_opening(&handle.body, &doors) {
            registry.wants_open(handle.ino, &handle.body);
        }
        let socket = registry.name().to_owned();
        Ok(Registered { version: GUEST_VERSION, inode: handle.ino.0, ticket, socket })
    }

    /// Ends the registration of a handle: from now on it follows the kernel's rules, for good.
    fn unregister(&self, number: u64) -> Outcome<Handle> {
        if self.registry.is_none() {
            return Err(Errno::ENOTTY.into());
        }
        let handle = self.handles.handle(number).ok_or(Errno::EBADF)?;
        let mut doors = handle.body.doors.lock();
        if self.handles.change_standing(number, Standing::Barred) == Some(Standing::Registered) {
            doors.registered = doors.registered.saturating_sub(1);
        }
        doors.made += 1;
        handle.body.growth.end(&handle.body.far, Until::Allowed);
        self.close_to_guests(&handle.body, &mut doors)?;
        drop(doors);
        Ok(handle)
    }
}
