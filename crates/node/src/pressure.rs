//! How many regions a node may have while its machine needs memory for other processes: the decisions,
//! without clock and machine.
//!
//! P1. While less than the reserve is available, the node at once gives up as many regions as are missing:
//!     free ones, then revocable leases. Regions that are on their way back count, so that none is given up
//!     twice.
//! P2. While some process waits for memory during at least a tenth of the time, the reserve counts twice. How
//!     much is available is an estimate: it includes page cache that programs need.
//! P3. The node takes memory again only after 30 s without P1 and P2, in steps of a sixteenth of what it was
//!     started with, ten seconds apart. Each step leaves twice the reserve, so that it does not cause P1 or P2.

use std::time::Duration;

use farpool_lease::Millis;
use farpool_wire::control::RevokeResponse;

use crate::lending::NodeCore;

/// Minimum time until leases end that are taken back because of pressure: time for owners to move data.
/// Leases that their owners give back end earlier.
pub const PRESSURE_GRACE: Millis = Millis(10_000);

/// Time without pressure after which the node takes memory again.
pub const CALM: Millis = Millis(30_000);
/// Pause between two steps in which the node takes memory again.
pub const STEP_PAUSE: Millis = Millis(10_000);
/// In how many steps it takes back all of its memory.
const STEPS: u32 = 16;
/// For how long waiting is counted before the node judges by it: a single bad second must not cost leases.
const STALL_WINDOW: Millis = Millis(5_000);
/// There is pressure if processes have waited for at least one of so many parts of the window.
const STALL_PART: u32 = 10;

/// What was measured at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measured {
    /// Memory that a process could take now without displacing others.
    pub available_bytes: u64,
    /// Total time for which some process has waited for memory: a counter that only grows. Zero if the kernel
    /// does not say.
    pub stalled: Duration,
}

/// The node's regions at that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Regions {
    /// Size of each.
    bytes: u64,
    /// How many the node was started with.
    total: u32,
    /// How many have memory, also those whose memory is about to go back.
    with_memory: u32,
    /// The operator's limit.
    target: u32,
    /// The limit that the pressure has set so far.
    allowed: u32,
}

/// A change of a node's limit, the number of regions that it is to have memory for.
#[derive(Clone, PartialEq, Debug)]
pub struct LimitChange {
    /// The limit that the pressure sets now.
    pub allowed: u32,
    /// The node's limit before the change: the lesser of the operator's and of what the pressure allowed.
    pub before: u32,
    /// The node's limit now.
    pub after: u32,
    /// What the node takes back because of that.
    pub taken_back: RevokeResponse,
}

/// What the node knows about the pressure on its machine's memory.
pub struct Pressure {
    reserve_bytes: u64,
    /// No memory is taken before.
    calm_at: Millis,
    /// Start of the current window, and how long processes had waited for memory by then.
    window: Option<(Millis, Duration)>,
    /// Whether processes waited too much in the window before the current one.
    was_stalled: bool,
}

impl Pressure {
    /// No pressure is known. The node leaves `reserve_bytes` of its machine's memory available.
    pub fn new(reserve_bytes: u64) -> Self {
        Pressure { reserve_bytes, calm_at: Millis(0), window: None, was_stalled: false }
    }

    /// Whether less than the reserve is available.
    pub fn is_short(&self, measured: &Measured) -> bool {
        measured.available_bytes < self.reserve_bytes
    }

    /// Sets the limit of a node, with regions of `region_bytes`, by a measurement. `None`: it stays as it is.
    pub fn apply(
        &mut self,
        core: &mut NodeCore,
        now: Millis,
        measured: Measured,
        region_bytes: u64,
    ) -> Option<LimitChange> {
        let regions = Regions {
            bytes: region_bytes,
            total: core.regions(),
            with_memory: core.with_memory(),
            target: core.target(),
            allowed: core.allowed(),
        };
        let allowed = self.allowed(now, measured, regions);
        if allowed == regions.allowed {
            return None;
        }
        let before = core.limit();
        let taken_back = core.allow(now, allowed, PRESSURE_GRACE);
        Some(LimitChange { allowed, before, after: core.limit(), taken_back })
    }

    /// How many regions the pressure allows, given a measurement.
    fn allowed(&mut self, now: Millis, measured: Measured, regions: Regions) -> u32 {
        let Regions { bytes, total, with_memory, target, allowed } = regions;
        let twice = self.reserve_bytes.saturating_mul(2);
        let is_stalled = self.is_stalled_after(now, measured.stalled);
        let missing =
            if is_stalled { twice } else { self.reserve_bytes }.saturating_sub(measured.available_bytes);
        if missing > 0 || is_stalled {
            self.calm_at = now.plus(CALM);
            let given_up = in_regions(missing.div_ceil(bytes));
            return if given_up > 0 { allowed.min(with_memory.saturating_sub(given_up)) } else { allowed };
        }
        // Memory that was allowed and not taken yet is still measured as available.
        let has_taken_all = with_memory >= allowed.min(target);
        if now < self.calm_at || allowed >= total || !has_taken_all {
            return allowed;
        }
        self.calm_at = now.plus(STEP_PAUSE);
        let to_spare = in_regions(measured.available_bytes.saturating_sub(twice) / bytes);
        allowed.saturating_add((total / STEPS).max(1).min(to_spare)).min(total)
    }

    /// Counts the time that processes have waited for memory. Returns whether it is too much.
    fn is_stalled_after(&mut self, now: Millis, stalled: Duration) -> bool {
        let (since, before) = *self.window.get_or_insert((now, stalled));
        let elapsed = now.since(since);
        if elapsed >= STALL_WINDOW {
            let waited = stalled.saturating_sub(before);
            self.was_stalled = waited.saturating_mul(STALL_PART) >= Duration::from_millis(elapsed.0);
            self.window = Some((now, stalled));
        }
        self.was_stalled
    }
}

