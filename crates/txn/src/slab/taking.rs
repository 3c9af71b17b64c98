//! Taking chunks and giving them up (B3).

use std::ops::Range;

use farpool_wire::Epoch;

use super::Slab;
use super::block::decode_header;
use super::layout::{Class, HEADER_BYTES};
use crate::membership::read_seats;
use crate::memory::{Memory, MemoryError, Piece};
use crate::record::{RecordId, WORD_BYTES};
use crate::rules::Rules;
use crate::slot::SharedSlot;
use crate::worker::Worker;

/// Bytes of owners and classes, or of block headers, that are read at once.
const BYTES_AT_ONCE: u64 = 32 << 10;
/// The owner word of a chunk that no member owns.
const NO_OWNER: u64 = 0;

/// A chunk that is being taken or given up. If this is dropped before the outcome is known, no thread of this
/// member touches the chunk again.
struct Moving<'a> {
    slab: &'a Slab,
    slot: &'a SharedSlot,
    chunk: u32,
    has_ended: bool,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.slot.note_write_in_flight();
        }
    }
}

impl Slab {
    /// Takes a chunk without an owner, for blocks of this class. False: there is none. If `waits`, no chunk
    /// is taken while this member is taking another one; true then as well.
    pub(super) async fn take_free<R: Rules>(
        &self,
        worker: &Worker<R>,
        class: Class,
        waits: bool,
    ) -> Result<bool, MemoryError> {
        let owners = self.owners(worker.memory()).await?;
        for &(chunk, _) in owners.iter().filter(|(_, owner)| *owner == NO_OWNER) {
            if waits && self.chunks.lock().is_any_moving() {
                return Ok(true);
            }
            if self.take_one(worker, chunk, NO_OWNER, class).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Changes a chunk of this member that has no block in use to this class. False: there is none.
    pub(super) async fn use_empty<R: Rules>(
        &self,
        worker: &Worker<R>,
        class: Class,
    ) -> Result<bool, MemoryError> {
        let empty = self.chunks.lock().begin_giving_up(Some(class));
        let Some(chunk) = empty else { return Ok(false) };
        self.set_up(worker, self.moving(worker, chunk), class).await?;
        Ok(true)
    }

    /// Takes a chunk whose owner is gone, with everything in it. `None`: there is none.
    pub(super) async fn take_over<R: Rules>(
        &self,
        worker: &Worker<R>,
        class: Class,
    ) -> Result<Option<u32>, MemoryError> {
        let owners = self.owners(worker.memory()).await?;
        // The seats are read after the owners: a member that owned a chunk then and has no seat now is gone
        // for ever.
        let seats = read_seats(worker.memory(), &self.members).await?;
        let is_gone = |owner: u64| !seats.iter().any(|seat| seat.claim == Some(Epoch(owner)));
        let others = owners.into_iter().filter(|(_, owner)| *owner != NO_OWNER && *owner != self.claim.0);
        for (chunk, owner) in others.filter(|(_, owner)| R::takes_over(is_gone(*owner))) {
            if self.take_one(worker, chunk, owner, class).await? {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }

    /// All chunks with their owners, starting with a chunk that differs between members.
    async fn owners(&self, memory: &Memory) -> Result<Vec<(u32, u64)>, MemoryError> {
        let mut owners = Vec::new();
        for (piece, layout) in self.pieces() {
            let words = layout.words();
            for start in words.clone().step_by(BYTES_AT_ONCE as usize) {
                let bytes = memory.read(&piece, start..words.end.min(start + BYTES_AT_ONCE)).await?;
                let (words, _) = bytes.as_chunks::<WORD_BYTES>();
                owners.extend(words.iter().step_by(2).map(|word| u64::from_le_bytes(*word)));
            }
        }
        let mut owners: Vec<(u32, u64)> = (0..).zip(owners).collect();
        let first = (self.claim.0 % owners.len() as u64) as usize;
        owners.rotate_left(first);
        Ok(owners)
    }

    fn moving<'a, R: Rules>(&'a self, worker: &'a Worker<R>, chunk: u32) -> Moving<'a> {
        Moving { slab: self, slot: worker.slot(), chunk, has_ended: false }
    }

    /// Takes a chunk from its owner. False: another member was first.
    async fn take_one<R: Rules>(
        &self,
        worker: &Worker<R>,
        chunk: u32,
        owner: u64,
        class: Class,
    ) -> Result<bool, MemoryError> {
        if !self.chunks.lock().begin_taking(chunk) {
            return Ok(false);
        }
        let moving = self.moving(worker, chunk);
        let memory = worker.memory();
        let (piece, layout, within) = self.chunk(chunk).expect("it was found in a piece");
        let found = memory.compare_and_swap(&piece, layout.owner(within), owner, self.claim.0).await?;
        if found != owner {
            moving.remove();
            return Ok(false);
        }
        if owner == NO_OWNER {
            self.set_up(worker, moving, class).await?;
            return Ok(true);
        }
        // Read only now: the previous owner may have changed the class until it was gone.
        let word = memory.read_word(&piece, layout.class(within)).await?;
        match Class::from_word(word) {
            Some(class) => {
                let written = headers(memory, &piece, layout.headers(within, class)).await?;
                moving.add(class, &written);
            }
            // Its owner died before the chunk had a class: none of its blocks was ever written.
            None => self.set_up(worker, moving, class).await?,
        }
        Ok(true)
    }

    /// Sets the class of a chunk that belongs to this member and has no block in use.
    async fn set_up<R: Rules>(
        &self,
        worker: &Worker<R>,
        moving: Moving<'_>,
        class: Class,
    ) -> Result<(), MemoryError> {
        let (piece, layout, within) = self.chunk(moving.chunk).expect("it was found in a piece");
        worker.memory().write_word(&piece, layout.class(within), class.word()).await?;
        moving.add(class, &[]);
        Ok(())
    }

    /// Gives up all chunks that have no block in use, except those of class `kept`.
    pub(super) async fn give_up_empty<R: Rules>(
        &self,
        worker: &Worker<R>,
        kept: Option<Class>,
    ) -> Result<(), MemoryError> {
        loop {
            let empty = self.chunks.lock().begin_giving_up(kept);
            let Some(chunk) = empty else { return Ok(()) };
            let moving = self.moving(worker, chunk);
            let (piece, layout, within) = self.chunk(chunk).expect("it was taken in a piece");
            let at = layout.owner(within);
            worker.memory().compare_and_swap(&piece, at, self.claim.0, NO_OWNER).await?;
            moving.remove();
        }
    }
}

/// The versions that the blocks of a chunk were written for; `range` has the headers of these blocks.
async fn headers(
    memory: &Memory,
    piece: &Piece,
    range: Range<u64>,
) -> Result<Vec<Option<(RecordId, u64)>>, MemoryError> {
    let mut headers = Vec::new();
    for start in range.clone().step_by(BYTES_AT_ONCE as usize) {
        let bytes = memory.read(piece, start..range.end.min(start + BYTES_AT_ONCE)).await?;
        headers.extend(bytes.as_chunks::<{ HEADER_BYTES as usize }>().0.iter().map(decode_header));
    }
    Ok(headers)
}

impl Moving<'_> {
    /// The chunk does not belong to this member.
    fn remove(mut self) {
        self.slab.chunks.lock().remove(self.chunk);
        self.has_ended = true;
    }

    /// The chunk belongs to this member.
    fn add(mut self, class: Class, written: &[Option<(RecordId, u64)>]) {
        self.slab.chunks.lock().add(self.chunk, class, written);
        self.has_ended = true;
    }
}
