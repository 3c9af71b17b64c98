//! Waiting until no call uses the index behind a door, so that another index can take its place (C4, C5).

use crate::grace::{self, Grace};
use crate::ground::Ground;
use crate::layout::{self, Shape};
use crate::outside::close_door;
use crate::places::{self, Place};

/// The wait after a door was closed.
#[derive(Clone, Copy, Debug)]
pub struct Vacating(Grace);

impl Vacating {
    /// Closes the door, whatever its state.
    pub async fn begin<G: Ground>(ground: &G) -> Vacating {
        close_door(ground).await;
        Vacating(Grace::begin(ground).await)
    }

    /// A holder whose call has not ended; `None`: all have. Frees the places of dead processes: what they may
    /// have left behind lies in an index that nobody uses any more.
    pub async fn occupant<G: Ground>(
        &self,
        ground: &G,
        place_count: u32,
        is_alive: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        free_dead_places(ground, place_count, is_alive).await;
        if self.0.is_over(ground, place_count).await {
            return None;
        }
        for number in 0..place_count {
            let place = Place::new(ground, number);
            if ground.load(place.at + places::EPOCH).await != 0 {
                return Some(place.holder().await);
            }
        }
        Some(0) // the last one has just left
    }

    /// Puts an index behind the door, which is closed and vacant.
    pub async fn install_index<G: Ground>(self, ground: &G, index: u64, shape: Shape) {
        ground.store(layout::SHAPE, layout::shape_word(shape)).await;
        ground.store(layout::INDEX, index).await;
    }
}

/// Frees the places of dead processes. What they may have left behind lies in an index that nobody uses any
/// more.
pub(crate) async fn free_dead_places<G: Ground>(
    ground: &G,
    place_count: u32,
    is_alive: impl Fn(u64) -> bool,
) {
    for number in 0..place_count {
        let place = Place::new(ground, number);
        let holder = place.holder().await;
        if holder != 0 && !is_alive(holder) {
            place.withdraw().await;
            grace::leave(ground, place.at).await;
            place.free().await;
        }
    }
}
