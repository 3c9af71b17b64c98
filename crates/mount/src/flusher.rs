//! The flusher: has the kernel write back what it has collected for a file, and tells it how long a file is.
//!
//! The kernel asks for data and holes without writing back first, so the daemon may not know of the newest data. It can
//! ask for them by declaring the kernel's pages of the file invalid; the call that does so returns when they are
//! written, by other worker threads. So no worker may make it: if all did, none would be left to write.
//!
//! F1. One thread makes these calls, another answers who asked for them, and no worker waits for either.
//! F2. The first cannot be killed while it waits for pages. So that the daemon's end is seen nevertheless, it shares no
//!     descriptor with the others but the device's, and the watcher ends the connection, and with it the wait. The
//!     second has all descriptors: a request is answered where it was read.
//! F3. Where the watcher could not end the connection, there is no flusher: a killed daemon must not hang anybody.
//!
//! F4. To tell the kernel a size, the flusher stores the file's last byte in the kernel's pages and has it
//!     forget that page. The store raises the kernel's size at once, and makes the kernel drop older answers.
//! F5. Both this and forgetting all pages take locks of pages, and not that of the inode. A process may hold a
//!     page's lock while it waits for a worker (read-ahead, a write through the pages), so F1 holds here, too.
//!     The callers that wait for such an answer hold no page's lock: `open`, `ioctl`, `lseek`, a read that has
//!     not begun, a direct write.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use fuser::INodeNo;

use crate::body::Body;

/// Most calls that wait; each is a system call of some process on the mount, and more than this many is an attack.
const MAX_WAITING: usize = 1024;
/// `FUSE_NOTIFY_INVAL_INODE` of `linux/fuse.h`.
const INVALIDATE_INODE: i32 = 2;
/// `FUSE_NOTIFY_STORE`.
const STORE: i32 = 4;
/// A header (length, code, no request), then inode, first byte and length. In a store the length has four
/// bytes, and four unused ones follow.
const MESSAGE_BYTES: usize = 40;
/// Length of the range that ends where the file does.
const TO_THE_END: i64 = 0;

/// The way to the threads; dropping it ends them.
pub(crate) struct Flusher {
    jobs: SyncSender<Job>,
}

struct Job {
    node: INodeNo,
    work: Work,
    then: Then,
}

enum Work {
    /// Write back and forget pages, from this byte on.
    Flush(i64),
    /// Tell the kernel the size.
    Tell(Arc<Body>),
}

type Then = Box<dyn FnOnce() + Send>;

/// More calls wait than can be meant well.
#[derive(Debug)]
pub(crate) struct Crowded;

impl Flusher {
    /// Starts the threads of a mount, given the device through which the kernel asks.
    pub(crate) fn start(device: BorrowedFd<'_>) -> io::Result<Self> {
        let (jobs, queue) = mpsc::sync_channel(MAX_WAITING);
        let (flushed, answers) = mpsc::sync_channel(MAX_WAITING);
        let (started, is_started) = mpsc::channel();
        let number = device.as_raw_fd();
        let flush = move || {
            let (device, result) = match keep_only(number) {
                Ok(device) => (Some(device), Ok(())),
                Err(error) => (None, Err(error)),
            };
            // The other side waits for exactly this.
            let _ = started.send(result);
            if let Some(device) = device {
                flush_all(&device, &queue, &flushed);
            }
        };
        thread::Builder::new().name("mount-flusher".into()).spawn(flush)?;
        thread::Builder::new().name("mount-answerer".into()).spawn(move || answer_all(answers))?;
        // The device stays open here until the thread has a table of its own.
        is_started.recv().map_err(io::Error::other)??;
        Ok(Flusher { jobs })
    }

    /// Has everything written back that the kernel holds of a file from a byte on, and then calls `then`.
    pub(crate) fn flush(
        &self,
        node: INodeNo,
        from: i64,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), Crowded> {
        self.jobs.try_send(Job { node, work: Work::Flush(from), then: Box::new(then) }).map_err(|_| Crowded)
    }

