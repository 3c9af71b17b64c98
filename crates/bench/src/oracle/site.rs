//! The far memory of an oracle: a region of each of some nodes, and ways of threads to it.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use farpool_fabric::{Endpoint, TransportChoice, Transports, block_on};
use farpool_txn::{Memory, Piece};

use crate::footprint::Footprint;
use crate::local_pool::{Lend, LocalPool};
use crate::reach::open_endpoint;

/// What a node lends: the least that one does.
const REGION_BYTES: u64 = 1 << 20;
/// Room for a thread's transfers: the images of all slots that there can be, and some words.
const ARENA_BYTES: usize = 256 << 10;

/// Nodes and their memory, gone with the value.
pub struct Site {
    // Dropped before the pool that it leases from.
    footprint: Footprint,
    transports: Transports,
    _pool: LocalPool,
}

impl Site {
    /// Starts so many nodes, and leases a region of each.
    pub fn start(transports: Transports, nodes: u32, farpool: &Path, stop: &AtomicBool) -> Result<Site> {
        let lend = Lend { nodes, bytes_each: REGION_BYTES, region_bytes: REGION_BYTES };
        let pool = LocalPool::lending(farpool, lend, transports.choice)?;
        let bytes = u64::from(nodes) * REGION_BYTES;
        let footprint = Footprint::lease(&pool.broker, None, transports, bytes, stop)?;
        let found = footprint.regions.len();
        ensure!(found == nodes as usize, "{nodes} nodes have lent {found} regions");
        Ok(Site { footprint, transports, _pool: pool })
    }

    /// The regions, each on a node of its own.
    pub fn pieces(&self) -> Vec<Piece> {
        let regions = self.footprint.regions.iter();
        regions.map(|region| Piece { region: region.id, epoch: region.epoch, start: 0 }).collect()
    }

    /// A thread's way to all of them.
    pub fn memory(&self) -> Result<Memory> {
        let endpoint: Endpoint = open_endpoint(self.transports, ARENA_BYTES)
            .context("there is no memory for a thread's transfers: lower --clients")?;
        let mut memory = Memory::new(endpoint.clone());
        for region in &self.footprint.regions {
            let attach = memory.attach(&region.node.peer, region.id, region.epoch, region.key);
            block_on(&endpoint, attach).with_context(|| format!("cannot open region {}", region.id))?;
        }
        Ok(memory)
    }

    /// Whether all leases are still in force; what was measured on others means nothing.
    pub fn is_whole(&self) -> bool {
        self.footprint.is_whole()
    }

    /// Whether operations are carried out by the thread that posts them.
    pub fn is_shared_memory(&self) -> bool {
        self.transports.choice == TransportChoice::Shm
    }
}
