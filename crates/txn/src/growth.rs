//! How a table grows: in *layers* of pieces. Pure.
//!
//! A table begins with one layer of pieces. Each further layer has as many pieces as the first, and as much
//! room as all layers before it together, so each one doubles the table. A piece must fit a region, so from a
//! certain layer on all layers have the same size. Records, buckets of an index, and chunks of a slab are
//! each numbered through all pieces. A number never changes its place.

use std::ops::Range;

/// The most things of one kind in all layers that double the table: with those of later layers, their numbers
/// still fit a word.
const MOST: u64 = 1 << 56;

/// The sizes of a table's pieces, in things of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Growth {
    /// Pieces of a layer.
    pieces: u64,
    /// What each piece of the first layer has.
    each: u64,
    /// The last layer that doubles the table. All later ones are as large as this one.
    last_doubling: u32,
}

impl Growth {
    /// One layer: this many pieces with `each` things.
    ///
    /// # Panics
    /// When there is none, or more than any memory has: a bug of the caller.
    pub fn one_layer(pieces: usize, each: u64) -> Growth {
        Growth::new(pieces as u64, each, 1).expect("pieces that lie in memory, and have something")
    }

    /// Layers of `pieces` pieces. Each piece of the first layer has `each` things, and each piece of a later
    /// layer at most `most_times` as many: always a power of two times `each`. `None`: an argument is zero,
    /// or there are too many things.
    pub fn new(pieces: u64, each: u64, most_times: u64) -> Option<Growth> {
        let last_doubling = most_times.checked_ilog2()? + 1;
        let all = pieces.checked_mul(each)?.checked_mul(1 << last_doubling.min(u64::BITS - 1))?;
        (1..=MOST).contains(&all).then_some(Growth { pieces, each, last_doubling })
    }

    /// How many pieces a layer has.
    pub fn pieces_per_layer(&self) -> u64 {
        self.pieces
    }

    /// What each piece of the first layer has.
    pub fn each(&self) -> u64 {
        self.each
    }

    /// How many times as much a piece has as those of the first layer.
    pub fn times(&self, piece: u64) -> u64 {
        if piece < self.pieces {
            return 1;
        }
        1 << ((piece / self.pieces).min(u64::from(self.last_doubling)) - 1)
    }

    /// What a piece has.
    pub fn size(&self, piece: u64) -> u64 {
        self.each * self.times(piece)
    }

    /// The numbers of what a piece has.
    pub fn numbers(&self, piece: u64) -> Range<u64> {
        let (layer, within) = (piece / self.pieces, piece % self.pieces);
        let start = self.pieces * self.each * self.times_before(layer) + within * self.size(piece);
        start..start + self.size(piece)
    }

    /// How many things the first `pieces` pieces have together.
    pub fn total(&self, pieces: u64) -> u64 {
        self.numbers(pieces).start
    }

    /// The piece that has a number, and the place there.
    #[inline]
    pub fn find(&self, number: u64) -> (u64, u64) {
        if number < self.pieces * self.each {
            return (number / self.each, number % self.each);
        }
        self.find_grown(number)
    }

    fn find_grown(&self, number: u64) -> (u64, u64) {
        let times = number / (self.pieces * self.each);
        let doubled = times.checked_ilog2().map_or(0, |log| u64::from(log) + 1);
        let last = u64::from(self.last_doubling);
        let layer = match times.checked_sub(1 << last) {
            None => doubled,
            Some(beyond) => last + 1 + beyond / (1 << (last - 1)),
        };
        let first = layer * self.pieces;
        let (start, size) = (self.numbers(first).start, self.size(first));
        (first + (number - start) / size, (number - start) % size)
    }

    /// How many times as much as the first layer all before this one have together.
    fn times_before(&self, layer: u64) -> u64 {
        let last = u64::from(self.last_doubling);
        match layer {
            0 => 0,
            _ if layer <= last => 1 << (layer - 1),
            _ => (1 << last) + (layer - last - 1) * (1 << (last - 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_layer_has_as_much_as_all_before_it_up_to_the_limit() {
        let growth = Growth::new(2, 10, 5).unwrap();
        let sizes: Vec<u64> = (0..12).step_by(2).map(|piece| growth.size(piece)).collect();
        assert_eq!(sizes, [10, 10, 20, 40, 40, 40], "five times is more than four times");
        let starts: Vec<u64> = (0..12).step_by(2).map(|piece| growth.numbers(piece).start).collect();
        assert_eq!(starts, [0, 20, 40, 80, 160, 240]);
        assert_eq!((growth.find(0), growth.find(39), growth.find(159)), ((0, 0), (3, 9), (7, 39)));
    }

    #[test]
    fn sizes_that_no_memory_holds_make_no_growth() {
        assert!(
            Growth::new(0, 1, 1).is_none()
                && Growth::new(1, 0, 1).is_none()
                && Growth::new(1, 1, 0).is_none()
        );
        assert!(Growth::new(1, 1, u64::MAX).is_none() && Growth::new(1 << 30, 1 << 30, 1).is_none());
        assert!(Growth::new(5, 1 << 20, 1 << 12).is_some());
    }

    proptest! {
        #[test]
        fn numbers_follow_each_other_through_all_pieces(pieces in 1..9u64, each in 1..50u64, most in 1..70u64) {
            let growth = Growth::new(pieces, each, most).unwrap();
            let mut next = 0;
            for piece in 0..20 * pieces {
                let numbers = growth.numbers(piece);
                prop_assert_eq!((numbers.start, growth.total(piece)), (next, next));
                prop_assert!(growth.times(piece) <= most && numbers.end - numbers.start == growth.size(piece));
                for (place, number) in [(0, numbers.start), (growth.size(piece) - 1, numbers.end - 1)] {
                    prop_assert_eq!(growth.find(number), (piece, place));
                }
                next = numbers.end;
            }
        }
    }
}
