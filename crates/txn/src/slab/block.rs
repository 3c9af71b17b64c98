//! A block, from when a transaction takes it until that transaction has finished.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join;

use super::layout::BlockAt;
use super::payload::Pointer;
use super::{Slab, layout::Class};
use crate::error::ReadError;
use crate::memory::{Memory, MemoryError, Piece};
use crate::record::RecordId;
use crate::rules::Rules;
use crate::slot::SharedSlot;
use crate::table::Table;
use crate::worker::Worker;

/// Bytes of a payload that are transferred at once, so that a long payload does not take all buffers of a
/// thread.
const PART_BYTES: u64 = 64 << 10;

/// A block that a transaction has taken, for a version of a record that it is about to write.
pub(crate) struct Fresh {
    slab: Arc<Slab>,
    slot: Arc<SharedSlot>,
    at: BlockAt,
    record: RecordId,
    number: u64,
    /// By a wrong rule of simulations: the payload, which is written only after the commit.
    unwritten: Option<Vec<u8>>,
    when_dropped: WhenDropped,
}

/// The state of the block once this is dropped.
#[derive(PartialEq)]
enum WhenDropped {
    /// Nothing points to it: it is free again.
    Free,
    /// A write to it may still land, or a commit that points to it may have taken effect: it becomes free
    /// only once this member is gone.
    InDoubt,
    /// It belongs to a committed version.
    Kept,
}

impl Drop for Fresh {
    fn drop(&mut self) {
        match self.when_dropped {
            WhenDropped::Free => self.slab.chunks.lock().give_back(self.at),
            WhenDropped::InDoubt => self.slot.note_write_in_flight(),
            WhenDropped::Kept => {}
        }
    }
}

impl Fresh {
    /// The block is in doubt until the outcome of its commit is known.
    pub(crate) fn mark_in_doubt(&mut self) {
        self.when_dropped = WhenDropped::InDoubt;
    }

    /// Frees the block: nothing of its transaction is left.
    pub(crate) fn give_back(mut self) {
        self.when_dropped = WhenDropped::Free;
    }

    /// Keeps the block: its transaction is committed.
    pub(crate) async fn keep<R: Rules>(mut self, memory: &Memory) -> Result<(), MemoryError> {
        if let Some(payload) = mem::take(&mut self.unwritten).filter(|_| !R::writes_payloads_first()) {
            self.slab.write(memory, self.at, (self.record, self.number), &payload).await?;
        }
        self.slab.chunks.lock().keep(self.at, self.record, self.number);
        self.when_dropped = WhenDropped::Kept;
        Ok(())
    }
}

impl Slab {
    /// Puts a payload into a block, for the version of a record that the caller is about to write (B2).
    /// Returns the block and the pointer to it.
    ///
    /// # Errors
    /// When there is no block for it, or far memory does not answer.
    pub(crate) async fn put<R: Rules>(
        self: &Arc<Self>,
        worker: &Worker<R>,
        table: &Table,
        (record, number): (RecordId, u64),
        payload: &[u8],
    ) -> Result<(Fresh, Pointer), ReadError> {
        let too_long = || ReadError::TooLong { most: self.layout.longest(), found: payload.len() };
        let class = Class::of(payload.len()).filter(|class| self.layout.blocks(*class) > 0);
        let at = self.allocate(worker, table, class.ok_or_else(too_long)?).await?;
        let at = at.ok_or(ReadError::NoSpace { bytes: payload.len() })?;
        let (slab, slot) = (self.clone(), worker.slot().clone());
        let when_dropped = WhenDropped::Free;
        let mut fresh = Fresh { slab, slot, at, record, number, unwritten: None, when_dropped };
        if R::writes_payloads_first() {
            fresh.when_dropped = WhenDropped::InDoubt;
            self.write(worker.memory(), at, (record, number), payload).await?;
            fresh.when_dropped = WhenDropped::Free;
        } else {
            fresh.unwritten = Some(payload.to_vec());
        }
        Ok((fresh, Pointer::new(record, at, payload)))
    }

    /// Writes a block and its header. No other member writes there.
    async fn write(
        &self,
        memory: &Memory,
        at: BlockAt,
        (record, number): (RecordId, u64),
        payload: &[u8],
    ) -> Result<(), MemoryError> {
        let Some((piece, place)) = self.place(at) else { unreachable!("the block is this member's") };
        let (_, layout, chunk) = self.chunk(at.chunk).expect("its place is known");
        let header = layout.header(chunk, at.block).start;
        let words = encode_header(record, number);
        let data = async {
            for part in parts(payload.len() as u64) {
                let bytes = &payload[part.start as usize..part.end as usize];
                memory.write(&piece, place.start + part.start, bytes).await?;
            }
            Ok(())
        };
        let (header, data) = join(memory.write(&piece, header, &words), data).await;
        header.and(data)
    }

    /// Reads the payload of a record. `None`: there is no such block, or its bytes are not the payload that
    /// the pointer was made for.
    pub(crate) async fn get<R: Rules>(
        &self,
        memory: &Memory,
        record: RecordId,
        pointer: Pointer,
    ) -> Result<Option<Vec<u8>>, MemoryError> {
        let Some((piece, place)) = self.place(pointer.at) else { return Ok(None) };
        let mut payload = Vec::with_capacity(pointer.length);
        for part in parts(pointer.length as u64) {
            payload.extend_from_slice(
                &memory.read(&piece, place.start + part.start..place.start + part.end).await?,
            );
        }
        Ok(Some(payload).filter(|payload| R::takes_payload(pointer.is_of(record, payload))))
    }

    /// The place of a block.
    fn place(&self, at: BlockAt) -> Option<(Piece, Range<u64>)> {
        let (piece, layout, chunk) = self.chunk(at.chunk)?;
        Some((piece, layout.block(chunk, at.class, at.block)?))
    }
}

/// The header of a block: the record's number plus one, since zero stands for none, and the number of the
/// version.
pub(super) fn encode_header(record: RecordId, number: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&record.0.wrapping_add(1).to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The record and number in a block's header. `None`: it was never written.
pub(super) fn decode_header(bytes: &[u8; 16]) -> Option<(RecordId, u64)> {
    let (words, _) = bytes.as_chunks::<8>();
    let record = u64::from_le_bytes(words[0]).checked_sub(1)?;
    Some((RecordId(record), u64::from_le_bytes(words[1])))
}

fn parts(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes).step_by(PART_BYTES as usize).map(move |start| start..bytes.min(start + PART_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_headers_is_fixed() {
        let bytes = encode_header(RecordId(5), 7);
        assert_eq!((bytes[0], bytes[8]), (6, 7));
        assert_eq!(bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 13);
        assert_eq!(decode_header(&bytes), Some((RecordId(5), 7)));
        assert_eq!(decode_header(&[0; 16]), None);
    }

    #[test]
    fn long_payloads_go_in_parts() {
        let all: Vec<Range<u64>> = parts(PART_BYTES + 3).collect();
        assert_eq!(all, [0..PART_BYTES, PART_BYTES..PART_BYTES + 3]);
        assert_eq!(parts(0).count(), 0);
    }
}
