//! The miss-ratio curve of an LRU cache, from a sample of blocks: SHARDS (Waldspurger et al., FAST 2015) with
//! a fixed rate.
//!
//! A block is sampled if the lowest bits of its hash are 0 (how many: [`sampling_shift`]), so either all
//! reads of a block are in the sample or none. The stack distance of a sampled read is the number of other
//! sampled blocks that were read since its block was last read. Divided by the rate, it estimates the
//! distance among all blocks: an LRU cache of more pages than that has the page. The stack ends at the
//! largest size that is asked for: a block below would be a miss at every size. So memory is bounded,
//! whatever is read.
//!
//! A single hot block changes the estimate, depending on whether it is sampled. So the number of samples is
//! compared with the number expected from all reads: missing samples count as hits, and surplus ones are
//! subtracted from the hits (SHARDS-adj). Counts are halved now and then, so that
//! the curve follows the load.
//!
//! Not here: where samples come from. Any word may come, in any order: it makes the curve wrong, and nothing
//! else.

use std::collections::HashMap;
use std::num::NonZeroU32;

/// Most blocks on the stack. A cache of half the size has an eighth of them, a thousand or more, so the error
/// is about one percentage point. In a small cache it is larger.
const STACK_MAX: u32 = 1 << 14;
/// With fewer sampled blocks in the cache, the error is several percentage points.
const SAMPLED_MIN: u64 = 256;
/// The recent hit rate is left open before there are so many samples. With as many as the second number, they
/// are halved.
const RECENT_MIN: f64 = 512.0;
const RECENT_MAX: f64 = 4096.0;
/// The curve reaches to so many times the size of the cache.
const LARGEST: u64 = 4;
/// At most one block in 2^4 is sampled, also in a small cache: samples cost a write to shared memory.
const SHIFT_MIN: u32 = 4;
/// Counts are halved when there are so many: about half of the curve's weight is on the last 2^16 samples.
const HALVED_AT: f64 = (1u32 << 17) as f64;
/// Bins of the histogram for each power of two.
const BINS_PER_OCTAVE: usize = 16;
const BINS: usize = 40 * BINS_PER_OCTAVE;

/// One block in 2^n is sampled, in a cache of so many slots; this is n.
pub(crate) fn sampling_shift(slots: u32) -> u32 {
    let blocks = LARGEST * u64::from(slots);
    let blocks_per_sample = blocks.div_ceil(u64::from(STACK_MAX)).next_power_of_two();
    blocks_per_sample.trailing_zeros().max(SHIFT_MIN)
}

/// Whether a block is sampled, by its hash.
pub(crate) fn is_sampled(hash: u64, shift: u32) -> bool {
    hash.trailing_zeros() >= shift
}

/// The curve, and the stack of the blocks that were sampled last.
#[derive(Debug)]
pub(crate) struct Curve {
    shift: u32,
    stack: Stack,
    /// Reads by their distance among all blocks.
    histogram: Vec<f64>,
    /// Samples in all, with those that were not on the stack.
    samples: f64,
    /// How many samples there should be, by the number of all reads.
    expected: f64,
    /// Samples since reads were counted last.
    uncounted: f64,
    recent: Recent,
}

/// The last samples alone, for one size of the cache.
#[derive(Debug, Default)]
struct Recent {
    /// The size, in pages.
    pages: u64,
    samples: f64,
    hits: f64,
}

impl Curve {
    /// The curve for a cache of at most so many slots.
    pub(crate) fn new(slots: u32) -> Curve {
        let shift = sampling_shift(slots);
        let depth = ((LARGEST * u64::from(slots)) >> shift).clamp(1, STACK_MAX.into()) as u32;
        let histogram = vec![0.0; BINS];
        let (samples, expected, uncounted, recent) = (0.0, 0.0, 0.0, Recent::default());
        Curve { shift, stack: Stack::new(depth), histogram, samples, expected, uncounted, recent }
    }

