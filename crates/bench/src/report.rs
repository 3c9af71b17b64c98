//! The results of a measurement: as JSON for programs, as lines for people.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::machine::Origin;
use crate::options::{IoOp, IoOptions, Pattern};
use crate::pages::Pages;
use crate::run::Slice;
use crate::spread::many;
use crate::tally::{Tally, median};

/// The results of a measurement. Names and meanings of the fields are stable; more fields may be added.
///
/// A latency is that of a doorbell: of one operation, or of one batch. Short doorbells are timed
/// `timed_together` at a time; a latency is then their mean.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct IoReport {
    /// Operations per second of all threads; the median over the slices.
    pub iops: f64,
    /// Bytes moved per second, likewise.
    pub mib_s: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// 99.9th percentile of the latency.
    pub p999_us: f64,
    /// Page size of the region memory; `null` if it belongs to another host or user.
    pub page_size_kib: Option<u64>,
    /// The floor, measured in the same run.
    pub floor: Option<FloorReport>,
    /// Ratio of `p50_us` to that of the floor; the median over pairs of slices.
    pub ratio_p50: Option<f64>,
    /// Ratio of `iops` to that of the floor, likewise.
    pub ratio_iops: Option<f64>,
    /// The transport.
    pub transport: String,
    /// The operation.
    pub op: IoOp,
    /// Where operations went.
    pub pattern: Pattern,
    /// Bytes per operation.
    pub block_bytes: usize,
    /// Doorbells in flight per thread.
    pub depth: usize,
    /// Operations per doorbell.
    pub batch: usize,
    /// Threads, each with an endpoint.
    pub threads: usize,
    /// Size of the far memory that operations were spread over.
    pub footprint_bytes: u64,
    /// How long operations were measured.
    pub seconds: f64,
    /// Number of slices of operations.
    pub slices: usize,
    /// Doorbells between two readings of the clock.
    pub timed_together: usize,
    /// Smallest and largest of the ratios of `p50_us`.
    pub ratio_p50_range: Option<(f64, f64)>,
    /// Smallest and largest of the ratios of `iops`.
    pub ratio_iops_range: Option<(f64, f64)>,
    /// Operations whose effect was checked; one wrong byte and there is no report.
    pub checked: u64,
    /// The machine and the commit.
    #[serde(flatten)]
    pub origin: Origin,
}

/// The results of the floor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FloorReport {
    /// What kind of floor it is.
    pub kind: String,
    /// Median latency of its doorbells.
    pub p50_us: f64,
    /// Its operations per second; the median over the slices.
    pub iops: f64,
}

/// All slices of a measurement, with the threads' results joined.
pub struct Measured {
    all: Tally,
    floor: Option<Tally>,
    rates: Vec<f64>,
    floor_rates: Vec<f64>,
    p50_ratios: Vec<f64>,
    rate_ratios: Vec<f64>,
}

impl Measured {
    /// Adds up, slice by slice, what all threads measured. `threads` gives the slices of each.
    pub fn of<'a>(threads: impl Iterator<Item = &'a [Slice]> + Clone, has_floor: bool) -> Result<Self> {
        let floor = has_floor.then(Tally::new).transpose()?;
        let (rates, floor_rates, p50_ratios, rate_ratios) = Default::default();
        let mut measured =
            Measured { all: Tally::new()?, floor, rates, floor_rates, p50_ratios, rate_ratios };
        let slices = threads.clone().map(<[Slice]>::len).min().unwrap_or(0);
        for number in 0..slices {
            measured.add(threads.clone().map(|slices| &slices[number]))?;
        }
        ensure!(!measured.all.is_empty(), "nothing was measured: give more --seconds");
        Ok(measured)
    }

    fn add<'a>(&mut self, threads: impl Iterator<Item = &'a Slice>) -> Result<()> {
        let (mut operation, mut floor) = (Tally::new()?, Tally::new()?);
        for slice in threads {
            operation.join(&slice.operation)?;
            if let Some(tally) = &slice.floor {
                floor.join(tally)?;
            }
        }
        self.rates.push(operation.per_second);
        self.all.join(&operation)?;
        if let Some(all) = &mut self.floor {
            ensure!(!floor.is_empty(), "the floor measured nothing: give more --seconds");
            all.join(&floor)?;
            self.floor_rates.push(floor.per_second);
            self.p50_ratios.push(operation.quantile_us(0.5) / floor.quantile_us(0.5));
            self.rate_ratios.push(operation.per_second / floor.per_second);
        }
        Ok(())
    }
}

impl IoReport {
    /// Computes the report.
    pub fn new(
        options: &IoOptions,
        measured: &Measured,
        floor_kind: Option<&'static str>,
        pages: Option<Pages>,
        checked: u64,
    ) -> Self {
        let iops = median(measured.rates.iter().copied()).unwrap_or(0.0);
        let floor = floor_kind.zip(measured.floor.as_ref()).map(|(kind, tally)| FloorReport {
            kind: kind.to_owned(),
            p50_us: tally.quantile_us(0.5),
            iops: median(measured.floor_rates.iter().copied()).unwrap_or(0.0),
        });
        IoReport {
            iops,
            mib_s: iops * options.block_bytes as f64 / f64::from(1 << 20),
            p50_us: measured.all.quantile_us(0.5),
            p99_us: measured.all.quantile_us(0.99),
            p999_us: measured.all.quantile_us(0.999),
            page_size_kib: pages.map(Pages::kib),
            floor,
            ratio_p50: median(measured.p50_ratios.iter().copied()),
            ratio_iops: median(measured.rate_ratios.iter().copied()),
            transport: options.transport.to_string(),
            op: options.op,
            pattern: options.pattern,
            block_bytes: options.block_bytes,
            depth: options.depth,
            batch: options.batch,
            threads: options.threads,
            footprint_bytes: options.footprint_bytes,
            seconds: options.duration.as_secs_f64(),
            slices: measured.rates.len(),
            timed_together: options.timed_together(),
            ratio_p50_range: range(&measured.p50_ratios),
            ratio_iops_range: range(&measured.rate_ratios),
            checked,
            origin: Origin::this(),
        }
    }
}

