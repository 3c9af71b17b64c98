//! Options of a measurement of transactions on records, checked before anything starts.

use std::time::Duration;

use anyhow::Result;
use farpool_txn::MAX_COMMITS_IN_FLIGHT;
use serde::{Deserialize, Serialize};

use super::chooser::RECORDS_MAX;
use super::ground::Ground;
use crate::by_key;
use crate::options::{IoTransport, THREADS_MAX, check_duration, named};

/// Most nodes of one run; each is a process that polls.
pub const NODES_MAX: usize = 16;
/// Fewest records: the records of one transaction must differ.
pub const RECORDS_MIN: u64 = 4;
/// Fewest records where they are the items of orders: those of one order differ.
const FEWEST_ITEMS: u64 = 16;
/// Largest exponent of Zipf's law: with it, nearly two of three draws are the same record.
const SKEW_MAX: f64 = 2.0;

/// What each transaction does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvMix {
    /// Reads four records.
    Read,
    /// Writes two records without using their old values.
    Update,
    /// Reads two records and writes them: increments a counter in each.
    Rmw,
    /// Places an order of ten lines; by key only.
    #[serde(rename = "new-order")]
    NewOrder,
    /// Inserts two rows under new keys, in no order; by key only.
    Insert,
    /// Reads the rows of 100 consecutive keys; only with an ordered index.
    Scan,
}

named!(
    KvMix,
    "mix",
    Read = "read",
    Update = "update",
    Rmw = "rmw",
    NewOrder = "new-order",
    Insert = "insert",
    Scan = "scan"
);

/// How records are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvIndex {
    /// By the hash of their keys, in a table of a database.
    Hash,
    /// The same, and the table's keys are kept in order, too.
    Btree,
}

named!(KvIndex, "index", Hash = "hash", Btree = "btree");

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct KvOptions {
    /// What each transaction does.
    pub mix: KvMix,
    /// How records are found. `None`: by their numbers, without a database.
    pub index: Option<KvIndex>,
    /// How many records there are.
    pub records: u64,
    /// Exponent of Zipf's law; 0: all records are equally frequent.
    pub skew: f64,
    /// Threads in a closed loop, each with a slot.
    pub threads: usize,
    /// Transactions in flight per thread.
    pub in_flight: usize,
    /// Nodes over which the records are spread.
    pub nodes: usize,
    /// Whether threads announce their snapshots and a thread publishes the horizon, as in a database.
    pub announce: bool,
    /// What carries the operations.
    pub transport: IoTransport,
    /// How long to measure, without the warm-up.
    pub duration: Duration,
    /// How long transactions run before the measurement.
    pub warm_up: Duration,
}

impl KvOptions {
    /// The far memory that it takes.
    ///
    /// # Errors
    /// If there is no layout: the table or a log would be too large, or there are more threads than slots.
    pub fn far_bytes(&self) -> Result<u64> {
        match self.index {
            Some(_) => Ok(by_key::far_bytes(self)),
            None => Ok(Ground::of(self)?.bytes()),
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    /// If something cannot be measured; the message names the option to change.
    pub fn check(&self) -> Result<(), String> {
        let counts = [
            ("--threads", self.threads as u64, 1, THREADS_MAX as u64),
            ("--in-flight", self.in_flight as u64, 1, MAX_COMMITS_IN_FLIGHT as u64),
            ("--nodes", self.nodes as u64, 1, NODES_MAX as u64),
            ("--records", self.records, RECORDS_MIN, RECORDS_MAX),
        ];
        if let Some((option, value, least, most)) =
            counts.into_iter().find(|&(_, value, least, most)| !(least..=most).contains(&value))
        {
            return Err(format!("{value}: choose {option} from {least} to {most}"));
        }
        if !(0.0..=SKEW_MAX).contains(&self.skew) {
            return Err(format!("a skew of {}: choose --skew from 0 to {SKEW_MAX}", self.skew));
        }
        if self.mix == KvMix::NewOrder && (self.index.is_none() || self.records < FEWEST_ITEMS) {
            return Err(format!("orders: choose --index hash, and --records from {FEWEST_ITEMS}"));
        }
        if self.mix == KvMix::Insert && self.index.is_none() {
            return Err("rows are inserted under keys: choose --index hash or btree".to_owned());
        }
        if self.mix == KvMix::Scan && self.index != Some(KvIndex::Btree) {
            return Err("scans need the order of keys: choose --index btree".to_owned());
        }
        check_duration(self.duration)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use farpool_fabric::TransportChoice;

    use super::*;

    /// A small, valid measurement.
    pub fn small() -> KvOptions {
        KvOptions {
            mix: KvMix::Rmw,
            index: None,
            records: 1000,
            skew: 0.0,
            threads: 1,
            in_flight: 1,
            nodes: 2,
            announce: false,
            transport: IoTransport(TransportChoice::Shm),
            duration: Duration::from_millis(10),
            warm_up: Duration::from_millis(1),
        }
    }

    #[test]
    fn bad_options_are_refused_with_the_option_to_change() {
        small().check().unwrap();
        let bad = [
            (KvOptions { threads: 0, ..small() }, "--threads"),
            (KvOptions { in_flight: MAX_COMMITS_IN_FLIGHT + 1, ..small() }, "--in-flight"),
            (KvOptions { nodes: 0, ..small() }, "--nodes"),
            (KvOptions { records: 3, ..small() }, "--records"),
            (KvOptions { records: RECORDS_MAX + 1, ..small() }, "--records"),
            (KvOptions { mix: KvMix::NewOrder, ..small() }, "--index"),
            (KvOptions { mix: KvMix::Insert, ..small() }, "--index"),
            (KvOptions { mix: KvMix::Scan, index: Some(KvIndex::Hash), ..small() }, "--index"),
            (KvOptions { skew: -0.1, ..small() }, "--skew"),
            (KvOptions { skew: f64::NAN, ..small() }, "--skew"),
            (KvOptions { duration: Duration::ZERO, ..small() }, "--seconds"),
        ];
        for (options, fix) in bad {
            let complaint = options.check().unwrap_err();
            assert!(complaint.contains(fix), "{complaint}");
        }
    }

    #[test]
    fn mixes_are_read_as_they_are_shown() {
        for mix in [KvMix::Read, KvMix::Update, KvMix::Rmw] {
            assert_eq!(mix.to_string().parse(), Ok(mix));
        }
        assert!("delete".parse::<KvMix>().unwrap_err().contains("rmw"));
    }
}
