//! The rules on which the cache's promises rest, apart from the code that applies them: a simulation replaces
//! a right one by a wrong one, and must notice. Production is compiled with [`Shipped`] alone.

/// When a page is admitted, when it stops being valid, and what is waited for.
pub trait Rules {
    /// Bits of an entry's generation that are counted. A simulation counts few, so that they repeat.
    const GENERATION_MASK: u64 = (1 << 29) - 1;

    /// Whether a page may be admitted: a bucket's header before the page was read, and its header now (C2).
    fn may_admit(before: u64, now: u64, writers: u64) -> bool {
        before == now && writers == 0
    }

    /// Whether a writer empties the entries of the block that it writes (C2).
    fn writers_invalidate() -> bool {
        true
    }

    /// Whether an entry is claimed, so that writers leave it alone, while its key is stored.
    fn claims_entries() -> bool {
        true
    }

    /// Whether a keeper empties the index unless it has found the door open (C5).
    fn doubts_old_entries() -> bool {
        true
    }

    /// Whether slots wait for the places that are occupied (C4).
    fn slots_wait() -> bool {
        true
    }

    /// As [`slots_wait`](Self::slots_wait), for the door (C5).
    fn door_waits() -> bool {
        true
    }

    /// Whether a file that was changed as a whole gets another id (C3).
    fn changes_ids() -> bool {
        true
    }

    /// Whether a retired file's pages are out of reach at once (C3).
    fn retires() -> bool {
        true
    }

    /// Whether the header of a dead writer's bucket is cleared as a whole, and not reduced by one (C6).
    fn clears_headers() -> bool {
        true
    }
}

/// The rules that are shipped.
#[derive(Clone, Copy, Debug)]
pub enum Shipped {}

impl Rules for Shipped {}