/// The report for people.
impl fmt::Display for IoReport {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { transport, op, pattern, depth, batch, threads, seconds, .. } = self;
        let mib = self.footprint_bytes >> 20;
        let pages =
            self.page_size_kib.map_or("pages of unknown size".into(), |kib| format!("{kib} KiB pages"));
        let per = if *batch > 1 { format!(", {batch} per doorbell") } else { String::new() };
        writeln!(
            text,
            "{transport} {op}, {pattern}, {} B, depth {depth}{per}, {}",
            self.block_bytes,
            many(*threads, "thread")
        )?;
        writeln!(text, "over {mib} MiB in {pages}; {seconds} s in {} slices", self.slices)?;
        let kind = self.floor.as_ref().map_or("", |floor| floor.kind.as_str());
        writeln!(
            text,
            "{:12}{:>16}{:>16}  {:5}  {kind}",
            "",
            "measured",
            column(kind, "floor"),
            column(kind, "ratio")
        )?;
        let floor = |value: fn(&FloorReport) -> f64| self.floor.as_ref().map(value);
        row(text, "op/s", self.iops, floor(|floor| floor.iops), self.ratio_iops, self.ratio_iops_range, 0)?;
        row(text, "MiB/s", self.mib_s, None, None, None, 0)?;
        row(
            text,
            "p50, us",
            self.p50_us,
            floor(|floor| floor.p50_us),
            self.ratio_p50,
            self.ratio_p50_range,
            3,
        )?;
        row(text, "p99, us", self.p99_us, None, None, None, 3)?;
        row(text, "p99.9, us", self.p999_us, None, None, None, 3)?;
        let times = match (self.timed_together, *batch) {
            (1, 1) => "times are of single operations".to_owned(),
            (1, _) => "times are of whole batches".to_owned(),
            (group, 1) => format!("times are means of {group} operations in a row"),
            (group, _) => format!("times are of whole batches, means of {group} in a row"),
        };
        writeln!(text, "{times}; {} operations checked", self.checked)?;
        write!(text, "{}", self.origin)
    }
}

fn column<'a>(kind: &str, title: &'a str) -> &'a str {
    if kind.is_empty() { "" } else { title }
}

fn row(
    text: &mut fmt::Formatter<'_>,
    name: &str,
    value: f64,
    floor: Option<f64>,
    ratio: Option<f64>,
    range: Option<(f64, f64)>,
    digits: usize,
) -> fmt::Result {
    write!(text, "{name:12}{value:>16.digits$}")?;
    if let (Some(floor), Some(ratio), Some((least, most))) = (floor, ratio, range) {
        write!(text, "{floor:>16.digits$}  {ratio:5.2}  {least:.2} to {most:.2} over the pairs")?;
    }
    writeln!(text)
}

fn range(values: &[f64]) -> Option<(f64, f64)> {
    let least = values.iter().copied().reduce(f64::min)?;
    let most = values.iter().copied().reduce(f64::max)?;
    Some((least, most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::small;
    use farpool_fabric::TransportChoice;
    use std::time::Duration;

    fn tally(each: Duration, operations: u64) -> Tally {
        let mut tally = Tally::new().unwrap();
        tally.record(each, 1);
        tally.finish(operations, Duration::from_secs(1));
        tally
    }

    fn report(floor: bool) -> IoReport {
        let micros = Duration::from_micros;
        let slice = |us, operations| Slice {
            operation: tally(micros(us), operations),
            floor: floor.then(|| tally(micros(10), 100)),
        };
        let slices = [slice(20, 50), slice(30, 40), slice(10, 100)];
        let measured = Measured::of([slices.as_slice()].into_iter(), floor).unwrap();
        let options = small(TransportChoice::Tcp, IoOp::Read);
        IoReport::new(&options, &measured, floor.then_some("a floor"), Some(Pages::Small), 3)
    }

    #[test]
    fn json_has_the_promised_fields_and_ratios_are_medians_of_pairs() {
        let json = serde_json::to_value(report(true)).unwrap();
        for field in ["iops", "mib_s", "p50_us", "p99_us", "p999_us", "ratio_p50", "ratio_iops"] {
            assert!(json[field].is_f64(), "{field}: {json}");
        }
        assert_eq!(json["page_size_kib"], 4);
        assert_eq!(json["floor"]["kind"], "a floor");
        assert!(json["floor"]["p50_us"].is_f64() && json["floor"]["iops"].is_f64());
        assert!((json["ratio_p50"].as_f64().unwrap() - 2.0).abs() < 0.01, "{json}");
        assert!((json["ratio_iops"].as_f64().unwrap() - 0.5).abs() < 0.01, "{json}");
    }

    #[test]
    fn without_a_floor_there_are_no_ratios() {
        let json = serde_json::to_value(report(false)).unwrap();
        for field in ["floor", "ratio_p50", "ratio_iops"] {
            assert!(json[field].is_null() && json.as_object().unwrap().contains_key(field), "{field}");
        }
        assert!(!report(false).to_string().contains("floor"));
    }

    #[test]
    fn lines_name_the_measurement_the_pages_and_the_machine() {
        let lines = report(true).to_string();
        for part in ["tcp read, random, 8192 B", "4 KiB pages", "floor", "a floor", "Linux", "2.00"] {
            assert!(lines.contains(part), "no `{part}` in {lines}");
        }
    }
}
