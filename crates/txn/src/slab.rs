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
use rustix_futex_sync::Mutex;

use crate::membership::MembersAt;
use crate::memory::Piece;
pub(crate) use block::Fresh;
use chunks::Chunks;
pub use layout::{BlockAt, Class, MOST_PAYLOAD_BYTES, SlabLayout};
pub use payload::{Held, LEAST_DATA_BYTES, Pointer};

/// The slab of a table, for use by all threads of one member.
#[derive(Debug)]
pub struct Slab {
    pieces: Vec<Piece>,
    layout: SlabLayout,
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
        let fits = layout.chunks().checked_mul(pieces.len() as u64).is_some_and(|all| all <= u32::MAX.into());
        let chunks = Mutex::new(Chunks::new(layout));
        (fits && !pieces.is_empty()).then(|| Arc::new(Slab { pieces, layout, members, claim, chunks }))
    }

    /// Its layout in each of its pieces.
    pub fn layout(&self) -> &SlabLayout {
        &self.layout
    }

    /// The piece of a chunk, and the chunk's number in that piece. `None`: there is no such chunk.
    fn chunk(&self, chunk: u32) -> Option<(&Piece, u64)> {
        let (piece, within) =
            (u64::from(chunk) / self.layout.chunks(), u64::from(chunk) % self.layout.chunks());
        Some((self.pieces.get(usize::try_from(piece).ok()?)?, within))
    }
}
