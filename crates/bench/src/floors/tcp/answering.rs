//! The floor's server: one thread, all connections, one memory.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};

use super::{HEADER_BYTES, RESPONSE_DEADLINE, Shape, WORD_BYTES, calm};
use crate::options::IoOp;
use crate::pages::{Pages, SharedPages};

/// Most blocks that one system call sends.
const GATHERED: usize = 32;
/// Blocks of at least this length are sent straight from the memory; shorter ones are cheaper to gather in a
/// buffer.
const DIRECT_BYTES: usize = 1 << 10;
/// Length of the buffer of received bytes, which also holds the start of an unfinished request. The largest
/// block fits with its header.
const RECEIVED_BYTES: usize = 3 << 20;
/// After this time without a byte the server sleeps, so that it takes no processor time from the measurements
/// in between.
const SPIN: Duration = Duration::from_millis(2);

/// Serves one client process on loopback, until the parent process ends this one.
pub fn serve(bytes: usize, pages: Pages, ready: impl FnOnce(SocketAddr)) -> Result<()> {
    let memory = SharedPages::new(bytes, pages)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
    listener.set_nonblocking(true)?;
    ready(listener.local_addr()?);
    let mut connections: Vec<Answering> = Vec::new();
    let mut busy = Instant::now();
    loop {
        let mut moved = false;
        connections.retain_mut(|connection| match connection.turn(&memory) {
            Ok(turned) => {
                moved |= turned;
                true
            }
            Err(_) => false, // the client has closed it, or asked for a place outside the memory
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
        let wanted = if connection.owes() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&connection.stream, wanted)
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
    received: Vec<u8>,
    filled: usize,
    /// Places of blocks to be sent straight from the memory; `sent` bytes of the first one have been sent.
    blocks: VecDeque<usize>,
    /// Other answers; their first `sent` bytes have been sent.
    answers: Vec<u8>,
    sent: usize,
}

impl Answering {
    fn greet(mut stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(RESPONSE_DEADLINE))?;
        let mut shape = [0; Shape::BYTES];
        stream.read_exact(&mut shape).context("a client did not send the shape of its requests")?;
        let shape = Shape::decode(shape)?;
        calm(&stream)?;
        stream.set_nonblocking(true)?;
        Ok(Answering {
            stream,
            shape,
            received: vec![0; RECEIVED_BYTES],
            filled: 0,
            blocks: VecDeque::new(),
            answers: Vec::new(),
            sent: 0,
        })
    }

    fn owes(&self) -> bool {
        !self.blocks.is_empty() || !self.answers.is_empty()
    }

    /// Receives and sends without blocking; returns whether any byte moved.
    fn turn(&mut self, memory: &SharedPages) -> std::io::Result<bool> {
        let mut got = 0;
        if !self.owes() {
            got = none_when_blocked(self.stream.read(&mut self.received[self.filled..]))?;
            self.filled += got;
            self.answer(memory)?;
        }
        let sent = if self.owes() { self.send(memory)? } else { 0 };
        Ok(got + sent > 0)
    }

    /// Carries out the requests that have arrived whole.
    fn answer(&mut self, memory: &SharedPages) -> std::io::Result<()> {
        let Shape { op, block } = self.shape;
        let mut requests = self.received[..self.filled].chunks_exact(self.shape.request());
        for request in &mut requests {
            let (header, payload) = request.split_at(HEADER_BYTES);
            let place = usize::try_from(word(header, 0)).unwrap_or(usize::MAX);
            let end = place.checked_add(block).filter(|&end| end <= memory.bytes());
            if end.is_none() || !place.is_multiple_of(WORD_BYTES) {
                return Err(ErrorKind::InvalidData.into());
            }
            match op {
                IoOp::Read if block >= DIRECT_BYTES => self.blocks.push_back(place),
                IoOp::Read => self.answers.extend_from_slice(bytes(memory, place, block)),
                IoOp::Call => self.answers.extend_from_slice(payload),
                IoOp::Write => {
                    // SAFETY: in bounds as checked; only this thread uses the memory, and no reference into
                    // it exists.
                    let to = unsafe { std::slice::from_raw_parts_mut(memory.base().add(place), block) };
                    to.copy_from_slice(payload);
                    self.answers.extend_from_slice(&[0; WORD_BYTES]);
                }
                IoOp::Cas => {
                    let (expected, new) = (word(payload, 0), word(payload, 1));
                    let swapped = atomic(memory, place).compare_exchange(
                        expected,
                        new,
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    );
                    self.answers.extend_from_slice(&swapped.unwrap_or_else(|before| before).to_le_bytes());
                }
                IoOp::Faa => {
                    let before = atomic(memory, place).fetch_add(word(payload, 0), Ordering::SeqCst);
                    self.answers.extend_from_slice(&before.to_le_bytes());
                }
            }
        }
        let begun = requests.remainder().len();
        self.received.copy_within(self.filled - begun..self.filled, 0);
        self.filled = begun;
        Ok(())
    }

    fn send(&mut self, memory: &SharedPages) -> std::io::Result<usize> {
        if self.blocks.is_empty() {
            let sent = none_when_blocked(self.stream.write(&self.answers[self.sent..]))?;
            self.sent += sent;
            if self.sent == self.answers.len() {
                self.answers.clear();
                self.sent = 0;
            }
            return Ok(sent);
        }
        let mut pieces = [IoSlice::new(&[]); GATHERED];
        let mut skip = self.sent;
        let mut count = 0;
        for (piece, &place) in pieces.iter_mut().zip(&self.blocks) {
            *piece = IoSlice::new(&bytes(memory, place, self.shape.block)[skip..]);
            skip = 0;
            count += 1;
        }
        let sent = none_when_blocked((&self.stream).write_vectored(&pieces[..count]))?;
        self.sent += sent;
        self.blocks.drain(..self.sent / self.shape.block);
        self.sent %= self.shape.block;
        Ok(sent)
    }
}

fn none_when_blocked(result: std::io::Result<usize>) -> std::io::Result<usize> {
    match result {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        result => result,
    }
}

/// # Panics
/// If the block does not lie within the memory; the caller checks that it does.
fn bytes(memory: &SharedPages, place: usize, block: usize) -> &[u8] {
    assert!(place + block <= memory.bytes());
    // SAFETY: in bounds as asserted; only this thread uses the memory, and writes nothing to it while the
    // slice exists; the slice borrows `memory`.
    unsafe { std::slice::from_raw_parts(memory.base().add(place), block) }
}

fn atomic(memory: &SharedPages, place: usize) -> &AtomicU64 {
    assert!(place + WORD_BYTES <= memory.bytes() && place.is_multiple_of(WORD_BYTES));
    // SAFETY: in bounds and aligned as asserted; alive as long as the borrow of `memory`; only this thread
    // uses it.
    unsafe { AtomicU64::from_ptr(memory.base().add(place).cast()) }
}

/// The `index`-th word.
fn word(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes.as_chunks().0[index])
}
