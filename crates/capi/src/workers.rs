//! Threads that carry out asynchronous operations.
//!
//! W1. An accepted operation is carried out and reported once, also when the connection ends.
//! W2. At most [`MAX_QUEUED`] operations wait; further ones are refused.
//! W3. These threads never wait for an operation, even if their callbacks call functions that would.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix_futex_sync::{Condvar, Mutex};

use crate::error::{Failure, answer};
use crate::file::{Memory, OpenFile};

/// Threads of a connection: the number of operations that are carried out at the same time.
const WORKERS: usize = 4;
/// Most operations that wait: far more than are needed to keep the threads busy.
const MAX_QUEUED: usize = 1024;

/// The callback that reports the result of an operation to C.
pub(crate) type Done = unsafe extern "C" fn(context: *mut c_void, result: libc::ssize_t);

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is all that is left of a process that forked, perhaps in a callback.
pub(crate) fn become_no_worker() {
    IS_WORKER.set(false);
}

/// Fails on a thread of the library: the thread might otherwise wait for an operation that it has to carry
/// out itself (W3).
pub(crate) fn must_not_wait() -> Result<(), Failure> {
    if IS_WORKER.get() {
        return Err(Failure::new(libc::EDEADLK, "a `done` function must not call this: it would wait"));
    }
    Ok(())
}

/// What an operation does.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Read,
    Write,
}

/// An operation that was accepted.
pub(crate) struct Job {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) kind: Kind,
    pub(crate) memory: Memory,
    pub(crate) offset: u64,
    pub(crate) done: Done,
    pub(crate) context: Context,
}

/// The caller's own pointer, handed back to it.
#[derive(Clone, Copy)]
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: the library never dereferences it; by contract, the callback may run on another thread.
unsafe impl Send for Context {}

impl Job {
    fn carry_out(self) {
        let Job { file, kind, memory, offset, done, context } = self;
        let result = answer(|| match kind {
            Kind::Read => file.read(memory, offset),
            Kind::Write => file.write(memory, offset),
        });
        // SAFETY: `done` has the signature that the header demands; `context` is the pointer given with it.
        unsafe { done(context.0, result as libc::ssize_t) };
        if !IS_WORKER.get() {
            // The callback has forked, and this is the child: the queue and the connection are its parent's.
            const REASON: &[u8] =
                b"farpool: a child that a `done` function forked must call exec or _exit, not return\n";
            // Not `eprintln!`: another thread of the parent may have held its lock.
            // SAFETY: the pointer and the length are those of a static text.
            let _written = unsafe { libc::write(libc::STDERR_FILENO, REASON.as_ptr().cast(), REASON.len()) };
            std::process::abort();
        }
        file.operation_ended();
    }
}

/// Operations that wait for a thread.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

impl Queue {
    pub(crate) fn put(&self, job: Job) -> Result<(), Failure> {
        let mut waiting = self.waiting.lock();
        if waiting.is_closed {
            return Err(Failure::new(libc::EBADF, "the connection is being closed"));
        }
        if waiting.jobs.len() >= MAX_QUEUED {
            let text = format!("{MAX_QUEUED} operations are waiting already: try again when some have ended");
            return Err(Failure::new(libc::EAGAIN, text));
        }
        waiting.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// The next job; `None` when there will be no more.
    fn take(&self) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(job) = waiting.jobs.pop_front() {
                return Some(job);
            }
            if waiting.is_closed {
                return None;
            }
            waiting = self.changed.wait(waiting);
        }
    }

    fn close(&self) {
        self.waiting.lock().is_closed = true;
        self.changed.notify_all();
    }
}

/// The threads.
pub(crate) struct Workers {
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    pub(crate) fn start() -> io::Result<Self> {
        let workers = Workers { queue: Arc::default(), threads: Mutex::default() };
        for _ in 0..WORKERS {
            let queue = workers.queue.clone();
            let run = move || {
                IS_WORKER.set(true);
                std::iter::from_fn(|| queue.take()).for_each(Job::carry_out);
            };
            workers.threads.lock().push(std::thread::Builder::new().name("farpool-io".into()).spawn(run)?);
        }
        Ok(workers)
    }

    pub(crate) fn queue(&self) -> Arc<Queue> {
        self.queue.clone()
    }

    /// Waits until all accepted operations are done (W1).
    pub(crate) fn finish(&self) {
        self.queue.close();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join(); // a callback that panicked has ended the process
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.finish();
    }
}
