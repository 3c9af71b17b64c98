//! What the rounds gave.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::lines::Line;
use crate::machine::Machine;
use crate::spread::Spread;

/// Reports of all rounds, by the lines' commands.
#[derive(Debug, Default)]
pub struct Results {
    reports: BTreeMap<(&'static str, &'static str), Vec<Value>>,
}

impl Results {
    /// Adds a round's report.
    pub fn add(&mut self, line: &Line, report: Value) -> Result<()> {
        let rate = report[line.kind.rate()].as_f64();
        rate.with_context(|| format!("{} said nothing of its speed", line.name))?;
        self.reports.entry((line.kind.command(), line.args)).or_default().push(report);
        Ok(())
    }

    /// A figure of a line over the rounds, by where its report has it; `None`: it has none.
    pub fn spread(&self, line: &Line, pointer: &str) -> Option<Spread> {
        let reports = self.reports.get(&(line.kind.command(), line.args))?;
        Spread::of(reports.iter().filter_map(|report| report.pointer(pointer)?.as_f64()))
    }

    /// How often a line was done per second.
    pub fn rate(&self, line: &Line) -> Option<Spread> {
        self.spread(line, &format!("/{}", line.kind.rate()))
    }

    /// A word of a line's first report.
    pub fn word(&self, line: &Line, pointer: &str) -> Option<&str> {
        self.reports.get(&(line.kind.command(), line.args))?.first()?.pointer(pointer)?.as_str()
    }

    /// The machine, and the commit if the build was told.
    pub fn origin(&self) -> Result<(Machine, Option<String>)> {
        let report = self.reports.values().flatten().next().context("nothing was measured")?;
        let machine = serde_json::from_value(report["machine"].clone());
        Ok((
            machine.context("a report says what machine it is of")?,
            report["commit"].as_str().map(str::to_owned),
        ))
    }
}
