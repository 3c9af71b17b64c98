//! Hostile clients that write arbitrary bytes into their ring: they lose their connection, and no other
//! client is affected. The tests use the wire format directly, without the client library.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::conformance::SuiteHost;
use farpool_fabric::{
    Endpoint, EndpointConfig, Host, Listeners, Mapping, MonotonicClock, Peer, Protection, Queue,
    ServerHandle, ShmTransport, block_on, serve,
};
use farpool_wire::{AccessKey, Epoch, HELLO_BYTES, Hello, Incarnation, RegionId, SessionId};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

const RING_BYTES: u64 = 1_052_672;
const FIRST_REQUEST: u64 = 256;
const FIRST_ANSWER: u64 = 525_568;
/// The frame that makes the node look into the ring.
const LOOK: [u8; 40] = {
    let mut frame = [0; 40];
    frame[0] = 8;
    frame
};
/// The frame that attaches the suite's region; its key follows.
const ATTACH: [u8; 40] = {
    let mut frame = [0; 40];
    frame[0] = 1;
    frame[4] = 16;
    frame[24] = 1;
    frame
};
const KEY: [u8; 16] = [0x5A; 16];
/// Length of the answer to it.
const ATTACHED_BYTES: usize = 24 + 32;
const PATIENCE: Duration = Duration::from_secs(20);

struct Node {
    host: Arc<SuiteHost>,
    server: ServerHandle,
    _directory: tempfile::TempDir,
}

impl Node {
    fn start() -> Node {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let host = SuiteHost::new();
        let server = serve(host.clone(), Listeners { tcp: None, unix: Some((listener, path)) }).unwrap();
        Node { host, server, _directory: directory }
    }

    fn client(&self) -> Queue {
        let endpoint = Endpoint::new(EndpointConfig {
            transport: Rc::new(ShmTransport),
            clock: Rc::new(MonotonicClock),
            session_ids: Box::new(|| SessionId(1)),
            arena_bytes: 1 << 20,
            deadline: PATIENCE,
        });
        let shm_socket = self.server.unix().cloned();
        let node = self.host.identity().node;
        let queue = endpoint.open(Peer { node, tcp: None, verbs: None, shm_socket }).unwrap();
        let region = RegionId { node, index: 0 };
        block_on(&endpoint, queue.attach(region, Epoch(1), AccessKey::from_bytes(KEY))).unwrap();
        queue
    }
}

/// A client that has greeted and attached the region, and that has mapped its ring.
struct Raw {
    stream: UnixStream,
    ring: Mapping,
}

impl Raw {
    fn connect(node: &Node, session: u64) -> Raw {
        let mut stream = UnixStream::connect(node.server.unix().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let node = node.host.identity().node;
        let hello = Hello { session: SessionId(session), incarnation: Incarnation(1), node };
        stream.write_all(&hello.encode()).unwrap();
        let ring = receive_greeting(&stream);
        stream.write_all(&[&ATTACH[..], &KEY].concat()).unwrap();
        stream.read_exact(&mut [0; ATTACHED_BYTES]).unwrap(); // the descriptors that come with it are dropped
        Raw { stream, ring: Mapping::new(ring.as_fd(), RING_BYTES, Protection::ReadWrite).unwrap() }
    }

    fn kick(&mut self) {
        let _ = self.stream.write_all(&LOOK); // fails once the node has closed the connection
    }

    fn is_closed(&mut self) -> bool {
        // Wake-ups may come first.
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

fn receive_greeting(stream: &UnixStream) -> OwnedFd {
    let mut received = 0;
    let mut ring = None;
    while received < HELLO_BYTES {
        let mut bytes = [0; HELLO_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes[received..])];
        let flags = RecvFlags::CMSG_CLOEXEC;
        received += rustix::net::recvmsg(stream, &mut room, &mut ancillary, flags).unwrap().bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                ring = ring.or(descriptors.last());
            }
        }
    }
    ring.expect("the greeting carries the ring")
}

