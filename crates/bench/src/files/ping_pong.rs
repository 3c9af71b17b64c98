//! A bare request and its answer over loopback, measured like a file: the least that an operation over tcp
//! can cost.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use farpool_fabric::TransportChoice;

use super::client::{Answer, Ask, FileOp};
use super::volume::Surroundings;
use crate::floors::{TcpFloor, TcpFloorServer};
use crate::options::{IoOp, IoOptions, IoTransport};
use crate::pages::Pages;
use crate::places::Places;
use crate::tally::Tally;

/// Run before each slice, not counted, as for clients of files.
const SETTLE: Duration = Duration::from_millis(10);

/// The server process, with as much memory as a file has bytes.
pub struct PingPong {
    server: TcpFloorServer,
    bytes: u64,
}

impl PingPong {
    /// Starts it, on large pages as nodes use, or on small ones if there are no large ones.
    pub fn start(around: &Surroundings<'_>) -> Result<Self> {
        let start = |pages| TcpFloorServer::start(around.farpool, around.bytes, pages);
        let server = start(Pages::Transparent).or_else(|_| start(Pages::Small))?;
        Ok(PingPong { server, bytes: around.bytes })
    }

    /// Runs one thread's slice.
    pub fn slice(&self, ask: &Ask) -> Result<Answer> {
        ensure!(ask.threads == 1, "a ping-pong has one thread at each end");
        let time = Duration::try_from_secs_f64(ask.seconds)?;
        let places = Places::new(ask.pattern, 1, self.bytes, ask.block_bytes, 1);
        let mut floor = TcpFloor::connect(self.server.address(), &options(ask, self.bytes, time), places)?;
        floor.run(Instant::now() + SETTLE, &mut Tally::new()?)?;
        let (mut tally, started) = (Tally::new()?, Instant::now());
        let operations = floor.run(started + time, &mut tally)?;
        tally.finish(operations, started.elapsed());
        Ok(Answer::of(&tally, ask))
    }
}

fn options(ask: &Ask, footprint_bytes: u64, duration: Duration) -> IoOptions {
    IoOptions {
        transport: IoTransport(TransportChoice::Tcp),
        op: match ask.op {
            FileOp::Read => IoOp::Read,
            FileOp::Write => IoOp::Write,
        },
        pattern: ask.pattern,
        block_bytes: ask.block_bytes,
        depth: 1,
        batch: 1,
        threads: 1,
        footprint_bytes,
        duration,
        floor: true,
    }
}
