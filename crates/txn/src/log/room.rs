//! Where in a log's ring intents may be written.

use std::collections::VecDeque;

/// Gives out the ring's bytes to commits in order, and gets them back in the same order.
#[derive(Debug)]
pub struct LogRoom {
    bytes: u64,
    /// Where the next bytes start, counted over all laps.
    next: u64,
    /// Room that is not free yet: the count of the commit that has it, and where it starts.
    taken: VecDeque<(u64, u64)>,
}

/// Free bytes that follow each other.
pub struct Found {
    start: u64,
    end: u64,
}

impl LogRoom {
    /// A ring of so many bytes, all free.
    pub fn new(bytes: u64) -> LogRoom {
        LogRoom { bytes, next: 0, taken: VecDeque::new() }
    }

    /// Finds so many bytes. `None`: they are not free now.
    pub fn find(&self, length: u64) -> Option<Found> {
        let left_of_lap = self.bytes - self.next % self.bytes;
        let start = if length <= left_of_lap { self.next } else { self.next + left_of_lap };
        let end = start + length;
        let oldest = self.taken.front().map_or(start, |&(_, oldest)| oldest);
        (length <= self.bytes && end - oldest <= self.bytes).then_some(Found { start, end })
    }

    /// Gives the bytes that were found last to a commit, whose count is higher than all before; returns where
    /// in the ring they start.
    pub fn take(&mut self, found: Found, count: u64) -> u64 {
        debug_assert!(self.next <= found.start, "it was found before others were taken");
        self.next = found.end;
        self.taken.push_back((count, found.start));
        found.start % self.bytes
    }

    /// Takes back the bytes of all commits up to a count.
    pub fn give_back(&mut self, count: u64) {
        while self.taken.pop_front_if(|(of, _)| *of <= count).is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(room: &mut LogRoom, length: u64, count: u64) -> Option<u64> {
        let found = room.find(length)?;
        Some(room.take(found, count))
    }

    #[test]
    fn intents_that_do_not_fit_before_the_ring_s_end_start_at_its_beginning() {
        let mut room = LogRoom::new(100);
        assert_eq!([1, 2, 3].map(|count| take(&mut room, 40, count)), [Some(0), Some(40), None]);
        room.give_back(1);
        assert_eq!((take(&mut room, 40, 3), take(&mut room, 8, 4)), (Some(0), None));
        room.give_back(3);
        assert_eq!(take(&mut room, 101, 4), None);
        assert_eq!(take(&mut room, 100, 4), Some(0), "all is free");
    }

    #[test]
    fn room_of_a_later_commit_is_not_freed_with_that_of_an_earlier_one() {
        let mut room = LogRoom::new(100);
        assert_eq!([3, 7].map(|count| take(&mut room, 50, count)), [Some(0), Some(50)]);
        room.give_back(6);
        assert_eq!((take(&mut room, 50, 8), take(&mut room, 1, 9)), (Some(0), None));
    }

    proptest! {
        #[test]
        fn nothing_is_given_out_twice(steps in prop::collection::vec((any::<bool>(), 1..60_u64), 1..200)) {
            let mut room = LogRoom::new(128);
            let mut taken: VecDeque<(u64, u64, u64)> = VecDeque::new();
            for (count, (takes, length)) in (0..).zip(steps) {
                if takes {
                    let Some(start) = take(&mut room, length, count) else {
                        prop_assert!(!taken.is_empty(), "an empty ring has room");
                        continue;
                    };
                    prop_assert!(start + length <= 128);
                    prop_assert!(taken.iter().all(|&(_, other, long)| start + length <= other || other + long <= start));
                    taken.push_back((count, start, length));
                } else if let Some((count, ..)) = taken.pop_front() {
                    room.give_back(count);
                }
            }
        }
    }
}
