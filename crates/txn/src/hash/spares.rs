//! Spares: record numbers and pairs of buckets that a process has taken from an index and not used yet.
//!
//! They are taken in runs, each by one fetch-and-add on a piece's counter. If the process dies, its spares
//! are lost. So runs are short at first, and double up to a limit: of each piece, a process that dies loses
//! about as many spares as it has used, at most.

use std::time::Duration;

use rustix_futex_sync::Mutex;

use super::layout::{IndexLayout, IndexShape, NUMBERS_AT, PAIRS_AT};
use crate::memory::{Memory, MemoryError, Piece};

/// The most record numbers that are taken at once: the fetch-and-add is then a small part of the cost of an
/// insert, and little is lost when a process dies.
const NUMBERS_AT_ONCE: u64 = 32;
/// Between two checks whether another thread has taken some spares.
const TAKING_PAUSE: Duration = Duration::from_micros(2);
/// Most such checks: the one that takes some may be a task that is not being polled.
const MOST_LOOKS_AT_TAKING: u32 = 500;
/// The most pairs of buckets that are taken at once: fewer than record numbers, because each insert needs a
/// number, and only one in several splits a bucket.
const PAIRS_AT_ONCE: u64 = 8;

/// The spares that the threads of a process have taken from an index for each other.
#[derive(Debug)]
pub struct IndexSpares {
    shape: IndexShape,
    /// Pieces of a layer.
    layer: u64,
    pub(super) numbers: Mutex<Spares>,
    pub(super) pairs: Mutex<Spares>,
}

impl IndexSpares {
    /// No spares yet of an index with this layout.
    pub fn new(layout: &IndexLayout) -> IndexSpares {
        let spares = IndexSpares {
            shape: *layout.shape(),
            layer: layout.pieces_per_layer(),
            numbers: Mutex::new(Spares::new(NUMBERS_AT, NUMBERS_AT_ONCE)),
            pairs: Mutex::new(Spares::new(PAIRS_AT, PAIRS_AT_ONCE)),
        };
        spares.grow(layout);
        spares
    }

    /// The index has this layout now: it may have more pieces than before.
    pub(super) fn grow(&self, layout: &IndexLayout) {
        let pieces = 0..layout.pieces() as usize;
        self.numbers.lock().grow(pieces.clone().map(|piece| layout.numbers_of(piece)));
        self.pairs.lock().grow(pieces.map(|piece| layout.pairs_of(piece)));
    }

    pub(super) fn is_of(&self, layout: &IndexLayout) -> bool {
        (&self.shape, self.layer) == (layout.shape(), layout.pieces_per_layer())
    }
}

/// Spares of one kind.
#[derive(Debug)]
pub(crate) struct Spares {
    /// The place of their counter in each piece.
    counter_at: u64,
    /// Most that are taken at once.
    at_once: u64,
    pieces: Vec<OfPiece>,
}

#[derive(Clone, Debug)]
struct OfPiece {
    /// How many the piece has.
    all: u64,
    /// How many are taken next.
    run: u64,
    /// The spares, with the next one last.
    spare: Vec<u64>,
    /// All that the piece has were handed out.
    is_used_up: bool,
    /// A thread is taking some.
    is_taking: bool,
}

/// What a caller that finds no spare does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// It adds this many to the piece's counter. Other threads wait meanwhile.
    Take(u64),
    /// It waits: another thread is taking some.
    Wait,
    /// There are no more.
    UsedUp,
}

/// Held while a caller takes some of a piece. Once it is dropped, others may take some.
struct Taking<'a> {
    spares: &'a Mutex<Spares>,
    piece: usize,
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.spares.lock().pieces[self.piece].is_taking = false;
    }
}

impl Spares {
    pub(crate) fn new(counter_at: u64, at_once: u64) -> Spares {
        Spares { counter_at, at_once, pieces: Vec::new() }
    }

    /// Each piece has so many. There may be more pieces than before.
    pub(crate) fn grow(&mut self, all: impl Iterator<Item = u64>) {
        let new = |all| OfPiece { all, run: 1, spare: Vec::new(), is_used_up: false, is_taking: false };
        self.pieces.extend(all.skip(self.pieces.len()).map(new));
    }

    /// A spare of a piece: its place in the piece.
    fn take(&mut self, piece: usize) -> Option<u64> {
        self.pieces[piece].spare.pop()
    }

    /// Gives a spare back. No other client has learned of it, and no WRITE for it is in flight: queues of
    /// other threads are not ordered with this thread's queue.
    pub(crate) fn give_back(&mut self, piece: usize, spare: u64) {
        self.pieces[piece].spare.push(spare);
    }

    /// Called after no spare was found. `waits`: the caller is ready to wait for another thread that takes
    /// some. A caller that is told to take some holds a [`Taking`] meanwhile.
    fn ask(&mut self, piece: usize, waits: bool) -> Ask {
        let of_piece = &mut self.pieces[piece];
        if of_piece.is_used_up {
            return Ask::UsedUp;
        }
        let is_taking = std::mem::replace(&mut of_piece.is_taking, true);
        if is_taking && waits {
            return Ask::Wait;
        }
        if is_taking {
            // Many may have waited for too long. If each of them took a long run, most of it would be lost.
            return Ask::Take(1);
        }
        let run = of_piece.run;
        of_piece.run = (run * 2).min(self.at_once);
        Ask::Take(run)
    }

