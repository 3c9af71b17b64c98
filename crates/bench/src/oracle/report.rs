//! The results of a measurement of an oracle: as JSON for programs, as lines for people.

use std::fmt;

use anyhow::{Context, Result, ensure};
use farpool_txn::Traffic;
use serde::{Deserialize, Serialize};

use super::client::Course;
use super::options::{OracleKind, OracleOptions};
use crate::machine::Origin;
use crate::slices::SlicePlan;
use crate::spread::{grouped, many};
use crate::tally::Tally;

/// Everything that was measured.
pub struct Measured {
    /// The results of each client.
    pub courses: Vec<Course>,
    /// The division of time.
    pub plan: SlicePlan,
    /// Transactions between two readings of the clock.
    pub timed_together: usize,
    /// The traffic of the oracle's own threads.
    pub service_traffic: Traffic,
}

/// The results of a measurement. Names and meanings of the fields are stable; more fields may be added.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OracleReport {
    /// Timestamp transactions per second of all clients; the median over the slices.
    pub t_trx_s: f64,
    /// Slowest and fastest slice.
    pub t_trx_s_range: (f64, f64),
    /// Time of a client per transaction: the number of clients divided by `t_trx_s`.
    pub ns_per_t_trx: f64,
    /// Median latency. If several transactions are timed together, latencies are means of `timed_together`.
    pub p50_us: f64,
    /// 99th percentile of the latency, likewise.
    pub p99_us: f64,
    /// Operations on far memory by clients, per transaction.
    pub operations_per_t_trx: f64,
    /// Bytes that they move, without the transport's headers.
    pub bytes_per_t_trx: f64,
    /// Operations by the oracle's own threads, per transaction.
    pub service_operations_per_t_trx: f64,
    /// Bytes that they move.
    pub service_bytes_per_t_trx: f64,
    /// Median time from the acknowledgement of a commit to the next begin of its client that sees it.
    pub publication_p50_us: f64,
    /// 99th percentile of that time.
    pub publication_p99_us: f64,
    /// Longest such time.
    pub publication_max_us: f64,
    /// The kind of oracle.
    pub oracle: OracleKind,
    /// The transport.
    pub transport: String,
    /// Number of client threads.
    pub clients: usize,
    /// Number of compute servers that the clients belonged to.
    pub servers: usize,
    /// Whether each server had a thread that read what was published.
    pub fetch_thread: bool,
    /// Whether the clients of a server shared a slot.
    pub compress: bool,
    /// Number of nodes that the vector was split over.
    pub partitions: usize,
    /// How long the measurement took.
    pub seconds: f64,
    /// Number of slices.
    pub slices: usize,
    /// Transactions between two readings of the clock.
    pub timed_together: usize,
    /// Acknowledged transactions in all. If not exactly these are published in the end, there is no report.
    pub checked: u64,
    /// The machine and the commit.
    #[serde(flatten)]
    pub origin: Origin,
}

impl OracleReport {
    /// Computes the report.
    pub(super) fn new(options: &OracleOptions, measured: &Measured) -> Result<Self> {
        let Measured { courses, plan, timed_together, service_traffic } = measured;
        let (mut latencies, mut publications) = (Tally::new()?, Tally::new()?);
        for course in courses {
            latencies.join(&course.latencies)?;
            publications.join(&course.publications)?;
        }
        let rates = plan.rates(courses.iter().map(|course| course.slices.as_slice()));
        let rates = rates.context("nothing was measured")?;
        ensure!(rates.middle > 0.0 && !publications.is_empty(), "nothing was measured: give more --seconds");
        let checked: u64 = courses.iter().map(|course| course.transactions).sum();
        let traffic = courses.iter().fold(Traffic::default(), |sum, course| sum + course.traffic);
        let each = |of: u64| of as f64 / checked as f64;
        Ok(OracleReport {
            t_trx_s: rates.middle,
            t_trx_s_range: (rates.least, rates.most),
            ns_per_t_trx: options.clients as f64 * 1e9 / rates.middle,
            p50_us: latencies.quantile_us(0.5),
            p99_us: latencies.quantile_us(0.99),
            operations_per_t_trx: each(traffic.operations),
            bytes_per_t_trx: each(traffic.bytes),
            service_operations_per_t_trx: each(service_traffic.operations),
            service_bytes_per_t_trx: each(service_traffic.bytes),
            publication_p50_us: publications.quantile_us(0.5),
            publication_p99_us: publications.quantile_us(0.99),
            publication_max_us: publications.quantile_us(1.0),
            oracle: options.oracle,
            transport: options.transport.to_string(),
            clients: options.clients,
            servers: options.servers,
            fetch_thread: options.fetch_thread,
            compress: options.compress,
            partitions: options.partitions,
            seconds: options.duration.as_secs_f64(),
            slices: plan.slices,
            timed_together: *timed_together,
            checked,
            origin: Origin::this(),
        })
    }

