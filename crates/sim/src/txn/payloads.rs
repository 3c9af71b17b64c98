//! Payloads of variable length. In some runs records have them, and a slab beside the table holds those that
//! do not fit their places.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use farpool_fabric::AccessKind;
use farpool_fabric::sim::Random;
use farpool_txn::Piece;
use farpool_txn::membership::{MembersAt, MembersLayout};
use farpool_txn::slab::{Held, Slab, SlabLayout};
use farpool_wire::{Epoch, Slot};

use super::{DATA_WORDS, ORACLE, OWNER, RECORDS, REGION_BYTES, REGIONS, Run};

/// Runs with long payloads, in thousandths.
const LONG_PERMILLE: u32 = 500;
/// The fewest chunks of a node, and how many more there may be: from too few for all payloads to enough.
const LEAST_CHUNKS: u64 = 4;
const MORE_CHUNKS: u64 = 16;
/// Bytes of a chunk: room for two blocks of the largest class in use, or for fourteen of the smallest.
pub(super) const CHUNK_BYTES: u64 = 2_112;
/// Where the slab lies, behind the records.
pub(super) const SLAB_START: u64 = 64 << 10;
/// Where the seats lie, behind the horizon.
const SEATS_START: u64 = 96 << 10;
/// The longest payload that fits a record's place.
const MOST_HERE: usize = (DATA_WORDS - 1) * 8;

/// Draws the slab of a run, if it has any, from a random stream of its own, so that runs without a slab are
/// not changed by the draw.
pub(super) fn draw(seed: u64) -> Option<SlabLayout> {
    let mut random = Random::new(seed, 11);
    let is_drawn = random.chance(LONG_PERMILLE);
    let layout = SlabLayout::new(LEAST_CHUNKS + random.below(MORE_CHUNKS + 1), CHUNK_BYTES);
    let layout = layout.filter(|layout| layout.bytes() <= REGION_BYTES - SLAB_START);
    Some(layout.expect("a few chunks")).filter(|_| is_drawn)
}

/// The payload that stands for a value: it repeats the value over its whole length.
pub(super) fn payload_of(run: &Run, value: u64) -> Vec<u8> {
    let length = if run.slab.is_some() { length_of(value) } else { DATA_WORDS * 8 };
    value.to_le_bytes().into_iter().cycle().take(length).collect()
}

/// Whether a value's payload fits a record's place.
pub(super) fn is_short(value: u64) -> bool {
    length_of(value) <= MOST_HERE
}

/// Draws a length from the value: the payload fits its record's place, or a block of one of several classes.
fn length_of(value: u64) -> usize {
    let drawn = value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let within = (drawn >> 32) as usize;
    match drawn >> 60 {
        0..=3 => 8 + within % (MOST_HERE - 7),
        4..=8 => 41 + within % 88,
        9..=12 => 129 + within % 128,
        13 | 14 => 257 + within % 256,
        _ => 513 + within % 300,
    }
}

impl Run {
    fn members(&self, grant: Epoch) -> MembersAt {
        let layout = MembersLayout::new(self.slots + 1, REGIONS as u16, 0).expect("a few slots");
        MembersAt { piece: self.piece(0, ORACLE, grant, SEATS_START), layout }
    }

    /// Gives the seat of a slot to that grant, or frees it.
    pub(super) fn seat(&self, slot: u16, claim: Option<Epoch>) {
        let MembersAt { piece, layout } = self.members(OWNER);
        let at = piece.start + layout.claim(Slot::new(slot).expect("a few slots"));
        let claim = claim.map_or(0, |claim| claim.0);
        self.touch(piece.region, AccessKind::Write, &mut |memory| memory.store(at, claim));
    }

    fn slab_piece(&self, node: usize, grant: Epoch) -> Piece {
        self.piece(node, RECORDS, grant, SLAB_START)
    }

    /// The slab that the threads of one client share, if the run has a slab.
    pub(super) fn slab(&self, grant: Epoch) -> Option<Arc<Slab>> {
        let pieces = (0..self.nodes.len()).map(|node| self.slab_piece(node, grant)).collect();
        self.slab.map(|layout| Slab::new(pieces, layout, self.members(grant), grant).expect("a few chunks"))
    }

    /// Draws a word of the payload of the record's current version, if the payload is in a block. Returns the
    /// slab's piece and the word's place in it.
    pub(super) fn word_of_payload(
        &self,
        node: usize,
        record: u64,
        random: &mut Random,
    ) -> Option<(Piece, u64)> {
        let layout = self.slab?;
        let data = self.records.current(record);
        let piece = self.piece(node, RECORDS, OWNER, 0);
        let words = (data.start + 40..data.end).step_by(8).map(|at| self.look(&piece, at).to_le_bytes());
        let data: Vec<u8> = words.flatten().collect();
        let Some(Held::There(pointer)) = Held::decode(&data) else { return None };
        let (node, chunk) =
            (u64::from(pointer.at.chunk) / layout.chunks(), u64::from(pointer.at.chunk) % layout.chunks());
        let block = layout.block(chunk, pointer.at.class, pointer.at.block)?;
        let word = random.below(pointer.length as u64 / 8);
        Some((self.slab_piece(node as usize, OWNER), block.start + 8 * word))
    }
}