    /// Adds the spares of a run: the counter was at `first` before `run` was added to it.
    fn refill(&mut self, piece: usize, first: u64, run: u64) {
        let of_piece = &mut self.pieces[piece];
        let end = first.saturating_add(run).min(of_piece.all);
        of_piece.is_used_up |= end == of_piece.all;
        of_piece.spare.splice(0..0, (first.min(end)..end).rev());
    }
}

/// Takes a spare of the first piece that has one, in this order. Returns the piece, and the spare's place in
/// it; `None`: all were handed out.
pub(crate) async fn take_spare(
    memory: &Memory,
    pieces: &[Piece],
    order: impl Iterator<Item = usize>,
    spares: &Mutex<Spares>,
) -> Result<Option<(usize, u64)>, MemoryError> {
    for piece in order {
        for look in 0.. {
            let (ask, counter_at) = {
                let mut spares = spares.lock();
                if let Some(spare) = spares.take(piece) {
                    return Ok(Some((piece, spare)));
                }
                (spares.ask(piece, look < MOST_LOOKS_AT_TAKING), spares.counter_at)
            };
            match ask {
                Ask::UsedUp => break,
                Ask::Wait => memory.endpoint().sleep(TAKING_PAUSE).await,
                Ask::Take(run) => {
                    let _taking = Taking { spares, piece };
                    let first = memory.fetch_and_add(&pieces[piece], counter_at, run).await?;
                    spares.lock().refill(piece, first, run);
                }
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(pieces: usize, each: u64) -> Spares {
        let mut spares = Spares::new(0, 4);
        spares.grow(std::iter::repeat_n(each, pieces));
        spares
    }

    /// Asks, as a caller that has then taken some.
    fn taken(spares: &mut Spares, piece: usize) -> Ask {
        let ask = spares.ask(piece, true);
        spares.pieces[piece].is_taking = false;
        ask
    }

    #[test]
    fn one_takes_some_while_others_wait() {
        let spares = Mutex::new(new(1, 10));
        assert_eq!(spares.lock().ask(0, true), Ask::Take(1));
        let taking = Taking { spares: &spares, piece: 0 };
        assert_eq!([(); 2].map(|()| spares.lock().ask(0, true)), [Ask::Wait; 2]);
        assert_eq!(spares.lock().ask(0, false), Ask::Take(1), "it was waited for long enough");
        drop(taking);
        assert_eq!(spares.lock().ask(0, true), Ask::Take(2));
    }

    #[test]
    fn runs_are_used_one_after_the_other_up_to_the_end() {
        let mut spares = new(2, 10);
        assert_eq!((spares.take(1), taken(&mut spares, 1)), (None, Ask::Take(1)));
        spares.refill(1, 4, 1);
        assert_eq!((spares.take(1), taken(&mut spares, 1)), (Some(4), Ask::Take(2)));
        spares.refill(1, 5, 2);
        assert_eq!(taken(&mut spares, 1), Ask::Take(4));
        spares.refill(1, 7, 4);
        let rest: Vec<u64> = std::iter::from_fn(|| spares.take(1)).collect();
        assert_eq!((rest, spares.ask(1, true)), (vec![5, 6, 7, 8, 9], Ask::UsedUp));
        assert_eq!((spares.take(0), spares.ask(0, true)), (None, Ask::Take(1)));
    }

    #[test]
    fn runs_grow_up_to_the_longest() {
        let mut spares = new(1, 100);
        assert_eq!([(); 5].map(|()| taken(&mut spares, 0)), [1, 2, 4, 4, 4].map(Ask::Take));
    }

    #[test]
    fn pieces_are_added_and_those_before_keep_their_spares() {
        let mut spares = new(1, 10);
        spares.refill(0, 0, 2);
        spares.grow([10, 20].into_iter());
        assert_eq!((spares.take(0), spares.ask(1, true)), (Some(0), Ask::Take(1)));
        spares.refill(1, 19, 1);
        assert_eq!((spares.take(1), spares.ask(1, true)), (Some(19), Ask::UsedUp));
        spares.grow([10].into_iter());
        assert_eq!(spares.take(0), Some(1), "a thread that knows fewer pieces takes none away");
    }

    #[test]
    fn a_spare_that_is_given_back_comes_next() {
        let mut spares = new(1, 10);
        spares.refill(0, 0, 4);
        let one = spares.take(0).unwrap();
        spares.give_back(0, one);
        assert_eq!(spares.take(0), Some(one));
    }

    #[test]
    fn a_counter_past_the_end_gives_nothing() {
        let mut spares = new(1, 10);
        spares.refill(0, 10, 4);
        assert_eq!((spares.take(0), spares.ask(0, true)), (None, Ask::UsedUp));
        spares.refill(0, u64::MAX, 4);
        assert_eq!(spares.take(0), None);
    }
}