fn echo(queue: &Queue) -> Vec<u8> {
    let mut buffer = queue.endpoint().arena().take(8).unwrap();
    buffer.copy_from_slice(b"echo yes");
    let answer = block_on(queue.endpoint(), queue.call(buffer, 8)).expect("this client is not affected");
    answer.buffer[..answer.bytes].to_vec()
}

#[test]
fn a_call_encoded_by_hand_is_answered() {
    let node = Node::start();
    let mut raw = Raw::connect(&node, 2);
    raw.ring.write(FIRST_REQUEST + 8, b"echo letter").unwrap();
    raw.ring.store(FIRST_REQUEST, 11 << 32 | 1).unwrap();
    raw.kick();
    let started = std::time::Instant::now();
    while raw.ring.load(FIRST_ANSWER) == Ok(0) {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert_eq!(raw.ring.load(FIRST_ANSWER), Ok(6 << 32 | 1));
    let mut answer = [0; 6];
    raw.ring.read(FIRST_ANSWER + 8, &mut answer).unwrap();
    assert_eq!(&answer, b"letter");
}

#[test]
fn invalid_words_in_a_slot_end_only_that_connection() {
    let node = Node::start();
    let honest = node.client();
    let lengths = [1 | 65_537 << 32, 1 | 0xFF_FFFF << 32, 1 | u64::MAX << 32];
    let statuses = [1 | 0xFE << 56, 1 | 1 << 56, 1 | 8 << 32 | 9 << 56]; // a request has no status
    let laps = [2, 3 | 8 << 32, u64::from(u32::MAX)]; // neither the previous lap nor the expected one
    let words = [&lengths[..], &statuses, &laps].concat();
    for (place, word) in (0u64..).zip(words) {
        let mut raw = Raw::connect(&node, 2 + place);
        raw.ring.store(FIRST_REQUEST, word).unwrap();
        raw.kick();
        assert!(raw.is_closed(), "{word:#x}");
        assert_eq!(node.host.rejected_connections(), place + 1);
        assert_eq!(echo(&honest), b"yes");
    }
}

#[test]
fn a_client_that_writes_random_words_into_its_ring_affects_no_other_client() {
    let node = Node::start();
    let honest = node.client();
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for session in 2..12 {
        let mut raw = Raw::connect(&node, session);
        for _ in 0..500 {
            // The two sleep words and the first words of slots are chosen more often than the others.
            let slot = next() % 16 * 65_664 + FIRST_REQUEST;
            let at = [0, 128, slot, next() % (RING_BYTES / 8) * 8][(next() % 4) as usize];
            let word = [next(), next() % 3, 1 | ((next() % 70_000) << 32)][(next() % 3) as usize];
            raw.ring.store(at, word).unwrap();
            if next().is_multiple_of(8) {
                raw.kick();
            }
        }
        assert_eq!(echo(&honest), b"yes");
    }
}

#[test]
fn asking_to_look_into_the_ring_without_a_key_is_malformed() {
    let node = Node::start();
    let mut stream = UnixStream::connect(node.server.unix().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = Hello { session: SessionId(1), incarnation: Incarnation(1), node: node.host.identity().node };
    stream.write_all(&hello.encode()).unwrap();
    stream.write_all(&LOOK).unwrap();
    let _ = stream.read_to_end(&mut Vec::new()); // returns at the end of the stream or at a reset
    assert_eq!(node.host.rejected_connections(), 1);
}

#[test]
fn asking_to_look_where_there_is_no_ring_is_malformed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = SuiteHost::new();
    let server = serve(host.clone(), Listeners { tcp: Some(listener), unix: None }).unwrap();
    let mut stream = std::net::TcpStream::connect(server.tcp().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let node = host.identity().node;
    let hello = Hello { session: SessionId(1), incarnation: Incarnation(1), node };
    stream.write_all(&hello.encode()).unwrap();
    stream.write_all(&LOOK).unwrap();
    let mut greeting = Vec::new();
    let _ = stream.read_to_end(&mut greeting); // returns at the end of the stream or at a reset
    assert_eq!(host.rejected_connections(), 1);
}
