//! The results of the rounds.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::lines::Line;
use crate::machine::Origin;
use crate::spread::Spread;

/// The reports of all rounds, by command and arguments of the line.
#[derive(Debug, Default)]
pub struct Results {
    reports: BTreeMap<(&'static str, &'static str), Vec<Value>>,
}

impl Results {
    /// Adds a round's report.
    pub fn add(&mut self, line: &Line, report: Value) -> Result<()> {
        let rate = report[line.kind.rate()].as_f64();
        rate.with_context(|| format!("the report of {} has no rate", line.name))?;
        self.reports.entry((line.kind.command(), line.args)).or_default().push(report);
        Ok(())
    }

    /// A value of a line over the rounds, by the JSON pointer of its field; `None` if no report has it.
    pub fn spread(&self, line: &Line, pointer: &str) -> Option<Spread> {
        let reports = self.reports.get(&(line.kind.command(), line.args))?;
        Spread::of(reports.iter().filter_map(|report| report.pointer(pointer)?.as_f64()))
    }

    /// The rate of a line over the rounds.
    pub fn rate(&self, line: &Line) -> Option<Spread> {
        self.spread(line, &format!("/{}", line.kind.rate()))
    }

    /// A text field of a line's first report.
    pub fn word(&self, line: &Line, pointer: &str) -> Option<&str> {
        self.reports.get(&(line.kind.command(), line.args))?.first()?.pointer(pointer)?.as_str()
    }

    /// The machine, and the commit if the build knew it.
    pub fn origin(&self) -> Result<Origin> {
        let report = self.reports.values().flatten().next().context("nothing was measured")?;
        serde_json::from_value(report.clone()).context("the report names no machine")
    }
}
