//! The overflow directory's part in a stock: when it gives regions, and when extents move back.

use std::sync::atomic::Ordering;

use super::{LOW_WATER_EXTENTS, Stock};
use crate::growth::{FULL_FOR, UNREACHABLE_FOR};
use crate::holder::GrowthOutcome;
use crate::space::{EXTENT_BYTES, Where};

// The flags are `Relaxed`: they guard no other memory, and the tasks that wait for an attempt are woken
// later, through a mutex.

impl Stock {
    /// Whether the overflow directory may have extents for this caller, now or after the next attempt.
    pub(super) fn may_overflow(&self, within: &Where) -> bool {
        within.allows_overflow()
            && self
                .overflowing
                .as_ref()
                .is_some_and(|overflowing| !overflowing.is_full.load(Ordering::Relaxed))
    }

    /// Asks the directory for an extent, in the next attempt to get regions. Returns what
    /// [`may_overflow`](Self::may_overflow) does.
    pub(super) fn want_overflow(&self, within: &Where) -> bool {
        if let Some(overflowing) = &self.overflowing
            && within.allows_overflow()
        {
            overflowing.wanted.store(true, Ordering::Relaxed);
            self.growth_wanted.notify_one();
        }
        self.may_overflow(within)
    }

    /// Whether an extent of the directory is free.
    pub(super) fn has_overflow(&self) -> bool {
        self.space.lock().free_in_overflow() > 0
    }

    /// Called after each attempt to lease regions. If it brought none, no more are requested for a while.
    /// The overflow directory then allocates a region, if few of its extents are free and a task wants one,
    /// or the directory is in use already.
    pub(super) async fn overflow_after(&self, outcome: GrowthOutcome) {
        let Some(overflowing) = &self.overflowing else { return };
        let counts_for = match outcome {
            GrowthOutcome::Grown => return,
            GrowthOutcome::Full => FULL_FOR,
            GrowthOutcome::Unreachable => UNREACHABLE_FOR,
        };
        let was_limited = self.with_holder(|holder| holder.was_limited());
        if self.regions_wanted() > 0 && !was_limited {
            self.no_far_until_ms.store(self.now().plus(counts_for).0, Ordering::Relaxed);
        }
        let (free, used) = {
            let space = self.space.lock();
            (space.free_in_overflow(), space.used_in_overflow())
        };
        // While the directory is in use, the next region is allocated before a task has to wait for it,
        // unless the request left nodes out: far memory may be free on those.
        let is_wanted = overflowing.wanted.swap(false, Ordering::Relaxed) || used > 0 && !was_limited;
        if free >= LOW_WATER_EXTENTS.min(self.region_bytes / EXTENT_BYTES) {
            overflowing.is_full.store(false, Ordering::Relaxed);
        } else if is_wanted {
            let region = overflowing.allocate(self.region_bytes).await;
            overflowing.is_full.store(region.is_none(), Ordering::Relaxed);
            if let Some(region) = region {
                self.space.lock().add_overflow(region, self.region_bytes, self.now().0);
            }
        }
    }

    /// Whether extents of the overflow directory should move to far memory: some are in use, and at least two
    /// regions of far memory are free or could be leased, by the broker's last answer. (With only one, new
    /// writes and extents that move back would compete for it.)
    pub fn is_to_move_back(&self) -> bool {
        let (used, free) = {
            let space = self.space.lock();
            (space.used_in_overflow(), space.free())
        };
        used > 0 && free * EXTENT_BYTES + self.lendable_regions() * self.region_bytes >= 2 * self.region_bytes
    }

    /// Bytes in use in the overflow directory; `None`: there is none.
    pub fn overflow_used_bytes(&self) -> Option<u64> {
        self.overflowing.as_ref().map(|_| self.space.lock().used_in_overflow() * EXTENT_BYTES)
    }
}
