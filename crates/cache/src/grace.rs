//! Waiting until every place that was occupied has been left (C4).
//!
//! A place that is entered holds the era in which it was, plus one; a place that was left holds 0. What is to
//! be waited for begins a new era. It is over once every occupied place was entered in that era or later.
//! (A process that enters stores the era, passes a barrier, and then looks at anything else. If it stores an
//! old era after the keeper has looked at its place, it is waited for too long, never too short: what it
//! finds is newer than what was waited for.)

use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::places;

/// What must be left behind: everything that began before this era.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Grace(u64);

impl Grace {
    pub(crate) async fn begin<G: Ground>(ground: &G) -> Grace {
        Grace(ground.add(layout::ERA, 1).await + 1)
    }

    pub(crate) async fn is_over<G: Ground>(self, ground: &G, layout: &Layout) -> bool {
        for place in 0..layout.shape().places {
            let entered = ground.load(layout.place(place) + places::ERA).await;
            if entered != 0 && entered - 1 < self.0 {
                return false;
            }
        }
        true
    }
}

/// Enters a place.
pub(crate) async fn enter<G: Ground>(ground: &G, place: usize) {
    let era = ground.load(layout::ERA).await;
    ground.store(place + places::ERA, era + 1).await;
    ground.barrier().await;
}

/// Leaves a place.
pub(crate) async fn leave<G: Ground>(ground: &G, place: usize) {
    ground.store(place + places::ERA, 0).await;
}
