//! The report on the cost of lending memory for the lender.

use anyhow::Result;

use crate::chart::{Bar, Chart, FLOOR, OURS, draw};
use crate::files::{Figure, Section, conditions};
use crate::paper::Effort;
use crate::paper::lending::{self, Slice, Use};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// Tables of this size fit in the server's buffers, as figure 13 requires.
const SCALE_MAX: f64 = 0.05;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    let scale = effort.scale.min(SCALE_MAX);
    let slices = lending::measure(&Effort { scale, ..effort.clone() }, stop)?;
    Ok(section(&slices, scale, effort))
}

fn section(slices: &[Slice], scale: f64, effort: &Effort<'_>) -> Section {
    let figures = |usage: Use, figure: fn(&Slice) -> f64| -> Vec<f64> {
        slices.iter().filter(|slice| slice.usage == usage).map(figure).collect()
    };
    let spread = |usage, figure| Spread::of(figures(usage, figure));
    let paired = |usage, figure| {
        let pairs = figures(usage, figure).into_iter().zip(figures(Use::Unused, figure));
        Spread::of(pairs.map(|(one, other)| one / other))
    };
    let mut body = String::from(
        "| | scans/s | × nobody | mean ms | p99 ms | p99 × nobody | borrower reads MiB/s |\n\
         |---|--:|--:|--:|--:|--:|--:|\n",
    );
    for usage in Use::ALL {
        body += &format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            usage.name(),
            middle(spread(usage, |it| it.per_second), 1),
            ratio(paired(usage, |it| it.per_second)),
            middle(spread(usage, |it| it.mean_ms), 2),
            middle(spread(usage, |it| it.p99_ms), 2),
            ratio(paired(usage, |it| it.p99_ms)),
            middle(spread(usage, |it| it.borrowed_mib_s), 0),
        );
    }
    let chart = |title: &str, digits, figure: fn(&Slice) -> f64| Chart {
        title: title.into(),
        digits,
        mark: None,
        bars: Use::ALL
            .into_iter()
            .filter_map(|usage| {
                let colour = if usage == Use::Unused { FLOOR } else { OURS };
                Some(Bar { name: usage.name().into(), colour, spread: spread(usage, figure)? })
            })
            .collect(),
    };
    let charts = [
        chart("scans per second on the lender (more is better)", 0, |it| it.per_second),
        chart("99 % of scans take at most, in ms (less is better)", 2, |it| it.p99_ms),
    ];
    let notes = vec![
        ("Question", "what does a machine lose whose idle memory another machine uses?".to_owned()),
        ("Floor", "the same server while nobody borrows.".into()),
        (
            "Method",
            format!(
                "the lender is the first processor (PostgreSQL, node), the borrower the second (mount, and fio with \
                 8 KiB random reads, O_DIRECT, one thread); two sessions scan ranges of 10,000 keys in tables that \
                 fit in memory; {} rounds of {} s each, ratios paired by round, medians with the smallest and the \
                 largest. Both processors share their caches and their memory's bandwidth, as two machines would not.",
                effort.rounds,
                effort.slice.as_secs_f64()
            ),
        ),
        conditions(&format!("TPC-H at scale factor {scale}")),
    ];
    let drawing = Some(draw(&charts));
    Section { figure: Figure::Sigmod13, notes, body, verdicts: Vec::new(), drawing }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    #[test]
    fn lending_is_reported_for_every_use_beside_none() {
        let slice = |round, usage| {
            let per_second = if usage == Use::Tcp { 90.0 } else { 100.0 };
            Slice { usage, round, per_second, mean_ms: 10.0, p99_ms: 20.0, borrowed_mib_s: 500.0 }
        };
        let (work_dir, farpool) = (Path::new("/"), Path::new("/"));
        let effort = Effort { rounds: 2, scale: 0.05, slice: Duration::from_secs(1), work_dir, farpool };
        let slices: Vec<Slice> = (0..2).flat_map(|round| Use::ALL.map(|usage| slice(round, usage))).collect();
        let section = section(&slices, 0.05, &effort);
        assert!(section.body.contains("| borrowed over tcp | 90.0 | 0.90 (0.90–0.90) |"), "{}", section.body);
        assert_eq!(section.body.lines().count(), 2 + Use::ALL.len());
    }
}
