//! Entering the library: marked, so that a signal handler or a callee that comes back finds the kernel; contained, so
//! that a fault of ours is not the program's; and without a trace in `errno`.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
}

const PTHREAD_CANCEL_DISABLE: i32 = 1;

thread_local! {
    /// Without a destructor, so that it can be read in a signal handler and at the end of a thread.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Whether a fault of the library has switched it off. Set once, and nothing is ordered by it.
static OFF: AtomicBool = AtomicBool::new(false);

/// One thread's stay within the library.
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
        // SAFETY: the thread's own `errno` and its own cancellation state.
        let errno = unsafe {
            pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut cancel_state);
            *libc::__errno_location()
        };
        Some(Stay { errno, cancel_state })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        // SAFETY: as in `begin`; the state is what it was then.
        unsafe {
            *libc::__errno_location() = self.errno;
            pthread_setcancelstate(self.cancel_state, std::ptr::null_mut());
        }
        WITHIN.set(false);
    }
}

/// Runs the library's own part of a hooked call. `None` if the thread is within already, if the library is off, or
/// if it has just failed: then the kernel is asked as if there were no library.
pub fn within<T>(work: impl FnOnce() -> Option<T>) -> Option<T> {
    let _stay = Stay::begin()?;
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        OFF.store(true, Ordering::Relaxed);
        None
    })
}

/// As [`within`], for work without an answer.
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
    fn who_is_within_does_not_enter_again() {
        assert_eq!(within(|| Some(within(|| Some(())))), Some(None));
        assert_eq!(within(|| Some(())), Some(()));
    }

    #[test]
    fn errno_is_as_it_was() {
        // SAFETY: the thread's own `errno`.
        unsafe { *libc::__errno_location() = libc::ENOTTY };
        within(|| {
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = libc::EIO };
            Some(())
        });
        // SAFETY: as above.
        assert_eq!(unsafe { *libc::__errno_location() }, libc::ENOTTY);
    }
}
