//! What to measure of an oracle, checked before anything starts.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::options::{IoTransport, THREADS_MAX};

/// Nodes of one run: each is a process that polls.
pub const PARTITIONS_MAX: usize = 16;

/// Which oracle.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OracleKind {
    /// The timestamp vector (paper 3, section 4.1).
    #[default]
    Vector,
    /// Two counters for all (section 3.1).
    Naive,
}

impl FromStr for OracleKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "vector" => Ok(OracleKind::Vector),
            "naive" => Ok(OracleKind::Naive),
            other => Err(format!("unknown oracle '{other}': choose vector or naive")),
        }
    }
}

impl fmt::Display for OracleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OracleKind::Vector => "vector",
            OracleKind::Naive => "naive",
        })
    }
}

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OracleOptions {
    /// Which oracle.
    pub oracle: OracleKind,
    /// What carries its operations.
    pub transport: IoTransport,
    /// Threads in a closed loop.
    pub clients: usize,
    /// Compute servers over which the clients are spread, all in this process.
    pub servers: usize,
    /// Whether a thread of each server reads what is published, for all of its clients (section 4.2).
    pub fetch_thread: bool,
    /// Whether the clients of a server share a slot.
    pub compress: bool,
    /// Nodes over which the vector is split.
    pub partitions: usize,
    /// How long is measured, warm-up not counted.
    pub duration: Duration,
}

impl OracleOptions {
    /// Says what cannot be measured.
    ///
    /// # Errors
    /// Names the option that mends it.
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
        if self.duration.is_zero() {
            return Err("nothing is measured in no time: give --seconds 1 or more".into());
        }
        Ok(())
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
    fn bad_options_name_the_option_that_mends_them() {
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
