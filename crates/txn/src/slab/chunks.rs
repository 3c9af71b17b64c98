//! What a member knows about the chunks that it owns: which blocks are free, and for which versions the
//! others were written. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{BlockAt, Class, SlabLayout};
use crate::record::RecordId;

/// All chunks of a member.
#[derive(Debug)]
pub(super) struct Chunks {
    layout: SlabLayout,
    owned: BTreeMap<u32, Chunk>,
    /// The chunks that have free blocks.
    open: BTreeSet<(Class, u32)>,
    /// The chunks that are being taken or given up: no other thread of this member does the same meanwhile.
    /// If the outcome is in doubt, a chunk stays here for ever.
    moving: BTreeSet<u32>,
    next_stamp: u64,
    /// The chunk and block that are looked at next.
    next: (u32, u32),
}

#[derive(Debug)]
struct Chunk {
    class: Class,
    blocks: Vec<State>,
    free: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    /// Taken by a transaction that is in flight or in doubt.
    Fresh,
    Used(Written),
}

/// The version that a block was written for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Written {
    /// The record.
    pub(super) record: RecordId,
    /// The number of its version.
    pub(super) number: u64,
    /// Different for each use of a block.
    stamp: u64,
}

/// A selection of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Of {
    All,
    Class(Class),
    Chunk(u32),
}

impl Of {
    fn is_it(self) -> impl Fn(&(&u32, &Chunk)) -> bool {
        move |(chunk, found)| match self {
            Of::All => true,
            Of::Class(class) => found.class == class,
            Of::Chunk(wanted) => **chunk == wanted,
        }
    }
}

impl Chunks {
    /// No chunks yet.
    pub(super) fn new(layout: SlabLayout) -> Chunks {
        let (owned, open, moving) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Chunks { layout, owned, open, moving, next_stamp: 0, next: (0, 0) }
    }

    /// Begins to take a chunk. False: this member has it already, or another thread of this member is taking
    /// it or giving it up.
    pub(super) fn begin_taking(&mut self, chunk: u32) -> bool {
        !self.owned.contains_key(&chunk) && self.moving.insert(chunk)
    }

    /// Whether any chunk is being taken or given up.
    pub(super) fn is_any_moving(&self) -> bool {
        !self.moving.is_empty()
    }

    /// A chunk that was being taken or given up does not belong to this member.
    pub(super) fn remove(&mut self, chunk: u32) {
        self.moving.remove(&chunk);
    }

    /// A chunk that was being taken belongs to this member. Its blocks are free, except for those in
    /// `written`.
    pub(super) fn add(&mut self, chunk: u32, class: Class, written: &[Option<(RecordId, u64)>]) {
        self.moving.remove(&chunk);
        let mut blocks = vec![State::Free; self.layout.blocks(class) as usize];
        for (block, written) in blocks.iter_mut().zip(written) {
            if let Some((record, number)) = *written {
                *block = State::Used(Written { record, number, stamp: self.next_stamp });
                self.next_stamp += 1;
            }
        }
        let is_free = |&block: &u32| matches!(blocks[block as usize], State::Free);
        let free: Vec<u32> = (0..blocks.len() as u32).rev().filter(is_free).collect();
        if !free.is_empty() {
            self.open.insert((class, chunk));
        }
        self.owned.insert(chunk, Chunk { class, blocks, free });
    }

    /// Takes a free block.
    pub(super) fn take(&mut self, class: Class) -> Option<BlockAt> {
        let &(_, chunk) = self.open.range((class, 0)..=(class, u32::MAX)).next()?;
        let of = self.owned.get_mut(&chunk)?;
        let block = of.free.pop()?;
        of.blocks[block as usize] = State::Fresh;
        if of.free.is_empty() {
            self.open.remove(&(class, chunk));
        }
        Some(BlockAt { chunk, class, block })
    }

    /// A block belongs to a committed version.
    pub(super) fn keep(&mut self, at: BlockAt, record: RecordId, number: u64) {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        if let Some(state) = self.state(at) {
            *state = State::Used(Written { record, number, stamp });
        }
    }

    /// Nothing is left of the transaction that took a block: the block is free again.
    pub(super) fn give_back(&mut self, at: BlockAt) {
        self.free(at, |state| matches!(state, State::Fresh));
    }

