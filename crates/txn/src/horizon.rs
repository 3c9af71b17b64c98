//! The horizon: a cut that every snapshot reaches, both present and future ones. No snapshot needs a version
//! that the horizon sees replaced (paper 3, section 5.3: garbage collection; in the paper, versions are given
//! up after a time, and longer transactions may fail).
//!
//! Z1. A worker's word states a number: no transaction of the worker has a cut with a lower number, or will
//!     have one. The worker begins from no such cut any more before it writes the word. The number only grows
//!     while the worker is there.
//! Z2. A worker that joins pins everything before it reads its first cut.
//! Z3. The collector knows a cut before it reads the workers' words, and publishes it only if none of these
//!     words states a lower number. So every worker whose word was found reaches the cut. A worker that was
//!     not found joined later, and begins from a later cut.
//! Z4. There is one collector at a time, and the horizon only grows. A client that knows an earlier horizon
//!     keeps more than necessary, and does nothing wrong.
//!
//! `docs/src/txn.md`, *the horizon*, has the argument.

mod announcer;
mod collecting;
mod collector;

use std::ops::Range;

use farpool_wire::Slot;

use crate::cut::Cut;
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::{Images, words};

pub(crate) use announcer::{Announcer, Open};
pub use collecting::{CollectPauses, collect};
pub use collector::Collector;

const WORD_BYTES: usize = 8;
/// The word of a place without a worker, and of memory that was never written.
const NOBODY: u64 = 0;

/// The layout of what workers announce, and of the horizon: a word for each worker, then two images of cuts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HorizonLayout {
    workers: usize,
    slots: usize,
}

/// Where the announcements and the horizon lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HorizonAt {
    /// The memory.
    pub piece: Piece,
    /// Its layout.
    pub layout: HorizonLayout,
}

impl HorizonLayout {
    /// Most workers of a database: their words are read with one READ, again and again.
    pub const MOST_WORKERS: u16 = 1 << 14;

    /// The layout with places for so many workers, for an oracle with so many slots. `None`: there must be at
    /// least one of each, and no more than there may be.
    pub fn new(workers: u16, slots: u16) -> Option<HorizonLayout> {
        let fits = (1..=Self::MOST_WORKERS).contains(&workers) && (1..=Slot::MOST).contains(&slots);
        fits.then_some(HorizonLayout { workers: workers.into(), slots: slots.into() })
    }

    /// Bytes that the whole takes; it starts at a multiple of eight.
    pub fn bytes(&self) -> usize {
        self.images().range().end
    }

    /// Where the workers' words lie.
    pub fn words(&self) -> Range<usize> {
        0..self.workers * WORD_BYTES
    }

    /// Where a worker's word lies; `None`: there is no such place.
    pub fn word(&self, worker: u16) -> Option<usize> {
        (usize::from(worker) < self.workers).then_some(usize::from(worker) * WORD_BYTES)
    }

    fn images(&self) -> Images {
        Images::new(self.words().end, self.slots)
    }

    /// The least number of a cut that any worker may have, in bytes that were read from
    /// [`words`](Self::words); `None`: there are no workers.
    pub fn least(&self, bytes: &[u8]) -> Option<u64> {
        words(bytes).filter(|&word| word != NOBODY).min().map(|word| word - 1)
    }
}

/// The word of a worker whose transactions have no cut with a lower number.
fn word_of(least: u64) -> u64 {
    least.saturating_add(1)
}

/// Takes the words of some workers away: they have no transactions; or they have died, and the grants under
/// which they might still read are fenced.
///
/// # Errors
/// When far memory does not answer.
///
/// # Panics
/// If there are no such places.
pub async fn forget(memory: &Memory, at: &HorizonAt, workers: Range<u16>) -> Result<(), MemoryError> {
    let first = at.layout.word(workers.start).expect("a worker's place");
    assert!(usize::from(workers.end) <= at.layout.workers, "workers' places");
    let empty = vec![NOBODY.to_le_bytes(); workers.len()];
    memory.write(&at.piece, first as u64, empty.as_flattened()).await
}

/// The last horizon: every snapshot, present or future, reaches it. `None`: there is none yet.
///
/// # Errors
/// When far memory does not answer.
pub async fn horizon(memory: &Memory, at: &HorizonAt) -> Result<Option<Cut>, MemoryError> {
    Ok(read_horizon(memory, at).await?.map(|(_, cut)| cut))
}

/// The last horizon, and in which image it is. `None`: there is none yet, or both images were replaced while
/// they were read.
async fn read_horizon(memory: &Memory, at: &HorizonAt) -> Result<Option<(usize, Cut)>, MemoryError> {
    let images = at.layout.images();
    let bytes = memory.read(&at.piece, images.range().start as u64..images.range().end as u64).await?;
    Ok(images.decode(&bytes).map(|found| (found.which, found.cut)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_the_horizon_is_fixed() {
        let layout = HorizonLayout::new(5, 3).unwrap();
        assert_eq!((layout.words(), layout.images().range(), layout.bytes()), (0..40, 40..120, 120));
        assert_eq!((layout.images().image(0), layout.images().image(1)), (40..80, 80..120));
        assert_eq!((layout.word(0), layout.word(4), layout.word(5)), (Some(0), Some(32), None));
        assert!(HorizonLayout::new(0, 1).is_none() && HorizonLayout::new(1, 0).is_none());
        assert!(HorizonLayout::new(1, Slot::MOST + 1).is_none());
    }

    #[test]
    fn places_without_a_worker_do_not_count_for_the_least_number() {
        let layout = HorizonLayout::new(3, 1).unwrap();
        let bytes = |words: [u64; 3]| words.map(u64::to_le_bytes).as_flattened().to_vec();
        assert_eq!(layout.least(&bytes([0; 3])), None);
        assert_eq!(layout.least(&bytes([0, word_of(7), word_of(5)])), Some(5));
        assert_eq!(layout.least(&bytes([word_of(0), word_of(7), 0])), Some(0));
    }
}
