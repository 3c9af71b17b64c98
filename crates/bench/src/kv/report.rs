//! The results of a measurement of transactions on records: as JSON for programs, as lines for people.

use std::fmt;

use anyhow::{Context, Result, ensure};
use farpool_txn::Traffic;
use serde::{Deserialize, Serialize};

use super::content::RECORD_BYTES;
use super::options::{KvIndex, KvMix, KvOptions};
use super::run::Thread;
use crate::machine::Origin;
use crate::slices::SlicePlan;
use crate::spread::{grouped, many};
use crate::tally::Tally;

/// Everything that was measured.
pub struct Measured {
    /// The results of each thread.
    pub threads: Vec<Thread>,
    /// The division of time.
    pub plan: SlicePlan,
    /// The traffic of the publisher and the collector, if it was counted.
    pub service_traffic: Option<Traffic>,
}

/// The results of a measurement. Names and meanings of the fields are stable; more fields may be added.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KvReport {
    /// Transactions per second of all threads; the median over the slices.
    pub trx_s: f64,
    /// Slowest and fastest slice.
    pub trx_s_range: (f64, f64),
    /// Time of a thread per transaction: the number of threads divided by `trx_s`.
    pub ns_per_trx: f64,
    /// Processor time of a thread per transaction. During the rest of `ns_per_trx` it waited, or was not
    /// scheduled.
    pub processor_ns_per_trx: f64,
    /// Median latency, from the start of the first attempt to the acknowledgement.
    pub p50_us: f64,
    /// 99th percentile of the latency.
    pub p99_us: f64,
    /// Committed transactions, the warm-up's included.
    pub committed: u64,
    /// How often a transaction was started again.
    pub aborted: u64,
    /// Operations on far memory by the threads, per committed transaction.
    pub operations_per_trx: f64,
    /// Bytes that they move, without the transport's headers.
    pub bytes_per_trx: f64,
    /// Operations by the publisher and the collector, per committed transaction; null by key: the
    /// database's own threads are not counted.
    pub service_operations_per_trx: Option<f64>,
    /// Bytes that they move.
    pub service_bytes_per_trx: Option<f64>,
    /// What each transaction did.
    pub mix: KvMix,
    /// How records were found; null: by number.
    pub index: Option<KvIndex>,
    /// How many records there were.
    pub records: u64,
    /// Bytes of data per record.
    pub record_bytes: usize,
    /// Far memory in all, with the oracle, the logs and the unused ends of regions.
    pub far_bytes: u64,
    /// Exponent of Zipf's law.
    pub skew: f64,
    /// The transport.
    pub transport: String,
    /// Nodes over which the records were spread.
    pub nodes: usize,
    /// Whether threads announced their snapshots.
    pub announce: bool,
    /// Threads in a closed loop.
    pub threads: usize,
    /// Transactions in flight per thread.
    pub in_flight: usize,
    /// How long the measurement took.
    pub seconds: f64,
    /// How long transactions ran before the measurement.
    pub warm_up_seconds: f64,
    /// Number of slices.
    pub slices: usize,
    /// The machine and the commit.
    #[serde(flatten)]
    pub origin: Origin,
}

impl KvReport {
    /// Computes the report.
    pub fn new(options: &KvOptions, far_bytes: u64, measured: &Measured) -> Result<Self> {
        let Measured { threads, plan, service_traffic } = measured;
        let courses = || threads.iter().map(|thread| &thread.course);
        let mut latencies = Tally::new()?;
        for course in courses() {
            latencies.join(&course.latencies)?;
        }
        let rates = plan.rates(courses().map(|course| course.slices.as_slice()));
        let rates = rates.context("nothing was measured")?;
        ensure!(rates.middle > 0.0, "nothing was measured: give more --seconds");
        let committed: u64 = courses().map(|course| course.committed).sum();
        let traffic = threads.iter().fold(Traffic::default(), |sum, thread| sum + thread.traffic);
        let each = |of: u64| of as f64 / committed as f64;
        Ok(KvReport {
            trx_s: rates.middle,
            trx_s_range: (rates.least, rates.most),
            ns_per_trx: options.threads as f64 * 1e9 / rates.middle,
            processor_ns_per_trx: each(threads.iter().map(|thread| thread.processor.as_nanos() as u64).sum()),
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
            committed,
            aborted: courses().map(|course| course.aborted).sum(),
            operations_per_trx: each(traffic.operations),
            bytes_per_trx: each(traffic.bytes),
            service_operations_per_trx: service_traffic.map(|traffic| each(traffic.operations)),
            service_bytes_per_trx: service_traffic.map(|traffic| each(traffic.bytes)),
            mix: options.mix,
            index: options.index,
            records: options.records,
            record_bytes: RECORD_BYTES,
            far_bytes,
            skew: options.skew,
            transport: options.transport.to_string(),
            nodes: options.nodes,
            announce: options.announce,
            threads: options.threads,
            in_flight: options.in_flight,
            seconds: options.duration.as_secs_f64(),
            warm_up_seconds: options.warm_up.as_secs_f64(),
            slices: plan.slices,
            origin: Origin::this(),
        })
    }
}

