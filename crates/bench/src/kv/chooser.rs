//! Which records a transaction works on.
//!
//! They follow Zipf's law, drawn by rejection-inversion (Hörmann and Derflinger, 1996): no table, one or two
//! draws, any exponent. The frequent records are spread over the whole table.

use crate::places::Random;

/// Most records of a table. [`SPREAD`] is a larger prime, so it has no factor in common with any number of
/// records.
pub const RECORDS_MAX: u64 = 1 << 31;
/// A prime. The *k*-th most frequent record has the number *k* times this prime, modulo the number of
/// records.
const SPREAD: u64 = 2_654_435_761;

/// Chooses records.
#[derive(Clone, Debug)]
pub struct Chooser {
    random: Random,
    records: u64,
    /// `None`: all records are equally frequent.
    zipf: Option<Zipf>,
}

/// The *k*-th most frequent record is drawn with a probability proportional to *k* to the power of minus the
/// exponent.
#[derive(Clone, Copy, Debug)]
struct Zipf {
    exponent: f64,
    records: f64,
    from: f64,
    until: f64,
    at_once: f64,
}

impl Chooser {
    /// `records` is from 1 to [`RECORDS_MAX`], `exponent` at least 0. Each seed gives another series.
    pub fn new(records: u64, exponent: f64, seed: u64) -> Chooser {
        let zipf = (exponent > 0.0).then(|| Zipf::new(records, exponent));
        Chooser { random: Random::new(seed), records, zipf }
    }

    /// How many records there are.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The generator, for other random choices.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// Draws `N` different records; there must be at least as many.
    #[inline]
    pub fn choose<const N: usize>(&mut self) -> [u64; N] {
        let mut chosen = [0; N];
        for place in 0..N {
            let mut number = self.one();
            while chosen[..place].contains(&number) {
                number = (number + 1) % self.records;
            }
            chosen[place] = number;
        }
        chosen
    }

    fn one(&mut self) -> u64 {
        let Some(zipf) = self.zipf else { return self.random.below(self.records) };
        let rank = zipf.rank(&mut self.random);
        rank * SPREAD % self.records
    }
}

impl Zipf {
    fn new(records: u64, exponent: f64) -> Zipf {
        let zipf = Zipf { exponent, records: records as f64, from: 0.0, until: 0.0, at_once: 0.0 };
        Zipf {
            from: zipf.integral(1.5) - 1.0,
            until: zipf.integral(zipf.records + 0.5),
            at_once: 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0)),
            ..zipf
        }
    }

    fn weight(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// Integral of the weight, up to a constant: (x^(1 - e) - 1) / (1 - e), or the logarithm if e is 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        log * quotient((1.0 - self.exponent) * log)
    }

    fn inverse(&self, x: f64) -> f64 {
        let scaled = (x * (1.0 - self.exponent)).max(-1.0);
        (x * if scaled.abs() > 1e-8 { scaled.ln_1p() / scaled } else { 1.0 - scaled / 2.0 }).exp()
    }

    /// A rank, counted from 1.
    fn rank(&self, random: &mut Random) -> u64 {
        loop {
            let area = self.until + random.fraction() * (self.from - self.until);
            let x = self.inverse(area);
            let rank = x.round().clamp(1.0, self.records);
            if rank - x <= self.at_once || area >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u64;
            }
        }
    }
}

/// (e^x - 1) / x, accurate also near 0.
fn quotient(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.exp_m1() / x } else { 1.0 + x / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_records_are_drawn_as_often_as_zipf_s_law_says() {
        const DRAWS: usize = 200_000;
        for exponent in [0.5, 0.99, 1.0, 2.0] {
            let mut chooser = Chooser::new(1000, exponent, 1);
            let mut counts = vec![0_u32; 1000];
            for _ in 0..DRAWS {
                counts[chooser.choose::<1>()[0] as usize] += 1;
            }
            let total: f64 = (1..=1000).map(|rank| f64::from(rank).powf(-exponent)).sum();
            for rank in 1..=3_u64 {
                let wanted = DRAWS as f64 * (rank as f64).powf(-exponent) / total;
                let found = f64::from(counts[(rank * SPREAD % 1000) as usize]);
                assert!((found / wanted - 1.0).abs() < 0.15, "{exponent}, {rank}: {found} of {wanted}");
            }
        }
    }

    #[test]
    fn without_skew_all_records_are_drawn_and_those_of_one_transaction_differ() {
        let mut chooser = Chooser::new(5, 0.0, 3);
        let mut counts = [0_u32; 5];
        for _ in 0..1000 {
            let mut chosen = chooser.choose::<4>();
            chosen.iter().for_each(|&number| counts[number as usize] += 1);
            chosen.sort_unstable();
            assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
        }
        assert!(counts.iter().all(|&count| count > 600));
        let mut skewed = Chooser::new(4, 3.0, 3);
        skewed.choose::<4>();
    }
}
