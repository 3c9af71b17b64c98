//! The far memory that is measured: whole regions, leased through the broker and held until the end.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farpool_control::Tls;
use farpool_fabric::Transports;
use farpool_pool::{EXTENT_BYTES, Extent, LeasedRegion, NoSpace, Pool, PoolConfig};

use crate::stop::check_stop;

/// How long to retry when the pool is full: memory that an earlier measurement gave back is scrubbed before
/// it is lent again, at some gigabytes per second.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two attempts.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Leased regions, all of one size. Dropping it gives them back.
pub struct Footprint {
    /// Sorted by node and number.
    pub regions: Vec<Arc<LeasedRegion>>,
    /// Size of each.
    pub region_bytes: u64,
    // Held so that the pool keeps the leases; dropped before the pool.
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
        // The pool hands out extents. A holder of one extent has the whole region, as long as it uses the
        // pool for nothing else.
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
                format!("the pool at {broker} cannot lend {mib} MiB: lower --footprint, or add nodes")
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

    /// Whether all leases are still valid; measurements on a lost lease are meaningless.
    pub fn is_whole(&self) -> bool {
        self.regions.iter().all(|region| !region.has_ended())
    }
}