    /// Frees a block that is not needed any more, unless it was reused since it was found to hold this
    /// version. Returns whether this has freed it.
    pub(super) fn free_unneeded(&mut self, at: BlockAt, found: Written) -> bool {
        self.free(at, |state| matches!(state, State::Used(written) if *written == found))
    }

    fn free(&mut self, at: BlockAt, is_it: impl FnOnce(&State) -> bool) -> bool {
        let Some(state) = self.state(at).filter(|state| is_it(state)) else { return false };
        *state = State::Free;
        if let Some(chunk) = self.owned.get_mut(&at.chunk) {
            chunk.free.push(at.block);
        }
        self.open.insert((at.class, at.chunk));
        true
    }

    fn state(&mut self, at: BlockAt) -> Option<&mut State> {
        self.owned.get_mut(&at.chunk)?.blocks.get_mut(at.block as usize)
    }

    /// At most `most` blocks that are in use: different ones with each call, until all have had their turn.
    pub(super) fn used(&mut self, of: Of, most: usize) -> Vec<(BlockAt, Written)> {
        let next = self.next;
        let place = |at: &BlockAt| (at.chunk, at.block);
        let tail = self.owned.range(next.0..).filter(of.is_it()).flat_map(used_of);
        let head = self.owned.range(..=next.0).filter(of.is_it()).flat_map(used_of);
        let tail = tail.skip_while(|(at, _)| place(at) < next);
        let head = head.take_while(|(at, _)| place(at) < next);
        let found: Vec<_> = tail.chain(head).take(most).collect();
        if let Some((last, _)) = found.last() {
            self.next = (last.chunk, last.block + 1);
        }
        found
    }

    /// How many blocks are not free.
    pub(super) fn count_taken(&self, of: Of) -> usize {
        let chunks = self.owned.iter().filter(of.is_it());
        chunks.map(|(_, chunk)| chunk.blocks.len() - chunk.free.len()).sum()
    }

    /// Begins to give up a chunk that has no block in use and is of another class than `kept`.
    pub(super) fn begin_giving_up(&mut self, kept: Option<Class>) -> Option<u32> {
        let is_empty = |chunk: &Chunk| {
            chunk.free.len() == chunk.blocks.len() && kept.is_none_or(|kept| chunk.class != kept)
        };
        let (&chunk, _) = self.owned.iter().find(|(_, chunk)| is_empty(chunk))?;
        let gone = self.owned.remove(&chunk)?;
        self.open.remove(&(gone.class, chunk));
        self.moving.insert(chunk);
        Some(chunk)
    }
}

