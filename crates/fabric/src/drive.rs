//! The blocking adapter: runs one future on this thread, polling the fabric meanwhile.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::endpoint::Endpoint;
use crate::spin::Spinner;

/// Longest sleep in one go: a bound on how late a deadline can be noticed if all else fails.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// Runs `future` to its end, polling `endpoint`, spinning a little and then sleeping while nothing happens.
///
/// The future must wait for nothing but operations of this endpoint and [`Endpoint::yield_now`].
pub fn block_on<F: Future>(endpoint: &Endpoint, future: F) -> F::Output {
    let mut future = pin!(future);
    let woken = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    let mut spinner = Spinner::new();
    loop {
        // The flag is of this thread alone: wakers run inside `endpoint.poll` below.
        if woken.0.swap(false, Ordering::Relaxed)
            && let Poll::Ready(output) = future.as_mut().poll(&mut context)
        {
            return output;
        }
        if endpoint.poll() > 0 || woken.0.load(Ordering::Relaxed) {
            spinner.progressed();
        } else if !spinner.spin_again() {
            sleep_until_ready(endpoint);
        }
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until a busy link's descriptor is ready, or the next deadline is there.
fn sleep_until_ready(endpoint: &Endpoint) {
    let now = endpoint.now_ns();
    let until_deadline = endpoint.next_deadline_ns().map(|at| Duration::from_nanos(at.saturating_sub(now)));
    let longest = until_deadline.unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP);
    let mut waits = Vec::new();
    let all_can_wait = endpoint.for_each_busy_link(|readiness| {
        // A number, since the borrow of the link ends here; the descriptor stays open: only this thread closes it.
        use std::os::fd::AsRawFd;
        waits.push((readiness.fd.as_raw_fd(), readiness.writable));
    });
    let longest = if all_can_wait { longest } else { Duration::ZERO };
    let mut fds: Vec<PollFd<'_>> = waits
        .iter()
        .map(|&(fd, writable)| {
            let interest = if writable { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            // SAFETY: the links own their descriptors and live in `endpoint`, which this thread alone changes
            // and does not until `poll` below returns.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            PollFd::from_borrowed_fd(fd, interest)
        })
        .collect();
    let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos() as i64 };
    // EINTR and the like only mean an earlier look.
    let _ = rustix::event::poll(&mut fds, Some(&timeout));
}
