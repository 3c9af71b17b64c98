//! What the threads of a process share of an ordered index: pairs of leaves that were handed out to the
//! process, and tokens for entries that they reserve.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_wire::Slot;
use rustix_futex_sync::Mutex;

use super::layout::{LEVELS, LevelLayout, TreeLayout};
use crate::hash::Spares;

/// Most pairs that are taken at once.
const PAIRS_AT_ONCE: u64 = 8;
/// Bits of a token that count; the others are the slot's.
const COUNT_BITS: u32 = 48;

/// Spares of one index, and tokens.
#[derive(Debug)]
pub struct TreeSpares {
    layer: u64,
    pub(super) levels: [Arc<LevelSpares>; LEVELS],
}

/// Those of one level.
#[derive(Debug)]
pub(super) struct LevelSpares {
    pub(super) pairs: Mutex<Spares>,
    /// The next token. Members have slots of their own. A slot's next member may use a token again that a
    /// dead one has left in an entry: that one's writes are fenced by then.
    next_token: AtomicU64,
}

impl TreeSpares {
    /// No spares yet of an index with this layout, for the member with this slot.
    pub fn new(layout: &TreeLayout, slot: Slot) -> TreeSpares {
        let levels = std::array::from_fn(|level| Arc::new(LevelSpares::new(layout.level(level), slot)));
        TreeSpares { layer: layout.pieces_per_layer(), levels }
    }

    pub(super) fn is_of(&self, layout: &TreeLayout) -> bool {
        self.layer == layout.pieces_per_layer()
    }
}

impl LevelSpares {
    fn new(layout: &LevelLayout, slot: Slot) -> LevelSpares {
        let spares = LevelSpares {
            pairs: Mutex::new(Spares::new(0, PAIRS_AT_ONCE)),
            next_token: AtomicU64::new((slot.index() as u64) << COUNT_BITS),
        };
        spares.grow(layout);
        spares
    }

    /// The level has this layout now: it may have more pieces than before.
    pub(super) fn grow(&self, layout: &LevelLayout) {
        self.pairs.lock().grow((0..layout.pieces() as usize).map(|piece| layout.pairs_of(piece)));
    }

    /// A token that no other client uses now.
    pub(super) fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed) // only has to be unique
    }
}