fn used_of((&chunk, of): (&u32, &Chunk)) -> impl Iterator<Item = (BlockAt, Written)> {
    let class = of.class;
    (0..).zip(&of.blocks).filter_map(move |(block, state)| match state {
        State::Used(written) => Some((BlockAt { chunk, class, block }, *written)),
        State::Free | State::Fresh => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RECORD: RecordId = RecordId(5);

    fn class(bytes: usize) -> Class {
        Class::of(bytes).unwrap()
    }

    /// Chunks that have room for three small blocks or one large block.
    fn chunks() -> Chunks {
        Chunks::new(SlabLayout::new(9, 448).unwrap())
    }

    #[test]
    fn blocks_are_taken_and_become_free_again_when_given_back() {
        let mut chunks = chunks();
        assert_eq!(chunks.take(class(1)), None);
        assert!(chunks.begin_taking(4) && !chunks.begin_taking(4));
        chunks.add(4, class(1), &[None, Some((RECORD, 7)), None]);
        assert!(!chunks.begin_taking(4), "it is there");
        let taken = [(); 3].map(|()| chunks.take(class(1)).map(|at| at.block));
        assert_eq!((taken, chunks.take(class(200))), ([Some(0), Some(2), None], None));
        chunks.give_back(BlockAt { chunk: 4, class: class(1), block: 2 });
        assert_eq!(chunks.take(class(1)).map(|at| at.block), Some(2));
    }

    #[test]
    fn a_reused_block_is_not_freed_by_outdated_knowledge() {
        let mut chunks = chunks();
        chunks.add(4, class(1), &[Some((RECORD, 7)), None, None]);
        let (at, before) = chunks.used(Of::All, 9)[0];
        assert!(chunks.free_unneeded(at, before) && !chunks.free_unneeded(at, before));
        assert_eq!(chunks.take(class(1)), Some(at));
        assert!(!chunks.free_unneeded(at, before), "a transaction has it");
        chunks.keep(at, RECORD, 7);
        assert!(!chunks.free_unneeded(at, before), "as another version of the same number");
        let (_, now) = chunks.used(Of::All, 9)[0];
        assert!(chunks.free_unneeded(at, now));
    }

    #[test]
    fn a_chunk_is_given_up_only_where_none_of_its_blocks_is_in_use() {
        let mut chunks = chunks();
        for (chunk, class) in [(1, class(1)), (2, class(200)), (3, class(1))] {
            chunks.add(chunk, class, &[]);
        }
        let fresh = chunks.take(class(1)).unwrap();
        assert_eq!((fresh.chunk, chunks.begin_giving_up(Some(class(1)))), (1, Some(2)));
        assert_eq!((chunks.begin_giving_up(None), chunks.begin_giving_up(None)), (Some(3), None));
        assert!(!chunks.begin_taking(3), "it is not given up yet");
        chunks.remove(3);
        assert!(chunks.begin_taking(3));
        chunks.keep(fresh, RECORD, 1);
        assert_eq!(chunks.begin_giving_up(None), None);
        let (at, written) = chunks.used(Of::All, 1)[0];
        assert!(chunks.free_unneeded(at, written));
        assert_eq!(chunks.begin_giving_up(None), Some(1));
    }

    #[test]
    fn all_used_blocks_have_their_turn() {
        let mut chunks = chunks();
        chunks.add(1, class(1), &[Some((RECORD, 1)), None, Some((RECORD, 2))]);
        chunks.add(6, class(1), &[Some((RECORD, 3)); 3]);
        chunks.add(7, class(200), &[Some((RECORD, 4))]);
        let mut turn = |of, most| -> Vec<(u32, u32)> {
            chunks.used(of, most).iter().map(|(at, _)| (at.chunk, at.block)).collect()
        };
        assert_eq!(turn(Of::All, 2), [(1, 0), (1, 2)]);
        assert_eq!(turn(Of::Class(class(1)), 4), [(6, 0), (6, 1), (6, 2), (1, 0)]);
        assert_eq!(turn(Of::Class(class(200)), 4), [(7, 0)]);
        assert_eq!(turn(Of::All, 9), [(1, 0), (1, 2), (6, 0), (6, 1), (6, 2), (7, 0)]);
        assert_eq!(turn(Of::Chunk(6), 9), [(6, 0), (6, 1), (6, 2)]);
        assert_eq!([Of::All, Of::Chunk(1), Of::Chunk(2)].map(|of| chunks.count_taken(of)), [6, 2, 0]);
    }

    proptest! {
        #[test]
        fn no_block_is_given_out_twice_and_none_is_lost(steps in prop::collection::vec((0..5_u8, 0..40_usize), 0..300)) {
            let mut chunks = chunks();
            let (mut fresh, mut kept) = (Vec::<BlockAt>::new(), Vec::<BlockAt>::new());
            let mut owned = 0_usize;
            for (step, which) in steps {
                match step {
                    0 if chunks.begin_taking(which as u32) => {
                        chunks.add(which as u32, class(1), &[]);
                        owned += 1;
                    }
                    1 => match chunks.take(class(1)) {
                        Some(at) => {
                            prop_assert!(!fresh.contains(&at) && !kept.contains(&at));
                            fresh.push(at);
                        }
                        None => prop_assert_eq!(fresh.len() + kept.len(), 3 * owned),
                    },
                    2 if !fresh.is_empty() => {
                        let at = fresh.swap_remove(which % fresh.len());
                        chunks.keep(at, RECORD, 1);
                        kept.push(at);
                    }
                    3 if !fresh.is_empty() => chunks.give_back(fresh.swap_remove(which % fresh.len())),
                    4 => {
                        let used = chunks.used(Of::All, 100);
                        prop_assert_eq!(used.len(), kept.len());
                        for (at, written) in used.into_iter().take(which) {
                            prop_assert!(chunks.free_unneeded(at, written));
                            kept.retain(|kept| *kept != at);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