    /// A block was read that has this hash.
    pub(crate) fn sample(&mut self, hash: u64) {
        if !is_sampled(hash, self.shift) {
            return; // no caller stores this
        }
        self.samples += 1.0;
        self.uncounted += 1.0;
        let distance = self.stack.read(name_of(hash)).map(|distance| u64::from(distance) << self.shift);
        if let Some(distance) = distance {
            self.histogram[bin(distance)] += 1.0;
        }
        self.recent.note(distance);
    }

    /// The hit rate of an LRU cache of so many pages over the last thousands of samples, not corrected for
    /// hot blocks. 0 while samples for this size are few.
    pub(crate) fn recent_hit_rate(&mut self, pages: u64) -> f64 {
        if self.recent.pages != pages {
            self.recent = Recent { pages, ..Recent::default() };
        }
        let Recent { samples, hits, .. } = self.recent;
        if samples < RECENT_MIN { 0.0 } else { hits / samples }
    }

    /// So many blocks were read since the last call, sampled or not. Of their samples, so many were lost.
    pub(crate) fn count_reads(&mut self, reads: u64, lost: u64) {
        let kept = std::mem::take(&mut self.uncounted);
        let all = kept + lost as f64;
        let part = if all > 0.0 { kept / all } else { 1.0 };
        self.expected += part * reads as f64 / (1u64 << self.shift) as f64;
        // Not between two calls: samples that have been halved would be compared with reads that have not.
        while self.samples.max(self.expected) >= HALVED_AT {
            self.histogram.iter_mut().for_each(|count| *count /= 2.0);
            self.samples /= 2.0;
            self.expected /= 2.0;
        }
    }

    /// Whether the curve can tell of a cache of so many pages that hardly any read would be a hit: about four
    /// times as many different blocks were read, and enough of them are sampled.
    pub(crate) fn knows(&self, pages: u64) -> bool {
        let sampled = pages >> self.shift;
        let deep = (LARGEST * sampled).min(self.stack.depth.into());
        sampled >= SAMPLED_MIN && self.stack.times.len() as u64 >= deep
    }

    /// Weight of the samples behind the curve, in reads: old ones count less and less.
    pub(crate) fn samples(&self) -> u64 {
        self.samples as u64
    }

    /// The expected hit rate of an LRU cache of so many pages. `None`: nothing was sampled.
    pub(crate) fn hit_rate(&self, pages: u64) -> Option<f64> {
        let last = bin(pages);
        let below: f64 = self.histogram[..last].iter().sum();
        // Within its bin, the counts are taken to be spread evenly.
        let (start, end) = (lower_end(last), lower_end(last + 1));
        let part = ((pages as f64 - start) / (end - start)).clamp(0.0, 1.0);
        let hits = below + part * self.histogram[last];
        // Without a count of all reads, the sample is taken as it is.
        let all = if self.expected > 0.0 { self.expected } else { self.samples };
        (self.samples > 0.0).then(|| ((hits + all - self.samples) / all).clamp(0.0, 1.0))
    }
}

impl Recent {
    /// A sampled block was read, at this distance among all blocks, if it was on the stack.
    fn note(&mut self, distance: Option<u64>) {
        self.samples += 1.0;
        self.hits += f64::from(u8::from(distance.is_some_and(|distance| distance < self.pages)));
        if self.samples >= RECENT_MAX {
            self.samples /= 2.0;
            self.hits /= 2.0;
        }
    }
}

/// Names a sampled block on the stack: its hash folded to 32 bits, which halves the memory of the stack.
/// Among 2^14 blocks, two hardly ever have the same name.
type Name = NonZeroU32;

/// The name of a block with this hash.
fn name_of(hash: u64) -> Name {
    NonZeroU32::new((hash >> 32 ^ hash) as u32).unwrap_or(NonZeroU32::MIN)
}

/// The bin of a distance: bins grow with it, so each is narrow beside what it holds.
fn bin(distance: u64) -> usize {
    let octave = distance.checked_ilog2().unwrap_or(0);
    let within = ((distance as f64 / 2f64.powi(octave as i32) - 1.0) * BINS_PER_OCTAVE as f64).max(0.0);
    let bin = if distance == 0 { 0 } else { (octave as usize + 1) * BINS_PER_OCTAVE + within as usize };
    bin.min(BINS - 1)
}

