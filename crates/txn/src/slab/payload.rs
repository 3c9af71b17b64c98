//! The data of a record whose payload may be long: the payload itself, or a pointer to its block
//! (`docs/src/wire.md`, *slabs*).

use super::layout::{BlockAt, MOST_PAYLOAD_BYTES};
use crate::checksum::checksum;
use crate::record::{RecordId, WORD_BYTES};

/// Fewest bytes of data of a record that may point to a block: length, block and checksum.
pub const LEAST_DATA_BYTES: usize = 3 * WORD_BYTES;
/// A bit of the length word: the payload lies in a block.
const OUT_OF_PLACE: u64 = 1 << 63;

/// The place of a payload that does not fit its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pointer {
    /// The block.
    pub at: BlockAt,
    /// The payload's length in bytes.
    pub length: usize,
    /// A checksum over the payload, the record's number and the block's name.
    pub sum: u64,
}

/// The decoded data of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held<'a> {
    /// The data are the payload itself.
    Here(&'a [u8]),
    /// The payload lies in a block.
    There(Pointer),
}

impl Pointer {
    /// A pointer to a record's payload that lies, or will lie, in this block.
    pub fn new(record: RecordId, at: BlockAt, payload: &[u8]) -> Pointer {
        Pointer { at, length: payload.len(), sum: sum(record, at, payload) }
    }

    /// Whether these bytes are the payload that it points to.
    pub fn is_of(&self, record: RecordId, payload: &[u8]) -> bool {
        payload.len() == self.length && self.sum == sum(record, self.at, payload)
    }
}

impl<'a> Held<'a> {
    /// The longest payload that fits the place of a record with this many bytes of data.
    pub fn most_here(data_bytes: usize) -> usize {
        data_bytes - WORD_BYTES
    }

    /// Turns a record's data into those of the longest payload that fits there, and returns the room for that
    /// payload.
    pub(crate) fn here_in(data: &mut [u8]) -> &mut [u8] {
        let (length, payload) = data.split_at_mut(WORD_BYTES);
        length.copy_from_slice(&(payload.len() as u64).to_le_bytes());
        payload
    }

    /// Encodes the data of a record, with this many bytes in all.
    pub fn encode(&self, data_bytes: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(data_bytes);
        match self {
            Held::Here(payload) => {
                bytes.extend((payload.len() as u64).to_le_bytes());
                bytes.extend(*payload);
            }
            Held::There(pointer) => {
                let words = [pointer.length as u64 | OUT_OF_PLACE, pointer.at.word(), pointer.sum];
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            }
        }
        debug_assert!(bytes.len() <= data_bytes);
        bytes.resize(data_bytes, 0);
        bytes
    }

    /// Decodes the data of a record. `None`: no client writes such data.
    pub fn decode(data: &'a [u8]) -> Option<Held<'a>> {
        let (word, rest) = data.split_first_chunk()?;
        let word = u64::from_le_bytes(*word);
        let length = usize::try_from(word & !OUT_OF_PLACE).ok()?;
        if word & OUT_OF_PLACE == 0 {
            return rest.get(..length).map(Held::Here);
        }
        let (at, rest) = rest.split_first_chunk()?;
        let (sum, _) = rest.split_first_chunk()?;
        let at = BlockAt::from_word(u64::from_le_bytes(*at))?;
        let fits = length <= MOST_PAYLOAD_BYTES && length as u64 <= at.class.bytes();
        fits.then(|| Held::There(Pointer { at, length, sum: u64::from_le_bytes(*sum) }))
    }

    /// The block that the data point to, if they do.
    pub(super) fn block_of(data: &[u8]) -> Option<BlockAt> {
        match Held::decode(data)? {
            Held::There(pointer) => Some(pointer.at),
            Held::Here(_) => None,
        }
    }
}

fn sum(record: RecordId, at: BlockAt, payload: &[u8]) -> u64 {
    checksum(&[record.0, at.word(), payload.len() as u64], payload)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::layout::Class;
    use super::*;

    fn pointer() -> Pointer {
        let at = BlockAt { chunk: 7, class: Class::of(300).unwrap(), block: 9 };
        Pointer::new(RecordId(5), at, &[1; 300])
    }

    #[test]
    fn layout_of_payloads_is_fixed() {
        let words = |held: Held<'_>| -> Vec<u64> {
            held.encode(32).as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
        };
        assert_eq!(words(Held::Here(&[1; 10])), [10, 0x0101_0101_0101_0101, 0x0101, 0]);
        let sum = checksum(&[5, 7 << 32 | 2 << 24 | 9, 300], &[1; 300]);
        assert_eq!(words(Held::There(pointer())), [1 << 63 | 300, 7 << 32 | 2 << 24 | 9, sum, 0]);
        assert_eq!(sum, 0x4611_95C8_B08A_8240, "the checksum is fixed, too");
    }

    #[test]
    fn data_are_filled_with_a_payload_in_its_place() {
        let mut data = [0; 32];
        Held::here_in(&mut data).fill(7);
        assert_eq!(Held::decode(&data), Some(Held::Here(&[7; 24])));
    }

    #[test]
    fn the_payload_of_another_record_or_block_is_not_taken() {
        let pointer = pointer();
        assert!(pointer.is_of(RecordId(5), &[1; 300]));
        assert!(!pointer.is_of(RecordId(6), &[1; 300]) && !pointer.is_of(RecordId(5), &[1; 299]));
        let mut other = [1; 300];
        other[299] = 2;
        assert!(!pointer.is_of(RecordId(5), &other));
        let moved = Pointer { at: BlockAt { block: 8, ..pointer.at }, ..pointer };
        assert!(!moved.is_of(RecordId(5), &[1; 300]));
    }

    #[test]
    fn invalid_data_are_refused() {
        let long = (17_u64).to_le_bytes();
        assert_eq!(Held::decode(&[&long[..], &[0; 16]].concat()), None, "longer than its place");
        assert_eq!(Held::decode(&[0; 7]), None);
        let mut data = Held::There(Pointer { length: 513, ..pointer() }).encode(24);
        assert_eq!(Held::decode(&data), None, "longer than its block");
        data[11] = 0xFF;
        assert_eq!(Held::decode(&data), None);
    }

    proptest! {
        #[test]
        fn payloads_round_trip(payload in prop::collection::vec(any::<u8>(), 0..40), more in 0..5_usize) {
            let data_bytes = payload.len().next_multiple_of(8) + 8 * (1 + more);
            let data = Held::Here(&payload).encode(data_bytes);
            prop_assert_eq!(Held::decode(&data), Some(Held::Here(&payload)));
            prop_assert!(payload.len() <= Held::most_here(data_bytes));
        }

        #[test]
        fn arbitrary_data_cause_no_panic(data in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = Held::decode(&data);
        }
    }
}
