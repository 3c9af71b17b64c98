//! Counts which parts of a file are missing, and which of them cannot be reconstructed. The counts are for
//! people: words may change during the count.

use std::collections::BTreeSet;
use std::sync::Arc;

use farpool_pool::Extent;

use crate::blocks::BLOCKS_PER_EXTENT;
use crate::file_core::FileCore;
use crate::redundancy::is_parity;
use crate::rows::Row;
use crate::rules::Rules;
use crate::volume::VolumeStatus;

impl<R: Rules> FileCore<R> {
    /// Adds this file to the status of all files.
    pub(crate) fn count_in(&self, status: &mut VolumeStatus) {
        status.files += 1;
        let Some(rows) = self.rows() else {
            status.lost_extents += self.plain_extents_lost();
            return;
        };
        status.redundant_files += 1;
        let stripes = self.map.read().stripes(0, u64::MAX);
        status.extents += stripes.len() as u64;
        let numbers: BTreeSet<u64> = stripes.into_iter().map(|stripe| rows.row_of(stripe)).collect();
        for row in numbers.into_iter().filter_map(|number| self.row(rows, number)) {
            let missing = row.members().filter(|(_, extent)| extent.region().has_ended()).count();
            status.missing_extents += missing as u64;
            // A row survives one missing member, unless its parity is lost, too.
            if missing > 0 {
                status.lost_extents += self.members_lost(&row);
            }
        }
    }

    fn plain_extents_lost(&self) -> u64 {
        let map = self.map.read();
        let extents = map.stripes(0, u64::MAX).into_iter().filter_map(|stripe| map.extent(stripe));
        let is_lost = |extent: &_| has_ended(extent) && !self.store.words.are_empty(extent);
        extents.filter(|extent| is_lost(extent)).count() as u64
    }

    /// Missing members with data of which some block cannot be reconstructed.
    fn members_lost(&self, row: &Row) -> u64 {
        let lost = |stripe: u64| (0..BLOCKS_PER_EXTENT).any(|block| self.is_block_lost(row, stripe, block));
        row.data.iter().filter(|(stripe, extent)| has_ended(extent) && lost(*stripe)).count() as u64
    }

    /// Whether a missing member's block has contents that the rest of its column cannot reconstruct.
    pub(crate) fn is_block_lost(&self, row: &Row, stripe: u64, block: u64) -> bool {
        let words = &self.store.words;
        let word = |extent: &Extent| words.load(words.place(extent, block)).unlocked();
        let holds = |extent: &Extent| !word(extent).is_empty() && !word(extent).is_lost();
        let Some(own) = row.member(stripe) else { return false };
        if word(own).is_empty() || word(own).is_lost() {
            return word(own).is_lost();
        }
        let cannot_help = |(member, extent): &(u64, Arc<Extent>)| {
            has_ended(extent) && holds(extent) || is_parity(*member) && word(extent).is_lost()
        };
        row.members().any(|other| other.0 != stripe && cannot_help(other))
    }
}

fn has_ended(extent: &Extent) -> bool {
    extent.region().has_ended()
}