/// The least distance of a bin.
fn lower_end(bin: usize) -> f64 {
    match (bin / BINS_PER_OCTAVE, bin % BINS_PER_OCTAVE) {
        (0, 0) => 0.0,
        (0, _) => 1.0,
        (octave, within) => 2f64.powi(octave as i32 - 1) * (1.0 + within as f64 / BINS_PER_OCTAVE as f64),
    }
}

/// Blocks in the order in which they were last read. A block's time is a position in a Fenwick tree, which
/// counts the blocks of other times. When the times run out, they are given anew.
#[derive(Debug)]
struct Stack {
    depth: u32,
    times: HashMap<Name, u32>,
    /// By time: the block that was last read then.
    blocks: Vec<Option<Name>>,
    /// Before this time there are no blocks.
    oldest: u32,
    now: u32,
    /// The Fenwick tree over times, from 1 on.
    tree: Vec<u32>,
}

impl Stack {
    fn new(depth: u32) -> Stack {
        let times = 2 * depth as usize + 2;
        let (blocks, tree) = (vec![None; times], vec![0; times + 1]);
        Stack { depth, times: HashMap::with_capacity(depth as usize + 1), blocks, oldest: 0, now: 0, tree }
    }

    /// Puts a block on top. Returns how many were above it, if it was there.
    fn read(&mut self, block: Name) -> Option<u32> {
        if self.now as usize == self.blocks.len() {
            self.renumber();
        }
        let before = self.times.insert(block, self.now);
        let distance = before.map(|time| {
            let above = self.times.len() as u32 - self.up_to(time);
            self.take(time);
            above
        });
        self.blocks[self.now as usize] = Some(block);
        self.add(self.now, 1);
        self.now += 1;
        if self.times.len() > self.depth as usize {
            self.drop_oldest();
        }
        distance
    }

    fn drop_oldest(&mut self) {
        while self.blocks[self.oldest as usize].is_none() {
            self.oldest += 1;
        }
        if let Some(block) = self.take(self.oldest) {
            self.times.remove(&block);
        }
    }

    fn take(&mut self, time: u32) -> Option<Name> {
        self.add(time, u32::MAX); // one less
        self.blocks[time as usize].take()
    }

    /// Gives the blocks the first times, in their order: at most half of all times.
    fn renumber(&mut self) {
        let kept: Vec<Name> = self.blocks.iter().copied().flatten().collect();
        self.blocks.fill(None);
        self.tree.fill(0);
        (self.oldest, self.now) = (0, kept.len() as u32);
        for (time, block) in (0..).zip(kept) {
            self.times.insert(block, time);
            self.blocks[time as usize] = Some(block);
            self.add(time, 1);
        }
    }

