//! Payloads of variable length: what does not fit a record's place lies in a *slab* beside the table, and the
//! record's data point to it (`docs/src/txn.md`, *payloads of variable length*).
//!
//! B1. A pointer is data of a record like any other: versions, rings, the overflow region, logs and recovery
//!     know nothing of it.
//! B2. A payload is whole in its *block* before the commit that points to it is written down; and it stays as
//!     it is for as long as any snapshot may need that version.
//! B3. Blocks lie in *chunks*, each of which one member owns: only he writes there. A claim names one member
//!     for ever; a chunk whose owner has no seat any more may be taken over, for he was fenced, and all that
//!     he left was undone.
//! B4. A block's header says for which version of which record it was written. The owner gives it out again
//!     once he has found, by looking at that record, that nobody needs it. Nothing else is kept in far
//!     memory, so there is nothing to mend after a death.
//! B5. A pointer has a checksum over the record, the block and the payload: bytes of another's are found out.

mod block;
mod chunks;
mod layout;
mod need;
mod payload;
mod sweeping;
mod taking;

use std::sync::Arc;

use farpool_wire::Epoch;
use parking_lot::Mutex;

use crate::membership::MembersAt;
use crate::memory::Piece;
pub(crate) use block::Fresh;
use chunks::Chunks;
pub use layout::{BlockAt, Class, MOST_PAYLOAD_BYTES, SlabLayout};
pub use payload::{Held, LEAST_DATA_BYTES, Pointer};

/// The slab of a table, as all threads of one member work with it.
#[derive(Debug)]
pub struct Slab {
    pieces: Vec<Piece>,
    layout: SlabLayout,
    members: MembersAt,
    claim: Epoch,
    chunks: Mutex<Chunks>,
}

impl Slab {
    /// A slab in these pieces, of one layout, for the member of that claim. It is made once in each member,
    /// for all its threads. Its memory is zeros, or what members have left there. `None`: there are too many
    /// pieces, or none.
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

    /// How it lies in each of its pieces.
    pub fn layout(&self) -> &SlabLayout {
        &self.layout
    }

    /// In which piece a chunk lies, and as which of that piece's. `None`: there are not so many.
    fn chunk(&self, chunk: u32) -> Option<(&Piece, u64)> {
        let (piece, within) =
            (u64::from(chunk) / self.layout.chunks(), u64::from(chunk) % self.layout.chunks());
        Some((self.pieces.get(usize::try_from(piece).ok()?)?, within))
    }
}
