//! Measures volumes in turn.
//!
//! R1. In each round every volume has one slice of every operation, one volume at a time. Each round begins
//!     with another volume.
//! R2. Ratios pair slices of the same round; the median of the ratios is shown.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::client::{Answer, Ask};
use super::volume::Volume;
use crate::progress::Tasks;
use crate::spread::Spread;
use crate::stop::check_stop;

/// An operation with its id.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Operation {
    /// How figures and promises refer to it.
    pub id: &'static str,
    /// The operation.
    pub ask: Ask,
}

/// The results of all rounds, by operation and volume.
#[derive(Debug, Default)]
pub struct Measured(BTreeMap<(&'static str, &'static str), Vec<Answer>>);

impl Measured {
    /// Adds the result of a slice.
    pub fn add(&mut self, operation: &'static str, volume: &'static str, answer: Answer) {
        self.0.entry((operation, volume)).or_default().push(answer);
    }

    /// A value over the rounds.
    pub fn spread(&self, operation: &str, volume: &str, figure: impl Fn(&Answer) -> f64) -> Option<Spread> {
        Spread::of(self.rounds(operation, volume)?.iter().map(figure))
    }

    /// The ratio of one volume's value to another's, round by round (R2).
    pub fn ratio(
        &self,
        operation: &str,
        volume: &str,
        other: &str,
        figure: impl Fn(&Answer) -> f64,
    ) -> Option<Spread> {
        let pairs = self.rounds(operation, volume)?.iter().zip(self.rounds(operation, other)?);
        Spread::of(pairs.map(|(one, other)| figure(one) / figure(other)))
    }

    /// About how many operations a volume has carried out, all of the same length.
    pub fn operations(&self, volume: &str, seconds: f64) -> f64 {
        let of_it = self.0.iter().filter(|((_, on), _)| *on == volume);
        of_it.flat_map(|(_, answers)| answers).map(|answer| answer.per_second * seconds).sum()
    }

    fn rounds(&self, operation: &str, volume: &str) -> Option<&[Answer]> {
        let found = self.0.iter().find(|((of, on), _)| *of == operation && *on == volume);
        found.map(|(_, answers)| answers.as_slice())
    }
}

/// Measures each volume alone.
pub fn one_by_one(
    volumes: &mut [Volume],
    operations: &[Operation],
    rounds: usize,
    progress: &mut Tasks,
    stop: &AtomicBool,
) -> Result<Measured> {
    let mut measured = Measured::default();
    for round in 0..rounds {
        for operation in operations {
            progress.step(&format!("round {}: {}", round + 1, operation.id));
            for turn in 0..volumes.len() {
                check_stop(stop)?;
                let count = volumes.len();
                let volume = &mut volumes[(turn + round) % count];
                volume.begin(&operation.ask)?;
                let answer = volume.end(&operation.ask, stop)?;
                measured.add(operation.id, volume.spec().id, answer);
                progress.done();
            }
        }
    }
    Ok(measured)
}

/// Measures all these volumes at the same time. Adds up their rates and averages their latencies.
pub fn together(volumes: &mut [Volume], ask: &Ask, stop: &AtomicBool) -> Result<Answer> {
    for volume in volumes.iter_mut() {
        volume.begin(ask)?;
    }
    let answers = volumes.iter_mut().map(|volume| volume.end(ask, stop)).collect::<Result<Vec<_>>>()?;
    let sum = |figure: fn(&Answer) -> f64| answers.iter().map(figure).sum::<f64>();
    let mean = |figure: fn(&Answer) -> f64| sum(figure) / answers.len().max(1) as f64;
    Ok(Answer {
        per_second: sum(|it| it.per_second),
        mib_s: sum(|it| it.mib_s),
        mean_us: mean(|it| it.mean_us),
        p50_us: mean(|it| it.p50_us),
        p99_us: mean(|it| it.p99_us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(p50_us: f64) -> Answer {
        Answer { per_second: 1e6 / p50_us, mean_us: p50_us, p50_us, p99_us: 2.0 * p50_us, mib_s: 1.0 }
    }

    #[test]
    fn ratios_pair_the_slices_of_a_round() {
        let mut measured = Measured::default();
        for (one, other) in [(10.0, 5.0), (30.0, 10.0), (100.0, 100.0)] {
            measured.add("read", "one", answer(one));
            measured.add("read", "other", answer(other));
        }
        let ratio = measured.ratio("read", "one", "other", |it| it.p50_us).unwrap();
        assert_eq!((ratio.least, ratio.middle, ratio.most), (1.0, 2.0, 3.0));
        assert_eq!(measured.spread("read", "one", |it| it.p50_us).unwrap().middle, 30.0);
        assert_eq!(measured.ratio("read", "one", "nobody", |it| it.p50_us), None);
        assert_eq!(measured.spread("write", "one", |it| it.p50_us), None);
        assert_eq!(measured.operations("other", 0.5).round(), 155_000.0);
    }
}
