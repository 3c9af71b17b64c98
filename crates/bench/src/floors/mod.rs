//! Floors: the least that an operation could cost on this machine, done without any of the fabric.
//!
//! F1. A floor touches the same number of places, picked by the same code, in a mapping of the same size and
//!     pages.
//! F2. As many operations of a floor are in flight as of the operation that is compared. Depth 1 says that an
//!     operation has ended before the next one starts, so the address of a bare load is made to depend on the
//!     word loaded before; with batches of sixteen, sixteen loads are under way at a time. The processor's
//!     locked instructions wait for each other by themselves; copies and stores are issued one after the
//!     other and may overlap, in the floor's favour.
//! F3. What talks to a floor is another process, and both ends poll; between slices they sleep.

mod memory;
mod ping_pong;
mod tcp;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use farpool_fabric::TransportChoice;

use crate::options::{IoOp, IoOptions};
use crate::pages::{Pages, SharedPages};
use crate::places::Places;
use crate::tally::Tally;

use memory::MemoryFloor;
use ping_pong::{PingPongFloor, PingPongServer};

pub use ping_pong::serve as serve_ping_pong;
pub use tcp::serve as serve_tcp;
pub use tcp::{TcpFloor, TcpFloorServer};

/// Transfers from here up are compared with memcpy, smaller ones with bare loads and stores.
const MEMCPY_FROM_BYTES: usize = 1024;

/// What the floors of all threads share; children of it end when it is dropped.
pub enum Ground {
    /// Memory to be accessed bare.
    Memory(Arc<SharedPages>),
    /// A server of bare requests and responses.
    Tcp(TcpFloorServer),
    /// A process that answers by one cache line, one per thread.
    PingPong(Vec<PingPongServer>),
}

impl Ground {
    /// Prepares the floor of a measurement; children are of the program in the file `farpool`.
    pub fn prepare(options: &IoOptions, pages: Pages, farpool: &Path) -> Result<Self> {
        match (options.transport.0, options.op) {
            (TransportChoice::Shm, IoOp::Call) => {
                let servers = (0..options.threads).map(|_| PingPongServer::start(farpool));
                servers.collect::<Result<_>>().map(Ground::PingPong)
            }
            (TransportChoice::Shm, _) => {
                let bytes = usize::try_from(options.footprint_bytes)?;
                Ok(Ground::Memory(Arc::new(SharedPages::new(bytes, pages)?)))
            }
            _ => TcpFloorServer::start(farpool, options.footprint_bytes, pages).map(Ground::Tcp),
        }
    }

    /// What it is, in words.
    pub fn kind(&self, options: &IoOptions) -> &'static str {
        match (self, options.op) {
            (Ground::Memory(_), IoOp::Cas) => "lock cmpxchg",
            (Ground::Memory(_), IoOp::Faa) => "lock xadd",
            (Ground::Memory(_), _) if options.block_bytes >= MEMCPY_FROM_BYTES => "memcpy",
            (Ground::Memory(_), IoOp::Write) => "bare stores",
            (Ground::Memory(_), _) => "bare loads",
            (Ground::Tcp(_), _) => "polling TCP request and response",
            (Ground::PingPong(_), _) => "polling ping-pong over two cache lines",
        }
    }

    /// The floor of one thread.
    pub fn floor(&self, options: &IoOptions, thread: usize, places: Places) -> Result<Floor> {
        Ok(match self {
            Ground::Memory(memory) => Floor::Memory(MemoryFloor::new(memory.clone(), options, places)),
            Ground::Tcp(server) => Floor::Tcp(TcpFloor::connect(server.address(), options, places)?),
            Ground::PingPong(servers) => {
                Floor::PingPong(PingPongFloor::new(servers[thread].lines(), options.timed_together()))
            }
        })
    }
}

/// One thread's floor.
pub enum Floor {
    /// See [`Ground::Memory`].
    Memory(MemoryFloor),
    /// See [`Ground::Tcp`].
    Tcp(TcpFloor),
    /// See [`Ground::PingPong`].
    PingPong(PingPongFloor),
}

impl Floor {
    /// Runs until `end`; returns how many operations ended.
    pub fn run(&mut self, end: Instant, tally: &mut Tally) -> Result<u64> {
        match self {
            Floor::Memory(floor) => Ok(floor.run(end, tally)),
            Floor::Tcp(floor) => floor.run(end, tally),
            Floor::PingPong(floor) => floor.run(end, tally),
        }
    }
}
