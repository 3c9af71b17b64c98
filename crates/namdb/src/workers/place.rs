//! The state of a place, which says which side may write its word: the client that has the place, or the
//! member's main part.
//!
//! P1. One side at a time writes the word. The main part clears the word of an idle client (`Forgetting`);
//!     until it has done so, the client begins nothing.
//! P2. A place is free only once nothing is in flight that changes its word. A client that leaves while the
//!     main part clears its word leaves the place behind (`Leaving`), and the main part frees it. So a late
//!     write never meets the next client's announcement.
//!
//! The rule is a function; the shell around it is one word, generic so that a model runs this very code in
//! every interleaving.

#[cfg(test)]
mod models;

use std::sync::atomic::{AtomicU8, Ordering};

/// The state of a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum State {
    /// No client has it, and neither side writes its word.
    Free,
    /// The client begins something, or has begun: it alone writes its word.
    Busy,
    /// The client has become idle.
    Resting,
    /// The client was already idle when the main part looked last.
    Idle,
    /// The main part clears the word. If that fails, this state is final.
    Forgetting,
    /// The word is cleared.
    Forgotten,
    /// The client announces itself again; its other sessions wait until it has.
    Waking,
    /// The client has left while the main part clears the word.
    Leaving,
    /// No client gets the place any more: its word may still be set, or a write to it may still land.
    Kept,
}

use State::{Busy, Forgetting, Forgotten, Free, Idle, Kept, Leaving, Resting, Waking};

/// In the order of their numbers.
const STATES: [State; 9] = [Free, Busy, Resting, Idle, Forgetting, Forgotten, Waking, Leaving, Kept];

/// What happens to a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A client takes it.
    Taken,
    /// The client begins something.
    Begins,
    /// The client has announced itself again.
    Awake,
    /// The client could not announce itself again.
    NotAwake,
    /// The client has nothing to do.
    Rests,
    /// The main part looks whether the client has had nothing to do since it looked last.
    LookedAt,
    /// The main part has cleared the word.
    WordGone,
    /// The client leaves, and has cleared its word.
    Leaves,
    /// The client is gone. Its word may still be set, or a write to it may still land.
    Abandoned,
}

impl State {
    /// The state after an event. `None`: the event changes nothing, or must wait.
    pub(super) fn after(self, event: Event) -> Option<State> {
        match (event, self) {
            (Event::Taken, Free) => Some(Busy),
            (Event::Begins, Busy | Resting | Idle) => Some(Busy),
            (Event::Begins, Forgotten) => Some(Waking),
            (Event::Awake, Waking) => Some(Busy),
            (Event::NotAwake, Waking) => Some(Forgotten),
            (Event::Rests, Busy) => Some(Resting),
            (Event::LookedAt, Resting) => Some(Idle),
            (Event::LookedAt, Idle) => Some(Forgetting),
            (Event::WordGone, Forgetting) => Some(Forgotten),
            (Event::WordGone, Leaving) => Some(Free),
            (Event::Leaves, Busy | Resting | Idle | Forgotten) => Some(Free),
            (Event::Leaves, Forgetting) => Some(Leaving),
            // The client's announcement was interrupted, and may still land.
            (Event::Leaves, Waking) => Some(Kept),
            (Event::Abandoned, _) => Some(Kept),
            _ => None,
        }
    }
}

/// A word that threads share.
pub(super) trait Word {
    fn new(value: u8) -> Self;
    fn load(&self, order: Ordering) -> u8;
    fn compare_exchange(&self, current: u8, new: u8, order: Ordering) -> Result<u8, u8>;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            fn new(value: u8) -> Self {
                <$atomic>::new(value)
            }

            fn load(&self, order: Ordering) -> u8 {
                self.load(order)
            }

            fn compare_exchange(&self, current: u8, new: u8, order: Ordering) -> Result<u8, u8> {
                // Relaxed: a caller that fails tries again with the value found.
                self.compare_exchange(current, new, order, Ordering::Relaxed)
            }
        }
    };
}
#[cfg(test)]
use word;

word!(AtomicU8);

/// A place's state, which the client and the main part share.
#[derive(Debug)]
pub(super) struct PlaceWord<W = AtomicU8>(W);

impl<W: Word> Default for PlaceWord<W> {
    fn default() -> Self {
        PlaceWord(W::new(Free as u8))
    }
}

impl<W: Word> PlaceWord<W> {
    /// Whether the place is free. For the caller that closes all places, and has noted so before the call: a
    /// client that takes the place after this call sees that note.
    pub(super) fn is_free(&self) -> bool {
        // This compare-and-swap leaves the word as it is. It stands in place of a load because only a write
        // can release: a client that takes the place afterwards reads what is written here, and so sees what
        // the caller wrote before. Acquire: pairs with the release of the client that had the place before.
        self.0.compare_exchange(Free as u8, Free as u8, Ordering::AcqRel).is_ok()
    }

    /// The present state. It is only a hint, except for a side that alone may change it.
    pub(super) fn state(&self) -> State {
        STATES[usize::from(self.0.load(Ordering::Relaxed))]
    }

    /// Applies an event; returns the state before, and the state after if it has changed.
    pub(super) fn happens(&self, event: Event) -> (State, Option<State>) {
        let mut before = self.state();
        loop {
            let Some(after) = before.after(event) else { return (before, None) };
            // Acquire and release: the state says which side may write the client's word in far memory. The
            // side that gives this right up releases after its last write, and the other one acquires.
            match self.0.compare_exchange(before as u8, after as u8, Ordering::AcqRel) {
                Ok(_) => return (before, Some(after)),
                Err(found) => before = STATES[usize::from(found)],
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: [Event; 9] = [
        Event::Taken,
        Event::Begins,
        Event::Awake,
        Event::NotAwake,
        Event::Rests,
        Event::LookedAt,
        Event::WordGone,
        Event::Leaves,
        Event::Abandoned,
    ];

    #[test]
    fn states_have_their_numbers() {
        assert!((0..).zip(STATES).all(|(number, state)| state as usize == number));
    }

    #[test]
    fn a_place_becomes_free_only_from_states_in_which_nothing_changes_its_word() {
        for state in STATES {
            for event in EVENTS {
                if state.after(event) == Some(Free) {
                    let is_settled = match event {
                        Event::Leaves => !matches!(state, Forgetting | Waking | Leaving | Kept | Free),
                        Event::WordGone => state == Leaving,
                        _ => false,
                    };
                    assert!(is_settled, "{state:?} {event:?}");
                }
            }
            assert_eq!(state.after(Event::Abandoned), Some(Kept));
        }
        assert!(EVENTS.iter().all(|&event| Kept.after(event).is_none_or(|after| after == Kept)));
    }
}