fn in_regions(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const RESERVE: u64 = 256 * MIB;

    /// A node with 32 regions of 64 MiB, `with_memory` of which have memory.
    fn regions(with_memory: u32, allowed: u32) -> Regions {
        Regions { bytes: 64 * MIB, total: 32, with_memory, target: 32, allowed }
    }

    fn measured(available_mib: u64) -> Measured {
        Measured { available_bytes: available_mib * MIB, stalled: Duration::ZERO }
    }

    #[test]
    fn the_machine_is_short_of_memory_if_a_byte_of_the_reserve_is_missing() {
        let pressure = Pressure::new(RESERVE);
        for (available_bytes, is_short) in
            [(0, true), (RESERVE - 1, true), (RESERVE, false), (u64::MAX, false)]
        {
            let measured = Measured { available_bytes, stalled: Duration::ZERO };
            assert_eq!(pressure.is_short(&measured), is_short, "{available_bytes}");
        }
    }

    #[test]
    fn what_is_missing_of_the_reserve_goes_back_in_whole_regions_and_is_asked_for_once() {
        let mut pressure = Pressure::new(RESERVE);
        assert_eq!(pressure.allowed(Millis(0), measured(256), regions(32, 32)), 32);
        assert_eq!(pressure.allowed(Millis(200), measured(191), regions(32, 32)), 30);
        assert_eq!(pressure.allowed(Millis(400), measured(191), regions(32, 30)), 30);
        assert_eq!(pressure.allowed(Millis(600), measured(255), regions(31, 30)), 30);
        assert_eq!(pressure.allowed(Millis(800), measured(319), regions(30, 30)), 30);
        assert_eq!(pressure.allowed(Millis(1000), measured(0), regions(30, 30)), 26);
        assert_eq!(pressure.allowed(Millis(1200), measured(0), regions(2, 26)), 0);
    }

    #[test]
    fn processes_that_wait_for_memory_have_the_node_leave_twice_the_reserve_and_take_none() {
        let mut pressure = Pressure::new(RESERVE);
        let mut allowed = 32;
        // The counter begins at 5 s: waiting before the first measurement does not count.
        let mut at = |ms, stalled_ms, available_mib| {
            let stalled = Duration::from_millis(5_000 + stalled_ms);
            let measured = Measured { stalled, ..measured(available_mib) };
            allowed = pressure.allowed(Millis(ms), measured, regions(allowed, allowed));
            allowed
        };
        assert_eq!(at(0, 0, 300), 32);
        assert_eq!(at(4_999, 4_999, 300), 32, "the window has not ended");
        assert_eq!(at(5_000, 499, 300), 32, "less than a tenth of it");
        assert_eq!(at(10_000, 999, 300), 28);
        for ms in (15_000..100_000).step_by(5_000) {
            assert_eq!(at(ms, ms / 10, 10_000), 28, "enough is available, but processes wait");
        }
        assert_eq!(at(100_000, 9_500, 10_000), 28, "they do not wait any more");
        assert_eq!(at(124_999, 9_500, 10_000), 28);
        assert_eq!(at(125_000, 9_500, 10_000), 30);
    }

    #[test]
    fn processes_that_wait_while_twice_the_reserve_is_available_do_not_change_what_is_allowed() {
        let mut pressure = Pressure::new(RESERVE);
        let shrunk = Regions { target: 3, ..regions(3, 32) };
        for ms in [0, 5_000, 10_000] {
            let waiting = Measured { stalled: Duration::from_millis(ms), ..measured(512) };
            assert_eq!(pressure.allowed(Millis(ms), waiting, shrunk), 32);
        }
    }

    #[test]
    fn memory_is_taken_again_after_a_calm_time_step_by_step_and_leaves_twice_the_reserve() {
        let mut pressure = Pressure::new(RESERVE);
        let mut allowed = pressure.allowed(Millis(0), measured(0), regions(14, 32));
        assert_eq!(allowed, 10);
        let mut at = |ms, available_mib, with_memory| {
            allowed = pressure.allowed(Millis(ms), measured(available_mib), regions(with_memory, allowed));
            allowed
        };
        assert_eq!(at(29_999, 10_000, 10), 10);
        assert_eq!(at(30_000, 10_000, 10), 12);
        assert_eq!(at(39_999, 10_000, 12), 12);
        assert_eq!(at(40_000, 10_000, 11), 12, "the last step is not taken yet");
        assert_eq!(at(40_200, 512 + 64, 12), 13, "a smaller step, which leaves twice the reserve");
        assert_eq!(at(50_200, 512 + 63, 13), 13);
        assert_eq!(at(60_200, 255, 13), 12);
        assert_eq!(at(90_199, 10_000, 12), 12, "the calm time begins anew");
        assert_eq!(at(90_200, 10_000, 12), 14);
    }

    #[test]
    fn memory_that_the_operator_does_not_want_is_allowed_again_as_well() {
        let mut pressure = Pressure::new(RESERVE);
        let mut allowed = pressure.allowed(Millis(0), measured(0), Regions { target: 3, ..regions(5, 32) });
        assert_eq!(allowed, 1);
        for ms in (30_000..400_000).step_by(10_000) {
            let shrunk = Regions { target: 3, ..regions(allowed.min(3), allowed) };
            allowed = pressure.allowed(Millis(ms), measured(10_000), shrunk);
        }
        assert_eq!(allowed, 32);
    }
}