/// The report for people.
impl fmt::Display for KvReport {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mix, transport, threads, in_flight, nodes, seconds, slices, .. } = self;
        let (threads, nodes) = (many(*threads, "thread"), many(*nodes, "node"));
        let announced = if self.announce { ", announced" } else { "" };
        let index = self.index.map_or(String::new(), |index| format!(" by key ({index} index)"));
        writeln!(
            text,
            "{mix} transactions{index} over {transport}, {threads} with {in_flight} in flight, {nodes}{announced}"
        )?;
        let (records, far) = (grouped(self.records as f64, 0), grouped((self.far_bytes >> 20) as f64, 0));
        let skew = if self.skew > 0.0 { format!(", skew {}", self.skew) } else { String::new() };
        writeln!(
            text,
            "{records} records of {} B in {far} MiB{skew}; {seconds} s in {slices} slices",
            self.record_bytes
        )?;
        let (least, most) = self.trx_s_range;
        let range = format!("{} to {} over the slices", grouped(least, 0), grouped(most, 0));
        let mut row = |name: &str, value: f64, digits: usize, note: &str| {
            writeln!(text, "{name:32}{:>14}  {note}", grouped(value, digits))
        };
        row("transactions/s", self.trx_s, 0, &range)?;
        row("ns per transaction and thread", self.ns_per_trx, 0, "")?;
        row("of which on the processor", self.processor_ns_per_trx, 0, "")?;
        row("p50, us", self.p50_us, 3, "")?;
        row("p99, us", self.p99_us, 3, "")?;
        row("committed", self.committed as f64, 0, "in all")?;
        row("begun again", self.aborted as f64, 0, "after a conflict, or for lack of room")?;
        row("far operations per transaction", self.operations_per_trx, 2, "by the threads")?;
        row("bytes per transaction", self.bytes_per_trx, 1, "")?;
        if let (Some(operations), Some(bytes)) = (self.service_operations_per_trx, self.service_bytes_per_trx)
        {
            row("far operations per transaction", operations, 2, "by the oracle's own threads")?;
            row("bytes per transaction", bytes, 1, "")?;
        }
        let checked = match self.mix {
            KvMix::NewOrder => "at the end all orders and their lines were there",
            KvMix::Insert => "at the end all rows that were inserted were there",
            _ => "a final look at all records found none that was wrong",
        };
        writeln!(text, "{checked}")?;
        write!(text, "{}", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::lane::Course;
    use super::super::options::tests::small;
    use super::*;

    fn report() -> KvReport {
        let slice = Duration::from_millis(1);
        let plan = SlicePlan { warm_up: slice, slices: 3, slice };
        let thread = |slices: [u64; 3]| {
            let mut course = Course::new(&plan).unwrap();
            course.latencies.record(Duration::from_micros(3), 1);
            let committed = slices.iter().sum();
            let course = Course { slices: slices.to_vec(), committed, aborted: 2, ..course };
            Thread { course, traffic: Traffic { operations: 60, bytes: 480 }, processor: slice }
        };
        let threads = vec![thread([10, 20, 0]), thread([0, 10, 20])];
        let service_traffic = Traffic { operations: 6, bytes: 600 };
        let options = KvOptions { threads: 2, skew: 0.5, ..small() };
        KvReport::new(&options, 3 << 20, &Measured { threads, plan, service_traffic: Some(service_traffic) })
            .unwrap()
    }

    #[test]
    fn slices_add_up_over_threads_and_traffic_is_per_transaction() {
        let report = report();
        assert_eq!((report.trx_s, report.trx_s_range), (20_000.0, (10_000.0, 30_000.0)));
        assert_eq!((report.ns_per_trx, report.committed, report.aborted), (100_000.0, 60, 4));
        assert_eq!((report.operations_per_trx, report.bytes_per_trx), (2.0, 16.0));
        assert_eq!(
            (report.service_operations_per_trx, report.service_bytes_per_trx),
            (Some(0.1), Some(10.0))
        );
    }

    #[test]
    fn lines_name_the_measurement_and_the_machine() {
        let lines = report().to_string();
        for part in [
            "rmw transactions over shm, 2 threads with 1 in flight, 2 nodes\n",
            "B in 3 MiB, skew 0.5; 0.01 s in 3 slices\n",
            "transactions/s",
            "Linux",
        ] {
            assert!(lines.contains(part), "no `{part}` in {lines}");
        }
    }
}
