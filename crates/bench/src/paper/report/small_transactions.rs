//! The report on small transactions of SQLite, by where the database lies and how it is reached.

use anyhow::Result;

use crate::chart::{Bar, Chart, FLOOR, OURS, PEER, draw};
use crate::files::{Figure, Section, Verdict, conditions};
use crate::paper::Effort;
use crate::paper::small_transactions::{self, DATABASES, INSERTS, NODE_MIB, Timed, Way, Work};
use crate::spread::{Spread, middle, ratio};
use crate::stop::StopFlag;

/// The goal for the interposer, as a multiple of the time on the same mount without it: registering files
/// must not cost more than it saves.
const MOUNT_AT_MOST: f64 = 1.1;

/// Measures, and reports.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Section> {
    Ok(section(&small_transactions::measure(effort, stop)?, effort.rounds))
}

fn section(slices: &[Timed], rounds: usize) -> Section {
    let of = |way: Way, work: Work| -> Vec<f64> {
        slices.iter().filter(|it| it.way == way && it.work == work).map(|it| it.each_us).collect()
    };
    let paired = |way, other, work| {
        Spread::of(of(way, work).into_iter().zip(of(other, work)).map(|(one, other)| one / other))
    };
    let heads: String = Work::ALL.map(|work| format!(" {}, µs | × by the kernel |", work.name())).concat();
    let mut body = format!("| the database on |{heads}\n|---|{}\n", "--:|".repeat(2 * Work::ALL.len()));
    for way in Way::ALL {
        let cells = Work::ALL.map(|work| {
            let each = middle(Spread::of(of(way, work)), 0);
            format!(" {each} | {} |", ratio(paired(way, Way::AcceleratedMount, work)))
        });
        body += &format!("| {} |{}\n", way.name(), cells.concat());
    }
    body += "\nSQLite keeps a journal for each transaction, syncs it and deletes it, as it does by default. Most calls are \
             answered by the kernel in any case: names are looked up, files are made, locked, synced and deleted.\n";
    let promised = |work: Work| {
        let what = format!("SQLite, {}: {}", work.name(), Way::Interposed.name());
        let reached = paired(Way::Interposed, Way::AcceleratedMount, work)?;
        Some(Verdict::at_most(&what, MOUNT_AT_MOST, Way::AcceleratedMount.name(), reached))
    };
    let chart = |work: Work| Chart {
        title: format!("{}: microseconds (less is better)", work.name()),
        digits: 0,
        mark: None,
        bars: Way::ALL
            .into_iter()
            .filter_map(|way| {
                let colour = match way {
                    Way::Tmpfs => FLOOR,
                    Way::Disk => PEER,
                    _ => OURS,
                };
                Some(Bar { name: way.name().into(), colour, spread: Spread::of(of(way, work))? })
            })
            .collect(),
    };
    let notes = vec![
        ("Question", "what does the interposer cost files that are opened for a few calls?".to_owned()),
        ("Floor", "the same on tmpfs: what is left is SQLite's own work.".into()),
        (
            "Method",
            format!(
                "SQLite's shell; {INSERTS} inserts of a row, each a transaction, into one database; and {DATABASES} databases that are \
                 made, given a table and a row, and closed; the shell's start is included. {rounds} rounds, in each of which all \
                 ways take turns; medians, ratios paired by round with the smallest and the largest."
            ),
        ),
        conditions(&format!("two nodes of {NODE_MIB} MiB")),
    ];
    let drawing = Some(draw(&Work::ALL.map(chart)));
    let verdicts = Work::ALL.into_iter().filter_map(promised).collect();
    Section { figure: Figure::SmallTransactions, notes, body, verdicts, drawing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_written_beside_the_mount_by_the_kernel() {
        let each_us = |way| if way == Way::Interposed { 525.0 } else { 500.0 };
        let slice = |way, work| Timed { way, work, each_us: each_us(way) };
        let slices: Vec<Timed> =
            Way::ALL.into_iter().flat_map(|way| Work::ALL.map(|work| slice(way, work))).collect();
        let tables = section(&slices, 1).tables();
        let row = "| interposer, shm | 525 | 1.05 (1.05–1.05) | 525 | 1.05 (1.05–1.05) |";
        assert!(tables.contains(row), "{tables}");
        assert_eq!(tables.matches("| yes |").count(), Work::ALL.len(), "{tables}");
    }
}
