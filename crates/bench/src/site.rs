//! The far memory of transactions: regions of some nodes, and the threads' access to them.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use farpool_fabric::{Endpoint, TransportChoice, Transports, block_on};
use farpool_txn::{Memory, Piece};

use crate::footprint::Footprint;
use crate::local_pool::{Lend, LocalPool};
use crate::reach::open_endpoint;

/// Nodes and their memory. Dropping the value ends the nodes.
pub struct Site {
    // Dropped before the pool that it leases from.
    footprint: Footprint,
    transports: Transports,
    arena_bytes: usize,
    _pool: LocalPool,
}

impl Site {
    /// Starts nodes, and leases all that they lend, the same number of regions from each. Each thread gets
    /// `arena_bytes` for its transfers.
    pub fn start(
        transports: Transports,
        lend: Lend,
        arena_bytes: usize,
        farpool: &Path,
        stop: &AtomicBool,
    ) -> Result<Site> {
        let pool = LocalPool::lending(farpool, lend, transports.choice)?;
        let bytes = u64::from(lend.nodes) * lend.bytes_each;
        let footprint = Footprint::lease(&pool.broker, None, transports, bytes, stop)?;
        let (nodes, found) = (lend.nodes, footprint.bytes());
        ensure!(found == bytes, "{nodes} nodes lent {found} bytes instead of {bytes}");
        Ok(Site { footprint, transports, arena_bytes, _pool: pool })
    }

    /// All regions, sorted by node.
    pub fn pieces(&self) -> Vec<Piece> {
        let regions = self.footprint.regions.iter();
        regions.map(|region| Piece { region: region.id, epoch: region.epoch, start: 0 }).collect()
    }

    /// Opens a thread's access to all regions.
    pub fn memory(&self) -> Result<Memory> {
        let endpoint: Endpoint = open_endpoint(self.transports, self.arena_bytes)
            .context("there is no memory for a thread's transfers: start fewer threads")?;
        let memory = Memory::new(endpoint.clone());
        for region in &self.footprint.regions {
            let attach = memory.attach(&region.node.peer, region.id, region.epoch, region.key);
            block_on(&endpoint, attach).with_context(|| format!("cannot open region {}", region.id))?;
        }
        Ok(memory)
    }

    /// Whether all leases are still valid; measurements on a lost lease are meaningless.
    pub fn is_whole(&self) -> bool {
        self.footprint.is_whole()
    }

    /// Whether the thread that posts an operation also carries it out.
    pub fn is_shared_memory(&self) -> bool {
        self.transports.choice == TransportChoice::Shm
    }
}
