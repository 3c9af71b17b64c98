//! Checksums of what lies in far memory: CRC-64/NVME of some words and the bytes after them, without copying
//! them together.
//!
//! Each transaction makes and checks a dozen of them, of some hundred bytes each. For such short inputs, a
//! library that is made for long ones takes longer than everything else that is done with them. So checksums
//! are computed by multiplication here: a checksum is the sum of each word times a power of *x*, modulo the
//! polynomial. The products do not depend on each other, and one reduction ends it.

use crc_fast::{CrcAlgorithm, Digest};

const WORD_BYTES: usize = 8;

/// The checksum of words, as they lie in memory, and of the bytes after them.
#[inline]
pub(crate) fn checksum(words: &[u64], bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len().is_multiple_of(WORD_BYTES) && is_x86_feature_detected!("pclmulqdq") {
        // SAFETY: the processor has the instruction, as was just tested; the caller must ensure nothing else.
        return unsafe { multiplied::checksum(words, bytes) };
    }
    by_digest(words, bytes)
}

fn by_digest(words: &[u64], bytes: &[u8]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    words.iter().for_each(|word| digest.update(&word.to_le_bytes()));
    digest.update(bytes);
    digest.finalize()
}

/// Polynomials are reflected, as the checksum's definition has them: bit *i* of a word is the coefficient of
/// x^(63 - i). A product of two has x^(126 - k) at bit *k*; read as x^(127 - k), it is the product times *x*.
#[cfg(target_arch = "x86_64")]
mod multiplied {
    use std::arch::x86_64::{
        __m128i, _mm_clmulepi64_si128, _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_setzero_si128,
        _mm_unpackhi_epi64, _mm_xor_si128,
    };

    use super::WORD_BYTES;

    /// The polynomial of CRC-64/NVME, without x^64.
    const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;
    /// Number of words whose products are added up before one reduction.
    const BLOCK: usize = 32;
    /// The *j*-th is x^(64 j - 1), modulo the polynomial: the factor of the *j*-th word from the end.
    const POWERS: [u64; BLOCK + 1] = powers();
    /// x^128 divided by the polynomial, without x^64.
    const QUOTIENT: u64 = quotient();

    const fn times_x(polynomial: u64) -> u64 {
        (polynomial >> 1) ^ if polynomial & 1 == 1 { POLYNOMIAL } else { 0 }
    }

    const fn powers() -> [u64; BLOCK + 1] {
        let mut powers = [0; BLOCK + 1];
        let mut power = 1; // x^63
        let mut place = 1;
        while place <= BLOCK {
            powers[place] = power;
            let mut step = 0;
            while step < 64 {
                power = times_x(power);
                step += 1;
            }
            place += 1;
        }
        powers
    }

    const fn quotient() -> u64 {
        let (mut quotient, mut rest) = (0, POLYNOMIAL);
        let mut place = 0;
        while place < 64 {
            quotient |= (rest & 1) << place;
            rest = times_x(rest);
            place += 1;
        }
        quotient
    }

    #[target_feature(enable = "pclmulqdq")]
    pub(super) fn checksum(words: &[u64], bytes: &[u8]) -> u64 {
        let (behind, _) = bytes.as_chunks::<WORD_BYTES>();
        let mut all = words.iter().copied().chain(behind.iter().map(|word| u64::from_le_bytes(*word)));
        let mut left = words.len() + behind.len();
        let mut state = u64::MAX;
        while left > 0 {
            let block = left.min(BLOCK);
            left -= block;
            let mut sum = _mm_setzero_si128();
            for power in POWERS[1..=block].iter().rev() {
                let word = all.next().unwrap_or_default() ^ std::mem::take(&mut state);
                sum = _mm_xor_si128(sum, product(word, *power));
            }
            state = low(_mm_unpackhi_epi64(sum, sum)) ^ reduced(low(sum));
        }
        !state
    }

    /// Times x^64, modulo the polynomial (Barrett).
    #[target_feature(enable = "pclmulqdq")]
    fn reduced(high: u64) -> u64 {
        let quotient = high ^ (low(product(high, QUOTIENT)) << 1);
        let rest = product(quotient, POLYNOMIAL);
        (low(_mm_unpackhi_epi64(rest, rest)) << 1) | (low(rest) >> 63)
    }

    #[target_feature(enable = "pclmulqdq")]
    fn product(one: u64, other: u64) -> __m128i {
        _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(one as i64), _mm_cvtsi64_si128(other as i64))
    }

    #[target_feature(enable = "pclmulqdq")]
    fn low(words: __m128i) -> u64 {
        _mm_cvtsi128_si64(words) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checksum_of_the_nine_digits_is_that_of_the_algorithm() {
        assert_eq!(checksum(&[], b"123456789"), 0xAE8B_1486_0A79_9888);
    }

    #[test]
    fn both_ways_agree_for_every_length() {
        let bytes: Vec<u8> = (0..2048_u32).map(|number| ((number * number) >> 3) as u8).collect();
        for length in (0..bytes.len()).step_by(8) {
            assert_eq!(checksum(&[], &bytes[..length]), by_digest(&[], &bytes[..length]), "{length}");
        }
    }

    proptest! {
        #[test]
        fn words_and_bytes_are_summed_as_if_they_lay_side_by_side(
            words in prop::collection::vec(any::<u64>(), 0..5),
            bytes in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let joined: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).chain(bytes.iter().copied()).collect();
            prop_assert_eq!(checksum(&words, &bytes), crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &joined));
        }
    }
}
