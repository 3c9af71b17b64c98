//! The state of a cache, in the words that users read.

use std::io;

use crate::client::daemon_answers;
use crate::door::DoorFile;
use crate::words::Door;

/// The state of a cache in a word. `answers`: its daemon has handed out the index.
pub fn state(door: Door, is_attached: bool, answers: bool) -> &'static str {
    match (door, is_attached) {
        (Door::Open, true) if !answers => "silent",
        (Door::Open, true) => "open",
        (Door::Invalidating, true) => "opening",
        (Door::Closed, true) => "closed",
        (Door::Closed, false) => "detached",
        (Door::Open | Door::Invalidating, false) => "abandoned",
    }
}

/// The state of the cache behind a door, and the number of its index, which is another one each time that a
/// cache is attached. Looks at no page and at no place. While a cache comes or goes, the state may be that of
/// neither before nor afterwards: look twice.
///
/// # Errors
/// If the door's lock cannot be looked at.
pub fn look_at(door: &DoorFile) -> io::Result<(&'static str, u64)> {
    // The lock first: a daemon that ends closes the door before it gives the lock back.
    let (is_attached, (found, index)) = (door.is_locked()?, door.state());
    let answers = !is_attached || found != Door::Open || daemon_answers(door, index);
    Ok((state(found, is_attached, answers), index))
}
