//! Which block an operation goes to, and what the block must hold.
//!
//! Picking a place takes a few arithmetic instructions, and no access to the memory that is measured. The
//! accesses that operations are compared with (the *floor*) pick their places with the same code.

use crate::options::Pattern;

/// A block within a footprint of equal regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FootprintBlock {
    /// The region's index in the footprint.
    pub region: usize,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// An endless series of places.
#[derive(Clone, Debug)]
pub struct Places {
    pattern: Pattern,
    regions: u64,
    blocks: u64,
    block_bytes: u64,
    region_bytes: u64,
    random: Random,
    next: u64,
}

impl Places {
    /// Blocks of `block_bytes` in `regions` regions of `region_bytes`. The seed determines a random series,
    /// and where a sequential one starts.
    ///
    /// # Panics
    /// If there is no region, a block has no bytes, or a region is smaller than a block.
    pub fn new(pattern: Pattern, regions: usize, region_bytes: u64, block_bytes: usize, seed: u64) -> Self {
        let blocks = region_bytes / block_bytes as u64;
        assert!(regions > 0 && blocks > 0, "no place for a block of {block_bytes} bytes");
        let mut random = Random::new(seed);
        let next = random.below(regions as u64 * blocks);
        Places {
            pattern,
            regions: regions as u64,
            blocks,
            block_bytes: block_bytes as u64,
            region_bytes,
            random,
            next,
        }
    }

    /// Size of the regions.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// Size of the blocks.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes as usize
    }

    /// Size of all regions together.
    pub fn footprint_bytes(&self) -> u64 {
        self.regions * self.region_bytes
    }

    /// The next place. Its block lies in its region, and its region in the footprint.
    #[inline]
    pub fn pick(&mut self) -> FootprintBlock {
        match self.pattern {
            Pattern::Random => {
                // Uses two independent halves of one random number, so that there is no division.
                let bits = self.random.bits();
                let region = ((bits >> 32) * self.regions) >> 32;
                let block = ((bits & u64::from(u32::MAX)) * self.blocks) >> 32;
                FootprintBlock { region: region as usize, offset: block * self.block_bytes }
            }
            Pattern::Sequential => {
                let place = self.next;
                self.next = if place + 1 == self.regions * self.blocks { 0 } else { place + 1 };
                FootprintBlock {
                    region: (place / self.blocks) as usize,
                    offset: place % self.blocks * self.block_bytes,
                }
            }
        }
    }
}

/// xorshift64*: good enough to spread places, and fast: two nanoseconds.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Each seed gives another series.
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from 0 to 1, without 1.
    pub fn fraction(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The word at `offset` of a region before anything else is written there; different at every place.
#[inline]
pub fn initial_word(region: usize, offset: u64) -> u64 {
    ((region as u64 + 1) << 40 | offset).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The wrapping sum of all words of a footprint that holds only initial words.
pub fn initial_sum(regions: usize, region_bytes: u64) -> u64 {
    let words = (0..regions).flat_map(|region| (0..region_bytes).step_by(8).map(move |at| (region, at)));
    words.fold(0, |sum, (region, at)| sum.wrapping_add(initial_word(region, at)))
}

/// The `index`-th word of every block that is written. All writers write the same, so they may overlap.
pub fn written_word(index: usize) -> u64 {
    !initial_word(usize::MAX >> 24, index as u64 * 8)
}

/// Fills a buffer with the initial words of a place.
pub fn fill_initial(buffer: &mut [u8], at: FootprintBlock) {
    for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&initial_word(at.region, at.offset + index as u64 * 8).to_le_bytes());
    }
}

/// Fills a buffer with what all writers write.
pub fn fill_written(buffer: &mut [u8]) {
    for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&written_word(index).to_le_bytes());
    }
}

/// Whether a buffer holds the initial words of a place.
pub fn is_initial(buffer: &[u8], at: FootprintBlock) -> bool {
    buffer
        .chunks_exact(8)
        .enumerate()
        .all(|(index, word)| word == initial_word(at.region, at.offset + index as u64 * 8).to_le_bytes())
}

/// Whether a buffer holds what all writers write.
pub fn is_written(buffer: &[u8]) -> bool {
    buffer.chunks_exact(8).enumerate().all(|(index, word)| word == written_word(index).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_places_reach_every_block_of_every_region() {
        let mut places = Places::new(Pattern::Random, 3, 4096, 512, 7);
        let mut seen = [[false; 8]; 3];
        for _ in 0..2000 {
            let place = places.pick();
            assert!(place.offset.is_multiple_of(512) && place.offset < 4096);
            seen[place.region][(place.offset / 512) as usize] = true;
        }
        assert_eq!(seen, [[true; 8]; 3]);
    }

    #[test]
    fn sequential_places_visit_each_block_once_per_round() {
        let mut places = Places::new(Pattern::Sequential, 2, 4096, 1024, 3);
        let round: Vec<FootprintBlock> = (0..8).map(|_| places.pick()).collect();
        for (index, place) in round.iter().enumerate() {
            assert!(!round[..index].contains(place));
        }
        assert_eq!(places.pick(), round[0]);
    }

    #[test]
    fn a_block_of_another_place_or_with_one_wrong_byte_is_detected() {
        let (here, there) =
            (FootprintBlock { region: 1, offset: 64 }, FootprintBlock { region: 2, offset: 64 });
        let mut buffer = [0; 64];
        fill_initial(&mut buffer, here);
        assert!(is_initial(&buffer, here) && !is_initial(&buffer, there) && !is_written(&buffer));
        buffer[63] ^= 1;
        assert!(!is_initial(&buffer, here));
        fill_written(&mut buffer);
        assert!(is_written(&buffer) && !is_initial(&buffer, here));
    }
}
