//! The parity of blocks: their exclusive or. Pure.

const WORD: usize = size_of::<u64>();

/// Adds a block to a parity, or removes it: exclusive or does both. The two have the same length.
pub(crate) fn add(parity: &mut [u8], block: &[u8]) {
    debug_assert_eq!(parity.len(), block.len());
    let whole = parity.len() - parity.len() % WORD;
    let (words, rest) = parity.split_at_mut(whole);
    for (word, other) in words.chunks_exact_mut(WORD).zip(block.chunks_exact(WORD)) {
        let sum = u64::from_ne_bytes(word.try_into().expect("a chunk is a word"))
            ^ u64::from_ne_bytes(other.try_into().expect("a chunk is a word"));
        word.copy_from_slice(&sum.to_ne_bytes());
    }
    rest.iter_mut().zip(&block[whole..]).for_each(|(byte, other)| *byte ^= other);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_block_is_the_parity_of_all_others(
            blocks in (0usize..100).prop_flat_map(|bytes| prop::collection::vec(prop::collection::vec(any::<u8>(), bytes), 1..6)),
            which: prop::sample::Index,
        ) {
            let lost = which.index(blocks.len());
            let mut parity = vec![0; blocks[0].len()];
            blocks.iter().for_each(|block| add(&mut parity, block));
            let others = blocks.iter().enumerate().filter(|(index, _)| *index != lost);
            others.for_each(|(_, block)| add(&mut parity, block));
            prop_assert_eq!(&parity, &blocks[lost]);
        }
    }
}
