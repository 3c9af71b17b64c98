//! Where in a log intents may be written.
//!
//! A log's *area* for intents is divided into segments. Commits fill one segment after another. A segment is
//! used again once no snapshot needs anything that lies there. The first one that is free comes next, so that
//! a log that is mostly free stays in the processors' caches.

use super::{Head, WORD_BYTES};

/// Most segments of a log: a head has a bit for each.
const MOST_SEGMENTS: u64 = 64;
/// The size of a segment in a small log. A log that is smaller than this has one segment.
const LEAST_SEGMENT_BYTES: u64 = 512;

/// Gives out the bytes of a log's area for intents to commits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogRoom {
    segment_bytes: u64,
    /// For each segment, the count of the last commit that has bytes there; 0: none has.
    last: Vec<u64>,
    /// The bytes that come next, and the end of their segment.
    next: u64,
    end: u64,
}

/// Free bytes that follow each other.
pub struct FreeRange {
    start: u64,
    /// The end of the last segment that they touch.
    segment_end: u64,
    length: u64,
}

/// The bytes that a commit has for its intents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IntentPlace {
    /// Where they start.
    pub start: u64,
    /// A bit for each segment that was not free when the commit began, or has intents of its own.
    pub segments: u64,
}

impl LogRoom {
    /// An area of so many bytes, all free.
    pub fn new(bytes: u64) -> LogRoom {
        Self::taken_until(bytes, 0)
    }

    /// An area of so many bytes, none of which is free before those of all commits up to the count `last`
    /// are.
    pub fn taken_until(bytes: u64, last: u64) -> LogRoom {
        let (segments, segment_bytes) = segments_of(bytes);
        LogRoom { segment_bytes, last: vec![last; segments as usize], next: 0, end: 0 }
    }

    /// An area of so many bytes after its last commit, which has this head: what that commit did not find
    /// free is not free before the bytes of all commits up to the count `last` are.
    pub fn after_head(bytes: u64, head: &Head, last: u64) -> LogRoom {
        let mut room = LogRoom::new(bytes);
        for (segment, of) in room.last.iter_mut().enumerate() {
            *of = if head.place.segments >> segment & 1 == 1 { last } else { 0 };
        }
        room
    }

    /// Most bytes that one commit can have in an area of so many: half of them. A commit that needs more
    /// would have to wait for a moment in which nearly nothing else is there, and others might go on for
    /// ever.
    pub fn most_bytes(bytes: u64) -> u64 {
        let (segments, segment_bytes) = segments_of(bytes);
        segments.div_ceil(2) * segment_bytes
    }

    /// Finds free bytes for a commit's intents. A segment is free if the count of its last commit is at most
    /// `freed`. `None`: there are not so many now.
    pub fn find(&self, length: u64, freed: u64) -> Option<FreeRange> {
        if length <= self.end - self.next {
            return Some(FreeRange { start: self.next, segment_end: self.end, length });
        }
        let wanted = usize::try_from(length.div_ceil(self.segment_bytes)).ok()?.max(1);
        let are_free = |segments: &[u64]| segments.iter().all(|last| *last <= freed);
        let first = self.last.windows(wanted).position(are_free)?;
        let at = |segment: usize| segment as u64 * self.segment_bytes;
        Some(FreeRange { start: at(first), segment_end: at(first + wanted), length })
    }

    /// Gives what [`find`](Self::find) has returned to a commit. Its count is higher than those of all
    /// commits before.
    pub fn take(&mut self, found: FreeRange, count: u64, freed: u64) -> IntentPlace {
        let FreeRange { start, segment_end, length } = found;
        (self.next, self.end) = (start + length, segment_end);
        let touched = start / self.segment_bytes..segment_end / self.segment_bytes;
        self.last[touched.start as usize..touched.end as usize].fill(count);
        let segments = self.last.iter().enumerate().filter(|(_, last)| **last > freed);
        IntentPlace { start, segments: segments.fold(0, |bits, (segment, _)| bits | 1 << segment) }
    }

    /// Takes back bytes to which nothing was written, if no others were given out since.
    pub fn release(&mut self, taken: IntentPlace, length: u64) {
        if self.next == taken.start + length {
            self.next = taken.start;
        }
    }
}

/// Into how many segments an area of so many bytes is divided, and the bytes of each.
fn segments_of(bytes: u64) -> (u64, u64) {
    let segments = (bytes / LEAST_SEGMENT_BYTES).clamp(1, MOST_SEGMENTS);
    (segments, bytes / segments / WORD_BYTES * WORD_BYTES)
}

#[cfg(test)]
mod tests {
    use farpool_wire::Version;
    use proptest::prelude::*;

    use super::*;

    const BYTES: u64 = 4 * LEAST_SEGMENT_BYTES;

