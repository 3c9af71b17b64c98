//! Sealed words: a value and a check of it, for memory that outlives its writer. Pure.

/// Makes a word: the value in its low `said_bits`, and a check of the value and the place in the other bits.
/// A word that was never stored, or was stored elsewhere, fails the check.
pub(crate) fn seal(place: u64, said: u64, said_bits: u32) -> u64 {
    said | check(place, said, said_bits) << said_bits
}

/// The value of a word, if its check is right.
pub(crate) fn open(place: u64, word: u64, said_bits: u32) -> Option<u64> {
    let said = word & ((1 << said_bits) - 1);
    (word == seal(place, said, said_bits)).then_some(said)
}

/// Never zero, so that zeros do not pass.
fn check(place: u64, said: u64, said_bits: u32) -> u64 {
    /// Two odd multipliers: 2^64 divided by the golden ratio, and by the root of x^4 = x + 1 that is above 1.
    const PLACE: u64 = 0x9E37_79B9_7F4A_7C15;
    const SAID: u64 = 0xD1B5_4A32_D192_ED03;
    // The finaliser of SplitMix64: each input bit changes half of the output bits on average.
    let mut mixed = place.wrapping_add(1).wrapping_mul(PLACE) ^ said.wrapping_mul(SAID);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((mixed ^ mixed >> 31) >> said_bits).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_of_sealed_words_is_fixed() {
        assert_eq!(seal(0, 0, 48) & ((1 << 48) - 1), 0);
        assert_eq!([seal(8, 5, 33), seal(16, 5, 33)].map(|word| word & 0x1_FFFF_FFFF), [5, 5]);
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens_in_its_place(place: u64, said: u64, said_bits in 1..49_u32) {
            let said = said & ((1 << said_bits) - 1);
            prop_assert_eq!(open(place, seal(place, said, said_bits), said_bits), Some(said));
            prop_assert_eq!(open(place, 0, said_bits), None);
        }

        #[test]
        fn a_word_with_a_wrong_bit_or_in_another_place_does_not_open(
            place in 0..1_u64 << 32, other in 0..1_u64 << 32, said in 0..1_u64 << 33, bit in 0..64_u32,
        ) {
            // One such word in 2^31 opens; proptest tries too few to meet one.
            let word = seal(place, said, 33);
            prop_assert!(open(place, word ^ 1 << bit, 33).is_none());
            prop_assert!(other == place || open(other, word, 33).is_none());
        }
    }

    #[test]
    fn later_versions_find_the_same_sealed_words() {
        let words = [
            ((0, 0, 33), 0xE220_A838_0000_0000),
            ((8, 5, 33), 0x2318_70B0_0000_0005),
            ((16, 5, 33), 0x1943_88E6_0000_0005),
            ((1 << 33, 0x1_FFFF_FFFF, 33), 0xB10D_9751_FFFF_FFFF),
            ((4096, 123_456_789, 48), 0xF04D_0000_075B_CD15),
        ];
        for ((place, said, said_bits), word) in words {
            assert_eq!(seal(place, said, said_bits), word, "{place} {said} {said_bits}");
        }
    }
}
