//! What a client has taken of an index and not used yet: record numbers, or pairs of buckets.
//!
//! They are taken in runs, by one fetch-and-add each on a piece's counter. What a client that dies had taken is not given out again.

/// Spares of one kind.
#[derive(Debug)]
pub(super) struct Spares {
    /// Where in each piece their counter is.
    pub(super) counter_at: u64,
    /// How many are taken at once.
    pub(super) at_once: u64,
    /// How many each piece has.
    each: u64,
    pieces: Vec<OfPiece>,
}

#[derive(Clone, Debug, Default)]
struct OfPiece {
    /// The next one last.
    spare: Vec<u64>,
    /// All of the piece's were handed out.
    is_used_up: bool,
}

impl Spares {
    pub(super) fn new(pieces: usize, each: u64, counter_at: u64, at_once: u64) -> Spares {
        Spares { counter_at, at_once, each, pieces: vec![OfPiece::default(); pieces] }
    }

    /// One of a piece's, by its place there.
    pub(super) fn take(&mut self, piece: usize) -> Option<u64> {
        self.pieces[piece].spare.pop()
    }

    /// Nobody else has come to know of it.
    pub(super) fn give_back(&mut self, piece: usize, spare: u64) {
        self.pieces[piece].spare.push(spare);
    }

    /// Whether there is no use in asking the piece for more.
    pub(super) fn is_used_up(&self, piece: usize) -> bool {
        self.pieces[piece].is_used_up
    }

    /// The counter stood at `first` before so many were added to it.
    pub(super) fn refill(&mut self, piece: usize, first: u64) {
        let end = first.saturating_add(self.at_once).min(self.each);
        let of_piece = &mut self.pieces[piece];
        of_piece.is_used_up = end == self.each;
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
        assert_eq!((spares.take(1), spares.is_used_up(1)), (None, false));
        spares.refill(1, 4);
        assert_eq!((spares.take(1), spares.is_used_up(1)), (Some(4), false));
        spares.refill(1, 8);
        let rest: Vec<u64> = std::iter::from_fn(|| spares.take(1)).collect();
        assert_eq!((rest, spares.is_used_up(1)), (vec![5, 6, 7, 8, 9], true));
        assert_eq!((spares.take(0), spares.is_used_up(0)), (None, false));
    }

    #[test]
    fn what_is_given_back_comes_next() {
        let mut spares = Spares::new(1, 10, 0, 4);
        spares.refill(0, 0);
        let one = spares.take(0).unwrap();
        spares.give_back(0, one);
        assert_eq!(spares.take(0), Some(one));
    }

    #[test]
    fn a_counter_past_the_end_gives_nothing() {
        let mut spares = Spares::new(1, 10, 0, 4);
        spares.refill(0, 10);
        assert_eq!((spares.take(0), spares.is_used_up(0)), (None, true));
        spares.refill(0, u64::MAX);
        assert_eq!(spares.take(0), None);
    }
}
