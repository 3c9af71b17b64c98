//! The layout of a region in this scenario, in words.

use std::ops::Range;

/// Size of a region: one page.
pub(super) const REGION_BYTES: u64 = 4096;
/// Words that every client writes and reads, several at a time.
pub(super) const PLAIN: Range<u64> = 0..16;
/// Words for compare-and-swap.
pub(super) const SWAPPED: Range<u64> = 16..19;
/// Words for fetch-and-add.
pub(super) const ADDED: Range<u64> = 19..22;
/// Two words for each client. The client writes them in order; the others read them.
pub(super) const STREAMS: Range<u64> = 24..40;
/// Records, each with one writer.
pub(super) const RECORDS: Range<u64> = 40..72;
/// Words of a record: its version, words derived from the version, and a checksum.
pub(super) const RECORD_WORDS: u64 = 8;
/// The words that are used.
pub(super) const USED_WORDS: u64 = 72;

/// The two words of a client's stream.
pub(super) fn stream_of(client: usize) -> [u64; 2] {
    let first = STREAMS.start + 2 * client as u64;
    [first, first + 1]
}

/// The first word of a client's record.
pub(super) fn record_of(client: usize) -> u64 {
    RECORDS.start + RECORD_WORDS * client as u64
}

/// The words of the record with this version.
pub(super) fn record(version: u64) -> [u64; RECORD_WORDS as usize] {
    let mut words = [0; RECORD_WORDS as usize];
    words[0] = version;
    for place in 1..words.len() - 1 {
        words[place] = mix(version, place as u64);
    }
    words[words.len() - 1] = checksum(&words);
    words
}

/// The last word of a record, computed from all the others.
pub(super) fn checksum(words: &[u64]) -> u64 {
    words[..words.len() - 1].iter().fold(17, |sum, &word| mix(sum, word))
}

fn mix(one: u64, other: u64) -> u64 {
    let mixed = (one ^ other.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}
