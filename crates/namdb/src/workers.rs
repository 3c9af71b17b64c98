//! The process's threads that run transactions, and which of them announce their snapshots at present.
//!
//! A client that has nothing to do would pin what its last snapshot needed. So its word is taken away by the
//! service thread, and the client announces itself again before it begins the next time. The [state](place)
//! of a place says who may write its word.

mod place;

use std::sync::Arc;
use std::time::Duration;

use farpool_txn::{Shipped, Worker};

use crate::error::{Ended, TxError};
use crate::plan::MOST_WORKERS;
use place::{Event, PlaceWord, State};

/// Between two looks at whether the service has taken the word away.
const PAUSE: Duration = Duration::from_micros(50);

/// The places of a process.
pub(crate) struct Workers {
    places: [PlaceWord; MOST_WORKERS as usize],
}

/// A client's place. After it is dropped, the next client gets it once nothing changes its word any more; the
/// client has cleared the word by then.
pub(crate) struct Place {
    workers: Arc<Workers>,
    number: u16,
}

/// An idle client whose word is being cleared. It begins nothing until that is [done](Self::forgotten), and
/// then announces itself again. If this is dropped before, the word may or may not go: the place is given to
/// no other client.
pub(crate) struct Idle<'a> {
    workers: &'a Workers,
    number: u16,
}

impl Default for Workers {
    fn default() -> Self {
        Workers { places: std::array::from_fn(|_| PlaceWord::default()) }
    }
}

impl Workers {
    /// A place for another client, which is busy; `None`: there is none.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Place> {
        let taken = self.places.iter().position(|place| place.happens(Event::Taken).1.is_some());
        taken.map(|number| Place { workers: self.clone(), number: number as u16 })
    }

    /// Whether there is no client, and nothing is in flight for one that has left. Called when the process's
    /// part has ended: a client that comes after this finds that out.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.iter().all(PlaceWord::is_free)
    }

    /// The clients that have had nothing to do since the last time this was asked.
    pub(crate) fn idle(&self) -> Vec<Idle<'_>> {
        let looks = (0..).zip(&self.places).map(|(number, place)| (number, place.happens(Event::LookedAt).1));
        let idle = looks.filter(|&(_, state)| state == Some(State::Forgetting));
        idle.map(|(number, _)| Idle { workers: self, number }).collect()
    }
}

impl Idle<'_> {
    /// Which of the process's places it is.
    pub(crate) fn place(&self) -> u16 {
        self.number
    }

    /// The word is cleared, and no write to it is in flight.
    pub(crate) fn forgotten(self) {
        self.workers.places[usize::from(self.number)].happens(Event::WordGone);
    }
}

impl Place {
    /// Which of the process's it is.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    fn word(&self) -> &PlaceWord {
        &self.workers.places[usize::from(self.number)]
    }

    /// Called when the client begins something. Announces it again if its word was cleared meanwhile. `check`
    /// says whether this process's part in the database has ended, since the service may then never finish
    /// clearing.
    pub(crate) async fn wake(
        &self,
        worker: &Worker<Shipped>,
        check: impl Fn() -> Result<(), Ended>,
    ) -> Result<(), TxError> {
        loop {
            match self.word().happens(Event::Begins) {
                (_, Some(State::Waking)) => {
                    let waking = Waking(self.word());
                    worker.announce_again().await?;
                    waking.succeeded();
                    return Ok(());
                }
                (_, Some(_)) => return Ok(()),
                (_, None) => {
                    check().map_err(TxError::Ended)?;
                    worker.memory().endpoint().sleep(PAUSE).await;
                }
            }
        }
    }

    /// The client has nothing to do for now. If it could not announce itself, its word is gone still.
    pub(crate) fn rest(&self) {
        self.word().happens(Event::Rests);
    }

    /// The place is not given to another client: its word may still be there.
    pub(crate) fn keep(self) {
        self.word().happens(Event::LeavesWord);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Where it is kept, this changes nothing.
        self.word().happens(Event::Leaves);
    }
}

/// A client announces itself. Dropped before it [is awake](Self::succeeded), its word is gone still.
struct Waking<'a>(&'a PlaceWord);

impl Waking<'_> {
    fn succeeded(self) {
        self.0.happens(Event::Awake);
    }
}

impl Drop for Waking<'_> {
    fn drop(&mut self) {
        // Where it is awake, this changes nothing.
        self.0.happens(Event::NotAwake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_forgotten_once_it_has_had_nothing_to_do_from_one_look_to_the_next() {
        let workers = Arc::new(Workers::default());
        let place = workers.take().unwrap();
        let begin = || place.word().happens(Event::Begins);
        assert!(workers.idle().is_empty() && workers.idle().is_empty(), "it is busy");
        place.rest();
        assert!(workers.idle().is_empty(), "it may have been busy a moment ago");
        let mut idle = workers.idle();
        assert_eq!(idle.iter().map(Idle::place).collect::<Vec<_>>(), [0]);
        assert_eq!(begin(), (State::Forgetting, None), "it waits");
        idle.remove(0).forgotten();
        assert_eq!(begin(), (State::Forgotten, Some(State::Waking)));
        assert_eq!(begin(), (State::Waking, None), "others wait until it has announced itself");
        drop(Waking(place.word()));
        place.rest();
        assert_eq!(begin(), (State::Forgotten, Some(State::Waking)), "it has not");
        Waking(place.word()).succeeded();
        assert_eq!(place.word().state(), State::Busy);
        assert!(workers.idle().is_empty());
    }

    #[test]
    fn places_are_given_again_unless_they_are_kept() {
        let workers = Arc::new(Workers::default());
        let places: Vec<Place> = (0..MOST_WORKERS).map(|_| workers.take().unwrap()).collect();
        assert!(workers.take().is_none());
        let mut places = places.into_iter();
        drop(places.next());
        places.next().unwrap().keep();
        assert_eq!(workers.take().unwrap().number(), 0);
        drop(places);
        assert!(!workers.is_empty(), "one was kept");
    }

    #[test]
    fn a_place_that_is_left_while_its_word_is_taken_away_is_given_again_only_behind_that() {
        let workers = Arc::new(Workers::default());
        let place = workers.take().unwrap();
        place.rest();
        assert!(workers.idle().is_empty());
        let idle = workers.idle();
        drop(place);
        let next = workers.take().unwrap();
        assert_eq!(next.number(), 1, "what takes the word away is under way");
        assert!(!workers.is_empty());
        idle.into_iter().for_each(Idle::forgotten);
        assert_eq!(workers.take().unwrap().number(), 0);
    }

    #[test]
    fn a_place_whose_word_may_still_be_taken_away_is_nobody_elses() {
        let workers = Arc::new(Workers::default());
        let place = workers.take().unwrap();
        place.rest();
        assert!(workers.idle().is_empty());
        drop(workers.idle()); // given up
        drop(place);
        assert!(workers.idle().is_empty());
        assert_eq!(workers.take().unwrap().number(), 1);
        assert!(!workers.is_empty());
    }
}
