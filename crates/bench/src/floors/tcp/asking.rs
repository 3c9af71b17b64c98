//! The floor's client: as many requests in flight as the compared operation has.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::{RESPONSE_DEADLINE, Shape, WORD_BYTES, calm};
use crate::options::IoOptions;
use crate::places::Places;
use crate::tally::Tally;

/// One thread's client. Each operation in flight has a slot for its request and one for its answer, as it
/// would have buffers. The bytes of requests are prepared once; only the place in them changes.
pub struct TcpFloor {
    stream: TcpStream,
    shape: Shape,
    places: Places,
    batch: usize,
    depth: usize,
    /// When the doorbells in flight were rung.
    rung: VecDeque<Instant>,
    requests: Around,
    /// Where the next request goes.
    next: usize,
    to_send: usize,
    answers: Around,
}

/// A ring of bytes.
struct Around {
    bytes: Vec<u8>,
    at: usize,
}

impl Around {
    fn new(bytes: usize) -> Self {
        Around { bytes: vec![3; bytes], at: 0 }
    }

    fn advance(&mut self, by: usize) {
        self.at = (self.at + by) % self.bytes.len();
    }
}

impl TcpFloor {
    /// Connects and tells the server the shape of this connection's requests.
    pub fn connect(address: SocketAddr, options: &IoOptions, places: Places) -> Result<Self> {
        let mut stream = TcpStream::connect(address).context("cannot reach the floor")?;
        let shape = Shape::of(options);
        calm(&stream)?;
        stream.write_all(&shape.encode())?;
        stream.set_nonblocking(true)?;
        let &IoOptions { batch, depth, .. } = options;
        let in_flight = batch * depth;
        Ok(TcpFloor {
            stream,
            shape,
            places,
            batch,
            depth,
            rung: VecDeque::with_capacity(depth),
            requests: Around::new(in_flight * shape.request()),
            next: 0,
            to_send: 0,
            answers: Around::new(in_flight * shape.response()),
        })
    }

    /// Runs until `end`; returns how many operations ended.
    pub fn run(&mut self, end: Instant, tally: &mut Tally) -> Result<u64> {
        let doorbell_bytes = self.batch * self.shape.response();
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
                let rung = self.rung.pop_front().context("a response without a request")?;
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
        for _ in 0..self.batch {
            let place = self.places.pick();
            let place = place.region as u64 * self.places.region_bytes() + place.offset;
            // The request that used this slot has been answered: there is a slot for each one in flight.
            self.requests.bytes[self.next..self.next + WORD_BYTES].copy_from_slice(&place.to_le_bytes());
            self.next = (self.next + self.shape.request()) % self.requests.bytes.len();
        }
        self.to_send += self.batch * self.shape.request();
    }

    fn send(&mut self) -> Result<usize> {
        if self.to_send == 0 {
            return Ok(0);
        }
        let Around { bytes, at } = &self.requests;
        let first = &bytes[*at..(at + self.to_send).min(bytes.len())];
        let second = &bytes[..self.to_send - first.len()];
        match self.stream.write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
            Ok(sent) => {
                self.to_send -= sent;
                self.requests.advance(sent);
                Ok(sent)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error).context("cannot send to the floor"),
        }
    }

    fn receive(&mut self) -> Result<usize> {
        let (second, first) = self.answers.bytes.split_at_mut(self.answers.at);
        match self.stream.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(second)]) {
            Ok(0) => bail!("the floor has closed the connection"),
            Ok(got) => {
                self.answers.advance(got);
                Ok(got)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error).context("cannot receive from the floor"),
        }
    }
}
