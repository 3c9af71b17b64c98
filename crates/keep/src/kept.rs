//! The state that results from a log's changes. Pure.

use std::collections::BTreeMap;

use crate::change::{Change, encode};

/// Approximate bytes of changes in each record of a snapshot. A snapshot is split into many records, so that
/// none of them is large.
const SNAPSHOT_RECORD_BYTES: usize = 256 << 10;

/// Keys and their values.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Kept {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Kept {
    /// Applies changes.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            match change {
                Change::Put { key, value } => {
                    self.values.insert(key, value);
                }
                Change::Remove { key } => {
                    self.values.remove(&key);
                }
                Change::RemoveAll { prefix } => {
                    let begins = self.values.range(prefix.clone()..).map(|(key, _)| key);
                    let begins: Vec<_> = begins.take_while(|key| key.starts_with(&prefix)).cloned().collect();
                    begins.iter().for_each(|key| drop(self.values.remove(key)));
                }
            }
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// The keys that begin with `prefix`, in ascending order and without the prefix, with their values.
    pub fn under<'a>(&'a self, prefix: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let from = self.values.range(prefix.to_vec()..);
        let all = from.take_while(move |(key, _)| key.starts_with(prefix));
        all.map(move |(key, value)| (&key[prefix.len()..], value.as_slice()))
    }

    /// Records that turn an empty state into this one.
    pub(crate) fn snapshot(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let mut values = self.values.iter().peekable();
        std::iter::from_fn(move || {
            values.peek()?;
            let (mut changes, mut bytes) = (Vec::new(), 0);
            while bytes < SNAPSHOT_RECORD_BYTES
                && let Some((key, value)) = values.next()
            {
                let change = Change::Put { key: key.clone(), value: value.clone() };
                bytes += change.bytes();
                changes.push(change);
            }
            Some(encode(&changes).expect("each came from a record, and a few of them fit in one"))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::change::decode;
    use crate::change::tests::any_change;

    proptest! {
        #[test]
        fn changes_give_the_same_state_as_a_simple_model(changes in vec(any_change(), 0..40)) {
            let mut model: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
            for change in &changes {
                match change {
                    Change::Put { key, value } => {
                        model.retain(|(other, _)| other != key);
                        model.push((key.clone(), value.clone()));
                    }
                    Change::Remove { key } => model.retain(|(other, _)| other != key),
                    Change::RemoveAll { prefix } => model.retain(|(key, _)| !key.starts_with(prefix)),
                }
            }
            model.sort();
            let mut kept = Kept::default();
            kept.apply(changes);
            let found: Vec<_> = kept.under(&[]).map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
            prop_assert_eq!(found, model);
        }

        #[test]
        fn a_snapshot_makes_the_same_state(changes in vec(any_change(), 0..40)) {
            let mut kept = Kept::default();
            kept.apply(changes);
            let mut again = Kept::default();
            for record in kept.snapshot() {
                again.apply(decode(&record).unwrap().0);
            }
            prop_assert_eq!(again, kept);
        }
    }
}
