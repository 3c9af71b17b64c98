//! The contents of far memory according to a file's words, for a checker that sees far memory itself.

use std::sync::Arc;

use farpool_pool::Extent;
use farpool_wire::BlockWord;

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::file_core::FileCore;
use crate::redundancy::is_parity;
use crate::rules::Rules;

/// A block that counts as stored.
pub struct Claim {
    /// Where it lies.
    pub extent: Arc<Extent>,
    /// Which block of the extent it is.
    pub block: u64,
    /// It is the parity of its column.
    pub is_parity: bool,
    word: BlockWord,
}

impl Claim {
    /// Whether these contents are the block's.
    pub fn is_met_by<R: Rules>(&self, contents: &[u8]) -> bool {
        self.word.matches(R::checksum(contents))
    }
}

/// The blocks of one column that count as stored.
pub struct ColumnClaim {
    /// Data, and the parity if it counts as stored.
    pub blocks: Vec<Claim>,
    /// The parity is the exclusive or of the data.
    pub has_parity: bool,
}

impl<R: Rules> FileCore<R> {
    /// What the words say of each column that no operation holds. In a file without rows, each block is a
    /// column.
    pub fn claims(&self) -> Vec<ColumnClaim> {
        let row_of = |stripe: u64| self.rows().map_or(stripe, |rows| rows.row_of(stripe));
        let mut members: Vec<(u64, Arc<Extent>)> = {
            let map = self.map.read();
            let stripes = map.stripes(0, u64::MAX).into_iter();
            stripes.filter_map(|stripe| Some((stripe, map.extent(stripe)?))).collect()
        };
        members.sort_by_key(|(stripe, _)| (row_of(*stripe), is_parity(*stripe)));
        let rows = members.chunk_by(|one, other| row_of(one.0) == row_of(other.0));
        let columns = rows
            .flat_map(|row| (0..BLOCKS_PER_EXTENT).filter_map(move |block| self.column_claim(row, block)));
        columns.collect()
    }

    /// The claim of a column whose members are given, the parity last; `None`: an operation holds it.
    fn column_claim(&self, members: &[(u64, Arc<Extent>)], block: u64) -> Option<ColumnClaim> {
        let words = &self.store.words;
        let word_of = |extent: &Extent| words.load(words.place(extent, block));
        let (last, last_extent) = members.last()?;
        // An operation that changes a column holds the lock of its parity block.
        if word_of(last_extent).is_locked() || self.rows().is_some() && !is_parity(*last) {
            return None;
        }
        let has_parity = is_parity(*last) && !word_of(last_extent).is_lost();
        let blocks = members.iter().filter_map(|(stripe, extent)| {
            let word = word_of(extent).unlocked();
            let (extent, is_parity) = (extent.clone(), is_parity(*stripe));
            let is_stored = !word.is_empty() && !word.is_lost();
            is_stored.then_some(Claim { extent, block, is_parity, word })
        });
        Some(ColumnClaim { blocks: blocks.collect(), has_parity })
    }
}
