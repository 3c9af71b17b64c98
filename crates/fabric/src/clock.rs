//! Time as the fabric sees it: nanoseconds since some start, never going back.

/// A monotonic clock. The simulator has its own.
pub trait Clock {
    /// Nanoseconds since an arbitrary, fixed start.
    fn now_ns(&self) -> u64;
}

/// The machine's monotonic clock: all processes of the host read the same.
#[derive(Clone, Copy, Default, Debug)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}
