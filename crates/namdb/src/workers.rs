//! The process's threads that run transactions, and which of them announce their snapshots at present.
//!
//! A client that has nothing to do would pin what its last snapshot needed. So its word is taken away by the
//! service thread, and the client announces itself again before it begins the next time. The [state](place)
//! of a place says who may write its word.

mod place;

use std::sync::Arc;

use farpool_txn::{BeginError, LeaveError, Rules, Worker};

use crate::environment::Environment;
use crate::error::{DatabaseError, TxError};
use crate::member::MemberCore;
use place::{Event, PlaceWord, State};

/// The places of a process.
pub(crate) struct Workers {
    places: Box<[PlaceWord]>,
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

impl Workers {
    /// So many places, all free.
    pub(crate) fn new(places: u16) -> Workers {
        Workers { places: (0..places).map(|_| PlaceWord::default()).collect() }
    }

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
        let looks =
            (0..).zip(&*self.places).map(|(number, place)| (number, place.happens(Event::LookedAt).1));
        let idle = looks.filter(|&(_, state)| state == Some(State::Forgetting));
        idle.map(|(number, _)| Idle { workers: self, number }).collect()
    }
}

impl<E: Environment> MemberCore<E> {
    /// A place for another client, which is busy. The seat is not given back before the place is free again.
    pub(crate) fn take_place(&self) -> Result<Place, DatabaseError> {
        let most = self.layout().limits.clients;
        let place = self.workers.take().ok_or(DatabaseError::TooManyClients(most))?;
        // Only now: before, the seat may have been given back.
        self.check()?;
        Ok(place)
    }

    /// The worker of a client, which announces its snapshots in the place of this number from now on.
    pub(crate) async fn announced<R: Rules>(
        &self,
        worker: Worker<R>,
        number: u16,
    ) -> Result<Worker<R>, BeginError> {
        let word = self.layout().clients(self.seat().slot).start + number;
        let announced = worker.announcing(self.at().horizon(), word).await?;
        Ok(announced.expect("the layout has a word for each place"))
    }

    /// A client has left, or has failed to. If its word may still be there, what its snapshots needed is kept
    /// until the others have recovered the seat: so they must.
    pub(crate) fn has_left_place(&self, place: Place, left: Result<(), LeaveError>) {
        let Err(error) = left else { return };
        place.keep();
        if let LeaveError::Memory(error) = error {
            self.fails(error.into());
        }
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

    /// Called when the client begins something. Announces it again if its word was cleared meanwhile. Fails
    /// if the member has ended, since it may then never finish clearing the word.
    pub(crate) async fn wake<E: Environment>(
        &self,
        worker: &Worker<E::Rules>,
        member: &MemberCore<E>,
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
                    member.check().map_err(TxError::Ended)?;
                    worker.memory().endpoint().sleep(member.timing().wake_pause).await;
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

    const MOST: u16 = 64;

    #[test]
    fn a_client_is_forgotten_once_it_has_had_nothing_to_do_from_one_look_to_the_next() {
        let workers = Arc::new(Workers::new(MOST));
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
        let workers = Arc::new(Workers::new(MOST));
        let places: Vec<Place> = (0..MOST).map(|_| workers.take().unwrap()).collect();
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
        let workers = Arc::new(Workers::new(MOST));
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
        let workers = Arc::new(Workers::new(MOST));
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
