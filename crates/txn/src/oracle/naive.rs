//! The oracle that paper 3 begins with (section 3.1): two counters for all clients. It is kept as a baseline
//! for measurements of the timestamp vector (section 7.2).
//!
//! N1. One operation fetches a commit timestamp and increments the counter, so each timestamp is given to at
//!     most one client.
//! N2. A client that is done writes its timestamp to its place in a list. One thread advances the read
//!     timestamp for as long as the next timestamp is in the list. Only this thread writes the word of the
//!     read timestamp, which only grows.
//! N3. A place of the list is used again only once the read timestamp has passed it.
//!
//! Not here: recovery. A client that dies with a commit timestamp stops the read timestamp for all (section
//! 3.2). So does a timestamp that no client got, because the counter's memory moved.

use std::ops::Range;
use std::time::Duration;

use crate::error::BeginError;
use crate::memory::{Memory, MemoryError, Piece};

const WORD_BYTES: u64 = 8;
/// Words that are written by different clients lie on different cache lines.
const LINE_BYTES: u64 = 64;
/// The last timestamp that all transactions see.
const READ_AT: u64 = 0;
/// The last commit timestamp that was given.
const COMMIT_AT: u64 = LINE_BYTES;
const LIST_AT: u64 = 2 * LINE_BYTES;
/// Places that are looked at together: a READ of 4 KiB.
const PLACES_AT_ONCE: u64 = 512;
/// The pause after a look at the list that found nothing new.
const PAUSE: Duration = Duration::from_micros(2);
/// How long a transaction waits for a place in the list. Places become free far sooner.
const PATIENCE: Duration = Duration::from_secs(2);

/// The place of a naive oracle. Its memory is zeros, or has been used as this oracle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NaiveAt {
    piece: Piece,
    /// How far commit timestamps may be ahead of the read timestamp.
    places: u64,
}

/// A finished transaction of timestamps only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NaiveStamped {
    /// The timestamp from which it began.
    pub read: u64,
    /// The commit timestamp that it got.
    pub commit: u64,
}

impl NaiveAt {
    /// An oracle whose list has this many places. `None`: there must be at least one.
    pub fn new(piece: Piece, places: u64) -> Option<NaiveAt> {
        (places > 0).then_some(NaiveAt { piece, places })
    }

    /// Bytes that it takes from the start of its piece.
    pub fn bytes(&self) -> u64 {
        LIST_AT + self.places * WORD_BYTES
    }

    fn place(&self, timestamp: u64) -> u64 {
        LIST_AT + timestamp % self.places * WORD_BYTES
    }

    /// The places of the timestamps after `read`, up to the list's end.
    fn places_after(&self, read: u64) -> Range<u64> {
        let start = self.place(read + 1);
        start..self.bytes().min(start + PLACES_AT_ONCE * WORD_BYTES)
    }

    /// The timestamp that a transaction begins from.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn read_timestamp(&self, memory: &Memory) -> Result<u64, MemoryError> {
        memory.read_word(&self.piece, READ_AT).await
    }

    /// A transaction of timestamps only: it begins, takes a commit timestamp, and marks that as done.
    ///
    /// # Errors
    /// When far memory does not answer, or the list stays full.
    pub async fn stamp(&self, memory: &Memory) -> Result<NaiveStamped, BeginError> {
        let read = self.read_timestamp(memory).await?;
        let commit = memory.fetch_and_add(&self.piece, COMMIT_AT, 1).await? + 1;
        self.wait_for_place(memory, read, commit).await?;
        memory.write_word(&self.piece, self.place(commit), commit).await?;
        Ok(NaiveStamped { read, commit })
    }

    /// Waits until the timestamp's place may be used (N3).
    async fn wait_for_place(&self, memory: &Memory, mut read: u64, commit: u64) -> Result<(), BeginError> {
        let endpoint = memory.endpoint();
        let mut give_up_at = None;
        while commit > read + self.places {
            let now = endpoint.now_ns();
            if now > *give_up_at.get_or_insert(now + PATIENCE.as_nanos() as u64) {
                return Err(BeginError::OracleStopped);
            }
            endpoint.sleep(PAUSE).await;
            read = self.read_timestamp(memory).await?;
        }
        Ok(())
    }

    /// Moves the read timestamp until `has_ended`. Only one thread may do so.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn advance(&self, memory: &Memory, has_ended: impl Fn() -> bool) -> Result<(), MemoryError> {
        let mut read = self.read_timestamp(memory).await?;
        while !has_ended() {
            let found = memory.read(&self.piece, self.places_after(read)).await?;
            let up_to = done_up_to(read, &found);
            if up_to > read {
                memory.write_word(&self.piece, READ_AT, up_to).await?;
                read = up_to;
            } else {
                memory.endpoint().sleep(PAUSE).await;
            }
        }
        Ok(())
    }
}

/// The last timestamp up to which all are done without a gap. `places` are those of the timestamps after
/// `read`.
fn done_up_to(read: u64, places: &[u8]) -> u64 {
    let (words, _) = places.as_chunks::<{ WORD_BYTES as usize }>();
    let done =
        words.iter().zip(read + 1..).take_while(|(word, wanted)| u64::from_le_bytes(**word) == *wanted);
    read + done.count() as u64
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Epoch, NodeId, RegionId};

    use super::*;

    fn naive(places: u64) -> NaiveAt {
        let region = RegionId { node: NodeId(1), index: 0 };
        NaiveAt::new(Piece { region, epoch: Epoch(1), start: 0 }, places).unwrap()
    }

    #[test]
    fn layout_of_the_counters_and_the_list_is_fixed() {
        let naive = naive(1000);
        assert_eq!((naive.place(1), naive.place(999), naive.place(1000)), (136, 128 + 8 * 999, 128));
        assert_eq!(naive.bytes(), 128 + 8 * 1000);
        assert_eq!(naive.places_after(0), 136..136 + 4096);
        assert_eq!(naive.places_after(997), 128 + 8 * 998..128 + 8 * 1000, "no further than the list's end");
    }

    #[test]
    fn the_read_timestamp_stops_at_the_first_gap_and_ignores_the_round_before() {
        let list = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(done_up_to(7, &list(&[8, 9, 0, 11])), 9);
        assert_eq!(done_up_to(7, &list(&[8 - 4, 9])), 7, "what lies there is from the round before");
        assert_eq!(done_up_to(7, &[]), 7);
    }
}
