//! The size and the kind of a new table.

use farpool_txn::slab::{Class, LEAST_DATA_BYTES, SlabLayout};

/// If rows may be long: bytes for the length before a row that lies in its place.
const LENGTH_BYTES: usize = 8;
/// Wanted number of chunks in each slab: each compute server has at least one chunk for each size of blocks
/// that it needs.
const CHUNKS_WANTED: u64 = 64;
/// Most blocks for the longest rows in a chunk.
const MOST_LONGEST_BLOCKS: u64 = 16;
/// Chunks of the smallest slab: enough for two compute servers that write rows of several sizes.
const LEAST_CHUNKS: u64 = 16;

/// The size of a new table. Its memory is taken when it is made.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::TableOptions;
///
/// // A million rows of up to 200 bytes; the few that are longer have up to 64 KiB each, 1 GiB together.
/// let options = TableOptions::rows(1_000_000).row_bytes(200).longest(64 << 10).slab_bytes(1 << 30);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// How many keys it has room for before it grows, counting all that were ever inserted.
    pub rows: u64,
    /// Bytes of the largest row, in the format of crate `postcard`.
    pub row_bytes: usize,
    /// Bytes of the longest row, if rows of more than `row_bytes` are to lie in a slab beside the table.
    pub longest: Option<usize>,
    /// Bytes of the longest encoded key, if keys have variable length: a string takes one byte more than its
    /// length, and one more for each byte 0 or 1 in it. At most 256.
    pub key_bytes: usize,
    /// Bytes of that slab at first. `None`: room for as many of the longest rows as the table has keys.
    pub slab_bytes: Option<u64>,
    /// Whether its keys are kept in order, for [scans](crate::Tx::scan).
    pub is_ordered: bool,
}

impl TableOptions {
    /// A table with room for this many keys before it grows, with rows of up to 64 bytes.
    pub fn rows(rows: u64) -> TableOptions {
        TableOptions {
            rows,
            row_bytes: 64,
            longest: None,
            key_bytes: 64,
            slab_bytes: None,
            is_ordered: false,
        }
    }

    /// With keys in order: [`Tx::scan`](crate::Tx::scan) finds the rows of a range of keys. Inserting a new
    /// key then takes three more round trips, and keys take more memory (`docs/src/namdb.md`, *limits*).
    pub fn ordered(self) -> TableOptions {
        TableOptions { is_ordered: true, ..self }
    }

    /// With keys of up to this many bytes, if keys have any length.
    pub fn key_bytes(self, key_bytes: usize) -> TableOptions {
        TableOptions { key_bytes, ..self }
    }

    /// With rows of up to this many bytes.
    pub fn row_bytes(self, row_bytes: usize) -> TableOptions {
        TableOptions { row_bytes, ..self }
    }

    /// With rows of up to this many bytes, 1 MiB at most. Rows of more than `row_bytes` lie in a slab.
    pub fn longest(self, longest: usize) -> TableOptions {
        TableOptions { longest: Some(longest), ..self }
    }

    /// With a slab of about this many bytes. Each version that a snapshot may need takes a block of it, of a
    /// power of two from 128 bytes on. Each compute server takes a piece of it for each size that it writes.
    pub fn slab_bytes(self, slab_bytes: u64) -> TableOptions {
        TableOptions { slab_bytes: Some(slab_bytes), ..self }
    }

    /// Bytes of a row's place.
    pub(crate) fn place_bytes(&self) -> usize {
        let bytes = self.row_bytes.next_multiple_of(8);
        if self.longest.is_some() { (bytes + LENGTH_BYTES).max(LEAST_DATA_BYTES) } else { bytes }
    }

    /// The slab of each of this many pieces, if the table is to have one.
    pub(crate) fn slab_each(&self, pieces: u64) -> Option<SlabLayout> {
        let longest = self.longest?.max(1);
        let block = Class::of(longest)?.bytes();
        let all = self.slab_bytes.unwrap_or(self.rows.saturating_mul(block));
        let each = all.div_ceil(pieces);
        let blocks = (each / block / CHUNKS_WANTED).clamp(1, MOST_LONGEST_BLOCKS);
        SlabLayout::for_payloads(longest, blocks, each.max(LEAST_CHUNKS * block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_has_room_for_what_was_asked_and_chunks_for_several_compute_servers() {
        assert_eq!((TableOptions::rows(10).slab_each(1), TableOptions::rows(10).place_bytes()), (None, 64));
        let long = TableOptions::rows(1_000).longest(40_000).row_bytes(100);
        assert_eq!((long.place_bytes(), long.row_bytes(1).place_bytes()), (112, 24));
        let slab = long.slab_each(2).unwrap();
        assert!(slab.longest() >= 40_000 && slab.bytes() * 2 >= 1_000 * 40_000 && slab.chunks() >= 32);
        let small = long.slab_bytes(1).slab_each(3).unwrap();
        assert!(small.longest() >= 40_000 && small.chunks() >= LEAST_CHUNKS - 1, "{small:?}");
        assert!(long.longest(2 << 20).slab_each(1).is_none());
    }
}
