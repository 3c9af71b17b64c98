//! Floors: the least that an operation could cost on this machine, done without any part of the fabric.
//!
//! F1. A floor touches the same number of places as the operation that is compared with it, picked by the
//!     same code, in a mapping of the same size and page size.
//! F2. A floor has as many operations in flight as that operation. Depth 1 means that an operation ends
//!     before the next one starts; so the address of a bare load depends on the word loaded before. With
//!     batches of sixteen, sixteen loads are in flight at a time. The processor's locked instructions wait
//!     for each other by themselves. Copies and stores are issued one after the other and may overlap, in the
//!     floor's favour.
//! F3. The other end of a floor is another process, and both ends poll; between slices they sleep.

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

/// Transfers of at least this length are compared with memcpy, shorter ones with bare loads and stores.
const MEMCPY_FROM_BYTES: usize = 1024;

/// What the floors of all threads share. Dropping it ends its child processes.
pub enum Ground {
    /// Memory that the threads access directly.
    Memory(Arc<SharedPages>),
    /// A server of bare requests and responses.
    Tcp(TcpFloorServer),
    /// One process per thread, which answers through a cache line.
    PingPong(Vec<PingPongServer>),
}

impl Ground {
    /// Prepares the floor of a measurement. Child processes run the program in the file `farpool`.
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

    /// A description in words.
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