    fn add(&mut self, time: u32, addend: u32) {
        let mut at = time as usize + 1;
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add(addend);
            at += at & at.wrapping_neg();
        }
    }

    /// How many blocks have this time or an earlier one.
    fn up_to(&self, time: u32) -> u32 {
        let mut at = time as usize + 1;
        let mut sum = 0u32;
        while at > 0 {
            sum = sum.wrapping_add(self.tree[at]);
            at &= at - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// The finaliser of SplitMix64, as `Layout` mixes the numbers of blocks.
    fn mix(value: u64) -> u64 {
        let mut mixed = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A generator of random numbers.
    struct Random(u64);

    impl Random {
        fn unit(&mut self) -> f64 {
            self.0 += 1;
            (mix(self.0) >> 11) as f64 / (1u64 << 53) as f64
        }

        fn below(&mut self, limit: u64) -> u64 {
            (self.unit() * limit as f64) as u64
        }
    }

    const SLOTS: u32 = 20_000;
    const SIZES: [u64; 4] = [SLOTS as u64 / 2, SLOTS as u64, 2 * SLOTS as u64, 4 * SLOTS as u64];
    const READS: usize = 1_500_000;

    fn uniform(blocks: u64) -> Vec<u64> {
        let mut random = Random(1 << 40);
        (0..READS).map(|_| random.below(blocks)).collect()
    }

    fn zipf(blocks: u64, skew: f64) -> Vec<u64> {
        let mut sums: Vec<f64> = (1..=blocks).map(|rank| (rank as f64).powf(-skew)).collect();
        (1..sums.len()).for_each(|rank| sums[rank] += sums[rank - 1]);
        let (mut random, all) = (Random(1 << 41), *sums.last().unwrap());
        (0..READS)
            .map(|_| {
                let wanted = random.unit() * all;
                sums.partition_point(|sum| *sum <= wanted) as u64
            })
            .collect()
    }

    /// Again and again the same blocks in their order, between reads of a few hot ones.
    fn scans(blocks: u64) -> Vec<u64> {
        let mut random = Random(1 << 42);
        let read =
            |at: u64| if at.is_multiple_of(2) { at / 2 % blocks } else { blocks + random.below(4_000) };
        (0..READS as u64).map(read).collect()
    }

    /// A name that no other block has.
    fn plain(block: u64) -> Name {
        Name::new(block as u32 + 1).unwrap()
    }

    /// The hit rates of LRU caches of these sizes, from the distances of all reads.
    fn exact(reads: &[u64]) -> [f64; 4] {
        let mut stack = Stack::new(4 * SLOTS + 1);
        let distances: Vec<_> = reads.iter().filter_map(|block| stack.read(plain(*block))).collect();
        SIZES.map(|size| {
            let hits = distances.iter().filter(|distance| u64::from(**distance) < size).count();
            hits as f64 / reads.len() as f64
        })
    }

    fn sampled(reads: &[u64], is_lost: impl Fn(usize) -> bool) -> Curve {
        // Reads are counted now and then.
        const BETWEEN: usize = 10_000;
        let mut curve = Curve::new(SLOTS);
        for (part, between) in reads.chunks(BETWEEN).enumerate() {
            let mut lost = 0;
            for (number, block) in (part * BETWEEN..).zip(between) {
                let hash = mix(*block);
                match is_sampled(hash, curve.shift) {
                    true if is_lost(number) => lost += 1,
                    true => curve.sample(hash),
                    false => {}
                }
            }
            curve.count_reads(between.len() as u64, lost);
        }
        curve
    }

    fn worst(curve: &Curve, exact: [f64; 4]) -> f64 {
        let errors =
            SIZES.iter().zip(exact).map(|(size, exact)| (curve.hit_rate(*size).unwrap() - exact).abs());
        errors.fold(0.0, f64::max)
    }

    #[test]
    fn the_stack_counts_other_blocks_since_the_last_read_as_a_list_does() {
        let (mut stack, mut list, mut random) = (Stack::new(50), Vec::new(), Random(7));
        for _ in 0..20_000 {
            let block = random.below(80);
            let found = list.iter().rev().position(|other| *other == block);
            assert_eq!(stack.read(plain(block)), found.map(|above| above as u32));
            list.retain(|other| *other != block);
            list.push(block);
            let first = list.len().saturating_sub(50);
            list.drain(..first);
        }
    }

    #[test]
    fn the_curve_is_within_two_points_of_exact_lru_caches() {
        let loads = [
            ("uniform", uniform(60_000)),
            ("uniform, larger than the curve", uniform(200_000)),
            ("Zipf 0.99", zipf(200_000, 0.99)),
            ("Zipf 0.7", zipf(200_000, 0.7)),
            ("scans", scans(60_000)),
        ];
        for (name, reads) in loads {
            let (exact, curve) = (exact(&reads), sampled(&reads, |_| false));
            let error = worst(&curve, exact);
            let found = SIZES.map(|size| curve.hit_rate(size).unwrap());
            println!("{name}: exact {exact:.3?}, sampled {found:.3?}, {} samples", curve.samples());
            assert!(error < 0.02, "{name}: off by {error:.3}");
        }
    }

    #[test]
    fn lost_samples_change_the_curve_little() {
        let reads = zipf(200_000, 0.7);
        // The daemon was late: all samples of every fourth stretch are lost.
        let curve = sampled(&reads, |number| number / 50_000 % 4 == 3);
        let error = worst(&curve, exact(&reads));
        assert!(error < 0.04, "off by {error:.3}");
    }

    #[test]
    fn absurd_counts_of_reads_are_forgotten() {
        let (reads, mut curve) = (zipf(200_000, 0.7), Curve::new(SLOTS));
        [(u64::MAX, 0), (u64::MAX, u64::MAX)]
            .into_iter()
            .for_each(|(all, lost)| curve.count_reads(all, lost));
        for block in reads.iter().cycle().take(4 * READS) {
            curve.sample(mix(*block));
            curve.count_reads(1, 0);
        }
        let error = worst(&curve, exact(&reads));
        assert!(error < 0.04, "off by {error:.3}");
    }

    /// Samples that are counted from time to time, as a keeper does it.
    fn feed(curve: &mut Curve, hashes: impl Iterator<Item = u64>) {
        const BETWEEN: u64 = 50_000;
        for (number, hash) in (1..).zip(hashes) {
            curve.sample(hash);
            if number % BETWEEN == 0 {
                curve.count_reads(BETWEEN << curve.shift, 0);
            }
        }
    }

    #[test]
    fn yesterdays_load_is_forgotten_and_counts_that_come_late_change_nothing() {
        let mut curve = Curve::new(SLOTS);
        let never_twice = (0..1u64 << 24).map(|number| number << 8);
        feed(&mut curve, never_twice.take(400_000));
        assert_eq!(curve.hit_rate(SIZES[1]), Some(0.0));
        feed(&mut curve, (0..400_000).map(|number| (number % 100) << 8));
        assert!(curve.hit_rate(SIZES[1]).unwrap() > 0.95);
    }

    #[test]
    fn a_curve_knows_a_size_after_four_times_as_many_blocks_if_enough_of_them_are_sampled() {
        let mut curve = Curve::new(SLOTS);
        let (shift, slots) = (curve.shift, u64::from(SLOTS));
        let read = |curve: &mut Curve, blocks: Range<u64>| {
            blocks.for_each(|block| curve.sample(block << shift));
        };
        read(&mut curve, 1..((4 * slots) >> shift));
        assert_eq!([slots, slots / 4, slots / 64].map(|pages| curve.knows(pages)), [false, true, false]);
        read(&mut curve, ((4 * slots) >> shift)..((5 * slots) >> shift));
        assert!(curve.knows(slots));
    }

    #[test]
    fn the_recent_hit_rate_follows_the_load_at_once() {
        let mut curve = Curve::new(SLOTS);
        let pages = SLOTS.into();
        assert_eq!(curve.recent_hit_rate(pages), 0.0);
        feed(&mut curve, (0..1u64 << 17).map(|number| number << 8));
        assert_eq!(curve.recent_hit_rate(pages), 0.0);
        feed(&mut curve, (0..2_000).map(|number| (number % 100) << 8));
        assert!(curve.recent_hit_rate(pages) > 0.3 && curve.hit_rate(pages).unwrap() < 0.05);
    }

    #[test]
    fn any_words_leave_memory_bounded_and_rates_between_0_and_1() {
        for slots in [0, 1, 100, 1 << 20, 1 << 31] {
            let (mut curve, mut random) = (Curve::new(slots), Random(3));
            assert_eq!(curve.hit_rate(1), None);
            for number in 0..300_000u64 {
                let word = mix(random.0 ^ number) << (random.below(40));
                [word, 0, u64::MAX, 1 << 63].into_iter().for_each(|word| curve.sample(word));
                curve.count_reads(word, random.0);
            }
            assert!(curve.stack.times.len() <= STACK_MAX as usize);
            assert!(curve.stack.blocks.len() <= 2 * STACK_MAX as usize + 2);
            for size in [0, 1, slots.into(), u64::MAX] {
                let rate = curve.hit_rate(size).unwrap();
                assert!((0.0..=1.0).contains(&rate), "{slots} slots, size {size}: {rate}");
            }
        }
    }

    #[test]
    fn a_bin_begins_where_the_one_before_ends() {
        for distance in (0..5_000).chain([1 << 33, (1 << 33) + 12_345]) {
            let bin = bin(distance);
            let ends = lower_end(bin)..=lower_end(bin + 1);
            assert!(ends.contains(&(distance as f64)), "{distance}: bin {bin}, {ends:?}");
        }
    }
}
