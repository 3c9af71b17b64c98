//! memcached and redis: values of 8 KiB, read in random order by a client that polls, as the fabric's client
//! does.
//!
//! All keys have the same length, so all requests to read have one length, and all responses to them another.
//! So the client finds the responses by counting bytes, and compares the contents of only some of them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{START_DEADLINE, free_address, listens};
use crate::child::{Child, tied};
use crate::options::Pattern;
use crate::places::Places;
use crate::stop::check_stop;
use crate::table::results::Figures;
use crate::tally::Tally;

/// A database page.
const VALUE_BYTES: usize = 8 << 10;
/// Longest wait for a response.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);
/// Time before each measurement, not counted.
const WARM_UP: Duration = Duration::from_millis(300);
/// Values in flight while a peer is filled.
const FILL_DEPTH: usize = 32;
/// Room for a response and the beginning of the next ones.
const RECEIVED_BYTES: usize = 256 << 10;
/// Peers need more memory for a value than its length; this factor is enough for both.
const ROOM_FACTOR: u64 = 2;

/// Which of the two servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// memcached's text protocol.
    Memcached,
    /// RESP.
    Redis,
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Protocol::Memcached => "memcached",
            Protocol::Redis => "redis",
        }
    }

    fn put_get(self, key: u64, request: &mut Vec<u8>) {
        // Writing to a vector does not fail.
        let _ = match self {
            Protocol::Memcached => write!(request, "get k{key:010}\r\n"),
            Protocol::Redis => write!(request, "*2\r\n$3\r\nGET\r\n$11\r\nk{key:010}\r\n"),
        };
    }

    fn put_set(self, key: u64, request: &mut Vec<u8>) {
        let _ = match self {
            Protocol::Memcached => write!(request, "set k{key:010} 0 0 {VALUE_BYTES}\r\n"),
            Protocol::Redis => write!(request, "*3\r\n$3\r\nSET\r\n$11\r\nk{key:010}\r\n${VALUE_BYTES}\r\n"),
        };
        put_value(key, request);
        request.extend_from_slice(b"\r\n");
    }

    fn stored(self) -> &'static [u8] {
        match self {
            Protocol::Memcached => b"STORED\r\n",
            Protocol::Redis => b"+OK\r\n",
        }
    }

    fn put_hit(self, key: u64, response: &mut Vec<u8>) {
        let _ = match self {
            Protocol::Memcached => write!(response, "VALUE k{key:010} 0 {VALUE_BYTES}\r\n"),
            Protocol::Redis => write!(response, "${VALUE_BYTES}\r\n"),
        };
        put_value(key, response);
        response.extend_from_slice(if self == Protocol::Memcached { b"\r\nEND\r\n" } else { b"\r\n" });
    }
}

/// The value under a key: the key, repeated.
fn put_value(key: u64, into: &mut Vec<u8>) {
    for _ in 0..VALUE_BYTES / 8 {
        into.extend_from_slice(&key.to_le_bytes());
    }
}

/// A running, filled server.
pub struct Cache {
    protocol: Protocol,
    address: SocketAddr,
    keys: u64,
    _child: Child,
}

impl Cache {
    /// Starts it and stores `bytes` bytes of values.
    pub fn start(protocol: Protocol, bytes: u64, dir: &Path, stop: &AtomicBool) -> Result<Self> {
        let address = free_address()?;
        let (ip, port) = (address.ip().to_string(), address.port().to_string());
        let room_mib = ((bytes * ROOM_FACTOR) >> 20).max(64).to_string();
        let mut command = match protocol {
            Protocol::Memcached => {
                let mut command = tied("memcached");
                // -M: errors instead of evictions. -u matters only for root: without it memcached refuses to
                // run as root.
                command.args(["-l", &ip, "-p", &port, "-U", "0", "-M", "-m", &room_mib, "-u", "root"]);
                command
            }
            Protocol::Redis => {
                let mut command = tied("redis-server");
                command.args(["--bind", &ip, "--port", &port, "--save", "", "--appendonly", "no"]);
                command.arg("--dir").arg(dir);
                command
            }
        };
        command.stdout(Stdio::null());
        let mut child = Child::start(protocol.name(), command)?;
        child.wait_until(START_DEADLINE, |_| Ok(listens(address)))?;
        let cache = Cache { protocol, address, keys: bytes / VALUE_BYTES as u64, _child: child };
        cache.fill(stop).with_context(|| format!("cannot fill {}", protocol.name()))?;
        Ok(cache)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(RESPONSE_DEADLINE))?;
        Ok(stream)
    }

    fn fill(&self, stop: &AtomicBool) -> Result<()> {
        let mut stream = self.connect()?;
        let mut requests = Vec::new();
        for first in (0..self.keys).step_by(FILL_DEPTH) {
            let keys = first..self.keys.min(first + FILL_DEPTH as u64);
            let expected = self.protocol.stored().repeat(keys.clone().count());
            requests.clear();
            keys.for_each(|key| self.protocol.put_set(key, &mut requests));
            stream.write_all(&requests)?;
            let mut answers = vec![0; expected.len()];
            stream.read_exact(&mut answers)?;
            let said = String::from_utf8_lossy(&answers);
            ensure!(answers == expected, "unexpected answer `{}`", said.lines().next().unwrap_or_default());
            check_stop(stop)?;
        }
        Ok(())
    }

    /// Reads random values for `time`, with `depth` requests in flight.
    pub fn gets(&self, depth: usize, time: Duration, stop: &AtomicBool) -> Result<Figures> {
        check_stop(stop)?;
        let stream = self.connect()?;
        stream.set_nonblocking(true)?;
        let mut client = Client::new(self, stream);
        client.run(depth, Instant::now() + WARM_UP, &mut Tally::new()?)?;
        let mut tally = Tally::new()?;
        let started = Instant::now();
        let operations = client.run(depth, started + time, &mut tally)?;
        tally.finish(operations, started.elapsed());
        let iops = tally.per_second;
        Ok(Figures {
            iops,
            mib_s: iops * VALUE_BYTES as f64 / f64::from(1 << 20),
            p50_us: tally.quantile_us(0.5),
            p99_us: tally.quantile_us(0.99),
            floor: None,
            ratio_p50: None,
            ratio_iops: None,
        })
    }
}

