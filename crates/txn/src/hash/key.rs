//! Keys: their hashes, and their layout beside their records.

use crc_fast::{CrcAlgorithm, Digest};
use siphasher::sip::SipHasher13;

use super::bucket::HASH_BITS;

const WORD_BYTES: usize = size_of::<u64>();
/// Bytes of the longest key. A longer one is better kept in the record, with a hash of it as the key.
pub const MOST_KEY_BYTES: usize = 256;
/// Half of the hash function's key; the other is the table's seed.
const HASH_KEY: u64 = u64::from_le_bytes(*b"farpool\0");

/// The hash of a key: it determines the home bucket, and its lowest bits are in the key's entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyHash(pub u64);

impl KeyHash {
    /// The hash of a key, in a table with this seed: SipHash-1-3.
    pub fn of(seed: u64, key: &[u8]) -> KeyHash {
        KeyHash(SipHasher13::new_with_keys(seed, HASH_KEY).hash(key))
    }

    /// The bits that are in an entry: the lowest ones, by which buckets are split.
    pub(super) fn entry_bits(self) -> u64 {
        self.0 & ((1 << HASH_BITS) - 1)
    }

    /// One of `homes` buckets, chosen by all other bits.
    pub(super) fn home(self, homes: u64) -> u64 {
        let bits = u128::from(self.0 >> HASH_BITS);
        ((bits * u128::from(homes)) >> (u64::BITS - HASH_BITS)) as u64
    }
}

/// Bytes of a key with its checksum, in whole words.
pub(super) fn key_area_bytes(key_bytes: usize) -> u64 {
    (WORD_BYTES + key_bytes.next_multiple_of(WORD_BYTES)) as u64
}

/// The bytes of a key beside its record: checksum, key, zeros.
pub(super) fn encode_key(number: u64, key: &[u8]) -> Vec<u8> {
    let mut bytes = [&seal(number, key).to_le_bytes(), key].concat();
    bytes.resize(key_area_bytes(key.len()) as usize, 0);
    bytes
}

/// The key in these bytes, if the checksum says that it belongs to this record.
pub(super) fn decode_key(number: u64, key_bytes: usize, bytes: &[u8]) -> Option<&[u8]> {
    let (sum, rest) = bytes.split_first_chunk::<WORD_BYTES>()?;
    let key = rest.get(..key_bytes)?;
    (u64::from_le_bytes(*sum) == seal(number, key)).then_some(key)
}

/// The checksum of a key. It covers the number of the key's record, too.
fn seal(number: u64, key: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    digest.update(&number.to_le_bytes());
    digest.update(key);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hashes_and_key_areas_are_fixed() {
        assert_eq!(KeyHash::of(7, b"a key"), KeyHash(0x38ED_C492_BF7E_4D60));
        assert_eq!(KeyHash::of(8, b"a key"), KeyHash(0x0F71_D978_474D_A8FB));
        let hash = KeyHash(0xFFFF_0000_0012_3456);
        assert_eq!((hash.entry_bits(), hash.home(1_000)), (0x2_3456, 999));
        let area = encode_key(3, b"0123456789");
        assert_eq!(area[8..], *b"0123456789\0\0\0\0\0\0");
        assert_eq!(area[..8], [59, 7, 55, 149, 157, 23, 189, 130]);
    }

    #[test]
    fn memory_that_was_never_written_is_no_key() {
        assert_eq!(decode_key(0, 4, &[0; 16]), None);
        assert_eq!(decode_key(0, 12, &[0; 16]), None, "too short");
        assert_eq!(decode_key(0, 4, &[]), None);
    }

    proptest! {
        #[test]
        fn a_key_is_read_back_and_only_as_its_own_records(
            key in prop::collection::vec(any::<u8>(), 1..40), number: u64, other: u64, flip: prop::sample::Index,
        ) {
            let mut area = encode_key(number, &key);
            prop_assert_eq!(area.len() as u64, key_area_bytes(key.len()));
            prop_assert_eq!(decode_key(number, key.len(), &area), Some(&key[..]));
            prop_assert!(other == number || decode_key(other, key.len(), &area).is_none());
            let bit = flip.index(8 * (WORD_BYTES + key.len()));
            area[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(decode_key(number, key.len(), &area), None);
        }

        #[test]
        fn homes_are_in_range(hash: u64, homes in 1u64..(1 << 43)) {
            prop_assert!(KeyHash(hash).home(homes) < homes);
        }
    }
}