    /// Has the kernel forget the pages of a file that guests have worked on, tells it how long the file is, then calls
    /// `then`. Growth by guests must have ended before.
    pub(crate) fn tell(
        &self,
        node: INodeNo,
        body: Arc<Body>,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), Crowded> {
        self.jobs.try_send(Job { node, work: Work::Tell(body), then: Box::new(then) }).map_err(|_| Crowded)
    }
}

fn flush_all(device: &OwnedFd, queue: &Receiver<Job>, flushed: &SyncSender<Then>) {
    for Job { node, work, then } in queue {
        match work {
            Work::Flush(from) => forget(device, node, from, TO_THE_END),
            Work::Tell(body) => tell(device, node, &body),
        }
        if flushed.send(then).is_err() {
            return; // the other thread cannot end first
        }
    }
}

fn answer_all(answers: Receiver<Then>) {
    for then in answers {
        // A panic leaves a request without its answer, and fuser answers that with EIO.
        if catch_unwind(AssertUnwindSafe(then)).is_err() {
            tracing::error!("a handler panicked after a flush");
        }
    }
}

fn forget(device: &OwnedFd, node: INodeNo, from: i64, length: i64) {
    if let Err(error) =
        rustix::io::write(device, &message(INVALIDATE_INODE, node, from, length.to_ne_bytes(), &[]))
    {
        tracing::debug!(%error, "the kernel knows nothing of the file that it has not written");
    }
}

fn tell(device: &OwnedFd, node: INodeNo, body: &Body) {
    let _telling = body.telling.lock();
    body.pages.forget(|| forget(device, node, 0, TO_THE_END));
    if body.growth.is_known() {
        return;
    }
    let (end, size) = (body.growth.last_end(), body.far.size());
    if let Some(last) = size.checked_sub(1).and_then(|last| i64::try_from(last).ok()) {
        // Any byte will do: no process uses the page before it is forgotten, since a process that might use
        // it waits for this answer.
        let [a, b, c, d] = 1_u32.to_ne_bytes();
        let stored = rustix::io::write(device, &message(STORE, node, last, [a, b, c, d, 0, 0, 0, 0], &[0]));
        // The kernel may have forgotten the file; or it had no memory for the page, which it asks for only
        // after it has noted the size.
        if let Err(error) = stored {
            tracing::debug!(%error, "the kernel has not stored the last byte of a file");
        }
        forget(device, node, last, 1);
    }
    body.growth.told(end);
}

fn message(code: i32, node: INodeNo, from: i64, length: [u8; 8], data: &[u8]) -> Vec<u8> {
    let total = MESSAGE_BYTES + data.len();
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(&(total as u32).to_ne_bytes());
    bytes.extend_from_slice(&code.to_ne_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&node.0.to_ne_bytes());
    bytes.extend_from_slice(&from.to_ne_bytes());
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(data);
    bytes
}

/// Gives this thread a table of descriptors of its own, with nothing in it but the standard ones and `kept` (F2).
fn keep_only(kept: RawFd) -> io::Result<OwnedFd> {
    let kept_number = u32::try_from(kept).map_err(|_| io::ErrorKind::InvalidInput)?;
    let first = libc::STDERR_FILENO as u32 + 1;
    // SAFETY: plain system calls. What they close, they close in this thread's own table: nothing in this thread
    // owns a descriptor, and those of other threads stay open in theirs.
    unsafe {
        if libc::unshare(libc::CLONE_FILES) != 0 {
            return Err(io::Error::last_os_error());
        }
        for (from, to) in [(first, kept_number - 1), (kept_number + 1, u32::MAX)] {
            if from <= to && libc::syscall(libc::SYS_close_range, from, to, 0) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(OwnedFd::from_raw_fd(kept))
    }
}
