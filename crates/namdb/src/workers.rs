//! The process's threads that run transactions, and which of them announce their snapshots at present.
//!
//! A client that has nothing to do would pin what its last snapshot needed. So its word is taken away by the service thread, and the
//! client announces itself again before it begins the next time. The place's state says who may write the word.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use farpool_txn::{Shipped, Worker};
use parking_lot::Mutex;

use crate::error::TxError;
use crate::plan::MOST_WORKERS;

/// The client begins, or has begun: its word is its own.
const BUSY: u8 = 0;
/// The client has nothing to do since a moment ago.
const RESTING: u8 = 1;
/// ... and had nothing to do when the service looked last.
const IDLE: u8 = 2;
/// The service takes the word away.
const FORGETTING: u8 = 3;
/// The client announces itself again; whoever else begins something there waits until it has.
const WAKING: u8 = 5;
/// The word is gone, or this process's part in the database is over.
const FORGOTTEN: u8 = 4;

/// Between two looks at whether the service has taken the word away.
const PAUSE: Duration = Duration::from_micros(50);

/// The places of a process.
#[derive(Default)]
pub(crate) struct Workers {
    places: Mutex<Vec<Option<Arc<AtomicU8>>>>,
}

/// A place that a client has. Dropped, it is free again; its word must be gone by then.
pub(crate) struct Place {
    workers: Arc<Workers>,
    number: u16,
    state: Arc<AtomicU8>,
    is_kept: bool,
}

/// A client that has nothing to do, and whose word may be taken away: it begins nothing until this is dropped, and then announces itself
/// again.
pub(crate) struct Idle {
    number: u16,
    state: Arc<AtomicU8>,
}

impl Workers {
    /// A place for another client, which is busy; `None`: there is none.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Place> {
        let mut places = self.places.lock();
        let free = places.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            places.push(None);
            places.len() - 1
        });
        let state = Arc::new(AtomicU8::new(BUSY));
        if number >= usize::from(MOST_WORKERS) {
            places.pop();
            return None;
        }
        places[number] = Some(state.clone());
        Some(Place { workers: self.clone(), number: number as u16, state, is_kept: false })
    }

    /// Whether there is no client.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.lock().iter().all(Option::is_none)
    }

    /// The clients that have had nothing to do since the last time this was asked.
    pub(crate) fn idle(&self) -> Vec<Idle> {
        let places = self.places.lock();
        let mut idle = Vec::new();
        for (number, state) in (0..).zip(places.iter()) {
            let Some(state) = state else { continue };
            // Acquire and release, here and below: who has the word hands it over with the state.
            let change =
                |from, to| state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if change(IDLE, FORGETTING) {
                idle.push(Idle { number, state: state.clone() });
            } else {
                change(RESTING, IDLE);
            }
        }
        idle
    }
}

impl Idle {
    /// Which of the process's places it is.
    pub(crate) fn place(&self) -> u16 {
        self.number
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.state.store(FORGOTTEN, Ordering::Release);
    }
}

impl Place {
    /// Which of the process's it is.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// The client begins something. It announces itself again if its word was taken away meanwhile.
    pub(crate) async fn wake(&self, worker: &Worker<Shipped>) -> Result<(), TxError> {
        loop {
            match self.state.begin() {
                FORGETTING | WAKING => worker.memory().endpoint().sleep(PAUSE).await,
                FORGOTTEN => {
                    let waking = Waking(&self.state);
                    worker.announce_again().await?;
                    waking.succeeded();
                    return Ok(());
                }
                _ => return Ok(()),
            }
        }
    }

    /// The client has nothing to do for now. If it could not announce itself, its word is gone still.
    pub(crate) fn rest(&self) {
        let _ = self.state.compare_exchange(BUSY, RESTING, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The place is not given to another client: its word may still be there.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.is_kept {
            self.workers.places.lock()[usize::from(self.number)] = None;
        }
    }
}

/// A client announces itself. Dropped before it [is awake](Self::succeeded), its word is gone still.
struct Waking<'a>(&'a AtomicU8);

impl Waking<'_> {
    fn succeeded(self) {
        self.0.store(BUSY, Ordering::Release);
        std::mem::forget(self);
    }
}

impl Drop for Waking<'_> {
    fn drop(&mut self) {
        self.0.store(FORGOTTEN, Ordering::Release);
    }
}

trait Begin {
    /// The client begins something, if it may; says what it was at.
    fn begin(&self) -> u8;
}

impl Begin for AtomicU8 {
    fn begin(&self) -> u8 {
        let next = |found| match found {
            FORGETTING | WAKING => None,
            FORGOTTEN => Some(WAKING),
            _ => Some(BUSY),
        };
        self.try_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or_else(|found| found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_forgotten_once_it_has_had_nothing_to_do_from_one_look_to_the_next() {
        let workers = Arc::new(Workers::default());
        let place = workers.take().unwrap();
        assert!(workers.idle().is_empty() && workers.idle().is_empty(), "it is busy");
        place.rest();
        assert!(workers.idle().is_empty(), "it may have been busy a moment ago");
        let idle = workers.idle();
        assert_eq!(idle.iter().map(Idle::place).collect::<Vec<_>>(), [0]);
        assert_eq!(place.state.begin(), FORGETTING, "it waits");
        drop(idle);
        assert_eq!(place.state.begin(), FORGOTTEN);
        assert_eq!(place.state.begin(), WAKING, "others wait until it has announced itself");
        drop(Waking(&place.state));
        place.rest();
        assert_eq!(place.state.begin(), FORGOTTEN, "it has not");
        Waking(&place.state).succeeded();
        assert_eq!(place.state.begin(), BUSY);
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
}
