//! Which pages are admitted: all, or those of one block in 16 while hardly any read is a hit.
//!
//! If much more is read than fits, nearly every page is evicted before it is read again. Each admission costs
//! a copy, a checksum and an eviction, and gains nothing. Then only one block in 16 is admitted when it is
//! read: always the same blocks, chosen by a hash. Other blocks no longer evict them. So the hit rate stays
//! the same if reads are spread evenly, and rises if they go round in a loop. The miss-ratio curve (`curve`)
//! does not depend on what is admitted, so it shows when admitting all pages is worth while again. It knows
//! nothing of writes, so pages that are written are always admitted, and the hit rate itself is heeded, too.
//!
//! Also always admitted are pages of pinned files, and pages that a program loads without counting its reads.

use crate::advice::ADMISSION;
use crate::curve::is_sampled;
use crate::ground::Ground;
use crate::layout::Layout;
use crate::words::Key;

/// One block in 2^4 is admitted while hardly any read is a hit.
const PART_SHIFT: u32 = 4;
/// Hit rate below which only a part is admitted: at this rate, hits save a database about as much time as
/// admitting the other pages costs.
const PART_BELOW: f64 = 0.04;
/// Hit rate, expected or found, at which all pages are admitted again: twice `PART_BELOW`, so that the two do
/// not alternate. A loop over many blocks finds one in 16 at most while a part is admitted, which is less.
const ALL_FROM: f64 = 0.08;

/// Which pages are admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Admission {
    All,
    /// One block in 16.
    Part,
}

impl Admission {
    /// Which pages are admitted from now on. `found`: the hit rate of the last second. `expected`: that of an
    /// LRU cache of this size which admits all pages. `None`: too little was read to tell. `is_full`: whether
    /// the cache has no room for more.
    pub(crate) fn next(self, found: Option<f64>, expected: Option<f64>, is_full: bool) -> Admission {
        let is_known = found.is_some() && expected.is_some();
        let rate = found.unwrap_or(0.0).max(expected.unwrap_or(0.0));
        match self {
            Admission::All if is_full && is_known && rate < PART_BELOW => Admission::Part,
            Admission::Part if !is_full || rate >= ALL_FROM => Admission::All,
            _ => self,
        }
    }

    /// Stores it in the word that callers load before they admit a page.
    pub(crate) async fn store<G: Ground>(self, ground: &G, layout: &Layout) {
        let shift = if self == Admission::All { 0 } else { PART_SHIFT };
        ground.store(layout.advice(ADMISSION), shift.into()).await;
    }
}

/// One block in so many is admitted: 1 or 16.
pub(crate) async fn admits_one_in<G: Ground>(ground: &G, layout: &Layout) -> u64 {
    1 << shift(ground, layout).await
}

/// Whether a block is admitted if its file is not pinned.
pub(crate) async fn admits<G: Ground>(ground: &G, layout: &Layout, key: Key) -> bool {
    is_sampled(layout.hash_of(key), shift(ground, layout).await)
}

/// The stored shift, `PART_SHIFT` at most: any process of the database can have changed the word.
async fn shift<G: Ground>(ground: &G, layout: &Layout) -> u32 {
    ground.load(layout.advice(ADMISSION)).await.min(PART_SHIFT.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_admitted_while_few_pages_are_found_and_few_would_be() {
        let (all, part) = (Admission::All, Admission::Part);
        let next = |it: Admission, found, expected| it.next(found, expected, true);
        // Before it is known what is read, and where SIEVE finds what LRU would not, or the other way round.
        for (found, expected) in [
            (None, None),
            (Some(0.0), None),
            (None, Some(0.0)),
            (Some(0.5), Some(0.0)),
            (Some(0.0), Some(0.5)),
        ] {
            assert_eq!(next(all, found, expected), all, "{found:?}, {expected:?}");
        }
        assert_eq!(next(all, Some(0.01), Some(0.01)), part);
        assert_eq!(next(part, Some(0.0625), Some(0.01)), part, "a part finds more in a loop");
        assert_eq!(next(part, Some(0.01), Some(0.05)), part);
        assert_eq!(next(all, Some(0.01), Some(0.05)), all);
        assert_eq!(next(part, None, Some(0.5)), all, "pages are read again");
        assert_eq!(next(part, Some(0.1), None), all, "what was written is read");
        assert_eq!([all, part].map(|it| it.next(Some(0.0), Some(0.0), false)), [all, all], "there is room");
    }
}
