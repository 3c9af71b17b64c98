//! The oracle's own threads, which run beside the clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use farpool_fabric::block_on;
use farpool_txn::horizon::{CollectPauses, HorizonAt, collect};
use farpool_txn::oracle::{NaiveAt, fetch, publish};
use farpool_txn::{Fetched, Oracle, OracleAt, Shipped, Traffic};

use crate::site::Site;

/// A thread that runs until all clients have ended.
#[derive(Clone, Debug)]
pub enum Service {
    /// Publishes cuts of one part, with a pause after each.
    Publisher(OracleAt, Duration),
    /// Fetches for a compute server what is published, with a pause after each look.
    Fetcher(Oracle, Arc<Fetched>, Duration),
    /// Publishes the horizon, with a pause after each look.
    Collector(Oracle, HorizonAt, CollectPauses),
    /// Advances the naive oracle's read timestamp.
    Advancer(NaiveAt),
}

impl Service {
    /// The thread's name.
    pub fn name(&self) -> &'static str {
        match self {
            Service::Publisher(..) => "publisher",
            Service::Fetcher(..) => "fetch thread",
            Service::Collector(..) => "collector",
            Service::Advancer(_) => "read timestamp",
        }
    }

    /// Runs until `is_finished` is set. Returns its traffic.
    pub fn run(&self, site: &Site, is_finished: &AtomicBool) -> Result<Traffic> {
        let memory = site.memory()?;
        let endpoint = memory.endpoint().clone();
        // Relaxed: the flag carries no data.
        let is_finished = || is_finished.load(Ordering::Relaxed);
        let served = match self {
            Service::Publisher(part, pace) => {
                block_on(&endpoint, publish::<Shipped>(&memory, *part, *pace, None, is_finished))
            }
            Service::Fetcher(oracle, fetched, pause) => {
                block_on(&endpoint, fetch::<Shipped>(&memory, oracle, fetched, *pause, is_finished))
            }
            Service::Collector(oracle, at, pauses) => {
                block_on(&endpoint, collect::<Shipped>(&memory, oracle, at, *pauses, is_finished))
            }
            Service::Advancer(naive) => block_on(&endpoint, naive.advance(&memory, is_finished)),
        };
        served.with_context(|| format!("the {} failed", self.name()))?;
        Ok(memory.traffic())
    }
}
