//! Growth: the stock requests more regions when free extents run low, and wakes the tasks that wait for one.

use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use super::Stock;
use crate::growth::Growth;
use crate::holder::GrowthOutcome;
use crate::space::Where;

impl Stock {
    /// Waits until more regions are wanted. Only one task may wait.
    pub async fn growth_wanted(&self) {
        self.growth_wanted.notified().await;
    }

    /// To be called after each attempt to lease regions, with its outcome. If the attempt brought no regions
    /// and one of the overflow directory is wanted, asks the directory for one. Wakes the tasks that wait for
    /// the attempt, and returns how long to pause before the next one.
    pub async fn attempt_ended(&self, outcome: GrowthOutcome) -> Duration {
        self.overflow_after(outcome).await;
        let pause = self.growth_ended(outcome);
        // The pause spares the broker, and a full directory. Regions of the directory are wanted as fast as
        // tasks fill them.
        let asks_directory_only = self.regions_wanted() == 0 && self.may_overflow(&Where::Anywhere);
        if asks_directory_only { Duration::ZERO } else { pause }
    }

    /// Wakes the tasks that wait for an attempt to grow. Returns how long to wait before asking the broker
    /// again.
    pub(super) fn growth_ended(&self, outcome: GrowthOutcome) -> Duration {
        let now = self.now();
        let mut growing = self.growing.lock();
        let pause = growing.growth.ended(now, outcome);
        growing.waiting.drain(..).for_each(Waker::wake);
        Duration::from_millis(pause.0)
    }

    pub(super) fn may_grow(&self) -> bool {
        self.regions_wanted() > 0
    }

    /// How many regions to ask for next. Zero for a while after a request that brought none, as long as the
    /// overflow directory can give extents instead.
    pub fn regions_wanted(&self) -> u32 {
        // Relaxed: a time that guards no other memory.
        let is_pausing = self.now().0 < self.no_far_until_ms.load(Ordering::Relaxed);
        if is_pausing && (self.may_overflow(&Where::Anywhere) || self.has_overflow()) {
            return 0;
        }
        let held = self.ledger.lock().regions.len() as u64;
        Growth::wanted(held, self.limit_regions)
    }

    /// From now on, regions are leased only when a task waits for an extent, and not in advance. For owners
    /// that can wait: others get the memory that would be held in reserve.
    pub fn keep_no_spare(&self) {
        self.spare_extents.store(0, Ordering::Relaxed); // guards no other memory
    }

    pub(super) fn spare_extents(&self) -> u64 {
        self.spare_extents.load(Ordering::Relaxed)
    }

    /// Whether more regions should be asked for: too few extents are free, or none where one is wanted.
    pub fn is_low(&self) -> bool {
        // Without a spare, a task that finds no extent still needs a region.
        self.space.lock().free() < self.spare_extents().max(1)
            || self.with_holder(|holder| holder.wants_elsewhere())
    }
}
