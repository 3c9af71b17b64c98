//! The places of a member's clients, and which clients announce their snapshots at present.
//!
//! An idle client would pin the versions that its last snapshot needed. So the member's main part clears its
//! word, and the client announces itself again before its next transaction. The [state](place) of a place
//! says which side may write its word.

mod place;

use std::sync::Arc;

use farpool_txn::{BeginError, LeaveError, Rules, Worker};

use crate::environment::Environment;
use crate::error::{DatabaseError, TxError};
use crate::member::MemberCore;
use place::{Event, PlaceWord, State};

/// The places of a member's clients.
pub(crate) struct Places {
    words: Box<[PlaceWord]>,
}

/// A client's place. Once it is [freed](Self::free), another client may get it as soon as no write to its
/// word is in flight. If it is dropped without being freed, no other client gets it: its word may still be
/// set, or a write to it may still land.
pub(crate) struct ClientPlace {
    places: Arc<Places>,
    number: u16,
    /// The client has left, and another one may have the place already.
    is_free: bool,
}

/// An idle client whose word is being cleared. It begins nothing until that is [done](Self::word_cleared),
/// then announces itself again. If this is dropped first, no other client gets the place: its word may still
/// be set.
pub(crate) struct Idle<'a> {
    places: &'a Places,
    number: u16,
}

impl Places {
    /// This many places, all free.
    pub(crate) fn new(places: u16) -> Places {
        Places { words: (0..places).map(|_| PlaceWord::default()).collect() }
    }

    /// A place for another client, which counts as busy; `None`: no place is free.
    pub(crate) fn take(self: &Arc<Self>) -> Option<ClientPlace> {
        let taken = self.words.iter().position(|place| place.happens(Event::Taken).1.is_some());
        taken.map(|number| ClientPlace { places: self.clone(), number: number as u16, is_free: false })
    }

    /// Whether there is no client, and nothing in flight for one that has left. Call it when the member has
    /// ended: a client that takes a place after this call finds that the member has ended.
    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(PlaceWord::is_free)
    }

    /// The clients that have had nothing to do since the last time this was asked.
    pub(crate) fn idle(&self) -> Vec<Idle<'_>> {
        let looks = (0..).zip(&*self.words).map(|(number, place)| (number, place.happens(Event::LookedAt).1));
        let idle = looks.filter(|&(_, state)| state == Some(State::Forgetting));
        idle.map(|(number, _)| Idle { places: self, number }).collect()
    }
}

impl<E: Environment> MemberCore<E> {
    /// A place for another client, which counts as busy. The seat is not given back before the place is free
    /// again.
    pub(crate) fn take_place(&self) -> Result<ClientPlace, DatabaseError> {
        self.check()?;
        let most = self.layout().limits.clients;
        let place = self.places.take().ok_or(DatabaseError::TooManyClients(most))?;
        // Once more: a member that has ended may have given its seat back before the place was taken.
        match self.check() {
            Ok(()) => Ok(place),
            Err(ended) => {
                place.free(); // nothing was announced
                Err(ended.into())
            }
        }
    }

    /// The worker of a client, which announces its snapshots in the place of this number from now on.
    pub(crate) async fn announce_in_place<R: Rules>(
        &self,
        worker: Worker<R>,
        number: u16,
    ) -> Result<Worker<R>, BeginError> {
        let word = self.layout().client_words(self.seat().slot).start + number;
        let announced = worker.announcing(self.at().horizon(), word).await?;
        Ok(announced.expect("the layout has a word for each place"))
    }

    /// Called when a client has left, or has failed to. If its word may still be set, versions are kept for
    /// its snapshots until the others have recovered the seat. So the member ends, and the others recover it.
    pub(crate) fn return_place(&self, place: ClientPlace, left: Result<(), LeaveError>) {
        match left {
            Ok(()) => place.free(),
            Err(LeaveError::Memory(error)) => drop(self.end_after(error.into())),
            Err(_) => {}
        }
    }
}

impl Idle<'_> {
    /// Which of the member's places it is.
    pub(crate) fn place(&self) -> u16 {
        self.number
    }

    /// The word is cleared, and no write to it is in flight.
    pub(crate) fn word_cleared(self) {
        self.places.words[usize::from(self.number)].happens(Event::WordGone);
    }
}

