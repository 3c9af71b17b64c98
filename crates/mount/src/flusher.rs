//! The flusher: it makes the kernel write back the data that the kernel has collected for a file, and tells
//! the kernel the size of a file.
//!
//! The kernel asks for data and holes without writing back first, so the daemon may not know the newest data.
//! The daemon can make the kernel write them by declaring the kernel's pages of the file invalid. That call
//! returns when worker threads have written the pages. So no worker may make it: if all did, none would be
//! left to write.
//!
//! F1. One thread makes these calls, another answers the requests that need them, and no worker waits for
//!     either.
//! F2. The first thread cannot be killed while it waits for pages. The watcher must notice the daemon's end
//!     all the same, so this thread shares only the device's descriptor with the other threads. The watcher
//!     ends the connection, and with it the wait. The second thread has all descriptors: a request is
//!     answered on the descriptor from which it was read.
//! F3. Where the watcher could not end the connection, there is no flusher: a killed daemon must not leave
//!     any process hanging.
//!
//! F4. To tell the kernel a size, the flusher stores the file's last byte in the kernel's pages and makes the
//!     kernel forget that page. The store raises the kernel's size at once, and makes the kernel drop older
//!     answers.
//! F5. Both this and forgetting all pages take locks of pages, but not the lock of the inode. A process may
//!     hold a page's lock while it waits for a worker (read-ahead, a write through the pages), so F1 holds
//!     here, too. The callers that wait for such an answer hold no page's lock: `open`, `ioctl`, `lseek`, a
//!     read that has not begun, a direct write.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use fuser::INodeNo;

use crate::body::Body;

/// Most requests that wait. Each is a system call of some process on the mount; more than this many are an
/// attack.
const MAX_WAITING: usize = 1024;
/// `FUSE_NOTIFY_INVAL_INODE` of `linux/fuse.h`.
const INVALIDATE_INODE: i32 = 2;
/// `FUSE_NOTIFY_STORE`.
const STORE: i32 = 4;
/// A header (length, code, no request number), then inode, first byte and length. In a store the length has
/// four bytes, followed by four unused ones.
const MESSAGE_BYTES: usize = 40;
/// The length that stands for a range up to the end of the file.
const TO_THE_END: i64 = 0;

/// The queue of the threads; dropping it ends them.
pub(crate) struct Flusher {
    jobs: SyncSender<Job>,
}

struct Job {
    node: INodeNo,
    work: Work,
    then: Then,
}

enum Work {
    /// Writes back and forgets pages, from this byte on.
    Flush(i64),
    /// Tells the kernel the size.
    Tell(Arc<Body>),
}

type Then = Box<dyn FnOnce() + Send>;

/// The queue is full.
#[derive(Debug)]
pub(crate) struct Crowded;

impl Flusher {
    /// Starts the threads of a mount. `device` is the FUSE device of the mount.
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
            // `start` waits for this message, so its receiver exists.
            let _ = started.send(result);
            if let Some(device) = device {
                flush_all(&device, &queue, &flushed);
            }
        };
        thread::Builder::new().name("mount-flusher".into()).spawn(flush)?;
        thread::Builder::new().name("mount-answerer".into()).spawn(move || answer_all(answers))?;
        // The device stays open in this table until the thread has a table of its own.
        is_started.recv().map_err(io::Error::other)??;
        Ok(Flusher { jobs })
    }

    /// Makes the kernel write back all that it holds of a file from a byte on, and then calls `then`.
    pub(crate) fn flush(
        &self,
        node: INodeNo,
        from: i64,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), Crowded> {
        self.jobs.try_send(Job { node, work: Work::Flush(from), then: Box::new(then) }).map_err(|_| Crowded)
    }

    /// Makes the kernel forget the pages of a file on which direct clients (called *guests* in the code) have
    /// worked, tells it the size of the file, and then calls `then`. Growth by direct clients must have ended
    /// before.
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
            return; // the other thread does not end first
        }
    }
}

fn answer_all(answers: Receiver<Then>) {
    for then in answers {
        // A panic leaves a request unanswered; fuser then answers it with EIO.
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
        // Any byte will do: no process uses the page before it is forgotten, since each process that might
        // use it waits for this answer.
        let [a, b, c, d] = 1_u32.to_ne_bytes();
        let stored = rustix::io::write(device, &message(STORE, node, last, [a, b, c, d, 0, 0, 0, 0], &[0]));
        // The kernel may have forgotten the file, or had no memory for the page. It asks for that memory only
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

/// Gives this thread a descriptor table of its own that holds only the standard descriptors and `kept` (F2).
fn keep_only(kept: RawFd) -> io::Result<OwnedFd> {
    let kept_number = u32::try_from(kept).map_err(|_| io::ErrorKind::InvalidInput)?;
    let first = libc::STDERR_FILENO as u32 + 1;
    // SAFETY: plain system calls on numbers. They close descriptors in this thread's own table only: nothing
    // in this thread owns a descriptor, and those of other threads stay open in their table. `kept` is open
    // in the new table, and nothing else owns it there.
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