    fn take(room: &mut LogRoom, length: u64, count: u64, freed: u64) -> Option<IntentPlace> {
        let found = room.find(length, freed)?;
        Some(room.take(found, count, freed))
    }

    #[test]
    fn segments_are_filled_in_turn_and_used_again_from_the_first_one_that_is_free() {
        let mut room = LogRoom::new(BYTES);
        let mut start = |length, count, freed| take(&mut room, length, count, freed).map(|taken| taken.start);
        assert_eq!([1, 2, 3].map(|count| start(400, count, 0)), [Some(0), Some(512), Some(1_024)]);
        assert_eq!((start(112, 4, 0), start(8, 5, 0)), (Some(1_424), Some(1_536)));
        assert_eq!((start(512, 6, 0), start(512, 6, 1)), (None, Some(0)));
        assert_eq!((start(600, 7, 4), start(600, 7, 2)), (Some(512), None));
    }

    #[test]
    fn a_commit_that_needs_several_segments_gets_consecutive_ones() {
        let mut room = LogRoom::new(BYTES);
        assert_eq!(take(&mut room, BYTES + 8, 1, 0), None);
        assert_eq!(take(&mut room, BYTES, 1, 0), Some(IntentPlace { start: 0, segments: 0b1111 }));
        assert_eq!((LogRoom::most_bytes(BYTES), take(&mut room, 8, 2, 0)), (BYTES / 2, None));
        assert_eq!(take(&mut room, 8, 2, 1), Some(IntentPlace { start: 0, segments: 0b0001 }));
        assert_eq!([40, 8_200, 1 << 20].map(segments_of), [(1, 40), (16, 512), (64, 16_384)]);
    }

    #[test]
    fn after_recovery_segments_that_the_last_head_does_not_list_are_free_at_once() {
        let mut room = LogRoom::new(BYTES);
        take(&mut room, 1_024, 3, 0).unwrap();
        let place = take(&mut room, 8, 4, 0).unwrap();
        assert_eq!(place, IntentPlace { start: 1_024, segments: 0b0111 });
        let head = Head { version: Version::INITIAL, place, length: 8, sum: 0 };
        let mut next = LogRoom::after_head(BYTES, &head, 9);
        assert_eq!(take(&mut next, 8, 10, 4).map(|taken| taken.start), Some(1_536));
        assert_eq!((take(&mut next, 512, 11, 8), take(&mut next, 1_024, 11, 9).is_some()), (None, true));
        let mut all = LogRoom::taken_until(BYTES, 7);
        assert_eq!((take(&mut all, 8, 8, 6), take(&mut all, 8, 8, 7).is_some()), (None, true));
    }

    #[test]
    fn bytes_to_which_nothing_was_written_are_given_out_again() {
        let mut room = LogRoom::new(BYTES);
        let first = take(&mut room, 96, 1, 0).unwrap();
        room.release(first, 96);
        let second = take(&mut room, 104, 2, 0).unwrap();
        assert_eq!(second.start, 0);
        take(&mut room, 8, 3, 0).unwrap();
        room.release(second, 104);
        assert_eq!(take(&mut room, 8, 4, 0).unwrap().start, 112, "others were given out since");
    }

    #[test]
    fn a_log_that_is_mostly_free_is_used_from_its_beginning() {
        let mut room = LogRoom::new(1 << 20);
        let starts =
            (1..10_000).map(|count| take(&mut room, 104, count, count - count.min(8)).unwrap().start);
        assert!(starts.max().unwrap() < 2 * (1 << 20) / MOST_SEGMENTS);
    }

    proptest! {
        #[test]
        fn nothing_is_given_out_twice(steps in prop::collection::vec((0..4_u64, 1..160_u64), 1..300)) {
            let mut room = LogRoom::new(BYTES);
            let (mut taken, mut freed): (Vec<(u64, u64, u64)>, u64) = (Vec::new(), 0);
            for (count, (frees, words)) in (1..).zip(steps) {
                freed = (freed + frees).min(count - 1);
                let length = 8 * words;
                taken.retain(|(of, ..)| *of > freed);
                let Some(IntentPlace { start, segments }) = take(&mut room, length, count, freed) else {
                    prop_assert!(!taken.is_empty(), "an empty log has room");
                    continue;
                };
                prop_assert!(start + length <= BYTES);
                prop_assert!(taken.iter().all(|&(_, other, long)| start + length <= other || other + long <= start));
                taken.push((count, start, length));
                for &(_, start, length) in &taken {
                    let touched = start / LEAST_SEGMENT_BYTES..=(start + length - 1) / LEAST_SEGMENT_BYTES;
                    prop_assert!(touched.clone().all(|segment| segments >> segment & 1 == 1));
                }
            }
        }
    }
}
