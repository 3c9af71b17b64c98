//! How often pages would be found if the cache had another size.
//!
//! Processes put hashes of some of the blocks that they read into a ring (`curve` says of which ones). The
//! keeper's thread draws the curve. Beside the ring it stores what the curve says of a few sizes, and which
//! pages are admitted (`admission`). A process that is overtaken by the ring, or a word that is read before
//! it was stored, makes the curve a little wrong.

use std::time::{Duration, Instant};

use crate::admission::Admission;
use crate::curve::Curve;
use crate::ground::Ground;
use crate::layout::{ADVICE_WORDS, Layout};
use crate::places::Place;

/// The sizes in question, in eighths of the present one.
const EIGHTHS: [u64; 4] = [4, 8, 16, 32];
/// Words of the advice: the present size in pages, the number of samples, the rates, and which pages are
/// admitted (`admission`).
const PAGES: usize = 0;
const SAMPLES: usize = 1;
const RATES: usize = 2;
pub(crate) const ADMISSION: usize = RATES + EIGHTHS.len();
const _: () = assert!(ADMISSION < ADVICE_WORDS);
/// With fewer reads since the last advice, the hit rate is left open: it would mostly be chance.
const ENOUGH_READS: u64 = 1_000;
/// A cache is full if less than this part of its memory is without a page. The keeper keeps less free.
const ROOM_DIVISOR: u64 = 16;
/// Samples that are needed for each sampled block of the largest size in question.
const NEEDED_PER_BLOCK: u64 = 3;
/// How often the advice is made anew.
const ADVISE_EVERY: Duration = Duration::from_secs(1);

/// The expected hit rates of caches that evict the page which was read the longest time ago (LRU).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// How many pages the cache has memory for.
    pub pages: u64,
    /// Weight of the samples behind the curve, in reads: at most 2^17, since old samples count less and less.
    /// With few of them it says little.
    pub samples: u64,
    /// With fewer samples, first reads of blocks, which no cache would find, weigh too much.
    pub needed_samples: u64,
    /// How many blocks are sampled in a cache of this size. The error is about one in the square root of it.
    pub sampled_pages: u64,
    /// For half of this size, this size, twice and four times as much.
    pub hit_rates: [f64; 4],
}

impl Advice {
    /// The sizes, in pages.
    pub fn sizes(&self) -> [u64; 4] {
        sizes(self.pages)
    }

    /// What the keeper has stored last. `None`: it has no samples yet, or the cache no memory.
    pub(crate) async fn load<G: Ground>(ground: &G, layout: &Layout) -> Option<Advice> {
        // Any process of the database can have changed these words.
        let pages = ground.load(layout.advice(PAGES)).await.min(layout.shape().slots.into());
        let samples = ground.load(layout.advice(SAMPLES)).await;
        let mut hit_rates = [0.0; EIGHTHS.len()];
        for (number, rate) in hit_rates.iter_mut().enumerate() {
            let stored = f64::from_bits(ground.load(layout.advice(RATES + number)).await);
            *rate = if stored.is_nan() { 0.0 } else { stored.clamp(0.0, 1.0) };
        }
        let largest = sizes(pages)[EIGHTHS.len() - 1];
        let needed_samples = NEEDED_PER_BLOCK * layout.sampled_of(largest);
        let sampled_pages = layout.sampled_of(pages);
        (samples > 0 && pages > 0).then_some(Advice {
            pages,
            samples,
            needed_samples,
            sampled_pages,
            hit_rates,
        })
    }
}

fn sizes(pages: u64) -> [u64; 4] {
    EIGHTHS.map(|eighths| pages * eighths / 8)
}

/// Notes that a sampled block is read.
pub(crate) async fn note_sample<G: Ground>(ground: &G, layout: &Layout, sample: u64) {
    let number = ground.add(layout.sampled(), 1).await;
    ground.store(layout.sample(number), sample).await;
}

