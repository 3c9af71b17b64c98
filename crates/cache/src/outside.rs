//! Changes of files by processes that have no place for them (C9).

use crate::at_once;
use crate::door::DoorFile;
use crate::grace;
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::living::this_process;
use crate::places::Place;
use crate::words::Door;

/// Changes files without a place. The cache finds no page meanwhile, and has lost all pages afterwards. Run
/// the future to its end: if it is dropped, or the process dies, the door stays closed for good.
pub async fn change_outside<G: Ground, T>(ground: &G, change: impl AsyncFnOnce() -> T) -> T {
    ground.add(layout::OUTSIDERS, 1).await;
    close_door(ground).await;
    let done = change().await;
    ground.add(layout::OUTSIDERS, 1_u64.wrapping_neg()).await;
    done
}

/// Closes the door, if it is not closed.
pub(crate) async fn close_door<G: Ground>(ground: &G) {
    loop {
        let door = ground.load(layout::DOOR).await;
        if Door::of(door) == Door::Closed
            || ground.replace(layout::DOOR, door, Door::Closed.next_word(door)).await
        {
            return;
        }
    }
}

/// Closes the door until it is removed, for changes whose end nobody will notice. Allocates nothing.
pub fn close_for_good(door: &DoorFile) {
    at_once(door.add(layout::OUTSIDERS, 1));
    at_once(close_door(door));
}

/// Closes the door until this process has ended. If there is no place for that, until the door is removed.
pub fn keep_closed(door: &DoorFile) {
    let place = this_process()
        .ok()
        .and_then(|holder| (0..door.places()).find(|place| at_once(Place::new(door, *place).take(holder))));
    let Some(place) = place else { return close_for_good(door) };
    at_once(grace::enter(door, Layout::place(place)));
    at_once(close_door(door));
}
