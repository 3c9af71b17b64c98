//! What a transaction has found lately, so that to write a row that was just read does not look for it again.

use std::collections::VecDeque;

use crate::record::RecordId;

/// Keys that are remembered: as many as are usually read together.
const MOST: usize = 32;

/// The numbers of the records of keys.
#[derive(Default)]
pub(super) struct RecentKeys(VecDeque<(RecordId, Box<[u8]>, u64)>);

impl RecentKeys {
    /// The number of a key's record, in the table whose first record is `table`.
    pub(super) fn get(&self, table: RecordId, key: &[u8]) -> Option<u64> {
        let known = self.0.iter().find(|(of, known, _)| *of == table && **known == *key);
        known.map(|(_, _, number)| *number)
    }

    /// Remembers the number of a key's record, and forgets the one that was found first if there are too
    /// many.
    pub(super) fn note(&mut self, table: RecordId, key: &[u8], number: u64) {
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back((table, key.into(), number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_found_last_are_remembered_by_table() {
        let mut keys = RecentKeys::default();
        (0..MOST as u64 + 1).for_each(|key| keys.note(RecordId(7), &key.to_le_bytes(), 10 + key));
        let number = |table, key: u64| keys.get(RecordId(table), &key.to_le_bytes());
        assert_eq!(
            (number(7, 0), number(7, 1), number(7, MOST as u64)),
            (None, Some(11), Some(10 + MOST as u64))
        );
        assert_eq!(number(8, 1), None);
    }
}
