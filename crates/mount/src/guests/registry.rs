//! The registry of direct clients (called *guests* in the code): which users are trusted, tickets, and files
//! that are to be opened to direct clients.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use farpool_throttle::Throttle;
use farpool_wire::TICKET_BYTES;
use fuser::{Errno, INodeNo};
use parking_lot::Mutex;

use crate::body::Body;
use crate::fs::Kernel;
use crate::namespace::Ino;

/// Most tickets that were issued and not used yet. If there are more, the oldest become invalid.
const MAX_TICKETS: usize = 4096;
/// Most files that wait to be opened to direct clients. A further one stays with the kernel until it is
/// registered again.
const MAX_WISHES: usize = 4096;

/// Whether direct clients may extend files that have a single handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Growing {
    /// Only the kernel may: it cannot be told of sizes, or a later process must find them.
    ByKernel,
    /// Direct clients may.
    ByGuests,
}

type Ticket = [u8; TICKET_BYTES];
type Wish = (Ino, Weak<Body>);

/// The registry, shared by the file system, which registers handles, and the server of direct clients.
pub(crate) struct Registry {
    name: String,
    trusted: Vec<u32>,
    tickets: Mutex<VecDeque<(Ticket, Ino, Weak<Body>)>>,
    wishes: SyncSender<Wish>,
    left_to_kernel: Throttle,
}

/// The thread that opens files to direct clients; it ends with its registry.
pub(crate) struct Opener(
    #[expect(dead_code, reason = "its end is the end of the registry's sender")] JoinHandle<()>,
);

impl Registry {
    /// A registry that trusts these users. A file is opened to direct clients once `kernel`, which is set by
    /// then, has forgotten the file's pages.
    pub(crate) fn open(
        trusted: Vec<u32>,
        kernel: Kernel,
        growing: Growing,
    ) -> std::io::Result<(Arc<Registry>, Opener)> {
        let mut name = [0; 16];
        getrandom::fill(&mut name).map_err(std::io::Error::other)?;
        let name = name.iter().fold("farpool-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
        let (wishes, wished) = sync_channel(MAX_WISHES);
        let opener = std::thread::Builder::new().name("guests-opener".into());
        let opener = Opener(opener.spawn(move || open_files(&wished, &kernel, growing))?);
        Ok((
            Arc::new(Registry {
                name,
                trusted,
                tickets: Mutex::default(),
                wishes,
                left_to_kernel: Throttle::new(),
            }),
            opener,
        ))
    }

    /// The name of the socket, in the abstract namespace.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn trusts(&self, uid: u32) -> bool {
        uid == 0 || self.trusted.contains(&uid)
    }

    /// A ticket: it opens a file's layout at the socket, once.
    pub(super) fn ticket(&self, ino: Ino, body: &Arc<Body>) -> Result<Ticket, Errno> {
        let mut ticket = [0; TICKET_BYTES];
        getrandom::fill(&mut ticket).map_err(|_| Errno::EAGAIN)?;
        let mut tickets = self.tickets.lock();
        if tickets.len() == MAX_TICKETS {
            tickets.pop_front();
        }
        tickets.push_back((ticket, ino, Arc::downgrade(body)));
        Ok(ticket)
    }

    /// Exchanges a ticket for its file. From now on the file is opened to direct clients whenever that is
    /// allowed.
    pub(super) fn redeem(&self, ticket: &[u8]) -> Option<Arc<Body>> {
        let (ino, body) = {
            let mut tickets = self.tickets.lock();
            let place = tickets.iter().position(|(known, ..)| known == ticket)?;
            let (_, ino, body) = tickets.remove(place)?;
            (ino, body.upgrade()?)
        };
        // The lock of the file's open handles (`doors`) is not taken here. An `open` request may hold it
        // while it waits for a direct client's operation, and that may need an answer from this thread. The
        // opener takes the lock and looks whether the file may be opened. Relaxed: the wish is sent after the
        // store, and the opener looks after it has received the wish. If no wish can be sent, nobody looks
        // because of this call.
        body.wanted_by_guests.store(true, Ordering::Relaxed);
        self.wants_open(ino, &body);
        Some(body)
    }

    /// Asks the opener to open a file: all its handles are registered, and some direct client wants to work
    /// on it.
    pub(super) fn wants_open(&self, ino: Ino, body: &Arc<Body>) {
        // Does not wait: a caller may hold the lock of the file's `doors`, which the opener takes as well.
        // The receiver is gone once the mount is ending.
        if let Err(TrySendError::Full(_)) = self.wishes.try_send((ino, Arc::downgrade(body)))
            && let Some(left_out) = self.left_to_kernel.occurs(Instant::now())
        {
            tracing::warn!(
                left_out,
                "too many files wait to be opened to direct clients; one more is served by the kernel only"
            );
        }
    }
}

/// Opens files to direct clients. It runs in a thread of its own: forgetting pages may wait for requests that
/// workers answer.
fn open_files(wished: &Receiver<Wish>, kernel: &Kernel, growing: Growing) {
    let mut said = false;
    while let Ok((ino, body)) = wished.recv() {
        if let Some(body) = body.upgrade()
            && let Err(error) = open_file(ino, &body, kernel, growing)
            && !std::mem::replace(&mut said, true)
        {
            tracing::warn!(%error, "some files cannot be worked on directly; only the kernel serves them");
        }
    }
}

fn open_file(ino: Ino, body: &Body, kernel: &Kernel, growing: Growing) -> std::io::Result<()> {
    let Some(kernel) = kernel.get() else { return Ok(()) };
    let before = {
        let doors = body.doors.lock();
        if !doors.all_registered() || doors.is_open {
            return Ok(());
        }
        if growing == Growing::ByGuests && doors.all == 1 {
            body.growth.begin(); // before the kernel forgets its attributes
        }
        doors.made
    };
    const ALL: i64 = 0;
    if let Err(error) = kernel.inval_inode(INodeNo(ino.0), ALL, ALL) {
        tracing::debug!(%error, "the kernel had no pages of the file");
    }
    let mut doors = body.doors.lock();
    // Otherwise the file was opened meanwhile, and the kernel may have pages again. The file is asked for
    // again when that handle is closed.
    if doors.made == before && doors.all_registered() && !doors.is_open {
        body.far.core().open_to_guests()?;
        doors.is_open = true;
        body.growth.allow(&body.far);
    }
    Ok(())
}