struct Client {
    protocol: Protocol,
    stream: TcpStream,
    places: Places,
    /// The time and the key of each request in flight.
    asked: VecDeque<(Instant, u64)>,
    to_send: Vec<u8>,
    received: Vec<u8>,
    /// Number of bytes in `received`.
    filled: usize,
    response_bytes: usize,
    expected: Vec<u8>,
}

impl Client {
    fn new(cache: &Cache, stream: TcpStream) -> Self {
        let mut expected = Vec::new();
        cache.protocol.put_hit(0, &mut expected);
        // Places are keys here: in a footprint of one region with blocks of one byte, each offset is a key.
        let places = Places::new(Pattern::Random, 1, cache.keys, 1, 1);
        Client {
            protocol: cache.protocol,
            stream,
            places,
            asked: VecDeque::new(),
            to_send: Vec::new(),
            received: vec![0; RECEIVED_BYTES],
            filled: 0,
            response_bytes: expected.len(),
            expected,
        }
    }

    fn run(&mut self, depth: usize, end: Instant, tally: &mut Tally) -> Result<u64> {
        let mut operations = 0;
        let mut now = Instant::now();
        (0..depth).for_each(|_| self.ask(now));
        let mut last = now;
        while !self.asked.is_empty() {
            self.send()?;
            if !self.receive()? {
                std::thread::yield_now();
                ensure!(last.elapsed() < RESPONSE_DEADLINE, "{} does not answer", self.protocol.name());
                continue;
            }
            now = Instant::now();
            last = now;
            let mut taken = 0;
            while self.filled - taken >= self.response_bytes {
                let (asked, key) = self.asked.pop_front().context("a response without a request")?;
                tally.record(now - asked, 1);
                self.check(key, taken)?;
                taken += self.response_bytes;
                operations += 1;
                if now < end {
                    self.ask(now);
                }
            }
            self.received.copy_within(taken..self.filled, 0);
            self.filled -= taken;
        }
        Ok(operations)
    }

    fn ask(&mut self, now: Instant) {
        let key = self.places.pick().offset;
        self.protocol.put_get(key, &mut self.to_send);
        self.asked.push_back((now, key));
    }

    fn send(&mut self) -> Result<()> {
        while !self.to_send.is_empty() {
            match self.stream.write(&self.to_send) {
                Ok(sent) => drop(self.to_send.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("cannot send"),
            }
        }
        Ok(())
    }

    /// Whether any byte arrived.
    fn receive(&mut self) -> Result<bool> {
        match self.stream.read(&mut self.received[self.filled..]) {
            Ok(0) => bail!("{} has closed the connection", self.protocol.name()),
            Ok(got) => {
                self.filled += got;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error).context("cannot receive"),
        }
    }

    /// Compares both ends of some responses: a miss or another value would differ there.
    fn check(&mut self, key: u64, at: usize) -> Result<()> {
        const ENDS: usize = 64;
        if !key.is_multiple_of(256) {
            return Ok(());
        }
        self.expected.clear();
        self.protocol.put_hit(key, &mut self.expected);
        let response = &self.received[at..at + self.response_bytes];
        let tail = self.response_bytes - ENDS;
        let same = response[..ENDS] == self.expected[..ENDS] && response[tail..] == self.expected[tail..];
        ensure!(same, "{} returned another value than the one stored under the key", self.protocol.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_responses_of_all_keys_are_equally_long() {
        for protocol in [Protocol::Memcached, Protocol::Redis] {
            for put in [Protocol::put_get, Protocol::put_set, Protocol::put_hit] {
                let (mut small, mut large) = (Vec::new(), Vec::new());
                put(protocol, 0, &mut small);
                put(protocol, 9_999_999_999, &mut large);
                assert_eq!(small.len(), large.len(), "{protocol:?}");
            }
        }
    }
}
