//! Checks whether a measurement fits the limit on this process's address space (`ulimit -v`).
//!
//! A small allocation that fails aborts the process, which would leave child processes and folders behind. So
//! the memory that a measurement needs is added up before it starts.

use std::fs;

use farpool_fabric::TransportChoice;
use rustix::process::{Resource, getrlimit};

use crate::options::IoOptions;
use crate::run::{Plan, arena_bytes};

/// A thread's stack and small allocations: the standard library's 2 MiB, and as much again.
const THREAD_BYTES: u64 = 4 << 20;
/// Threads beside those that measure: those of the pool's client, and those that read the children's output.
const OTHER_THREADS: u64 = 8;
/// Address space that the allocator reserves for one of its heaps, and the number of heaps per processor
/// (mallopt(3)).
const HEAP_BYTES: u64 = 64 << 20;
const HEAPS_PER_PROCESSOR: u64 = 8;
/// A [`Tally`](crate::tally::Tally): one histogram.
const TALLY_BYTES: u64 = 320 << 10;

/// Checks the options; the error says what to lower.
pub fn check(options: &IoOptions) -> Result<(), String> {
    let Some(limit) = getrlimit(Resource::As).current else { return Ok(()) };
    let (wanted, room) = (wanted_bytes(options, processors()), limit.saturating_sub(used_bytes()));
    if wanted <= room {
        return Ok(());
    }
    let (wanted, room) = (wanted >> 20, room >> 20);
    Err(format!(
        "this takes up to {wanted} MiB of address space, but {room} MiB are left: raise the limit (ulimit \
         -v), or lower --threads, --footprint, --depth or --block"
    ))
}

/// An upper bound, apart from what the allocator wastes.
fn wanted_bytes(options: &IoOptions, processors: u64) -> u64 {
    let threads = options.threads as u64;
    let mapped = if options.transport.0 == TransportChoice::Shm { options.footprint_bytes } else { 0 };
    // A floor of direct accesses has the footprint once more, one over TCP what is in flight.
    let floors = u64::from(options.floor);
    let in_flight = (options.depth * options.batch * options.block_bytes) as u64;
    let tallies = u64::from(Plan::of(options).pairs) * TALLY_BYTES * (1 + floors);
    let per_thread = [THREAD_BYTES, arena_bytes(options) as u64, mapped, tallies, floors * 2 * in_flight];
    let per_thread = per_thread.into_iter().fold(0, u64::saturating_add);
    let heaps = (threads + OTHER_THREADS).min(HEAPS_PER_PROCESSOR * processors) * HEAP_BYTES;
    let shared = OTHER_THREADS * THREAD_BYTES + heaps;
    threads.saturating_mul(per_thread).saturating_add(shared).saturating_add(mapped * (1 + floors))
}

fn processors() -> u64 {
    std::thread::available_parallelism().map_or(1, |number| number.get() as u64)
}

/// Address space that this process uses; statm counts in pages (proc(5)).
fn used_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::IoOp;
    use crate::options::tests::small;

    #[test]
    fn every_thread_maps_the_footprint_and_has_an_arena() {
        let one = IoOptions { threads: 1, ..small(TransportChoice::Shm, IoOp::Read) };
        let wanted = |options: &IoOptions| wanted_bytes(options, 2);
        let two = IoOptions { threads: 2, ..one };
        assert!(wanted(&two) - wanted(&one) >= one.footprint_bytes + THREAD_BYTES);
        let large = IoOptions { block_bytes: 1 << 20, depth: 16, ..one };
        assert!(wanted(&large) - wanted(&one) >= 16 << 20);
        let vast = IoOptions { footprint_bytes: u64::MAX / 4, threads: 256, ..one };
        assert_eq!(wanted(&vast), u64::MAX, "no overflow");
    }

    #[test]
    fn this_process_uses_some_address_space() {
        assert!(used_bytes() > 1 << 20);
    }
}