impl ClientPlace {
    /// Which of the member's places it is.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    fn word(&self) -> &PlaceWord {
        &self.places.words[usize::from(self.number)]
    }

    /// Called when the client begins something. Announces the client again if its word was cleared meanwhile.
    /// Fails if the word is being cleared and the member has ended, since the member may then never finish
    /// that.
    pub(crate) async fn begin<E: Environment>(
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

    /// Called when the client has nothing to do for now. If it could not announce itself again, its word
    /// stays cleared.
    pub(crate) fn rest(&self) {
        self.word().happens(Event::Rests);
    }

    /// The client has left, and its word is cleared.
    pub(crate) fn free(mut self) {
        self.is_free = true;
        self.word().happens(Event::Leaves);
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        if !self.is_free {
            self.word().happens(Event::Abandoned);
        }
    }
}

/// A client that announces itself again. If this is dropped before that [succeeded](Self::succeeded), its
/// word counts as cleared.
struct Waking<'a>(&'a PlaceWord);

impl Waking<'_> {
    fn succeeded(self) {
        self.0.happens(Event::Awake);
    }
}

impl Drop for Waking<'_> {
    fn drop(&mut self) {
        // If it is awake, this changes nothing.
        self.0.happens(Event::NotAwake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u16 = 64;

    #[test]
    fn a_client_that_is_idle_from_one_look_to_the_next_is_forgotten() {
        let places = Arc::new(Places::new(MOST));
        let place = places.take().unwrap();
        let begin = || place.word().happens(Event::Begins);
        assert!(places.idle().is_empty() && places.idle().is_empty(), "it is busy");
        place.rest();
        assert!(places.idle().is_empty(), "it may have been busy a moment ago");
        let mut idle = places.idle();
        assert_eq!(idle.iter().map(Idle::place).collect::<Vec<_>>(), [0]);
        assert_eq!(begin(), (State::Forgetting, None), "it waits");
        idle.remove(0).word_cleared();
        assert_eq!(begin(), (State::Forgotten, Some(State::Waking)));
        assert_eq!(begin(), (State::Waking, None), "others wait until it has announced itself");
        drop(Waking(place.word()));
        place.rest();
        assert_eq!(begin(), (State::Forgotten, Some(State::Waking)), "it has not");
        Waking(place.word()).succeeded();
        assert_eq!(place.word().state(), State::Busy);
        assert!(places.idle().is_empty());
    }

    #[test]
    fn places_are_reused_unless_they_are_kept() {
        let places = Arc::new(Places::new(MOST));
        let taken: Vec<ClientPlace> = (0..MOST).map(|_| places.take().unwrap()).collect();
        assert!(places.take().is_none());
        let mut taken = taken.into_iter();
        taken.next().unwrap().free();
        drop(taken.next());
        assert_eq!(places.take().map(|place| (place.number(), place.free())), Some((0, ())));
        taken.for_each(ClientPlace::free);
        assert!(!places.is_empty(), "one was kept");
    }

    #[test]
    fn a_place_left_while_its_word_is_cleared_is_reused_only_after_that() {
        let places = Arc::new(Places::new(MOST));
        let place = places.take().unwrap();
        place.rest();
        assert!(places.idle().is_empty());
        let idle = places.idle();
        place.free();
        let next = places.take().unwrap();
        assert_eq!(next.number(), 1, "the word of the first place is still being cleared");
        assert!(!places.is_empty());
        idle.into_iter().for_each(Idle::word_cleared);
        assert_eq!(places.take().unwrap().number(), 0);
    }

    #[test]
    fn a_place_whose_word_may_still_be_cleared_goes_to_no_other_client() {
        let places = Arc::new(Places::new(MOST));
        let place = places.take().unwrap();
        place.rest();
        assert!(places.idle().is_empty());
        drop(places.idle()); // given up
        place.free();
        assert!(places.idle().is_empty());
        assert_eq!(places.take().unwrap().number(), 1);
        assert!(!places.is_empty());
    }
}
