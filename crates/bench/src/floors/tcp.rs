//! A bare request/response server: so many bytes here, so many bytes back, nothing else.
//!
//! No framing but a header of fixed length, no places, no checks, one buffer at each end, which therefore stays in the
//! processor's caches. The plain server makes a system call per response; the gathering one sends those that are due
//! together by one, up to [`GATHERED`] of them, out of one and the same buffer.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};

use crate::child::Child;
use crate::options::{FloorChoice, IoOp, IoOptions};
use crate::tally::Tally;

/// Longest wait for a response: the other process has ended.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);
/// A request's header: operation, length and place would fit.
const HEADER_BYTES: usize = 16;
/// The least that is answered: a status.
const STATUS_BYTES: usize = 8;
/// Responses per system call at most.
const GATHERED: usize = 32;
/// Received per system call at most: a batch of large blocks, and still in the processor's cache.
const RECEIVED_BYTES: usize = 256 << 10;
/// After so long without a byte the server sleeps, so that it takes nothing from what is measured in between.
const SPIN: Duration = Duration::from_millis(2);
/// Larger than any block with its header.
const MESSAGE_MAX: u32 = 2 << 20;

/// The server's process.
pub struct TcpFloorServer {
    address: SocketAddr,
    _child: Child,
}

impl TcpFloorServer {
    pub(super) fn start(farpool: &Path) -> Result<Self> {
        let args = ["bench", "floor", "tcp"].map(Into::into);
        let (child, said) = Child::of_this_program(farpool, "the floor", args, Stdio::null())?;
        let address = said.parse().with_context(|| format!("the floor is ready at `{said}`"))?;
        Ok(TcpFloorServer { address, _child: child })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Sizes: all that a connection of the floor agrees on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    request: usize,
    response: usize,
    /// Responses per system call.
    gathered: usize,
}

impl Shape {
    const BYTES: usize = 12;

    fn of(options: &IoOptions) -> Self {
        let (there, back) = match options.op {
            IoOp::Read => (0, options.block_bytes),
            IoOp::Write => (options.block_bytes, STATUS_BYTES),
            IoOp::Cas => (2 * 8, 8), // two words there, one back
            IoOp::Faa => (8, 8),
            IoOp::Call => (options.block_bytes, options.block_bytes),
        };
        let gathered = if options.floor == Some(FloorChoice::Gathered) { GATHERED } else { 1 };
        Shape { request: HEADER_BYTES + there, response: back, gathered }
    }

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let numbers = [self.request, self.response, self.gathered];
        for (place, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
            *place = (number as u32).to_le_bytes();
        }
        bytes
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Result<Self> {
        let [request, response, gathered] = [0, 1, 2].map(|at| u32::from_le_bytes(bytes.as_chunks().0[at]));
        let sane = 1..=MESSAGE_MAX;
        ensure!(
            sane.contains(&request) && sane.contains(&response),
            "impossible sizes: {request}, {response}"
        );
        ensure!((1..=GATHERED as u32).contains(&gathered), "cannot gather {gathered} responses");
        Ok(Shape { request: request as usize, response: response as usize, gathered: gathered as usize })
    }
}

/// Serves one client process on loopback, for ever: whoever started this process ends it.
pub fn serve(ready: impl FnOnce(SocketAddr)) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
    listener.set_nonblocking(true)?;
    ready(listener.local_addr()?);
    let mut connections: Vec<Answering> = Vec::new();
    let mut received = vec![0; RECEIVED_BYTES];
    let mut busy = Instant::now();
    loop {
        let mut moved = false;
        connections.retain_mut(|connection| match connection.turn(&mut received) {
            Ok(turned) => {
                moved |= turned;
                true
            }
            Err(_) => false, // the client has gone
        });
        if moved {
            busy = Instant::now();
        } else if busy.elapsed() < SPIN {
            std::thread::yield_now();
        } else {
            sleep_until_ready(&listener, &connections)?;
            accept(&listener, &mut connections)?;
            busy = Instant::now();
        }
    }
}

fn sleep_until_ready(listener: &TcpListener, connections: &[Answering]) -> Result<()> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(connections.iter().map(|connection| {
        let writes = if connection.owed > 0 { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::new(&connection.stream, PollFlags::IN | writes)
    }));
    match poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot sleep"),
    }
}

fn accept(listener: &TcpListener, connections: &mut Vec<Answering>) -> Result<()> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => connections.push(Answering::greet(stream)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error).context("cannot accept"),
        }
    }
}

/// The server's end of a connection.
struct Answering {
    stream: TcpStream,
    shape: Shape,
    /// Bytes of a request that has not arrived whole.
    begun: usize,
    /// Bytes of responses to be sent, the rest of one that was begun first.
    owed: usize,
    response: Vec<u8>,
}