    fn optimisations(&self) -> String {
        let mut text = String::new();
        if self.servers > 1 {
            text += &format!(" of {} compute servers", self.servers);
        }
        if self.fetch_thread {
            text += ", fetch thread";
        }
        if self.compress {
            text += ", one slot per server";
        }
        if self.partitions > 1 {
            text += &format!(", {} partitions", self.partitions);
        }
        text
    }
}

/// The report for people.
impl fmt::Display for OracleReport {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oracle, transport, clients, seconds, slices, .. } = self;
        writeln!(
            text,
            "{oracle} oracle over {transport}, {}{}",
            many(*clients, "client"),
            self.optimisations()
        )?;
        writeln!(text, "{seconds} s in {slices} slices")?;
        let (least, most) = self.t_trx_s_range;
        let range = format!("{} to {} over the slices", grouped(least, 0), grouped(most, 0));
        let mut row = |name: &str, value: f64, digits: usize, note: &str| {
            writeln!(text, "{name:32}{:>14}  {note}", grouped(value, digits))
        };
        row("t-trx/s", self.t_trx_s, 0, &range)?;
        row("ns per t-trx and client", self.ns_per_t_trx, 0, "")?;
        row("p50, us", self.p50_us, 3, "")?;
        row("p99, us", self.p99_us, 3, "")?;
        row("far operations per t-trx", self.operations_per_t_trx, 2, "by clients")?;
        row("bytes per t-trx", self.bytes_per_t_trx, 1, "")?;
        row("far operations per t-trx", self.service_operations_per_t_trx, 2, "by the oracle's own threads")?;
        row("bytes per t-trx", self.service_bytes_per_t_trx, 1, "")?;
        row(
            "publication p50, us",
            self.publication_p50_us,
            1,
            "from acknowledgement to a begin that sees it",
        )?;
        row("publication p99, us", self.publication_p99_us, 1, "")?;
        row("publication max, us", self.publication_max_us, 1, "")?;
        writeln!(text, "{} transactions were acknowledged, and all were published", self.checked)?;
        write!(text, "{}", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::options::tests::small;
    use super::*;

    fn report() -> OracleReport {
        let tally = |us| {
            let mut tally = Tally::new().unwrap();
            tally.record(Duration::from_micros(us), 1);
            tally
        };
        let course = |slices: [u64; 3]| Course {
            slices: slices.to_vec(),
            transactions: slices.iter().sum(),
            latencies: tally(1),
            publications: tally(20),
            traffic: Traffic { operations: 60, bytes: 480 },
        };
        let slice = Duration::from_millis(1);
        let plan = SlicePlan { warm_up: slice, slices: 3, slice };
        let courses = vec![course([10, 20, 0]), course([0, 10, 20])];
        let service_traffic = Traffic { operations: 6, bytes: 600 };
        let options = OracleOptions { clients: 2, compress: true, ..small() };
        OracleReport::new(&options, &Measured { courses, plan, timed_together: 1, service_traffic }).unwrap()
    }

    #[test]
    fn slices_add_up_over_clients_and_traffic_is_per_transaction() {
        let report = report();
        assert_eq!((report.t_trx_s, report.t_trx_s_range), (20_000.0, (10_000.0, 30_000.0)));
        assert_eq!(report.ns_per_t_trx, 100_000.0);
        assert_eq!((report.operations_per_t_trx, report.bytes_per_t_trx), (2.0, 16.0));
        assert_eq!((report.service_operations_per_t_trx, report.service_bytes_per_t_trx), (0.1, 10.0));
        assert_eq!(report.checked, 60);
    }

    #[test]
    fn lines_name_the_measurement_and_the_machine() {
        let lines = report().to_string();
        for part in [
            "vector oracle over shm, 2 clients, one slot per server\n",
            "t-trx/s",
            "publication p99",
            "Linux",
        ] {
            assert!(lines.contains(part), "no `{part}` in {lines}");
        }
    }
}
