//! The handles that C programs hold. They have the type of pointers, but are numbers.
//!
//! H1. A number is used once. A handle that was closed, or that the library never gave out, is refused; no
//!     handle is ever dereferenced.
//! H2. A child process made by fork(2) starts without handles, and refuses those of its parent.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix_futex_sync::RwLock;

use crate::error::Failure;
use crate::file::OpenFile;
use crate::pool::Connection;
use crate::workers;

/// A handle of a connection, as C passes it. It is checked when it is used.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ConnectionHandle(usize);

/// The same for an open file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct FileHandle(usize);

/// The objects behind the handles of this process.
#[derive(Default)]
struct Handles {
    connections: HashMap<ConnectionHandle, Arc<Connection>>,
    files: HashMap<FileHandle, (ConnectionHandle, Arc<OpenFile>)>,
}

/// Null until the first handle of a process.
static HANDLES: AtomicPtr<RwLock<Handles>> = AtomicPtr::new(std::ptr::null_mut());
/// The next number. Never null. A forked child continues with its parent's count, so its handles differ from
/// those that the parent had at the fork.
static NEXT: AtomicUsize = AtomicUsize::new(1);
static MINDS_FORKS: AtomicBool = AtomicBool::new(false);

/// Makes a forked child start without handles. It must not touch the parent's table: a lock that a thread of
/// the parent held stays locked in the child for ever.
extern "C" fn begin_anew() {
    // Relaxed: the child has one thread.
    HANDLES.store(std::ptr::null_mut(), Ordering::Relaxed);
    workers::become_no_worker();
}

fn handles() -> &'static RwLock<Handles> {
    // Acquire: pairs with the release below, which publishes the lock's own bytes.
    let mut found = HANDLES.load(Ordering::Acquire);
    if found.is_null() {
        // Every thread that finds no table registers before it publishes one, so that no child keeps a table
        // of its parent. Twice does no harm. Relaxed: the order within this thread is enough.
        if !MINDS_FORKS.load(Ordering::Relaxed) {
            // SAFETY: the function only stores two words, which is allowed in a forked child.
            unsafe { libc::pthread_atfork(None, None, Some(begin_anew)) };
            MINDS_FORKS.store(true, Ordering::Relaxed);
        }
        let fresh = Box::into_raw(Box::default());
        match HANDLES.compare_exchange(
            std::ptr::null_mut(),
            fresh,
            Ordering::AcqRel, // acquire: pairs with itself in another thread
            Ordering::Acquire,
        ) {
            Ok(_) => found = fresh,
            Err(faster) => {
                // SAFETY: it came from `Box::into_raw` just now, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                found = faster;
            }
        }
    }
    // SAFETY: it came from `Box::into_raw` and is never freed; all access goes through its lock.
    unsafe { &*found }
}

fn next() -> usize {
    // Relaxed: the numbers only have to be unique.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn not_open(what: &str) -> Failure {
    Failure::new(libc::EBADF, format!("the handle is not that of an open {what} of this process"))
}

fn not_null(number: usize, what: &str) -> Result<(), Failure> {
    if number == 0 { Err(Failure::invalid(format!("the {what} is a null pointer"))) } else { Ok(()) }
}

impl ConnectionHandle {
    /// Gives out a handle.
    pub(crate) fn of(connection: Connection) -> Self {
        let handle = ConnectionHandle(next());
        handles().write().connections.insert(handle, Arc::new(connection));
        handle
    }

    pub(crate) fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The connection of the handle, as a reference that keeps it while it is used.
    pub(crate) fn get(self) -> Result<Arc<Connection>, Failure> {
        not_null(self.0, "connection")?;
        handles().read().connections.get(&self).cloned().ok_or_else(|| not_open("connection"))
    }

    /// Invalidates the handle, and those of all its files.
    pub(crate) fn take_back(self) -> Result<(Arc<Connection>, Vec<Arc<OpenFile>>), Failure> {
        let mut handles = handles().write();
        let connection = handles.connections.remove(&self).ok_or_else(|| not_open("connection"))?;
        let files = handles.files.extract_if(|_, (of, _)| *of == self).map(|(_, (_, file))| file).collect();
        Ok((connection, files))
    }
}

impl FileHandle {
    /// Gives out a handle, unless the connection was closed meanwhile.
    pub(crate) fn of(connection: ConnectionHandle, file: OpenFile) -> Result<Self, Failure> {
        let mut handles = handles().write();
        if !handles.connections.contains_key(&connection) {
            return Err(not_open("connection"));
        }
        let handle = FileHandle(next());
        handles.files.insert(handle, (connection, Arc::new(file)));
        Ok(handle)
    }

    /// The file of the handle, as a reference that keeps it while it is used.
    pub(crate) fn get(self) -> Result<Arc<OpenFile>, Failure> {
        not_null(self.0, "file")?;
        let file = handles().read().files.get(&self).map(|(_, file)| file.clone());
        file.ok_or_else(|| not_open("file"))
    }

    /// Invalidates the handle.
    pub(crate) fn take_back(self) -> Result<Arc<OpenFile>, Failure> {
        not_null(self.0, "file")?;
        let taken = handles().write().files.remove(&self);
        taken.map(|(_, file)| file).ok_or_else(|| not_open("file"))
    }
}
