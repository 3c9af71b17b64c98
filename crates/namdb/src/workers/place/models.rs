//! Models of a place: `loom` runs the code itself in every interleaving, with every outdated value that the
//! memory model allows a load to return. Clients take the place, announce themselves, rest, begin again and
//! leave, while the main part clears words.
//!
//! A model holds if a client's word is set for as long as the client is busy. Each fault below breaks the
//! rule on purpose, and must be caught.

use std::sync::Arc;

use loom::model::Builder;
use loom::sync::atomic::{AtomicBool as LoomFlag, AtomicU8 as LoomState, AtomicU64 as LoomWord};
use loom::thread;

use super::*;

/// Most switches away from a thread that could go on, in one history.
const PREEMPTIONS: usize = 3;
/// Looks of the main part: after a client has come to rest, two find it idle.
const LOOKS: usize = 3;

const SOUND: u8 = 0;
/// A client that leaves while its word is being cleared frees the place at once.
const FREED_AT_ONCE: u8 = 1;
/// The state orders nothing: all accesses are relaxed.
const UNORDERED: u8 = 2;
/// Closing the places only loads their states.
const GLANCES: u8 = 4;
/// A client begins while its word is being cleared.
const BEGINS_AT_ONCE: u8 = 3;

word!(LoomState);

struct Faulty<const FAULT: u8>(LoomState);

impl<const FAULT: u8> Word for Faulty<FAULT> {
    fn new(value: u8) -> Self {
        Faulty(LoomState::new(value))
    }

    fn load(&self, order: Ordering) -> u8 {
        self.0.load(order)
    }

    fn compare_exchange(&self, current: u8, new: u8, order: Ordering) -> Result<u8, u8> {
        let new = match FAULT {
            FREED_AT_ONCE if new == Leaving as u8 => Free as u8,
            _ => new,
        };
        let order = if FAULT == UNORDERED { Ordering::Relaxed } else { order };
        Word::compare_exchange(&self.0, current, new, order)
    }
}

/// A place, and its word in far memory, which says whether a client is announced there.
struct Shared<const FAULT: u8> {
    place: PlaceWord<Faulty<FAULT>>,
    word: LoomWord,
}

impl<const FAULT: u8> Shared<FAULT> {
    /// Relaxed: far memory orders nothing by itself.
    fn write(&self, word: u64) {
        self.word.store(word, Ordering::Relaxed);
    }

    fn assert_announced(&self) {
        assert_eq!(self.word.load(Ordering::Relaxed), 1, "a busy client's word is cleared");
    }

    /// The main part, which clears words.
    fn serve(&self) {
        for _ in 0..LOOKS {
            if self.place.happens(Event::LookedAt).1 == Some(Forgetting) {
                self.write(0);
                self.place.happens(Event::WordGone);
            }
        }
    }

    /// A client from joining to leaving. Returns whether it got the place.
    fn live(&self, begins_again: bool) -> bool {
        if self.place.happens(Event::Taken).1.is_none() {
            return false;
        }
        self.write(1);
        self.assert_announced();
        self.place.happens(Event::Rests);
        if begins_again {
            self.begin();
            self.assert_announced();
            self.place.happens(Event::Rests);
        }
        self.write(0);
        self.place.happens(Event::Leaves);
        true
    }

    fn begin(&self) {
        loop {
            match self.place.happens(Event::Begins) {
                (_, Some(Waking)) => {
                    self.write(1);
                    self.place.happens(Event::Awake);
                    return;
                }
                (_, Some(_)) => return,
                (Forgetting, None) if FAULT == BEGINS_AT_ONCE => return,
                (_, None) => thread::yield_now(),
            }
        }
    }
}

fn model<const FAULT: u8>(begins_again: bool) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        let shared = Arc::new(Shared::<FAULT> { place: PlaceWord::default(), word: LoomWord::new(0) });
        let service = thread::spawn({
            let shared = shared.clone();
            move || shared.serve()
        });
        assert!(shared.live(begins_again), "the place is free at first");
        // The next client stays busy to the end.
        let is_taken = shared.place.happens(Event::Taken).1.is_some();
        if is_taken {
            shared.write(1);
            shared.assert_announced();
        }
        service.join().unwrap();
        if is_taken {
            shared.assert_announced();
        } else {
            assert_eq!(shared.place.state(), Free, "nothing is in flight any more");
        }
    });
}

/// A member ends while a client joins: either the seat is given back, or the client works on, but not both.
fn model_of_closing<const FAULT: u8>() {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(|| {
        let place = Arc::new(PlaceWord::<Faulty<FAULT>>::default());
        let has_ended = Arc::new(LoomFlag::new(false));
        let closes = thread::spawn({
            let (place, has_ended) = (place.clone(), has_ended.clone());
            move || {
                has_ended.store(true, Ordering::Release);
                if FAULT == GLANCES { place.state() == Free } else { place.is_free() }
            }
        });
        let goes_on = place.happens(Event::Taken).1.is_some() && !has_ended.load(Ordering::Acquire);
        let is_given_back = closes.join().unwrap();
        assert!(!(goes_on && is_given_back), "a client works in a seat that may belong to another member");
    });
}

#[test]
fn a_client_that_joins_while_the_seat_is_given_back_finds_that_out() {
    model_of_closing::<SOUND>();
}

#[test]
fn the_model_notices_that_closing_only_loads_the_states() {
    assert_caught(model_of_closing::<GLANCES>);
}

fn assert_caught(model: impl Fn() + std::panic::UnwindSafe) {
    assert!(std::panic::catch_unwind(model).is_err(), "the fault was not noticed");
}

#[test]
fn a_place_left_while_its_word_is_cleared_goes_to_the_next_client_only_after_that() {
    model::<SOUND>(false);
}

#[test]
fn a_client_that_begins_again_is_announced_in_every_interleaving_with_the_main_part() {
    model::<SOUND>(true);
}

#[test]
fn the_model_notices_a_place_that_is_free_at_once() {
    assert_caught(|| model::<FREED_AT_ONCE>(false));
}

#[test]
fn the_model_notices_states_that_order_nothing() {
    assert_caught(|| model::<UNORDERED>(true));
}

#[test]
fn the_model_notices_a_client_that_begins_while_its_word_is_cleared() {
    assert_caught(|| model::<BEGINS_AT_ONCE>(true));
}