/// Makes the advice, on the keeper's thread.
pub(crate) struct Adviser {
    curve: Curve,
    /// How many samples were drawn into the curve.
    drawn: u64,
    /// How many reads all places had counted by then.
    reads: Reads,
    advised: Instant,
    /// What callers were told last.
    admission: Admission,
}

/// How many blocks the database looked up, and how many it found.
#[derive(Clone, Copy, Default)]
struct Reads {
    hits: u64,
    all: u64,
}

impl Reads {
    /// Those since an earlier count.
    fn since(self, before: Reads) -> Reads {
        Reads { hits: self.hits.saturating_sub(before.hits), all: self.all.saturating_sub(before.all) }
    }

    /// The part of them that were hits, from 0 to 1. `None`: fewer than [`ENOUGH_READS`].
    fn hit_rate(self) -> Option<f64> {
        (self.all >= ENOUGH_READS).then(|| self.hits as f64 / self.all as f64)
    }
}

impl Adviser {
    /// For an index that is new: there are no samples in it.
    pub(crate) async fn new<G: Ground>(ground: &G, layout: &Layout, now: Instant) -> Adviser {
        let reads = reads_of_all(ground, layout).await;
        let curve = Curve::new(layout.shape().slots);
        Adviser { curve, drawn: 0, reads, advised: now, admission: Admission::All }
    }

    /// Draws new samples into the curve. Stores new advice once a second, and at once if samples were lost.
    /// `pages`: how many pages there are; `memory`: for how many there is memory.
    pub(crate) async fn go_on<G: Ground>(
        &mut self,
        ground: &G,
        layout: &Layout,
        (pages, memory): (u32, u32),
        now: Instant,
    ) {
        let lost = self.draw(ground, layout).await;
        if lost == 0 && now.saturating_duration_since(self.advised) < ADVISE_EVERY {
            return;
        }
        self.advised = now;
        let reads = reads_of_all(ground, layout).await;
        let new = reads.since(self.reads);
        self.curve.count_reads(new.all, lost);
        self.reads = reads;
        self.advise(ground, layout, memory.into()).await;
        let recent = self.curve.recent_hit_rate(memory.into());
        let expected = self.curve.hit_rate(memory.into()).filter(|_| self.curve.knows(memory.into()));
        let expected = expected.map(|rate| rate.max(recent));
        let is_full = u64::from(pages) * ROOM_DIVISOR >= u64::from(memory) * (ROOM_DIVISOR - 1);
        self.admission = self.admission.next(new.hit_rate(), expected, is_full);
        self.admission.store(ground, layout).await;
    }

    /// Returns how many samples were overtaken by others.
    async fn draw<G: Ground>(&mut self, ground: &G, layout: &Layout) -> u64 {
        let end = ground.load(layout.sampled()).await;
        let waiting = end.wrapping_sub(self.drawn);
        let there = waiting.min(layout.samples().into());
        for number in end.wrapping_sub(there)..end {
            self.curve.sample(ground.load(layout.sample(number)).await);
        }
        self.drawn = end;
        waiting - there
    }

    async fn advise<G: Ground>(&self, ground: &G, layout: &Layout, pages: u64) {
        for (number, size) in sizes(pages).into_iter().enumerate() {
            let rate = self.curve.hit_rate(size).unwrap_or(0.0);
            ground.store(layout.advice(RATES + number), rate.to_bits()).await;
        }
        ground.store(layout.advice(PAGES), pages).await;
        ground.store(layout.advice(SAMPLES), self.curve.samples()).await;
    }
}

/// What all places have counted, of all processes that had them.
async fn reads_of_all<G: Ground>(ground: &G, layout: &Layout) -> Reads {
    let mut sum = Reads::default();
    for number in 0..layout.shape().places {
        let (hits, misses) = Place::new(ground, number).reads().await;
        sum.hits = sum.hits.wrapping_add(hits);
        sum.all = sum.all.wrapping_add(hits).wrapping_add(misses);
    }
    sum
}
