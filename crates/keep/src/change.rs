//! Changes of the state, and the format of their records. Pure.
//!
//! ```text
//! record   u32 bytes of the changes, u64 CRC-64/NVME of them, the changes       (all little-endian)
//! change   u8 kind, u32 bytes of the key, key, and for a value: u32 bytes, value
//! ```

/// Longest key: it suffices for a table's byte, numbers, and a name of 255 bytes.
pub(crate) const MAX_KEY_BYTES: usize = 512;
/// Largest value: an extended attribute of 64 KiB and what is stored with it.
pub(crate) const MAX_VALUE_BYTES: usize = 128 << 10;
/// Largest record. A reader takes up to this much into memory before it knows whether the bytes are a record.
pub(crate) const MAX_RECORD_BYTES: usize = 4 << 20;
/// Length and checksum.
pub(crate) const RECORD_HEAD_BYTES: usize = 12;

const PUT: u8 = 1;
const REMOVE: u8 = 2;
const REMOVE_ALL: u8 = 3;

/// One change of the state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Sets the value of a key.
    Put {
        /// The key.
        key: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
    },
    /// Removes a key.
    Remove {
        /// The key.
        key: Vec<u8>,
    },
    /// Removes all keys that begin with a prefix.
    RemoveAll {
        /// The prefix.
        prefix: Vec<u8>,
    },
}

impl Change {
    fn key(&self) -> &[u8] {
        match self {
            Change::Put { key, .. } | Change::Remove { key } | Change::RemoveAll { prefix: key } => key,
        }
    }

    /// Bytes that the change takes in a record.
    pub(crate) fn bytes(&self) -> usize {
        let value = if let Change::Put { value, .. } = self { 4 + value.len() } else { 0 };
        1 + 4 + self.key().len() + value
    }
}

/// The bytes are not a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NotARecord;

/// Encodes changes as a record. `None`: one of the changes, or the whole record, is too large.
pub(crate) fn encode(changes: &[Change]) -> Option<Vec<u8>> {
    let bytes: usize = changes.iter().map(Change::bytes).sum();
    let fits = |change: &Change| {
        let value = if let Change::Put { value, .. } = change { value.len() } else { 0 };
        change.key().len() <= MAX_KEY_BYTES && value <= MAX_VALUE_BYTES
    };
    if bytes > MAX_RECORD_BYTES || !changes.iter().all(fits) {
        return None;
    }
    let mut body = Vec::with_capacity(bytes);
    for change in changes {
        body.push(match change {
            Change::Put { .. } => PUT,
            Change::Remove { .. } => REMOVE,
            Change::RemoveAll { .. } => REMOVE_ALL,
        });
        push_bytes(&mut body, change.key());
        if let Change::Put { value, .. } = change {
            push_bytes(&mut body, value);
        }
    }
    let mut record = Vec::with_capacity(RECORD_HEAD_BYTES + body.len());
    record.extend_from_slice(&(body.len() as u32).to_le_bytes());
    record.extend_from_slice(&checksum(&body).to_le_bytes());
    record.extend_from_slice(&body);
    Some(record)
}

fn push_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    to.extend_from_slice(bytes);
}

/// Decodes the record at the start of `bytes`: its changes, and its length.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Vec<Change>, usize), NotARecord> {
    let mut rest = bytes;
    let length = take_u32(&mut rest)? as usize;
    let sum = u64::from_le_bytes(take(&mut rest, 8)?.try_into().map_err(|_| NotARecord)?);
    if length > MAX_RECORD_BYTES {
        return Err(NotARecord);
    }
    let mut body = take(&mut rest, length)?;
    if checksum(body) != sum {
        return Err(NotARecord);
    }
    let mut changes = Vec::new();
    while let Some((&kind, behind)) = body.split_first() {
        body = behind;
        let key = take_bytes(&mut body, MAX_KEY_BYTES)?;
        changes.push(match kind {
            PUT => Change::Put { key, value: take_bytes(&mut body, MAX_VALUE_BYTES)? },
            REMOVE => Change::Remove { key },
            REMOVE_ALL => Change::RemoveAll { prefix: key },
            _ => return Err(NotARecord),
        });
    }
    Ok((changes, RECORD_HEAD_BYTES + length))
}

fn take<'a>(from: &mut &'a [u8], length: usize) -> Result<&'a [u8], NotARecord> {
    let (taken, rest) = from.split_at_checked(length).ok_or(NotARecord)?;
    *from = rest;
    Ok(taken)
}

fn take_u32(from: &mut &[u8]) -> Result<u32, NotARecord> {
    let bytes = take(from, 4)?.try_into().map_err(|_| NotARecord)?;
    Ok(u32::from_le_bytes(bytes))
}

fn take_bytes(from: &mut &[u8], most: usize) -> Result<Vec<u8>, NotARecord> {
    let length = take_u32(from)? as usize;
    if length > most {
        return Err(NotARecord);
    }
    Ok(take(from, length)?.to_vec())
}

pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn any_change() -> impl Strategy<Value = Change> {
        // Few keys, so that several changes have the same one.
        let key = || vec(0..3u8, 0..4);
        prop_oneof![
            4 => (key(), vec(any::<u8>(), 0..20)).prop_map(|(key, value)| Change::Put { key, value }),
            1 => key().prop_map(|key| Change::Remove { key }),
            1 => key().prop_map(|prefix| Change::RemoveAll { prefix }),
        ]
    }

    proptest! {
        #[test]
        fn a_record_is_decoded_with_its_changes_and_its_length(
            changes in vec(any_change(), 0..10), behind in vec(any::<u8>(), 0..20),
        ) {
            let mut record = encode(&changes).unwrap();
            let length = record.len();
            record.extend_from_slice(&behind);
            prop_assert_eq!(decode(&record), Ok((changes, length)));
        }

        #[test]
        fn a_record_that_is_cut_off_or_changed_is_none(
            changes in vec(any_change(), 1..10), at: prop::sample::Index, flip in 1..=255u8,
        ) {
            let mut record = encode(&changes).unwrap();
            let at = at.index(record.len());
            prop_assert_eq!(decode(&record[..at]), Err(NotARecord));
            record[at] ^= flip;
            prop_assert!(decode(&record).is_err());
        }

        #[test]
        fn garbage_is_no_record_and_no_panic(garbage in vec(any::<u8>(), 0..200)) {
            prop_assert!(decode(&garbage).is_err());
        }
    }

    #[test]
    fn layout_of_a_record_is_fixed() {
        let record = encode(&[Change::Put { key: vec![b'K'], value: vec![7, 8] }]).unwrap();
        assert_eq!(record[..4], [12, 0, 0, 0]);
        assert_eq!(record[12..], [1, 1, 0, 0, 0, b'K', 2, 0, 0, 0, 7, 8]);
    }

    #[test]
    fn changes_that_are_too_large_are_not_encoded() {
        assert_eq!(encode(&[Change::Put { key: vec![0], value: vec![0; MAX_VALUE_BYTES + 1] }]), None);
        assert_eq!(encode(&[Change::Remove { key: vec![0; MAX_KEY_BYTES + 1] }]), None);
        let many = vec![Change::Put { key: vec![0], value: vec![0; MAX_VALUE_BYTES] }; 40];
        assert_eq!(encode(&many), None);
    }
}
