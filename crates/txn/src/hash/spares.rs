//! What a client has taken of an index and not used yet: record numbers, or pairs of buckets.
//!
//! They are taken in runs, by one fetch-and-add each on a piece's counter. What a client that dies had taken is not given out again: so
//! runs are short at first, and each is twice as long as the one before. A client takes along no more than it has used, and one.

/// Spares of one kind.
#[derive(Debug)]
pub(super) struct Spares {
    /// Where in each piece their counter is.
    pub(super) counter_at: u64,
    /// How many are taken at once, at most.
    at_once: u64,
    /// How many each piece has.
    each: u64,
    pieces: Vec<OfPiece>,
}

#[derive(Clone, Debug)]
struct OfPiece {
    /// How many are taken next.
    run: u64,
    /// The next one last.
    spare: Vec<u64>,
    /// All of the piece's were handed out.
    is_used_up: bool,
}

impl Spares {
    pub(super) fn new(pieces: usize, each: u64, counter_at: u64, at_once: u64) -> Spares {
        Spares {
            counter_at,
            at_once,
            each,
            pieces: vec![OfPiece { run: 1, spare: Vec::new(), is_used_up: false }; pieces],
        }
    }

    /// One of a piece's, by its place there.
    pub(super) fn take(&mut self, piece: usize) -> Option<u64> {
        self.pieces[piece].spare.pop()
    }

    /// Nobody else has come to know of it.
    pub(super) fn give_back(&mut self, piece: usize, spare: u64) {
        self.pieces[piece].spare.push(spare);
    }

    /// How many to add to a piece's counter; `None`: there is no use in it.
    pub(super) fn wanted(&mut self, piece: usize) -> Option<u64> {
        let of_piece = &mut self.pieces[piece];
        let run = of_piece.run;
        (!of_piece.is_used_up).then(|| {
            of_piece.run = (run * 2).min(self.at_once);
            run
        })
    }

    /// The counter stood at `first` before so many were added to it.
    pub(super) fn refill(&mut self, piece: usize, first: u64, run: u64) {
        let end = first.saturating_add(run).min(self.each);
        let of_piece = &mut self.pieces[piece];
        of_piece.is_used_up |= end == self.each;
        // Several of a thread's tasks may have asked: what they got comes in any order.
        of_piece.spare.splice(0..0, (first.min(end)..end).rev());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_used_one_after_the_other_up_to_the_end() {
        let mut spares = Spares::new(2, 10, 0, 4);
        assert_eq!((spares.take(1), spares.wanted(1)), (None, Some(1)));
        spares.refill(1, 4, 1);
        assert_eq!((spares.take(1), spares.wanted(1)), (Some(4), Some(2)));
        spares.refill(1, 5, 2);
        assert_eq!(spares.wanted(1), Some(4));
        spares.refill(1, 7, 4);
        let rest: Vec<u64> = std::iter::from_fn(|| spares.take(1)).collect();
        assert_eq!((rest, spares.wanted(1)), (vec![5, 6, 7, 8, 9], None));
        assert_eq!((spares.take(0), spares.wanted(0)), (None, Some(1)));
    }

    #[test]
    fn runs_grow_up_to_the_longest() {
        let mut spares = Spares::new(1, 100, 0, 4);
        assert_eq!([(); 5].map(|()| spares.wanted(0)), [1, 2, 4, 4, 4].map(Some));
    }

    #[test]
    fn what_is_given_back_comes_next() {
        let mut spares = Spares::new(1, 10, 0, 4);
        spares.refill(0, 0, 4);
        let one = spares.take(0).unwrap();
        spares.give_back(0, one);
        assert_eq!(spares.take(0), Some(one));
    }

    #[test]
    fn a_counter_past_the_end_gives_nothing() {
        let mut spares = Spares::new(1, 10, 0, 4);
        spares.refill(0, 10, 4);
        assert_eq!((spares.take(0), spares.wanted(0)), (None, None));
        spares.refill(0, u64::MAX, 4);
        assert_eq!(spares.take(0), None);
    }
}
