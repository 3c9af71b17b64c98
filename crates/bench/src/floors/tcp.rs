//! A bare request and response between two processes over loopback: as many bytes each way as the operation
//! has, and the same work on memory of the same size and page size.
//!
//! - Nothing else: a request is a place and its payload, an answer only its bytes; no keys, regions,
//!   deadlines or wakers.
//! - As fast as we know to make it: both ends poll; requests that arrive together are answered by one system
//!   call; large blocks leave the memory without an intermediate copy, and small answers are gathered in one
//!   buffer.
//! - Without congestion control that paces: there is no network.
//! - Either end touches as many bytes as the fabric must. A floor that sends the same hot buffer again and
//!   again would measure the processor's caches.

mod answering;
mod asking;

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::child::Child;
use crate::options::{IoOp, IoOptions};
use crate::pages::Pages;

pub use answering::serve;
pub use asking::TcpFloor;

/// Longest wait for the other process; after that it is taken for dead.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);
/// A request's header: a place, and room for what a real request also carries.
const HEADER_BYTES: usize = 16;
/// The shortest answer: a status or a word.
const WORD_BYTES: usize = 8;
/// Larger than any block.
const BLOCK_MAX: u32 = 2 << 20;

/// Sets TCP Reno: only the processors are to be measured, so nothing may pace, and BBR, the default of some
/// systems, does.
fn calm(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_tcp_congestion(stream, "reno").context("every kernel has TCP Reno")
}

/// The server's process.
pub struct TcpFloorServer {
    address: SocketAddr,
    _child: Child,
}

impl TcpFloorServer {
    /// Starts it with this much memory.
    pub fn start(farpool: &Path, bytes: u64, pages: Pages) -> Result<Self> {
        let (bytes, pages) = (bytes.to_string(), pages.to_string());
        let args = ["bench", "floor", "tcp", "--bytes", &bytes, "--pages", &pages].map(Into::into);
        let (child, said) = Child::of_this_program(farpool, "the floor", args, Stdio::null())?;
        let address = said
            .parse()
            .with_context(|| format!("the floor says that it listens at `{said}`, which is no address"))?;
        Ok(TcpFloorServer { address, _child: child })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The shape of all requests of a connection, which the client sends first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    op: IoOp,
    block: usize,
}

impl Shape {
    const BYTES: usize = 8;
    const OPS: [IoOp; 5] = [IoOp::Read, IoOp::Write, IoOp::Cas, IoOp::Faa, IoOp::Call];

    fn of(options: &IoOptions) -> Self {
        Shape { op: options.op, block: options.block_bytes }
    }

    /// Length of a request.
    fn request(self) -> usize {
        HEADER_BYTES
            + match self.op {
                IoOp::Read => 0,
                IoOp::Write | IoOp::Call => self.block,
                IoOp::Cas => 2 * WORD_BYTES,
                IoOp::Faa => WORD_BYTES,
            }
    }

    /// Length of an answer.
    fn response(self) -> usize {
        match self.op {
            IoOp::Read | IoOp::Call => self.block,
            IoOp::Write | IoOp::Cas | IoOp::Faa => WORD_BYTES,
        }
    }

    fn encode(self) -> [u8; Self::BYTES] {
        let op = Self::OPS.iter().position(|&op| op == self.op).expect("all operations are listed");
        let [a, b, c, d] = (op as u32).to_le_bytes();
        let [e, f, g, h] = (self.block as u32).to_le_bytes();
        [a, b, c, d, e, f, g, h]
    }

    fn decode([a, b, c, d, e, f, g, h]: [u8; Self::BYTES]) -> Result<Self> {
        let (op, block) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let op = *Self::OPS.get(op as usize).with_context(|| format!("no operation {op}"))?;
        let words = block.is_multiple_of(WORD_BYTES as u32);
        ensure!((1..=BLOCK_MAX).contains(&block) && words, "impossible block of {block} bytes");
        Ok(Shape { op, block: block as usize })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;
    use crate::options::tests::small;
    use crate::places::Places;
    use crate::tally::Tally;
    use farpool_fabric::TransportChoice;

    const MEMORY_BYTES: usize = 4 << 20;

    /// A server that ends with the test's process.
    fn server() -> SocketAddr {
        let (say, said) = channel();
        let serve = move || serve(MEMORY_BYTES, Pages::Small, move |address| say.send(address).unwrap());
        std::thread::spawn(serve);
        said.recv().unwrap()
    }

    #[test]
    fn requests_of_every_shape_are_answered() {
        let address = server();
        let read = small(TransportChoice::Tcp, IoOp::Read);
        for options in [
            read,
            IoOptions { depth: 32, ..read },
            IoOptions { block_bytes: 512 << 10, depth: 4, ..read },
            IoOptions { block_bytes: 64, batch: 16, depth: 2, ..read },
            small(TransportChoice::Tcp, IoOp::Write),
            IoOptions { depth: 3, block_bytes: 256 << 10, ..small(TransportChoice::Tcp, IoOp::Write) },
            small(TransportChoice::Tcp, IoOp::Cas),
            IoOptions { batch: 4, ..small(TransportChoice::Tcp, IoOp::Faa) },
            small(TransportChoice::Tcp, IoOp::Call),
        ] {
            let places = Places::new(options.pattern, 2, MEMORY_BYTES as u64 / 2, options.block_bytes, 1);
            let mut floor = TcpFloor::connect(address, &options, places).unwrap();
            for _ in 0..3 {
                let mut tally = Tally::new().unwrap();
                let operations = floor.run(Instant::now(), &mut tally).unwrap();
                assert_eq!(operations, (options.depth * options.batch) as u64, "{options:?}");
            }
        }
    }

    #[test]
    fn a_place_outside_the_memory_ends_the_connection() {
        let options = small(TransportChoice::Tcp, IoOp::Read);
        let beyond = Places::new(options.pattern, 1 << 20, MEMORY_BYTES as u64, options.block_bytes, 1);
        let mut floor = TcpFloor::connect(server(), &options, beyond).unwrap();
        assert!(floor.run(Instant::now(), &mut Tally::new().unwrap()).is_err());
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let good = Shape { op: IoOp::Call, block: 64 };
        assert_eq!(Shape::decode(good.encode()).unwrap(), good);
        for bad in [Shape { block: 0, ..good }, Shape { block: 1 << 30, ..good }, Shape { block: 9, ..good }]
        {
            assert!(Shape::decode(bad.encode()).is_err(), "{bad:?}");
        }
        assert!(Shape::decode([9, 0, 0, 0, 64, 0, 0, 0]).is_err());
    }
}
