//! An oracle, in one part or split over several nodes (paper 3, section 4.2: partitioning).
//!
//! Slot *i* of an oracle of *P* parts is slot *i* div *P* of part *i* mod *P*. So the parts' sizes differ by
//! at most one slot.

use std::sync::Arc;
use std::time::Duration;

use farpool_wire::Slot;

use super::board::Board;
use crate::cut::Cut;
use crate::memory::Piece;

/// A look at all parts of an oracle takes no longer than this over TCP on one host (`farpool bench io`), as
/// long as no thread has to wait for a processor. A reader that takes longer looks again.
pub const LOOK: Duration = Duration::from_micros(60);

/// A publisher's pause is this many looks for each part. Within two pauses each of *P* parts changes at most
/// twice. So of the 2*P* + 1 gaps between the changes, one is at least 8*P* / (2*P* + 1) looks long. With two
/// parts or more, that is more than three looks. So of looks that follow each other, two begin and end in it.
const LOOKS_PER_PART: u32 = 4;

/// The place of a part of an oracle. Most oracles have one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OracleAt {
    /// The memory.
    pub piece: Piece,
    /// Its layout.
    pub board: Board,
}

/// All parts of an oracle. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Oracle {
    parts: Arc<[OracleAt]>,
    slots: usize,
}

impl From<OracleAt> for Oracle {
    fn from(part: OracleAt) -> Oracle {
        Oracle { slots: part.board.slots(), parts: [part].into() }
    }
}

impl Oracle {
    /// An oracle of this many slots, with a part in each of these pieces. `None`: each part must have at
    /// least one slot.
    pub fn split(slots: u16, pieces: &[Piece]) -> Option<Oracle> {
        let parts = u16::try_from(pieces.len()).ok().filter(|&parts| parts > 0)?;
        let of_part = |(number, piece): (u16, &Piece)| {
            let slots = slots.checked_sub(number)?.div_ceil(parts);
            Some(OracleAt { piece: *piece, board: Board::new(slots)? })
        };
        let parts: Option<Arc<[OracleAt]>> = (0..).zip(pieces).map(of_part).collect();
        Some(Oracle { parts: parts?, slots: slots.into() })
    }

    /// Its parts. Each has a publisher of its own.
    pub fn parts(&self) -> &[OracleAt] {
        &self.parts
    }

    /// How many slots it has.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The place of a slot's word. `None`: there is no such slot.
    pub(crate) fn word(&self, slot: Slot) -> Option<(Piece, u64)> {
        let parts = self.parts.len();
        let part = self.parts[slot.index() % parts];
        let slot = Slot::new((slot.index() / parts) as u16)?;
        Some((part.piece, part.board.word(slot)? as u64))
    }

    /// The pause that each publisher makes after each cut, so that readers find all parts unchanged for long
    /// enough. It assumes that one look at all parts takes at most `look`. A reader that takes longer tries
    /// again.
    pub fn pace(&self, look: Duration) -> Duration {
        match self.parts.len() {
            1 => Duration::ZERO,
            parts => look * LOOKS_PER_PART * parts as u32,
        }
    }

    /// The whole cut, made up of the cuts of all parts. Its number is the sum of theirs. If no part of one
    /// such cut is earlier than in another one, the later cut has the larger sum.
    pub(crate) fn join(&self, parts: &[Cut]) -> Cut {
        debug_assert_eq!(parts.len(), self.parts.len());
        let counts = (0..self.slots).map(|slot| parts[slot % parts.len()].counts()[slot / parts.len()]);
        Cut::new(parts.iter().map(Cut::sequence).sum(), counts.collect())
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::{Epoch, NodeId, RegionId};

    use super::*;

    fn pieces(count: u64) -> Vec<Piece> {
        let piece =
            |node| Piece { region: RegionId { node: NodeId(node), index: 0 }, epoch: Epoch(1), start: 8 };
        (1..=count).map(piece).collect()
    }

    #[test]
    fn slots_take_turns_over_the_parts() {
        let oracle = Oracle::split(5, &pieces(3)).unwrap();
        let slots: Vec<usize> = oracle.parts().iter().map(|part| part.board.slots()).collect();
        assert_eq!((slots, oracle.slots()), (vec![2, 2, 1], 5));
        let word = |slot| oracle.word(Slot::new(slot).unwrap()).map(|(piece, at)| (piece.region.node.0, at));
        assert_eq!([0, 2, 4, 5, 6].map(word), [Some((1, 0)), Some((3, 0)), Some((2, 8)), None, None]);
        assert!(Oracle::split(2, &pieces(3)).is_none() && Oracle::split(2, &[]).is_none());
    }

    #[test]
    fn a_cut_of_all_parts_has_their_counts_in_the_order_of_slots() {
        let oracle = Oracle::split(5, &pieces(2)).unwrap();
        let parts = [Cut::new(7, [10, 12, 14].into()), Cut::new(5, [11, 13].into())];
        assert_eq!(oracle.join(&parts), Cut::new(12, [10, 11, 12, 13, 14].into()));
        let whole = Oracle::from(oracle.parts()[0]);
        assert_eq!(whole.join(&parts[..1]), parts[0]);
    }

    #[test]
    fn publishers_of_several_parts_leave_time_for_looks_at_all_of_them() {
        let look = Duration::from_micros(3);
        let pace = |parts: u64| Oracle::split(9, &pieces(parts)).unwrap().pace(look);
        assert_eq!((pace(1), pace(2), pace(3)), (Duration::ZERO, look * 8, look * 12));
    }
}
