//! A bare ping-pong between two processes: a word in one cache line, answered in another, both ends polling.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use crate::child::Child;
use crate::tally::Tally;

/// A page, of which three cache lines are used.
const PAGE_BYTES: usize = 4096;
/// Distance between the lines: far enough apart that no prefetcher fetches two of them together.
const LINE_WORDS: usize = 64;
/// After this time without a ping the other end sleeps, so that it takes no processor time from the
/// measurements in between.
const SPIN: Duration = Duration::from_millis(2);
/// Polls between two readings of the clock, and between two yields to other threads.
const LOOKS: u32 = 1 << 10;
/// Longest wait for a pong; after that the other process is taken for dead.
const PONG_DEADLINE: Duration = Duration::from_secs(10);

/// Words of a shared page, each in a cache line of its own.
pub struct Lines {
    base: NonNull<AtomicU32>,
}

// SAFETY: the mapping lives until drop, belongs to no thread, and is accessed by atomics only.
unsafe impl Send for Lines {}
// SAFETY: threads share the mapping, and access it by atomics only.
unsafe impl Sync for Lines {}

impl Lines {
    fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if (rustix::fs::fstat(fd)?.st_size as u64) < PAGE_BYTES as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is smaller than a page"));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing of ours.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, access, MapFlags::SHARED, fd, 0)? };
        Ok(Lines { base: NonNull::new(base.cast()).expect("mmap never returns null") })
    }

    fn word(&self, line: usize) -> &AtomicU32 {
        debug_assert!(line < 3);
        // SAFETY: within the page, since there are three lines; aligned; the mapping lives as long as `self`;
        // accessed by atomics only.
        unsafe { self.base.add(line * LINE_WORDS).as_ref() }
    }

    fn ping(&self) -> &AtomicU32 {
        self.word(0)
    }

    fn pong(&self) -> &AtomicU32 {
        self.word(1)
    }

    /// Whether the other end sleeps or is about to.
    fn sleeping(&self) -> &AtomicU32 {
        self.word(2)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, with this length; all references borrow `self`, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

/// The other end, in a process of its own.
pub struct PingPongServer {
    lines: Arc<Lines>,
    _child: Child,
}

impl PingPongServer {
    pub(super) fn start(farpool: &Path) -> Result<Self> {
        let fd =
            memfd_create("farpool-ping-pong", MemfdFlags::CLOEXEC).context("cannot make shared memory")?;
        rustix::fs::ftruncate(&fd, PAGE_BYTES as u64)?;
        let lines = Lines::map(fd.as_fd()).context("cannot map shared memory")?;
        let args = ["bench", "floor", "ping-pong"].map(Into::into);
        let (child, _) = Child::of_this_program(farpool, "the floor", args, Stdio::from(fd))?;
        Ok(PingPongServer { lines: Arc::new(lines), _child: child })
    }

    pub(super) fn lines(&self) -> Arc<Lines> {
        self.lines.clone()
    }
}

/// Answers pings on the page behind `fd`, until the parent process ends this one.
pub fn serve(fd: OwnedFd, ready: impl FnOnce()) -> Result<()> {
    let lines =
        Lines::map(fd.as_fd()).context("cannot map standard input, which must be a file of shared memory")?;
    ready();
    let mut answered = 0;
    loop {
        // Acquire and release here and in `PingPongFloor`, as if ping and pong were messages that carry data.
        let ping = lines.ping().load(Ordering::Acquire);
        if ping != answered {
            answered = ping;
            lines.pong().store(ping, Ordering::Release);
        } else {
            await_ping(&lines, answered)?;
        }
    }
}

fn await_ping(lines: &Lines, answered: u32) -> Result<()> {
    let is_here = || lines.ping().load(Ordering::Acquire) != answered;
    let mut since = None;
    loop {
        for _ in 0..LOOKS {
            if is_here() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
        if since.get_or_insert_with(Instant::now).elapsed() > SPIN {
            break;
        }
    }
    // Sequentially consistent with `PingPongFloor::wake`: either it sees this flag, or we see its ping.
    lines.sleeping().store(1, Ordering::SeqCst);
    while lines.ping().load(Ordering::SeqCst) == answered {
        match futex::wait(lines.ping(), futex::Flags::empty(), answered, None) {
            Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot sleep"),
        }
    }
    lines.sleeping().store(0, Ordering::SeqCst);
    Ok(())
}

/// This process's end.
pub struct PingPongFloor {
    lines: Arc<Lines>,
    together: usize,
    sent: u32,
}

impl PingPongFloor {
    pub(super) fn new(lines: Arc<Lines>, together: usize) -> Self {
        PingPongFloor { lines, together, sent: 0 }
    }

    pub(super) fn run(&mut self, end: Instant, tally: &mut Tally) -> Result<u64> {
        let mut operations = 0;
        self.ping();
        self.wake()?;
        self.await_pong()?;
        let mut started = Instant::now();
        loop {
            for _ in 0..self.together {
                self.ping();
                self.await_pong()?;
            }
            operations += self.together as u64;
            let now = Instant::now();
            tally.record(now - started, self.together);
            if now >= end {
                return Ok(operations);
            }
            started = now;
        }
    }

    #[inline]
    fn ping(&mut self) {
        self.sent = self.sent.wrapping_add(1);
        self.lines.ping().store(self.sent, Ordering::Release);
    }

    /// Wakes the other end if it sleeps: it does so between slices, and not within one.
    fn wake(&self) -> Result<()> {
        std::sync::atomic::fence(Ordering::SeqCst); // between the ping and the load; see `await_ping`
        if self.lines.sleeping().load(Ordering::SeqCst) != 0 {
            futex::wake(self.lines.ping(), futex::Flags::empty(), 1).context("cannot wake the floor")?;
        }
        Ok(())
    }

    #[inline]
    fn await_pong(&self) -> Result<()> {
        let is_here = || self.lines.pong().load(Ordering::Acquire) == self.sent;
        for _ in 0..LOOKS {
            if is_here() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let since = Instant::now();
        while !is_here() {
            self.wake()?; // it may have gone to sleep while this thread was not scheduled
            std::thread::yield_now();
            ensure!(since.elapsed() < PONG_DEADLINE, "the floor does not answer");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ping_is_answered_also_after_the_other_end_has_slept() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, PAGE_BYTES as u64).unwrap();
        let lines = Arc::new(Lines::map(fd.as_fd()).unwrap());
        std::thread::spawn(move || serve(fd, || ())); // ends with the test's process
        let mut floor = PingPongFloor::new(lines.clone(), 8);
        for round in 1..=3 {
            let mut tally = Tally::new().unwrap();
            assert_eq!(floor.run(Instant::now(), &mut tally).unwrap(), 8);
            assert_eq!(lines.pong().load(Ordering::Acquire), 9 * round, "eight, and one to wake it");
            while lines.sleeping().load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn memory_that_is_no_page_is_refused() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        assert!(Lines::map(fd.as_fd()).is_err());
    }
}
