//! Entering the library. The thread is marked, so that a signal handler or a callback into a hook finds the
//! kernel. Panics are contained, so that a fault of the library does not become the program's. `errno` is
//! restored.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
}

const PTHREAD_CANCEL_DISABLE: i32 = 1;

thread_local! {
    /// It has no destructor, so that it can be read in a signal handler and at the end of a thread.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Whether a fault of the library has switched it off. It is set once, and orders nothing.
static OFF: AtomicBool = AtomicBool::new(false);

/// The time that one thread spends within the library.
struct Stay {
    errno: i32,
    cancel_state: i32,
}

impl Stay {
    fn begin() -> Option<Self> {
        if OFF.load(Ordering::Relaxed) || WITHIN.replace(true) {
            return None;
        }
        let mut cancel_state = 0;
        // SAFETY: the thread's own `errno` and its own cancellation state; `cancel_state` lives until the
        // call returns.
        let errno = unsafe {
            pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut cancel_state);
            *libc::__errno_location()
        };
        Some(Stay { errno, cancel_state })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        // SAFETY: the thread's own `errno` and its own cancellation state, which is set to what `begin`
        // found.
        unsafe {
            *libc::__errno_location() = self.errno;
            pthread_setcancelstate(self.cancel_state, std::ptr::null_mut());
        }
        WITHIN.set(false);
    }
}

/// Runs the library's own part of a hooked call. `None` if the thread is within the library already, if the
/// library is off, or if it has just failed: then the kernel is asked as if there were no library.
pub fn within<T>(work: impl FnOnce() -> Option<T>) -> Option<T> {
    let _stay = Stay::begin()?;
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        OFF.store(true, Ordering::Relaxed);
        None
    })
}

/// As [`within`], for work without a result.
pub fn do_within(work: impl FnOnce()) {
    within(|| {
        work();
        Some(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_within_the_library_does_not_enter_again() {
        assert_eq!(within(|| Some(within(|| Some(())))), Some(None));
        assert_eq!(within(|| Some(())), Some(()));
    }

    #[test]
    fn errno_is_as_it_was() {
        // SAFETY: the thread's own `errno`.
        unsafe { *libc::__errno_location() = libc::ENOTTY };
        within(|| {
            // SAFETY: the thread's own `errno`.
            unsafe { *libc::__errno_location() = libc::EIO };
            Some(())
        });
        // SAFETY: the thread's own `errno`.
        assert_eq!(unsafe { *libc::__errno_location() }, libc::ENOTTY);
    }
}
