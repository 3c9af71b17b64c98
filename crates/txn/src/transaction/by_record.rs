//! What a transaction knows of records, by their numbers. Most transactions have few records.

use std::collections::BTreeMap;

use crate::record::RecordId;

/// Up to this many entries, a linear search is faster than a tree.
const FEW: usize = 16;

/// Entries in the order of their records.
pub(super) enum ByRecord<T> {
    Few(Vec<(RecordId, T)>),
    Many(BTreeMap<RecordId, T>),
}

impl<T> ByRecord<T> {
    pub(super) const fn new() -> Self {
        ByRecord::Few(Vec::new())
    }

    /// Whether another entry can be added without making it a tree.
    pub(super) fn has_room_for_few(&self) -> bool {
        matches!(self, ByRecord::Few(few) if few.len() < FEW)
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            ByRecord::Few(few) => few.is_empty(),
            ByRecord::Many(many) => many.is_empty(),
        }
    }

    pub(super) fn get(&self, record: RecordId) -> Option<&T> {
        match self {
            ByRecord::Few(few) => few.iter().find(|(of, _)| *of == record).map(|(_, entry)| entry),
            ByRecord::Many(many) => many.get(&record),
        }
    }

    pub(super) fn get_mut(&mut self, record: RecordId) -> Option<&mut T> {
        match self {
            ByRecord::Few(few) => few.iter_mut().find(|(of, _)| *of == record).map(|(_, entry)| entry),
            ByRecord::Many(many) => many.get_mut(&record),
        }
    }

    /// Replaces the entry that there may be.
    pub(super) fn insert(&mut self, record: RecordId, entry: T) {
        match self {
            ByRecord::Few(few) => {
                let place = few.partition_point(|(of, _)| *of < record);
                if let Some((_, known)) = few.get_mut(place).filter(|(of, _)| *of == record) {
                    *known = entry;
                } else if few.len() < FEW {
                    few.insert(place, (record, entry));
                } else {
                    let few = std::mem::take(few).into_iter();
                    *self = ByRecord::Many(few.chain([(record, entry)]).collect());
                }
            }
            ByRecord::Many(many) => drop(many.insert(record, entry)),
        }
    }

    pub(super) fn remove(&mut self, record: RecordId) -> Option<T> {
        match self {
            ByRecord::Few(few) => {
                let place = few.iter().position(|(of, _)| *of == record)?;
                Some(few.remove(place).1)
            }
            ByRecord::Many(many) => many.remove(&record),
        }
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        let (few, many) = match self {
            ByRecord::Few(few) => (few.as_slice(), None),
            ByRecord::Many(many) => (&[][..], Some(many.values())),
        };
        few.iter().map(|(_, entry)| entry).chain(many.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn few_or_many_entries_are_those_of_a_map(
            steps in prop::collection::vec((0..40_u64, prop::option::of(any::<u8>())), 0..120)
        ) {
            let (mut map, mut expected) = (ByRecord::new(), BTreeMap::new());
            for (record, entry) in steps {
                let record = RecordId(record);
                match entry {
                    Some(entry) => {
                        map.insert(record, entry);
                        expected.insert(record, entry);
                    }
                    None => prop_assert_eq!(map.remove(record), expected.remove(&record)),
                }
                prop_assert_eq!(map.get(record), expected.get(&record));
                prop_assert_eq!(map.get_mut(record), expected.get_mut(&record));
                prop_assert_eq!(map.is_empty(), expected.is_empty());
                prop_assert!(map.values().eq(expected.values()));
            }
        }
    }
}
