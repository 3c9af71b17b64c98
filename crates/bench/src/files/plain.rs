//! Measures the figures about one file and one client, on volumes of every kind, and writes them down. The
//! catalog says what they compare.

use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::catalog::{Plain, Promise, STANDS, Shows, Stand, operation};
use super::client::{Answer, Opening};
use super::figure::Figure;
use super::rounds::{Measured, Operation, one_by_one};
use super::section::{Section, conditions};
use super::verdict::Verdict;
use super::volume::{Kind, Spec, Surroundings, Volume};
use super::{Effort, document_rounds};
use crate::chart::{self, Bar, Chart, FLOOR, OURS, PEER};
use crate::progress::Tasks;
use crate::spread::{middle, ratio};

/// A column's name, its digits after the decimal point, and its value.
type Column = (&'static str, usize, fn(&Answer) -> f64);

/// Whether [`measure`] gives this figure.
pub fn has(figure: Figure) -> bool {
    STANDS.iter().flat_map(|stand| stand.plains).any(|plain| plain.figure == figure)
}

/// Measures what the figures need, once for each stand, and returns the section of each figure.
pub fn measure(
    figures: &[Figure],
    around: &Surroundings<'_>,
    effort: &Effort,
    stop: &AtomicBool,
) -> Result<Vec<Section>> {
    let sections = STANDS.iter().map(|stand| stand.measure(figures, around, effort, stop));
    Ok(sections.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

impl Stand {
    fn measure(
        &self,
        figures: &[Figure],
        around: &Surroundings<'_>,
        effort: &Effort,
        stop: &AtomicBool,
    ) -> Result<Vec<Section>> {
        let wanted: Vec<&Plain> =
            self.plains.iter().filter(|plain| figures.contains(&plain.figure)).collect();
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut ids: Vec<&str> = wanted.iter().flat_map(|plain| plain.operations).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        let operations = ids.into_iter().map(|id| operation(id, effort.seconds));
        let operations: Vec<Operation> = operations.collect::<Result<_>>()?;
        let specs: Vec<&Spec> = self.volumes.iter().filter(|spec| spec.is_wanted(around)).collect();
        let mut progress = Tasks::start(specs.len() * (1 + effort.rounds * operations.len()));
        let mut volumes = Vec::new();
        for spec in specs {
            progress.step(&format!("starting and filling: {}", spec.name));
            volumes.push(spec.start(around)?);
            progress.done();
        }
        volumes.iter_mut().try_for_each(Volume::warm)?;
        let measured = one_by_one(&mut volumes, &operations, effort.rounds, &mut progress, stop)?;
        let remarks = volumes.iter_mut().map(|volume| {
            let operations = measured.operations(volume.spec().id, effort.seconds);
            volume.check(operations)
        });
        let remarks: Vec<Option<String>> = remarks.collect::<Result<_>>()?;
        let specs: Vec<&Spec> = volumes.iter().map(Volume::spec).collect();
        let section = |plain: &Plain| {
            let mut section = plain.section(&specs, &measured, around, effort);
            section.body.extend(remarks.iter().flatten().map(|remark| format!("\n{remark}\n")));
            section
        };
        Ok(wanted.into_iter().map(section).collect())
    }
}

fn opened(specs: &[&Spec]) -> &'static str {
    if specs.iter().all(|spec| spec.opening == Opening::Buffered) {
        "without O_DIRECT"
    } else {
        "with O_DIRECT"
    }
}

impl Plain {
    fn section(
        &self,
        specs: &[&Spec],
        measured: &Measured,
        around: &Surroundings<'_>,
        effort: &Effort,
    ) -> Section {
        let notes = vec![
            ("Question", self.question.to_owned()),
            ("Floor", self.floor.to_owned()),
            ("Method", format!("files opened {}; {}", opened(specs), document_rounds(effort))),
            conditions(&format!("a filled file of {} MiB on each", around.bytes >> 20)),
        ];
        let mut body = self.table(specs, measured);
        let has = |kind| specs.iter().any(|spec| spec.kind == kind);
        let no_disk = around.throttled.is_none() && has(Kind::Disk);
        let no_peers = !around.peers && has(Kind::Disk);
        for remark in [
            self.remark,
            no_disk.then_some("There was no throttled disk: it needs root and control groups."),
            no_peers.then_some("The peers were left out."),
        ]
        .into_iter()
        .flatten()
        {
            body += &format!("\n{remark}\n");
        }
        let (verdicts, drawing) = (self.verdicts(specs, measured), Some(self.drawing(specs, measured)));
        Section { figure: self.figure, notes, body, verdicts, drawing }
    }

    /// The value of which ratios are made.
    fn decides(&self) -> fn(&Answer) -> f64 {
        match self.shows {
            Shows::Throughput => |it| it.mib_s,
            Shows::Latency => |it| it.p50_us,
        }
    }

    fn decides_by(&self) -> &'static str {
        match self.shows {
            Shows::Throughput => "MiB/s",
            Shows::Latency => "p50",
        }
    }

    fn columns(&self) -> &'static [Column] {
        match self.shows {
            Shows::Throughput => &[("MiB/s", 0, |it| it.mib_s), ("op/s", 0, |it| it.per_second)],
            Shows::Latency => &[
                ("p50 µs", 1, |it| it.p50_us),
                ("p99 µs", 1, |it| it.p99_us),
                ("mean µs", 1, |it| it.mean_us),
            ],
        }
    }

    fn table(&self, specs: &[&Spec], measured: &Measured) -> String {
        let names: Vec<&str> = self.columns().iter().map(|(name, ..)| *name).collect();
        let besides: String = self.beside.iter().map(|(name, _)| format!(" × {name} |")).collect();
        let heads = self.operations.iter().map(|id| format!(" {id}: {} |{besides}", names.join(" | ")));
        let lines = "--:|".repeat(self.operations.len() * (names.len() + self.beside.len()));
        let mut text = format!("| |{}\n|---|{lines}\n", heads.collect::<String>());
        for spec in specs {
            text += &format!("| {} |", spec.name);
            for id in self.operations {
                for &(_, digits, figure) in self.columns() {
                    text += &format!(" {} |", middle(measured.spread(id, spec.id, figure), digits));
                }
                for (_, other) in self.beside {
                    text += &format!(" {} |", ratio(measured.ratio(id, spec.id, other, self.decides())));
                }
            }
            text.push('\n');
        }
        text
    }

    fn verdicts(&self, specs: &[&Spec], measured: &Measured) -> Vec<Verdict> {
        let name = |id: &str| specs.iter().find(|spec| spec.id == id).map_or("", |spec| spec.name);
        let verdict = |promise: &Promise| {
            let &Promise { operation, volume, than, times, aim } = promise;
            let reached = measured.ratio(operation, volume, than, self.decides())?;
            let what = format!("{operation}, {}: {}", self.decides_by(), name(volume));
            let verdict = match self.shows {
                Shows::Throughput => Verdict::at_least(&what, times, name(than), reached),
                Shows::Latency => Verdict::at_most(&what, times, name(than), reached),
            };
            Some(verdict.aiming_at(aim))
        };
        self.promises.iter().filter_map(verdict).collect()
    }

    fn drawing(&self, specs: &[&Spec], measured: &Measured) -> String {
        let (what, digits) = match self.shows {
            Shows::Throughput => ("MiB/s (more is better)", 0),
            Shows::Latency => ("median latency in µs (less is better)", 1),
        };
        let chart = |id: &&'static str| {
            let bar = |spec: &&Spec| {
                let colour = match spec.kind {
                    Kind::Floor | Kind::PingPong => FLOOR,
                    Kind::Far { .. } | Kind::Cached { .. } => OURS,
                    _ => PEER,
                };
                let spread = measured.spread(id, spec.id, self.decides())?;
                Some(Bar { name: spec.name.into(), colour, spread })
            };
            Chart {
                title: format!("{id}: {what}"),
                digits,
                mark: None,
                bars: specs.iter().filter_map(bar).collect(),
            }
        };
        chart::draw(&self.operations.iter().map(chart).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::verdict::MISSED;

    /// The first volume of a stand takes 10 µs, the others `times` as long.
    fn measured(stand: &Stand, times: f64) -> Measured {
        let mut measured = Measured::default();
        for round in 1..=3 {
            for (place, spec) in stand.volumes.iter().enumerate() {
                let p50_us = 10.0 * f64::from(round) * if place == 0 { 1.0 } else { times };
                let (per_second, mib_s) = (1e6 / p50_us, 1e4 / p50_us);
                let answer = Answer { per_second, mean_us: p50_us, p50_us, p99_us: 50.0, mib_s };
                for operation in stand.plains.iter().flat_map(|plain| plain.operations) {
                    measured.add(operation, spec.id, answer);
                }
            }
        }
        measured
    }

    fn section(stand: &Stand, plain: &Plain, times: f64) -> Section {
        let specs: Vec<&Spec> = stand.volumes.iter().collect();
        let path = std::path::Path::new("/");
        let around = Surroundings { farpool: path, disk: path, throttled: None, peers: true, bytes: 1 << 29 };
        let effort = Effort { rounds: 3, seconds: 0.3 };
        plain.section(&specs, &measured(stand, times), &around, &effort)
    }

    #[test]
    fn every_volume_has_a_row_and_a_bar_and_rows_are_equally_long() {
        for stand in STANDS {
            for plain in stand.plains {
                let section = section(stand, plain, 1.4);
                let rows = section.body.lines().take_while(|line| line.starts_with('|'));
                let columns: Vec<usize> = rows.map(|line| line.matches('|').count()).collect();
                assert!(columns.iter().all(|count| *count == columns[0]), "{}", section.body);
                let drawing = section.drawing.unwrap();
                for spec in stand.volumes {
                    assert!(section.body.contains(&format!("| {} |", spec.name)), "{}", section.body);
                    assert!(drawing.contains(&format!(">{}<", spec.name)), "{}", spec.name);
                }
                let body = &section.body;
                assert!(body.contains("1.40 (1.40–1.40)") || body.contains("0.71 (0.71–0.71)"), "{body}");
            }
        }
    }

    #[test]
    fn losses_are_marked() {
        for stand in STANDS {
            for plain in stand.plains {
                let losses = |times| {
                    let tables = section(stand, plain, times).tables();
                    ["**no**", MISSED].map(|lost| tables.matches(lost).count()).iter().sum()
                };
                // Volumes compared with another one than the first are as fast as that one here.
                let expected = match plain.figure {
                    Figure::Damon2 => (0, 2),
                    Figure::Damon3 => (2, 5),
                    Figure::Interposer | Figure::CachedPage => (1, 1),
                    _ => (0, 0),
                };
                assert_eq!((losses(1.4), losses(1.6)), expected, "{}", plain.figure);
            }
        }
    }

    #[test]
    fn missing_throttled_disk_is_mentioned_in_figures_that_would_show_it() {
        for stand in STANDS {
            for plain in stand.plains {
                let says = section(stand, plain, 1.0).body.contains("no throttled disk");
                let shows_it = !matches!(plain.figure, Figure::Interposer | Figure::CachedPage);
                assert_eq!(says, shows_it, "{}", plain.figure);
            }
        }
    }
}
