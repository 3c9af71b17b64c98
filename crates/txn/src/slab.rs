//! Payloads of variable length: a payload that does not fit its record's place lies in a *slab* beside the
//! table, and the record's data point to it (`docs/src/txn.md`, *payloads of variable length*).
//!
//! B1. A pointer is data of a record like any other: versions, logs and recovery do not know about it.
//! B2. A payload is whole in its *block* before the intents of the commit that points to it are logged. It
//!     does not change for as long as any snapshot may need that version.
//! B3. Blocks lie in *chunks*. One member owns each chunk, and only the owner writes there. A claim names one
//!     member for ever. A chunk whose owner has no seat any more may be taken over: the owner was fenced and
//!     everything that it left was rolled back, or it left with nothing in flight.
//! B4. A block's header says for which version of which record the block was written. The owner reuses the
//!     block once it has found, by looking at that record, that no snapshot needs the block. Nothing else is
//!     kept in far memory, so there is nothing to repair after a death.
//! B5. A pointer has a checksum over the record, the block and the payload: bytes of another payload are
//!     detected.

mod block;
mod chunks;
mod layout;
mod need;
mod payload;
mod sweeping;
mod taking;

use std::sync::Arc;

use farpool_wire::Epoch;
use rustix_futex_sync::{Mutex, RwLock};

use crate::growth::Growth;
use crate::membership::MembersAt;
use crate::memory::Piece;
pub(crate) use block::Fresh;
use chunks::Chunks;
pub use layout::{BlockAt, Class, MOST_PAYLOAD_BYTES, SlabLayout};
pub use payload::{Held, LEAST_DATA_BYTES, Pointer};

/// The slab of a table, for use by all threads of one member.
#[derive(Debug)]
pub struct Slab {
    /// The pieces that it had when the member found it,
    first: Box<[Piece]>,
    /// and those that it got later. None is ever removed. No thread waits for far memory while it holds this
    /// lock.
    later: RwLock<Vec<Piece>>,
    /// The layout of a piece of the first layer.
    layout: SlabLayout,
    growth: Growth,
    members: MembersAt,
    claim: Epoch,
    chunks: Mutex<Chunks>,
}

impl Slab {
    /// A slab in these pieces, all with this layout, for the member that has this claim. Each member makes it
    /// once, for all its threads. Its memory is zeros, or has been used as this slab. `None`: there are too
    /// many pieces, or none.
    pub fn new(
        pieces: Vec<Piece>,
        layout: SlabLayout,
        members: MembersAt,
        claim: Epoch,
    ) -> Option<Arc<Slab>> {
        let growth = Growth::new(pieces.len() as u64, layout.chunks(), 1)?;
        Self::grown(pieces, layout, growth, members, claim)
    }

    /// The same for a table that has grown: pieces in layers, of which those of the first have this
    /// layout. `None`: as above.
    pub fn grown(
        pieces: Vec<Piece>,
        layout: SlabLayout,
        growth: Growth,
        members: MembersAt,
        claim: Epoch,
    ) -> Option<Arc<Slab>> {
        let is_right =
            !pieces.is_empty() && growth.each() == layout.chunks() && Slab::can_count(&growth, pieces.len());
        let chunks = Mutex::new(Chunks::new(layout));
        let (first, later) = (pieces.into(), RwLock::default());
        is_right.then(|| Arc::new(Slab { first, later, layout, growth, members, claim, chunks }))
    }

    /// Adds the pieces that the slab does not know yet. From then on all threads of the member use them, even
    /// those that have not learned that the table has grown. False: there are too many pieces.
    pub fn grow(&self, pieces: &[Piece]) -> bool {
        let is_right = Slab::can_count(&self.growth, pieces.len());
        if is_right && pieces.len() > self.first.len() {
            let mut later = self.later.write();
            let new = pieces.get(self.first.len() + later.len()..).unwrap_or_default();
            later.extend_from_slice(new);
        }
        is_right
    }

    /// Whether a [pointer](Pointer) has room for the numbers of all chunks in so many pieces.
    pub fn can_count(chunks: &Growth, pieces: usize) -> bool {
        chunks.total(pieces as u64) <= u32::MAX.into()
    }

    fn count_chunks(&self) -> u64 {
        self.growth.total((self.first.len() + self.later.read().len()) as u64)
    }

    /// Its layout in a piece of the first layer. Larger pieces have more chunks.
    pub fn layout(&self) -> &SlabLayout {
        &self.layout
    }

    /// Its pieces, each with its layout.
    fn pieces(&self) -> impl Iterator<Item = (Piece, SlabLayout)> {
        let later = self.later.read().clone();
        (0..)
            .zip(self.first.iter().copied().chain(later))
            .map(|(number, piece)| (piece, self.layout.with_times(self.growth.times(number))))
    }

    /// The piece of a chunk with its layout, and the chunk's number in that piece. `None`: there is no such
    /// chunk.
    fn chunk(&self, chunk: u32) -> Option<(Piece, SlabLayout, u64)> {
        let (number, within) = self.growth.find(chunk.into());
        let index = usize::try_from(number).ok()?;
        let piece = match self.first.get(index) {
            Some(piece) => *piece,
            None => *self.later.read().get(index - self.first.len())?,
        };
        Some((piece, self.layout.with_times(self.growth.times(number)), within))
    }
}
