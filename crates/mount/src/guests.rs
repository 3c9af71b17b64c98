//! Processes that work on files of the mount directly (crate `file`, guests): which files are open to them, and who is let in.
//!
//! H1. A file is open to guests only while every opening of it is registered. An opening that is not, whoever makes it, is
//!     answered only once no operation of a guest is under way on the file.
//! H2. Before a file is opened to guests the kernel forgets its pages, and nobody has opened it since otherwise; registered
//!     openings bypass the kernel's pages, which is for whoever registers them to see to.
//! H3. Guests share what all files of the mount lie in. So only those are let in who are trusted with all of them: root, the
//!     user who mounted, and whom he named.
//! H4. What a guest leaves is looked after once its process is dead, by its descriptor: a connection that ends says nothing.
//! H5. A read by the kernel that began before its description was registered may leave pages there after H2. So when a file
//!     was closed to guests, the kernel forgets its pages again, before the call is answered for which it was closed.

mod growth;
mod hall;
mod server;
mod undertaker;

use std::sync::Arc;
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
pub(crate) use hall::{Growing, Hall, Opener};
pub(crate) use server::Server;

/// Bits of a mode that a write by others takes away: that is for the kernel's path.
const PRIVILEGES: u32 = 0o6000;

/// The openings of one file.
#[derive(Default)]
pub(crate) struct Openings {
    /// Those that there are, and those of them that are registered.
    all: u32,
    registered: u32,
    /// The file is open to guests.
    is_open: bool,
    /// Some guest has asked for its layout since it was first opened: before, nobody has anything of its being open to guests.
    is_wanted: bool,
    /// Counts openings that were ever made, to notice one.
    made: u64,
}

impl Openings {
    /// Whether guests may work on the file (H1).
    fn all_registered(&self) -> bool {
        self.all > 0 && self.registered == self.all
    }

    /// Whether it is to be opened to them.
    fn lacks_opening(&self) -> bool {
        self.all_registered() && self.is_wanted && !self.is_open
    }
}

/// The openings of a file, as its body keeps them.
pub(crate) type Doors = Mutex<Openings>;

impl FarFs {
    /// The file is about to be opened by somebody who has not registered (H1).
    pub(crate) fn admit(&self, body: &Body) -> Outcome<()> {
        if self.hall.is_none() {
            return Ok(());
        }
        // Kept while guests end their operations: others who open the file wait for that as well.
        let mut doors = body.doors.lock();
        doors.made += 1;
        body.growth.end(&body.far, Until::Allowed);
        self.close_to_guests(body, &mut doors)?;
        doors.all += 1;
        Ok(())
    }

    /// An opening is over.
    pub(crate) fn dismiss(&self, ino: Ino, body: &Arc<Body>, standing: Standing) {
        let Some(hall) = &self.hall else { return };
        let mut doors = body.doors.lock();
        doors.all = doors.all.saturating_sub(1);
        if standing == Standing::Registered {
            doors.registered = doors.registered.saturating_sub(1);
        }
        if doors.all == 0 {
            body.growth.end(&body.far, Until::Allowed);
            // Nobody waits for the guests here: what they might still be at work on is kept for them.
            let _ = self.close_to_guests(body, &mut doors);
            doors.is_wanted = false;
        } else if doors.lacks_opening() {
            hall.wants_open(ino, body);
        }
    }

    /// Calls `answer` once the kernel knows how long a file is, and has no page of it that guests have written since (H5):
    /// now if so, else after the flusher has seen to it (S2, S3). If `answer` is dropped uncalled, its reply says EIO.
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
                        tracing::warn!(left_out, "too many files wait for the kernel to be told their sizes");
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

    /// Ends growth by guests for good: the kernel is about to use its own idea of an open file's size, or to
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
        // If not, whoever opens the file next waits once more.
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
                    // An error is answered already: the reply that was not called says EIO.
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

    /// An opening says that it goes by the rules of guests.
    fn register(&self, number: u64, uid: u32) -> Outcome<Registered> {
        let hall = self.hall.as_ref().ok_or(Errno::ENOTTY)?;
        if !hall.trusts(uid) {
            return Err(Errno::EACCES.into());
        }
        let handle = self.handles.handle(number).ok_or(Errno::EBADF)?;
        if self.names()?.attributes(handle.ino)?.ownership.mode & PRIVILEGES != 0 {
            return Err(Errno::EPERM.into());
        }
        // First: nothing that counts as registered goes without.
        let ticket = hall.ticket(handle.ino, &handle.body)?;
        let mut doors = handle.body.doors.lock();
        match self.handles.change_standing(number, Standing::Registered) {
            Some(Standing::Plain) => doors.registered += 1,
            Some(Standing::Registered) => {}
            Some(Standing::Barred) | None => return Err(Errno::EPERM.into()),
        }
        if doors.lacks_opening() {
            hall.wants_open(handle.ino, &handle.body);
        }
        let socket = hall.name().to_owned();
        Ok(Registered { version: GUEST_VERSION, inode: handle.ino.0, ticket, socket })
    }

    /// An opening says that from now on it goes by the kernel's rules, for good.
    fn unregister(&self, number: u64) -> Outcome<Handle> {
        if self.hall.is_none() {
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
