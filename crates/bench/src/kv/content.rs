//! The content of records: their number, then one value in all other words.
//!
//! So a record that belongs elsewhere, or that mixes two writes, is detected whatever a transaction does with
//! it.

/// Bytes of a record's data.
pub const RECORD_BYTES: usize = 64;
const WORD_BYTES: usize = 8;

/// Fills a record's data.
#[inline]
pub fn fill(data: &mut [u8], number: u64, value: u64) {
    let (words, _) = data.as_chunks_mut::<WORD_BYTES>();
    words.fill(value.to_le_bytes());
    words[0] = number.to_le_bytes();
}

/// The value in a record's data; `None` if the data are another record's, or mix several writes.
#[inline]
pub fn value(data: &[u8], number: u64) -> Option<u64> {
    let (words, _) = data.as_chunks::<WORD_BYTES>();
    let (first, values) = words.split_first()?;
    let value = *values.first()?;
    let is_whole = *first == number.to_le_bytes() && values.iter().all(|other| *other == value);
    is_whole.then(|| u64::from_le_bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_another_record_or_mixed_writes_have_no_value() {
        let mut data = [0; RECORD_BYTES];
        fill(&mut data, 7, 9);
        assert_eq!((value(&data, 7), value(&data, 8)), (Some(9), None));
        data[RECORD_BYTES - 1] = 1;
        assert_eq!(value(&data, 7), None);
    }
}
