//! The keys of a run: few, and chosen to collide.

use std::collections::BTreeMap;

use farpool_fabric::sim::Random;
use farpool_txn::hash::{Entry, IndexLayout, KeyHash};

/// Candidates from which the keys are chosen: enough that some have equal hash bits in their entries.
const CANDIDATES: u32 = 2_500;
/// Keys of a run, before those with equal entries are added.
const KEYS: std::ops::Range<usize> = 3..20;
/// Keys that clients look up and never insert.
pub(super) const STRANGERS: usize = 2;

pub(super) struct Keys {
    keys: Vec<Vec<u8>>,
}

impl Keys {
    /// Chooses keys whose hashes first differ in late bits, and one or two groups of keys with equal entries.
    pub(super) fn choose(layout: &IndexLayout, random: &mut Random) -> Keys {
        let shape = layout.shape();
        let hash = |number: u32| KeyHash::of(shape.seed, &key(number, shape.key_bytes));
        let alike_bits = random.below(7);
        let wanted = random.bits();
        let mut by_entry: BTreeMap<(u64, u64), Vec<u32>> = BTreeMap::new();
        let mut alike = Vec::new();
        for number in 0..CANDIDATES {
            let hash = hash(number);
            let of_entry = by_entry.entry((layout.home(hash), Entry::new(hash, 0).word())).or_default();
            // No split separates these keys: one bucket has to hold them all.
            if of_entry.len() == shape.entries {
                continue;
            }
            of_entry.push(number);
            if (hash.0 ^ wanted).is_multiple_of(1 << alike_bits) {
                alike.push(number);
            }
        }
        random.shuffle(&mut alike);
        alike.truncate(KEYS.start + random.index(KEYS.len()));
        let pairs = by_entry.into_values().filter(|numbers| numbers.len() > 1);
        alike.extend(pairs.take(1 + random.index(2)).flatten());
        alike.sort_unstable();
        alike.dedup();
        random.shuffle(&mut alike);
        Keys { keys: alike.into_iter().map(|number| key(number, shape.key_bytes)).collect() }
    }

    pub(super) fn count(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn get(&self, index: usize) -> &[u8] {
        &self.keys[index]
    }
}

fn key(number: u32, bytes: usize) -> Vec<u8> {
    number.to_be_bytes().into_iter().chain((0..).map(|place| place ^ number as u8)).take(bytes).collect()
}
