//! The blocking adapter: runs one future on this thread, polling the fabric meanwhile.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::descriptors::Descriptor;
use crate::endpoint::Endpoint;
use crate::spin::{Spinner, may_spin};

/// Longest sleep in one go: a bound on how late a deadline can be noticed if all else fails.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);
/// The same for a sleep that no waker can end.
const LONGEST_DEAF_SLEEP: Duration = Duration::from_millis(50);

/// The kernel wakes a sleeper some fifty microseconds late (prctl(2), timer slack). What is due within this
/// time is polled for instead, and the thread yields the processor to others meanwhile.
const TOO_SHORT_TO_SLEEP: Duration = Duration::from_micros(10);

/// Runs `future` to its end, polling `endpoint`, spinning a little and then sleeping while nothing happens.
///
/// Wakers may be called from any thread: a sleeping `block_on` is woken through its [`Parker`]. A thread has
/// one parker, so a nested `block_on` may take a wake that is meant for the outer one. The outer one
/// therefore polls its future again afterwards.
pub fn block_on<F: Future>(endpoint: &Endpoint, future: F) -> F::Output {
    let mut future = pin!(future);
    let parker = PARKER.with(Arc::clone);
    parker.woken.store(true, Ordering::Relaxed); // only a later wake needs ordering
    let waker = Waker::from(parker.clone());
    let mut context = Context::from_waker(&waker);
    loop {
        // Acquire: pairs with the store in `wake_by_ref`, so that the future sees what the waker's thread did
        // before it.
        if parker.woken.swap(false, Ordering::AcqRel)
            && let Poll::Ready(output) = future.as_mut().poll(&mut context)
        {
            parker.woken.store(true, Ordering::Relaxed); // for a `block_on` around this one, on this thread
            return output;
        }
        if endpoint.poll() > 0 || parker.woken.load(Ordering::Relaxed) {
            SPINNER.with_borrow_mut(Spinner::progressed);
        } else if is_due_soon(endpoint) {
            std::thread::yield_now();
        } else if !endpoint.is_waiting() || !SPINNER.with_borrow_mut(Spinner::spin_again) {
            sleep_until_ready(endpoint, &parker);
        }
    }
}

thread_local! {
    /// One per thread, since a descriptor per call would cost more than most operations.
    static PARKER: Arc<Parker> = Arc::new(Parker::new());
    /// Kept between calls for what it has learnt.
    static SPINNER: RefCell<Spinner> = RefCell::new(Spinner::new());
}

/// Puts a thread to sleep and wakes it from another.
struct Parker {
    woken: AtomicBool,
    sleeping: AtomicBool,
    /// `None` when the process was out of descriptors: then sleeps are short.
    event: Option<Descriptor>,
}

impl Parker {
    fn new() -> Self {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.ok().map(Descriptor::out_of_the_way);
        Parker { woken: AtomicBool::new(false), sleeping: AtomicBool::new(false), event }
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Sequentially consistent with `sleep_until_ready`, which stores `sleeping` and then loads `woken`:
        // one of the two sees the other.
        self.woken.store(true, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst)
            && let Some(event) = &self.event
        {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes()); // a full counter wakes as well
        }
    }
}

fn is_due_soon(endpoint: &Endpoint) -> bool {
    let soon = |at: u64| at.saturating_sub(endpoint.now_ns()) <= TOO_SHORT_TO_SLEEP.as_nanos() as u64;
    may_spin() && endpoint.next_deadline_ns().is_some_and(soon)
}

/// Waits until a busy link's descriptor is ready, a waker is called, or the next deadline is there.
fn sleep_until_ready(endpoint: &Endpoint, parker: &Parker) {
    parker.sleeping.store(true, Ordering::SeqCst);
    if !parker.woken.load(Ordering::SeqCst) {
        wait_for_descriptors(endpoint, parker);
    }
    parker.sleeping.store(false, Ordering::SeqCst);
    if let Some(event) = &parker.event {
        let _ = rustix::io::read(event, &mut [0; 8]); // empty it; EAGAIN if it is empty already
    }
}

fn wait_for_descriptors(endpoint: &Endpoint, parker: &Parker) {
    let now = endpoint.now_ns();
    let until_deadline = endpoint.next_deadline_ns().map(|at| Duration::from_nanos(at.saturating_sub(now)));
    let limit = if parker.event.is_some() { LONGEST_SLEEP } else { LONGEST_DEAF_SLEEP };
    let longest = until_deadline.unwrap_or(limit).min(limit);
    let mut waits = Vec::new();
    let all_can_wait = endpoint.for_each_busy_link(|readiness| {
        // A number, since the borrow of the link ends here. The descriptor stays open: only this thread
        // closes it.
        use std::os::fd::AsRawFd;
        waits.push((readiness.fd.as_raw_fd(), readiness.writable));
    });
    let longest = if all_can_wait { longest } else { Duration::ZERO };
    let mut fds: Vec<PollFd<'_>> = waits
        .iter()
        .map(|&(fd, writable)| {
            let interest = if writable { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            // SAFETY: the links own their descriptors and live in `endpoint`, which only this thread changes,
            // and not until `poll` below has returned.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            PollFd::from_borrowed_fd(fd, interest)
        })
        .collect();
    if let Some(event) = &parker.event {
        fds.push(PollFd::new(event, PollFlags::IN));
    }
    let timeout = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos() as i64 };
    // Errors such as EINTR are ignored: they only end the sleep early, and `block_on` polls again.
    let _ = rustix::event::poll(&mut fds, Some(&timeout));
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use farpool_wire::SessionId;

    use super::*;
    use crate::{EndpointConfig, MonotonicClock, TcpTransport};

    #[test]
    fn a_wake_that_comes_while_another_block_on_runs_inside_is_not_lost() {
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(TcpTransport),
            clock: Rc::new(MonotonicClock),
            session_ids: Box::new(|| SessionId(1)),
            arena_bytes: 1,
            deadline: Duration::from_secs(1),
        });
        let mut polls = 0;
        let outer = std::future::poll_fn(|context| {
            polls += 1;
            context.waker().wake_by_ref();
            block_on(&endpoint, endpoint.yield_now());
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        });
        block_on(&endpoint, outer);
        assert_eq!(polls, 2);
    }
}
