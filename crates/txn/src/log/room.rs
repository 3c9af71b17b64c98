//! Where in a log's ring intents may be written.

use std::collections::VecDeque;

/// Gives out the ring's bytes in turn, and gets them back in the order in which they were given.
#[derive(Debug)]
pub struct LogRoom {
    bytes: u64,
    /// Where the next ones come from, counted over all laps.
    next: u64,
    /// Where those start that were not given back.
    taken: VecDeque<u64>,
}

impl LogRoom {
    /// A ring of so many bytes, all free.
    pub fn new(bytes: u64) -> LogRoom {
        LogRoom { bytes, next: 0, taken: VecDeque::new() }
    }

    /// Takes bytes that follow each other; says where in the ring they start. `None`: they are not free, for now.
    pub fn take(&mut self, length: u64) -> Option<u64> {
        let left_of_lap = self.bytes - self.next % self.bytes;
        let start = if length <= left_of_lap { self.next } else { self.next + left_of_lap };
        let oldest = self.taken.front().copied().unwrap_or(start);
        if length > self.bytes || start + length - oldest > self.bytes {
            return None;
        }
        self.next = start + length;
        self.taken.push_back(start);
        Some(start % self.bytes)
    }

    /// Gives back the `count` that were taken first.
    pub fn give_back(&mut self, count: usize) {
        self.taken.drain(..count);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_does_not_fit_before_the_ring_s_end_starts_at_its_beginning() {
        let mut room = LogRoom::new(100);
        assert_eq!((room.take(40), room.take(40), room.take(40)), (Some(0), Some(40), None));
        room.give_back(1);
        assert_eq!((room.take(40), room.take(8)), (Some(0), None));
        room.give_back(2);
        assert_eq!(room.take(101), None);
        assert_eq!(room.take(100), Some(0), "all is free");
    }

    proptest! {
        #[test]
        fn nothing_is_given_out_twice(steps in prop::collection::vec((any::<bool>(), 1..60_u64), 1..200)) {
            let mut room = LogRoom::new(128);
            let mut taken: VecDeque<(u64, u64)> = VecDeque::new();
            for (takes, length) in steps {
                if takes {
                    let Some(start) = room.take(length) else {
                        prop_assert!(!taken.is_empty(), "what is empty has room");
                        continue;
                    };
                    prop_assert!(start + length <= 128);
                    prop_assert!(taken.iter().all(|&(other, long)| start + length <= other || other + long <= start));
                    taken.push_back((start, length));
                } else if taken.pop_front().is_some() {
                    room.give_back(1);
                }
            }
        }
    }
}
