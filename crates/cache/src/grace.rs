//! Waiting until every place that was occupied has been left (C4).
//!
//! A place holds 0, or one more than the epoch in which its process entered. To wait, the keeper begins a new
//! epoch. The wait ends when every occupied place was entered in that epoch or later. A process stores the
//! epoch, passes a barrier, and then loads anything else. So a process whose store the keeper misses sees
//! everything that the keeper did before the wait. A process that stores an old epoch only makes a later wait
//! longer.

use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::places;

/// A wait for all calls that began before this epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grace(u64);

impl Grace {
    /// Begins to wait for the calls that are running now.
    pub(crate) async fn begin<G: Ground>(ground: &G) -> Grace {
        let epoch = ground.add(layout::EPOCH, 1).await.wrapping_add(1);
        // Pairs with the barrier in `enter`: either the keeper sees the place occupied, or the call sees what
        // the keeper has stored.
        ground.barrier().await;
        Grace(epoch)
    }

    pub(crate) async fn is_over<G: Ground>(self, ground: &G, places: u32) -> bool {
        for place in 0..places {
            let entered = ground.load(Layout::place(place) + places::EPOCH).await;
            if entered != 0 && entered - 1 < self.0 {
                return false;
            }
        }
        true
    }
}

/// Enters a place.
pub(crate) async fn enter<G: Ground>(ground: &G, place: usize) {
    let epoch = ground.load(layout::EPOCH).await;
    ground.store(place + places::EPOCH, epoch.wrapping_add(1)).await;
    ground.barrier().await;
}

/// Leaves a place.
pub(crate) async fn leave<G: Ground>(ground: &G, place: usize) {
    ground.store(place + places::EPOCH, 0).await;
}
