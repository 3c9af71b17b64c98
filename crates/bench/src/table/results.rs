//! The results of the rounds, and whether promises were met.

use std::collections::BTreeMap;

use super::lines::Target;
use crate::report::{FloorReport, IoReport};
use crate::spread::Spread;

/// One measurement of a line or a peer.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Operations per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_s: f64,
    /// Median latency, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency, in microseconds.
    pub p99_us: f64,
    /// The floor; only of the fabric's own lines.
    pub floor: Option<FloorReport>,
    /// Ratio of the median latency to the floor's; only of the fabric's own lines.
    pub ratio_p50: Option<f64>,
    /// Ratio of the rate to the floor's; only of the fabric's own lines.
    pub ratio_iops: Option<f64>,
}

impl From<IoReport> for Figures {
    fn from(report: IoReport) -> Self {
        let IoReport { iops, mib_s, p50_us, p99_us, floor, ratio_p50, ratio_iops, .. } = report;
        Figures { iops, mib_s, p50_us, p99_us, floor, ratio_p50, ratio_iops }
    }
}

/// The measurements of each line or peer, round by round; all have the same number.
#[derive(Clone, Debug, Default)]
pub struct Results(pub BTreeMap<&'static str, Vec<Figures>>);

/// A promise and what was reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What was promised, in words.
    pub promise: String,
    /// The value that decides.
    pub reached: String,
    /// Whether the promise was met.
    pub met: bool,
}

impl Results {
    /// Adds a round's measurement.
    pub fn add(&mut self, id: &'static str, figures: Figures) {
        self.0.entry(id).or_default().push(figures);
    }

    /// A value of a line over the rounds.
    pub fn spread(&self, id: &str, figure: impl Fn(&Figures) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.0.get(id)?.iter().filter_map(figure))
    }

    /// The ratio of a value of two lines, round by round.
    fn paired(&self, id: &str, other: &str, figure: impl Fn(&Figures) -> f64) -> Option<Spread> {
        let pairs = self.0.get(id)?.iter().zip(self.0.get(other)?);
        Spread::of(pairs.map(|(one, other)| figure(one) / figure(other)))
    }

    /// Whether a line meets a promise; `None` if it was not measured.
    pub fn verdict(&self, id: &str, target: Target) -> Option<Verdict> {
        Some(match target {
            Target::P50ByFloor(most) => {
                let ratio = self.spread(id, |figures| figures.ratio_p50)?.middle;
                verdict(format!("p50 ≤ {most} × floor"), format!("{ratio:.2} ×"), ratio <= most)
            }
            Target::RateByFloor(least) => {
                let ratio = self.spread(id, |figures| figures.ratio_iops)?.middle;
                verdict(format!("op/s ≥ {least} × floor"), format!("{ratio:.2} ×"), ratio >= least)
            }
            Target::RateBy(other, least) => {
                let ratio = self.paired(id, other, |figures| figures.iops)?.middle;
                verdict(format!("op/s ≥ {least} × {other}"), format!("{ratio:.2} ×"), ratio >= least)
            }
            Target::Rate(least) => {
                let rate = self.spread(id, |figures| Some(figures.iops))?.middle;
                verdict(format!("≥ {:.1} M op/s", least / 1e6), format!("{:.2} M", rate / 1e6), rate >= least)
            }
            Target::AheadOf(peers) => {
                let ratios =
                    peers.iter().map(|peer| Some((self.paired(id, peer, |it| it.p50_us)?.middle, *peer)));
                let ratios: Vec<(f64, &str)> = ratios.collect::<Option<_>>()?;
                let &(ratio, nearest) = ratios.iter().max_by(|one, other| one.0.total_cmp(&other.0))?;
                verdict("p50 below every peer's".into(), format!("{ratio:.2} × {nearest}"), ratio < 1.0)
            }
        })
    }
}

fn verdict(promise: String, reached: String, met: bool) -> Verdict {
    Verdict { promise, reached, met }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A measurement with a floor.
    pub fn figures(iops: f64, p50_us: f64, ratio: f64) -> Figures {
        let floor = FloorReport { kind: "a floor".into(), p50_us: p50_us / ratio, iops: iops * ratio };
        Figures {
            iops,
            mib_s: iops / 128.0,
            p50_us,
            p99_us: 2.0 * p50_us,
            floor: Some(floor),
            ratio_p50: Some(ratio),
            ratio_iops: Some(1.0 / ratio),
        }
    }

    #[test]
    fn promises_are_judged_by_the_median_of_paired_rounds() {
        let mut results = Results::default();
        for (ours, peer) in [(200.0, 100.0), (100.0, 100.0), (300.0, 100.0)] {
            results.add("ours", figures(ours, 1e6 / ours, 1.2));
            results.add("peer", figures(peer, 1e6 / peer, 1.0));
        }
        let met = |target| results.verdict("ours", target).unwrap().met;
        assert!(met(Target::RateBy("peer", 2.0)) && !met(Target::RateBy("peer", 2.1)));
        assert!(met(Target::P50ByFloor(1.2)) && !met(Target::P50ByFloor(1.1)));
        assert!(met(Target::RateByFloor(0.8)) && !met(Target::RateByFloor(0.9)));
        assert!(met(Target::Rate(200.0)) && !met(Target::Rate(201.0)));
        assert!(met(Target::AheadOf(&["peer"])) && !met(Target::AheadOf(&["peer", "ours"])));
        assert_eq!(results.verdict("ours", Target::RateBy("nobody", 1.0)), None);
    }
}
