//! The oracle's own threads: what goes on beside the clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use farpool_fabric::block_on;
use farpool_txn::horizon::{HorizonAt, collect};
use farpool_txn::oracle::{NaiveAt, fetch, publish};
use farpool_txn::{Fetched, MemoryError, Oracle, OracleAt, Shipped, Traffic};

use crate::site::Site;

/// A thread that runs until all clients are done.
#[derive(Clone, Debug)]
pub enum Service {
    /// Publishes cuts of a part, with a pause after each.
    Publisher(OracleAt, Duration),
    /// Fetches what is published, for a compute server, with a pause after each look.
    Fetcher(Oracle, Arc<Fetched>, Duration),
    /// Publishes which cut all snapshots reach, of tables without overflow regions, with a pause after each
    /// look.
    Collector(Oracle, HorizonAt, Duration),
    /// Moves the read timestamp.
    Advancer(NaiveAt),
}

impl Service {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Service::Publisher(..) => "publisher",
            Service::Fetcher(..) => "fetch thread",
            Service::Collector(..) => "collector",
            Service::Advancer(_) => "read timestamp",
        }
    }

    /// Serves until `is_over` is raised; says what it asked of far memory.
    pub fn run(&self, site: &Site, is_over: &AtomicBool) -> Result<Traffic> {
        let memory = site.memory()?;
        let endpoint = memory.endpoint().clone();
        // Relaxed: the flag carries no data.
        let is_over = || is_over.load(Ordering::Relaxed);
        let served = match self {
            Service::Publisher(part, pace) => {
                block_on(&endpoint, publish::<Shipped>(&memory, *part, *pace, None, is_over))
            }
            Service::Fetcher(oracle, fetched, pause) => {
                block_on(&endpoint, fetch::<Shipped>(&memory, oracle, fetched, *pause, is_over))
            }
            Service::Collector(oracle, at, pause) => {
                let tables = async |_: &_| Ok::<_, MemoryError>(None);
                block_on(&endpoint, collect::<Shipped, _>(&memory, oracle, at, tables, *pause, is_over))
            }
            Service::Advancer(naive) => block_on(&endpoint, naive.advance(&memory, is_over)),
        };
        served.with_context(|| format!("the thread of the {} has failed", self.name()))?;
        Ok(memory.traffic())
    }
}
