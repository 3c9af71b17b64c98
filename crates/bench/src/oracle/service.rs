//! The oracle's own threads: what goes on beside the clients.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use farpool_fabric::block_on;
use farpool_txn::oracle::{NaiveAt, publish};
use farpool_txn::{OracleAt, Shipped, Traffic};

use super::site::Site;

/// A thread that runs until all clients are done.
#[derive(Clone, Copy, Debug)]
pub enum Service {
    /// Publishes cuts.
    Publisher(OracleAt),
    /// Moves the read timestamp.
    Advancer(NaiveAt),
}

impl Service {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Service::Publisher(_) => "publisher",
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
            Service::Publisher(oracle) => block_on(&endpoint, publish::<Shipped>(&memory, *oracle, is_over)),
            Service::Advancer(naive) => block_on(&endpoint, naive.advance(&memory, is_over)),
        };
        served.with_context(|| format!("the thread of the {} has failed", self.name()))?;
        Ok(memory.traffic())
    }
}
