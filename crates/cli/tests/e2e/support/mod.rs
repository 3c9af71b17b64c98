//! Shared by the tests: processes that end with their test, pools, mounts, and waits with a deadline.

mod client;
mod files;
mod mount;
mod pool;
mod process;
mod thread;
mod up;

use std::time::{Duration, Instant};

pub use client::Client;
pub use files::{read_from_far, write_new};
pub use mount::{Mount, is_mounted, is_mounted_below};
pub use pool::{Pool, PoolOptions};
pub use process::{
    Output, Process, assert_complaint, built, children_of, farpool, farpool_that_may_lock, is_running, root,
    run, run_command, tied,
};
pub use thread::StoppedThread;
pub use up::Up;

/// Longest wait: only something that hangs takes as long, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Pause between two checks of a condition that can only be polled.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Polls until `condition` holds; panics if it does not within [`PATIENCE`].
#[track_caller]
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    within(PATIENCE, what, condition);
}

/// Polls until `condition` holds; panics if it does not within `deadline`.
#[track_caller]
pub fn within(deadline: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < deadline, "not within {deadline:?}: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Bytes that differ from file to file and place to place.
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut data = Vec::with_capacity(bytes + 8);
    while data.len() < bytes {
        data.extend_from_slice(&next());
    }
    data.truncate(bytes);
    data
}