impl Answering {
    fn greet(mut stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(RESPONSE_DEADLINE))?;
        let mut shape = [0; Shape::BYTES];
        stream.read_exact(&mut shape).context("a client that says nothing")?;
        let shape = Shape::decode(shape)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Answering { stream, shape, begun: 0, owed: 0, response: vec![7; shape.response] })
    }

    /// Receives and sends what can be; whether there was anything.
    fn turn(&mut self, received: &mut [u8]) -> std::io::Result<bool> {
        let got = match self.stream.read(received) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(got) => got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        self.begun += got;
        self.owed += self.begun / self.shape.request * self.shape.response;
        self.begun %= self.shape.request;
        let sent = if self.owed > 0 { self.send()? } else { 0 };
        Ok(got + sent > 0)
    }

    fn send(&mut self) -> std::io::Result<usize> {
        let first = self.response.len() - (self.owed - 1) % self.response.len() - 1;
        let mut pieces = [IoSlice::new(&[]); GATHERED];
        let whole = (self.owed.div_ceil(self.response.len())).min(self.shape.gathered);
        for (index, piece) in pieces[..whole].iter_mut().enumerate() {
            *piece = IoSlice::new(if index == 0 { &self.response[first..] } else { &self.response });
        }
        match (&self.stream).write_vectored(&pieces[..whole]) {
            Ok(sent) => {
                self.owed -= sent;
                Ok(sent)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error),
        }
    }
}

/// The client's end.
pub struct TcpFloor {
    stream: TcpStream,
    shape: Shape,
    batch: usize,
    depth: usize,
    /// When the doorbells in flight were rung.
    rung: VecDeque<Instant>,
    requests: Vec<u8>,
    to_send: usize,
    received: Vec<u8>,
}

impl TcpFloor {
    pub(super) fn connect(address: SocketAddr, options: &IoOptions) -> Result<Self> {
        let mut stream = TcpStream::connect(address).context("cannot reach the floor")?;
        let shape = Shape::of(options);
        stream.set_nodelay(true)?;
        stream.write_all(&shape.encode())?;
        stream.set_nonblocking(true)?;
        let &IoOptions { batch, depth, .. } = options;
        Ok(TcpFloor {
            stream,
            shape,
            batch,
            depth,
            rung: VecDeque::with_capacity(depth),
            requests: vec![3; (batch * depth * shape.request).min(RECEIVED_BYTES)],
            to_send: 0,
            received: vec![0; (batch * depth * shape.response).min(RECEIVED_BYTES)],
        })
    }

    pub(super) fn run(&mut self, end: Instant, tally: &mut Tally) -> Result<u64> {
        let doorbell_bytes = self.batch * self.shape.response;
        let mut begun = 0;
        let mut operations = 0;
        let mut now = Instant::now();
        (0..self.depth).for_each(|_| self.ring(now));
        let mut last_moved = now;
        while !self.rung.is_empty() {
            let moved = self.send()?;
            let got = self.receive()?;
            if got == 0 {
                if moved == 0 {
                    std::thread::yield_now();
                    ensure!(last_moved.elapsed() < RESPONSE_DEADLINE, "the floor does not answer");
                }
                continue;
            }
            begun += got;
            if begun < doorbell_bytes {
                continue;
            }
            now = Instant::now();
            last_moved = now;
            while begun >= doorbell_bytes {
                begun -= doorbell_bytes;
                let rung = self.rung.pop_front().context("a response that nobody asked for")?;
                tally.record(now - rung, 1);
                operations += self.batch as u64;
                if now < end {
                    self.ring(now);
                }
            }
        }
        Ok(operations)
    }

    fn ring(&mut self, now: Instant) {
        self.rung.push_back(now);
        self.to_send += self.batch * self.shape.request;
    }

    fn send(&mut self) -> Result<usize> {
        if self.to_send == 0 {
            return Ok(0);
        }
        let piece = self.to_send.min(self.requests.len());
        match self.stream.write(&self.requests[..piece]) {
            Ok(sent) => {
                self.to_send -= sent;
                Ok(sent)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error).context("cannot send to the floor"),
        }
    }

    fn receive(&mut self) -> Result<usize> {
        match self.stream.read(&mut self.received) {
            Ok(0) => bail!("the floor has closed the connection"),
            Ok(got) => Ok(got),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error).context("cannot receive from the floor"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::options::tests::small;
    use farpool_fabric::TransportChoice;

    /// A server that ends with the test's process.
    fn server() -> SocketAddr {
        let (say, said) = channel();
        std::thread::spawn(move || serve(move |address| say.send(address).unwrap()));
        said.recv().unwrap()
    }

    #[test]
    fn every_request_is_answered_whatever_the_shape() {
        let address = server();
        let read = small(TransportChoice::Tcp, IoOp::Read);
        for options in [
            read,
            IoOptions { depth: 32, ..read },
            IoOptions { depth: 32, floor: Some(FloorChoice::Gathered), ..read },
            IoOptions { block_bytes: 512 << 10, depth: 4, ..read },
            IoOptions { block_bytes: 64, batch: 16, depth: 2, ..read },
            small(TransportChoice::Tcp, IoOp::Write),
            small(TransportChoice::Tcp, IoOp::Cas),
            small(TransportChoice::Tcp, IoOp::Call),
        ] {
            let mut floor = TcpFloor::connect(address, &options).unwrap();
            for _ in 0..3 {
                let mut tally = Tally::new().unwrap();
                let operations = floor.run(Instant::now(), &mut tally).unwrap();
                assert_eq!(operations, (options.depth * options.batch) as u64, "{options:?}");
            }
        }
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let good = Shape { request: 16, response: 8, gathered: 1 };
        assert_eq!(Shape::decode(good.encode()).unwrap(), good);
        for bad in [
            Shape { request: 0, ..good },
            Shape { response: 1 << 30, ..good },
            Shape { gathered: 0, ..good },
            Shape { gathered: 1000, ..good },
        ] {
            assert!(Shape::decode(bad.encode()).is_err(), "{bad:?}");
        }
    }
}
