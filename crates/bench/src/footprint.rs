//! The far memory that is measured: whole regions, leased through the control plane and held until the end.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farpool_control::Tls;
use farpool_fabric::Transports;
use farpool_pool::{EXTENT_BYTES, Extent, LeasedRegion, NoSpace, Pool, PoolConfig};

use crate::child::check_stop;

/// How long a full pool is asked again: what an earlier measurement has given back is made clean before it is
/// lent, at some gigabytes per second.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Leased regions, all of one size. Dropping it gives them back.
pub struct Footprint {
    /// In the order of their nodes and numbers.
    pub regions: Vec<Arc<LeasedRegion>>,
    /// Size of each.
    pub region_bytes: u64,
    // Held, so that the pool keeps the leases; dropped before it.
    _extents: Vec<Extent>,
    _pool: Pool,
}

impl Footprint {
    /// Leases `bytes`, rounded up to whole regions.
    pub fn lease(
        broker: &str,
        tls: Option<Tls>,
        transport: Transports,
        bytes: u64,
        stop: &AtomicBool,
    ) -> Result<Self> {
        let config = PoolConfig { broker: broker.to_owned(), tls, transport, limit_bytes: None };
        let pool = Pool::connect(config).context("cannot lease far memory")?;
        let session = pool.session();
        let started = Instant::now();
        let mut extents: Vec<Extent> = Vec::new();
        let mut regions: Vec<Arc<LeasedRegion>> = Vec::new();
        // The pool lends extents; who holds one of a region and has no other use for the pool has the whole
        // region.
        for place in 0..bytes.div_ceil(EXTENT_BYTES) {
            let extent = loop {
                let taken = session.lock().block_on(pool.take_extent(place));
                match taken {
                    Err(NoSpace) if started.elapsed() < PATIENCE => std::thread::sleep(ASK_EVERY),
                    taken => break taken,
                }
                check_stop(stop)?;
            };
            let extent = extent.with_context(|| {
                let mib = bytes >> 20;
                format!("the pool at {broker} has no {mib} MiB to lend: lower --footprint, or add nodes")
            })?;
            if !regions.iter().any(|region| region.id == extent.region().id) {
                regions.push(extent.region().clone());
            }
            extents.push(extent);
        }
        regions.sort_by_key(|region| region.id);
        let region_bytes = pool.region_bytes();
        Ok(Footprint { regions, region_bytes, _extents: extents, _pool: pool })
    }

    /// Bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.len() as u64 * self.region_bytes
    }

    /// Whether all leases are still in force; what was measured on others means nothing.
    pub fn is_whole(&self) -> bool {
        self.regions.iter().all(|region| !region.is_over())
    }
}
