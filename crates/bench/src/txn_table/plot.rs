//! The plot: how many transactions per second each line reached, one chart per kind and transport.

use super::lines::{Kind, LINES, Line};
use super::results::Results;
use crate::chart::{self, Bar, Chart, OURS};

/// Title, which lines it has, and the bars' unit.
type Panel = (&'static str, Kind, bool, f64);

const PANELS: [Panel; 4] = [
    ("Oracle over shared memory: million timestamp transactions per second", Kind::Oracle, false, 1e6),
    ("Oracle over TCP: thousand timestamp transactions per second", Kind::Oracle, true, 1e3),
    ("Records over shared memory: thousand transactions per second", Kind::Kv, false, 1e3),
    ("Records over TCP: thousand transactions per second", Kind::Kv, true, 1e3),
];

/// An SVG of all lines but the floors.
pub fn draw(results: &Results) -> String {
    let charts = PANELS.map(|(title, kind, tcp, unit)| {
        let lines =
            LINES.iter().filter(|line| line.kind == kind && line.args.contains("--transport tcp") == tcp);
        let bar = |line: &Line| {
            Some(Bar { name: line.name.into(), colour: OURS, spread: results.rate(line)?.in_units_of(unit) })
        };
        Chart { title: title.into(), digits: 2, mark: None, bars: lines.filter_map(bar).collect() }
    });
    chart::draw(&charts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_line_but_a_floor_has_a_bar_in_its_unit() {
        let mut results = Results::default();
        for line in LINES {
            let mut report = json!({});
            report[line.kind.rate()] = json!(12_340.0);
            results.add(line, report).unwrap();
        }
        let svg = draw(&results);
        let shown = LINES.iter().filter(|line| line.kind != Kind::Floor).count();
        assert_eq!(svg.matches("<rect x=").count(), shown);
        assert!(svg.contains(">12.34<") && svg.contains(">0.01<"), "thousands and millions");
    }
}
