//! Options of a measurement of an oracle, checked before anything starts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::options::{IoTransport, THREADS_MAX, check_duration, named};

/// Most nodes of one run; each is a process that polls.
pub const PARTITIONS_MAX: usize = 16;

/// The kind of oracle.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OracleKind {
    /// The timestamp vector (paper 3, section 4.1).
    #[default]
    Vector,
    /// Two counters that all clients share (section 3.1).
    Naive,
}

named!(OracleKind, "oracle", Vector = "vector", Naive = "naive");

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OracleOptions {
    /// The kind of oracle.
    pub oracle: OracleKind,
    /// The transport.
    pub transport: IoTransport,
    /// Number of client threads, in a closed loop.
    pub clients: usize,
    /// Number of compute servers that the clients belong to, all in this process.
    pub servers: usize,
    /// Whether each server has a thread that reads what is published, for all of its clients (section 4.2).
    pub fetch_thread: bool,
    /// Whether the clients of a server share a slot.
    pub compress: bool,
    /// Number of nodes that the vector is split over.
    pub partitions: usize,
    /// How long to measure, without the warm-up.
    pub duration: Duration,
}

impl OracleOptions {
    /// Checks the options.
    ///
    /// # Errors
    /// If something cannot be measured; the message names the option to change.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=THREADS_MAX).contains(&self.clients) {
            return Err(format!("{} clients: choose --clients from 1 to {THREADS_MAX}", self.clients));
        }
        if !(1..=self.clients).contains(&self.servers) {
            return Err(format!("{} servers for {} clients: lower --servers", self.servers, self.clients));
        }
        if !(1..=PARTITIONS_MAX).contains(&self.partitions) {
            return Err(format!(
                "{} partitions: choose --partitions from 1 to {PARTITIONS_MAX}",
                self.partitions
            ));
        }
        let optimised = [
            (self.fetch_thread, "--fetch-thread"),
            (self.compress, "--compress"),
            (self.partitions > 1, "--partitions"),
            (self.servers > 1, "--servers"),
        ];
        let found = optimised.into_iter().find(|(is_on, _)| *is_on);
        if let Some((_, option)) = found.filter(|_| self.oracle == OracleKind::Naive) {
            return Err(format!("the naive oracle has no timestamp vector: leave {option} out"));
        }
        check_duration(self.duration)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use farpool_fabric::TransportChoice;

    use super::*;

    /// A small, valid measurement.
    pub fn small() -> OracleOptions {
        OracleOptions {
            oracle: OracleKind::Vector,
            transport: IoTransport(TransportChoice::Shm),
            clients: 1,
            servers: 1,
            fetch_thread: false,
            compress: false,
            partitions: 1,
            duration: Duration::from_millis(10),
        }
    }

    #[test]
    fn bad_options_are_refused_with_the_option_to_change() {
        small().check().unwrap();
        let bad = [
            (OracleOptions { clients: 0, ..small() }, "--clients"),
            (OracleOptions { clients: THREADS_MAX + 1, ..small() }, "--clients"),
            (OracleOptions { servers: 2, ..small() }, "--servers"),
            (OracleOptions { partitions: 0, ..small() }, "--partitions"),
            (OracleOptions { partitions: PARTITIONS_MAX + 1, ..small() }, "--partitions"),
            (OracleOptions { duration: Duration::ZERO, ..small() }, "--seconds"),
            (OracleOptions { oracle: OracleKind::Naive, compress: true, ..small() }, "--compress"),
            (OracleOptions { oracle: OracleKind::Naive, fetch_thread: true, ..small() }, "--fetch-thread"),
            (OracleOptions { oracle: OracleKind::Naive, partitions: 2, ..small() }, "--partitions"),
        ];
        for (options, fix) in bad {
            let complaint = options.check().unwrap_err();
            assert!(complaint.contains(fix), "{complaint}");
        }
    }

    #[test]
    fn oracles_are_read_as_they_are_shown() {
        for oracle in [OracleKind::Vector, OracleKind::Naive] {
            assert_eq!(oracle.to_string().parse(), Ok(oracle));
        }
        assert!("hybrid".parse::<OracleKind>().unwrap_err().contains("naive"));
    }
}
