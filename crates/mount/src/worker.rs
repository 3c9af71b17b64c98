//! The state of a worker thread: a session with the pool, and a bell that rings when the thread ends.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farpool_file::{FileStore, Session};

thread_local! {
    /// A worker belongs to one mount for its whole life, so the thread identifies the mount.
    static WORKER: RefCell<Worker> = const { RefCell::new(Worker { session: None, bell: None }) };
}

struct Worker {
    session: Option<Session>,
    bell: Option<Rope>,
}

/// Rings as soon as any worker thread has ended. While the mount is in use, that is a bug in the FUSE crate:
/// the request that the thread had read would never be answered.
#[derive(Clone, Default)]
pub(crate) struct Bell(Arc<AtomicBool>);

impl Bell {
    pub(crate) fn has_rung(&self) -> bool {
        // Pairs with the store in `Rope::drop`.
        self.0.load(Ordering::Acquire)
    }
}

struct Rope(Bell);

impl Drop for Rope {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Release);
    }
}

/// Runs a handler and catches its panic. `None`: it panicked, and the thread's session was dropped.
pub(crate) fn contained<R>(bell: &Bell, handler: impl FnOnce() -> R) -> Option<R> {
    WORKER.with_borrow_mut(|worker| {
        worker.bell.get_or_insert_with(|| Rope(bell.clone()));
    });
    // Unwind safety: the caller poisons what a panic may have left half changed.
    let result = catch_unwind(AssertUnwindSafe(handler)).ok();
    if result.is_none() {
        WORKER.with_borrow_mut(|worker| worker.session = None);
    }
    result
}

/// Lends the thread's session, which is made at its first use.
pub(crate) fn with_session<R>(store: &FileStore, work: impl FnOnce(&Session) -> R) -> R {
    WORKER.with_borrow_mut(|worker| work(worker.session.get_or_insert_with(|| store.session())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_at_the_boundary_and_only_the_end_of_a_thread_rings() {
        let bell = Bell::default();
        let worker = {
            let bell = bell.clone();
            std::thread::spawn(move || {
                let panicked = contained(&bell, || -> u32 { panic!("as a test") });
                assert_eq!((panicked, contained(&bell, || 7), bell.has_rung()), (None, Some(7), false));
            })
        };
        worker.join().unwrap();
        assert!(bell.has_rung());
    }
}
