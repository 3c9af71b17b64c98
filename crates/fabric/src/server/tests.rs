//! The server's bounds (V4), its turns driven by hand, with clients over real sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use farpool_wire::{
    AccessKey, Decoded, Epoch, GrantMode, HELLO_BYTES, Hello, HelloReply, Incarnation, MAX_TRANSFER_BYTES,
    NodeId, Opcode, REQUEST_HEADER_BYTES, RESPONSE_HEADER_BYTES, Refusal, RequestHeader, ResponseHeader,
    SessionId,
};

use tempfile::TempDir;

use super::connection::{DESCRIPTORS_DEADLINE, FILLINGS_PER_TURN, REFUSALS_WITHOUT_KEY};
use super::shares::SHARE_DEADLINE;
use super::*;
use crate::conformance::SuiteHost;

const EPOCH: Epoch = Epoch(1);
const KEY: [u8; 16] = [0x5A; 16];
const PATIENCE: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_secs(24 * 3600);
const MIB: usize = MAX_TRANSFER_BYTES;
/// More than there are shares.
const CROWD: usize = 3 * SHARES;

/// A server without a thread, and its clients.
struct Bench {
    host: Arc<SuiteHost>,
    server: Server,
    address: SocketAddr,
    clients: Vec<Client>,
    directory: TempDir,
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

struct Client {
    stream: Box<dyn Stream>,
    outgoing: Vec<u8>,
    sent: usize,
    incoming: Vec<u8>,
    greeting: Option<HelloReply>,
    outcomes: Vec<Result<(), Refusal>>,
    last_payload: Vec<u8>,
    closed: bool,
    reads: bool,
}

fn request(opcode: Opcode, length: usize, payload: usize) -> RequestHeader {
    let (payload, length) = (payload as u32, length as u32);
    RequestHeader { opcode, fence: false, payload, token: 7, region: 0, length, epoch: EPOCH, offset: 0 }
}

impl Bench {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let unix = Some((UnixListener::bind(&path).unwrap(), path));
        let host = SuiteHost::new();
        let mut server = Server::new(host.clone(), Listeners { tcp: Some(listener), unix }).unwrap();
        // Tests call the housekeeping themselves, however slowly they run.
        server.last_housekeeping = Instant::now() + NEVER;
        Bench { host, server, address, clients: Vec::new(), directory }
    }

    /// A client that greets with these numbers.
    fn greet(&mut self, session: u64, incarnation: u64, node: NodeId) -> usize {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.greet_on(Box::new(stream), session, incarnation, node)
    }

    fn greet_on(&mut self, stream: Box<dyn Stream>, session: u64, incarnation: u64, node: NodeId) -> usize {
        let hello = Hello { session: SessionId(session), incarnation: Incarnation(incarnation), node };
        let place = self.add(stream, hello);
        self.until(|bench| bench.clients[place].greeting.is_some());
        place
    }

    fn add(&mut self, stream: Box<dyn Stream>, hello: Hello) -> usize {
        self.clients.push(Client {
            stream,
            outgoing: hello.encode().to_vec(),
            sent: 0,
            incoming: Vec::new(),
            greeting: None,
            outcomes: Vec::new(),
            last_payload: Vec::new(),
            closed: false,
            reads: true,
        });
        self.clients.len() - 1
    }

    /// A client of a session of its own.
    fn join(&mut self) -> usize {
        let node = self.host.identity().node;
        self.greet(self.clients.len() as u64 + 1, 1, node)
    }

    /// A client of a session of its own, over the Unix socket.
    fn join_unix(&mut self) -> usize {
        let stream = UnixStream::connect(self.directory.path().join("socket")).unwrap();
        stream.set_nonblocking(true).unwrap();
        let node = self.host.identity().node;
        self.greet_on(Box::new(stream), self.clients.len() as u64 + 1, 1, node)
    }

    fn join_attached(&mut self) -> usize {
        let place = self.join();
        self.attach(place, 0, EPOCH)
    }

    fn attach(&mut self, place: usize, region: u32, epoch: Epoch) -> usize {
        let header = RequestHeader { region, epoch, ..request(Opcode::Attach, 0, KEY.len()) };
        self.send(place, &header.encode());
        self.send(place, &KEY);
        assert!(self.all_done(&[place], 1));
        self.clients[place].outcomes.clear();
        place
    }

    fn send(&mut self, place: usize, bytes: &[u8]) {
        self.clients[place].outgoing.extend_from_slice(bytes);
    }

    /// One turn of all clients and the server; true if anything happened. Checks the bound on kept memory.
    fn turn(&mut self) -> bool {
        let mut events = Vec::with_capacity(EVENTS);
        let moved: usize = self.clients.iter_mut().map(Client::pump).sum();
        self.server.serve_events(&mut events, Duration::from_millis(2)).unwrap();
        let bound = self.clients.len() * SMALL_BYTES + 2 * SHARES * BUFFER_BYTES;
        assert!(self.kept_bytes() <= bound, "{} bytes kept", self.kept_bytes());
        moved > 0 || !events.is_empty()
    }

    /// Takes turns until `is_so` holds.
    fn until(&mut self, is_so: impl Fn(&Bench) -> bool) {
        let started = Instant::now();
        while !is_so(self) {
            assert!(started.elapsed() < PATIENCE);
            self.turn();
        }
    }

    /// Takes turns until nothing has happened in several of them.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 5 {
            quiet = if self.turn() { 0 } else { quiet + 1 };
        }
    }

    /// Takes turns until each client of `crowd` has `answers` answers; true if none of them is a refusal.
    fn all_done(&mut self, crowd: &[usize], answers: usize) -> bool {
        self.until(|bench| crowd.iter().all(|&place| bench.clients[place].outcomes.len() == answers));
        crowd.iter().all(|&place| self.clients[place].outcomes.iter().all(Result::is_ok))
    }

    /// The clients whose connections have ended.
    fn closed(&mut self) -> Vec<usize> {
        self.settle();
        (0..self.clients.len()).filter(|&place| self.clients[place].closed).collect()
    }

    /// Memory that the server keeps for its connections.
    fn kept_bytes(&self) -> usize {
        self.server.connections.values().map(Connection::allocated_bytes).sum()
    }
}

impl Client {
    /// Sends and receives what the socket allows; returns how many bytes.
    fn pump(&mut self) -> usize {
        let mut moved = 0;
        while self.sent < self.outgoing.len() {
            match self.stream.write(&self.outgoing[self.sent..]) {
                Ok(bytes) => (self.sent, moved) = (self.sent + bytes, moved + bytes),
                Err(error) => {
                    self.closed |= error.kind() != ErrorKind::WouldBlock;
                    break;
                }
            }
        }
        let mut bytes = [0; 64 << 10];
        while self.reads && !self.closed {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.closed = true,
                Ok(count) => {
                    self.incoming.extend_from_slice(&bytes[..count]);
                    moved += count;
                }
                Err(error) => {
                    self.closed |= error.kind() != ErrorKind::WouldBlock;
                    break;
                }
            }
        }
        self.take_answers();
        moved
    }

    fn take_answers(&mut self) {
        if self.greeting.is_none()
            && let Ok(Decoded::Complete(greeting)) = HelloReply::decode(&self.incoming)
        {
            self.incoming.drain(..HELLO_BYTES);
            self.greeting = Some(greeting);
        }
        while self.greeting.is_some()
            && let Ok(Decoded::Complete(header)) = ResponseHeader::decode(&self.incoming)
            && self.incoming.len() >= RESPONSE_HEADER_BYTES + header.payload as usize
        {
            self.outcomes.push(header.outcome);
            let frame: Vec<u8> =
                self.incoming.drain(..RESPONSE_HEADER_BYTES + header.payload as usize).collect();
            self.last_payload = frame[RESPONSE_HEADER_BYTES..].to_vec();
        }
    }
}

#[test]
fn payloads_of_writes_that_will_be_refused_are_not_kept() {
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join()).collect();
    for &place in &crowd {
        bench.send(place, &request(Opcode::Write, 0, MIB).encode());
        bench.send(place, &vec![1; MIB - 1]);
    }
    bench.until(|bench| bench.clients.iter().all(|client| client.sent == client.outgoing.len()));
    bench.until(|bench| bench.kept_bytes() < CROWD << 10);
    for &place in &crowd {
        bench.send(place, &[1]);
    }
    bench.until(|bench| bench.clients.iter().all(|client| !client.outcomes.is_empty()));
    assert!(bench.clients.iter().all(|client| client.outcomes == [Err(Refusal::NotAttached)]));
}

#[test]
fn refused_writes_are_answered_in_their_turn_and_change_nothing() {
    let mut bench = Bench::start();
    let place = bench.join();
    let stale = RequestHeader { epoch: Epoch(9), ..request(Opcode::Write, 0, 100 << 10) };
    let requests = [
        (request(Opcode::Write, 0, MIB), vec![1; MIB]),
        (request(Opcode::Write, 0, 0), vec![]),
        (request(Opcode::Attach, 0, KEY.len()), KEY.to_vec()),
        (stale, vec![1; 100 << 10]),
        (request(Opcode::Write, 0, 8), vec![3; 8]),
        (RequestHeader { region: 1, ..request(Opcode::Write, 0, 8) }, vec![1; 8]),
        (request(Opcode::Read, 16, 0), vec![]),
    ];
    for (header, payload) in requests {
        bench.send(place, &header.encode());
        bench.send(place, &payload);
    }
    bench.until(|bench| bench.clients[place].outcomes.len() == 7);
    let (not_attached, stale) = (Err(Refusal::NotAttached), Err(Refusal::StaleEpoch));
    let client = &bench.clients[place];
    assert_eq!(client.outcomes, [not_attached, not_attached, Ok(()), stale, Ok(()), not_attached, Ok(())]);
    assert_eq!(client.last_payload, [[3; 8], [0; 8]].concat());
}

#[test]
fn a_crowd_in_the_middle_of_large_writes_is_kept_within_bounds_and_all_are_served() {
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join_attached()).collect();
    for &place in &crowd {
        bench.send(place, &request(Opcode::Write, 0, MIB).encode());
        bench.send(place, &vec![1; MIB - 1]);
    }
    bench.until(|bench| bench.kept_bytes() >= SHARES * MIB); // as many as may be in the middle of one
    bench.settle();
    for &place in &crowd {
        bench.send(place, &[1]);
        bench.send(place, &request(Opcode::Write, 0, MIB).encode());
        bench.send(place, &vec![1; MIB]);
    }
    assert!(bench.all_done(&crowd, 2));
    assert_eq!(bench.kept_bytes(), 0);
}

#[test]
fn a_crowd_with_large_writes_behind_small_requests_is_kept_within_bounds_and_all_are_served() {
    const ROUNDS: usize = 3;
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join_attached()).collect();
    for _ in 0..ROUNDS {
        for &place in &crowd {
            bench.send(place, &request(Opcode::Read, 8, 0).encode());
            bench.send(place, &request(Opcode::Write, 0, MIB).encode());
            bench.send(place, &vec![1; MIB - 1]);
        }
        bench.settle();
        crowd.iter().for_each(|&place| bench.send(place, &[1]));
    }
    assert!(bench.all_done(&crowd, 2 * ROUNDS));
    assert_eq!(bench.kept_bytes(), 0);
}

#[test]
fn a_crowd_that_keeps_several_reads_and_large_writes_in_flight_each_is_served_to_the_end() {
    const DEPTH: usize = 4;
    const ROUNDS: usize = 6;
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join_attached()).collect();
    let mut posted = vec![0; crowd.len()];
    let started = Instant::now();
    while crowd.iter().any(|&place| bench.clients[place].outcomes.len() < 2 * ROUNDS) {
        for (posted, &place) in posted.iter_mut().zip(&crowd) {
            while *posted < ROUNDS.min(bench.clients[place].outcomes.len() / 2 + DEPTH) {
                bench.send(place, &request(Opcode::Read, 8, 0).encode());
                bench.send(place, &request(Opcode::Write, 0, MIB).encode());
                bench.send(place, &vec![1; MIB]);
                *posted += 1;
            }
        }
        bench.turn();
        assert!(started.elapsed() < PATIENCE);
    }
    assert!(bench.all_done(&crowd, 2 * ROUNDS));
    assert_eq!(bench.closed(), []);
}

#[test]
fn a_crowd_that_does_not_read_its_answers_is_kept_within_bounds_and_all_are_answered() {
    /// More than the sockets' buffers hold.
    const READS: usize = 12;
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join_attached()).collect();
    for &place in &crowd {
        bench.clients[place].reads = false;
        bench.send(place, &request(Opcode::Read, MIB, 0).encode().repeat(READS));
    }
    bench.settle();
    bench.clients.iter_mut().for_each(|client| client.reads = true);
    assert!(bench.all_done(&crowd, READS));
}

#[test]
fn a_connection_that_holds_a_share_too_long_is_closed_and_small_requests_never_wait() {
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..SHARES).map(|_| bench.join_attached()).collect();
    for &place in &crowd {
        bench.send(place, &request(Opcode::Write, 0, MIB).encode());
        bench.send(place, &vec![1; MIB - 1]);
    }
    bench.until(|bench| bench.kept_bytes() >= SHARES * (MIB - 1));
    let (large, small) = (bench.join_attached(), bench.join_attached());
    bench.send(large, &request(Opcode::Read, MIB, 0).encode());
    bench.send(small, &request(Opcode::Read, 8 << 10, 0).encode());
    assert!(bench.all_done(&[small], 1));
    bench.settle();
    assert_eq!(bench.clients[large].outcomes, []);
    bench.server.keep_house(Instant::now() + SHARE_DEADLINE);
    assert!(bench.all_done(&[large], 1));
    bench.until(|bench| crowd.iter().all(|&place| bench.clients[place].closed));
}

#[test]
fn the_queue_for_shares_is_served_a_few_at_a_time_and_without_sleeping() {
    let mut bench = Bench::start();
    let holders: Vec<_> = (0..SHARES).map(|_| bench.join_attached()).collect();
    for &place in &holders {
        bench.send(place, &request(Opcode::Write, 0, MIB).encode());
        bench.send(place, &vec![1; MIB - 1]);
    }
    bench.until(|bench| bench.kept_bytes() >= SHARES * (MIB - 1));
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join_attached()).collect();
    for &place in &crowd {
        bench.send(place, &request(Opcode::Read, 96 << 10, 0).encode());
    }
    bench.until(|bench| bench.server.shares.waiting() == CROWD);
    let keep_much = bench.server.connections.iter().filter(|(_, connection)| connection.keeps_much());
    let holders: Vec<_> = keep_much.map(|(&token, _)| token).collect();
    assert_eq!(holders.len(), SHARES);
    holders.into_iter().for_each(|token| bench.server.close(token));
    let (started, mut before) = (Instant::now(), CROWD);
    while before > 0 {
        let longest = if bench.server.shares.can_go_on() { NEVER } else { Duration::from_millis(2) };
        bench.server.serve_events(&mut Vec::with_capacity(EVENTS), longest).unwrap();
        let now = bench.server.shares.waiting();
        assert!(before - now <= SHARES, "{before} {now}");
        before = now;
        bench.clients.iter_mut().for_each(|client| _ = client.pump());
        assert!(started.elapsed() < PATIENCE);
    }
    assert!(bench.all_done(&crowd, 1));
}

#[test]
fn a_client_that_drains_its_answers_as_they_come_leaves_others_their_turns() {
    const READS: usize = 200;
    let mut bench = Bench::start();
    let stream = TcpStream::connect(bench.address).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut drain = stream.try_clone().unwrap();
    let node = bench.host.identity().node;
    let greedy = bench.greet_on(Box::new(stream), 1, 1, node);
    bench.attach(greedy, 0, EPOCH);
    bench.clients[greedy].reads = false;
    let read = request(Opcode::Read, MIB, 0).encode();
    (0..READS).for_each(|_| bench.send(greedy, &read));
    let has_come = |bench: &Bench| {
        let mut connections = bench.server.connections.values();
        rustix::io::ioctl_fionread(connections.next().unwrap().stream()).unwrap()
    };
    let started = Instant::now();
    while has_come(&bench) < (READS * REQUEST_HEADER_BYTES) as u64 {
        bench.clients[greedy].pump();
        assert!(started.elapsed() < PATIENCE);
    }
    let unserved = |bench: &Bench| bench.server.connections.values().map(Connection::unserved_bytes).sum();
    std::thread::scope(|scope| {
        let draining = scope.spawn(move || {
            let (mut drained, mut bytes) = (0, vec![0; MIB]);
            while drained < READS * (MIB + RESPONSE_HEADER_BYTES) {
                match drain.read(&mut bytes) {
                    Ok(0) => panic!("closed"),
                    Ok(count) => drained += count,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
        });
        let mut before = READS * REQUEST_HEADER_BYTES;
        while !draining.is_finished() {
            bench.server.serve_events(&mut Vec::with_capacity(EVENTS), Duration::from_millis(2)).unwrap();
            let now: usize = unserved(&bench);
            assert!(before - now <= (FILLINGS_PER_TURN + 1) * REQUEST_HEADER_BYTES, "{before} {now}");
            before = now;
        }
        assert_eq!(before, 0);
    });
}

#[test]
fn clients_without_a_key_never_hold_a_share_and_are_refused_a_few_requests_before_they_are_closed() {
    let mut bench = Bench::start();
    let crowd: Vec<_> = (0..CROWD).map(|_| bench.join()).collect();
    let payload = [&b"echo "[..], &[7; (64 << 10) - 5]].concat();
    let most = REFUSALS_WITHOUT_KEY as usize;
    for &place in &crowd {
        bench.clients[place].reads = false;
        for _ in 0..2 * most {
            bench.send(place, &request(Opcode::Call, 64 << 10, payload.len()).encode());
            bench.send(place, &payload);
        }
    }
    bench.until(|bench| bench.server.connections.is_empty());
    assert!(!bench.server.shares.are_held());
    bench.clients.iter_mut().for_each(|client| client.reads = true);
    bench.until(|bench| crowd.iter().all(|&place| bench.clients[place].closed));
    for &place in &crowd {
        // Closing with unread bytes may take answers along.
        let outcomes = &bench.clients[place].outcomes;
        assert!(outcomes.len() <= most + 1 && outcomes.iter().all(|&end| end == Err(Refusal::NotAttached)));
    }
}

#[test]
fn a_client_that_shows_a_valid_key_after_some_that_have_ended_is_served() {
    let mut bench = Bench::start();
    let place = bench.join();
    let stale = RequestHeader { epoch: Epoch(0), ..request(Opcode::Attach, 0, KEY.len()) };
    for round in 0..3 {
        for _ in 0..REFUSALS_WITHOUT_KEY {
            bench.send(place, &[&stale.encode()[..], &KEY].concat());
        }
        bench.until(|bench| bench.clients[place].outcomes.len() == REFUSALS_WITHOUT_KEY as usize);
        bench.clients[place].outcomes.clear();
        bench.attach(place, 0, EPOCH);
        bench.send(place, &request(Opcode::Detach, 0, 0).encode());
        assert!(bench.all_done(&[place], 1), "round {round}");
        bench.clients[place].outcomes.clear();
    }
}

#[test]
fn a_greeting_meant_for_another_node_leaves_the_session_alone() {
    let mut bench = Bench::start();
    let node = bench.host.identity().node;
    let place = bench.join_attached();
    let lost = bench.greet(1, 2, NodeId(node.0 + 1));
    assert_eq!(bench.clients[lost].greeting.unwrap().node, node);
    bench.until(|bench| bench.clients[lost].closed);
    bench.send(place, &request(Opcode::Read, 8, 0).encode());
    assert!(bench.all_done(&[place], 1));
    let next = bench.greet(1, 2, node);
    assert_eq!(bench.clients[next].greeting.unwrap().incarnation, Incarnation(2));
    bench.until(|bench| bench.clients[place].closed);
}

#[test]
fn attaching_without_reading_the_answers_makes_few_descriptors_wait() {
    const ATTACHES: usize = 2000;
    let mut bench = Bench::start();
    let place = bench.join_unix();
    bench.clients[place].reads = false;
    bench.send(place, &[&request(Opcode::Attach, 0, KEY.len()).encode()[..], &KEY].concat().repeat(ATTACHES));
    bench.settle();
    let waiting = bench.server.connections.values().map(Connection::waiting_descriptors).sum::<usize>();
    assert!((1..=8).contains(&waiting), "{waiting} descriptors wait");
    bench.clients[place].reads = true;
    assert!(bench.all_done(&[place], ATTACHES));
}

#[test]
fn a_client_that_leaves_descriptors_unread_is_closed_and_one_that_reads_them_is_not() {
    let mut bench = Bench::start();
    let attach = [&request(Opcode::Attach, 0, KEY.len()).encode()[..], &KEY].concat();
    let (greedy, idle) = (bench.join_unix(), bench.join_unix());
    bench.clients[greedy].reads = false;
    bench.send(greedy, &attach.repeat(2000));
    bench.send(idle, &attach);
    assert!(bench.all_done(&[idle], 1));
    bench.settle();
    bench.server.now = Instant::now() + 2 * DESCRIPTORS_DEADLINE;
    bench.server.close_useless();
    bench.clients[greedy].reads = true;
    assert_eq!(bench.closed(), [greedy]);
}

#[test]
fn few_descriptors_allow_few_connections() {
    assert!((LEAST_CONNECTIONS..=MAX_CONNECTIONS).contains(&most_connections(16)));
    assert_eq!(most_connections(u32::MAX), LEAST_CONNECTIONS);
}

/// A server with `places` places, and a second grant.
fn bench_of(places: usize) -> Bench {
    let mut bench = Bench::start();
    bench.server.most_connections = places;
    bench.server.places = Places::of(places);
    bench.host.regions.open(1, OTHERS, AccessKey::from_bytes(KEY));
    bench
}

const OTHERS: Epoch = Epoch(2);
const PLACES: usize = 24;

impl Bench {
    /// Connects without waiting for an answer.
    fn come(&mut self) -> usize {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let node = self.host.identity().node;
        let hello =
            Hello { session: SessionId(self.clients.len() as u64 + 1), incarnation: Incarnation(1), node };
        self.add(Box::new(stream), hello)
    }

    fn join_other(&mut self) -> usize {
        let place = self.join();
        self.attach(place, 1, OTHERS)
    }
}

#[test]
fn connections_without_a_key_make_room_for_each_other_by_age_whatever_they_send_and_never_displace_a_key() {
    let mut bench = bench_of(PLACES);
    let keyed = [bench.join_attached(), bench.join_attached()];
    let dribbling: Vec<_> = (0..PLACES - keyed.len()).map(|_| bench.join()).collect();
    assert_eq!(bench.closed(), [], "there is a place for each");
    let byte = request(Opcode::Read, 8, 0).encode()[0];
    for (count, &oldest) in dribbling.iter().enumerate() {
        bench.send(oldest, &[byte]);
        bench.settle();
        let next = bench.come();
        bench.until(|bench| bench.clients[next].greeting.is_some());
        assert_eq!(bench.closed(), dribbling[..=count]);
    }
    bench.send(keyed[0], &request(Opcode::Read, 8, 0).encode());
    assert!(bench.all_done(&keyed[..1], 1));
}

#[test]
fn a_client_with_a_key_finds_a_place_in_a_flood_and_owners_share_the_places() {
    let mut bench = bench_of(PLACES);
    let most = bench.server.places.most();
    let greedy: Vec<_> = (0..most).map(|_| bench.join_attached()).collect();
    let crowd: Vec<_> = (0..2 * PLACES).map(|_| bench.come()).collect();
    bench.settle();
    assert!(crowd.iter().any(|&place| bench.clients[place].closed));
    bench.send(greedy[0], &request(Opcode::Read, 8, 0).encode());
    assert!(bench.all_done(&greedy[..1], 1));
    for count in 1..=most / 2 {
        bench.join_other();
        let closed = bench.closed();
        let given_up: Vec<_> = greedy.iter().copied().filter(|place| closed.contains(place)).collect();
        assert_eq!(given_up, greedy[1..=count], "the one that has been idle longest");
    }
    // Now both owners have equal shares: none gives up a place, and a new connection is refused.
    for _ in 0..3 {
        let (place, region, epoch) = (bench.join(), 1, OTHERS);
        let header = RequestHeader { region, epoch, ..request(Opcode::Attach, 0, KEY.len()) };
        bench.send(place, &[&header.encode()[..], &KEY].concat());
        bench.until(|bench| bench.clients[place].outcomes == [Err(Refusal::Exhausted)]);
    }
    assert_eq!(greedy.iter().filter(|&&place| bench.clients[place].closed).count(), most / 2);
}

#[test]
fn clients_that_send_their_keys_all_at_once_are_all_answered_though_there_are_fewer_places() {
    let mut bench = bench_of(PLACES);
    let most = bench.server.places.most();
    (0..most).for_each(|_| _ = bench.join_attached());
    let header = RequestHeader { region: 1, epoch: OTHERS, ..request(Opcode::Attach, 0, KEY.len()) };
    let crowd: Vec<_> = (0..2 * PLACES).map(|_| bench.come()).collect();
    for &place in &crowd {
        bench.send(place, &[&header.encode()[..], &KEY].concat());
    }
    // All requests have arrived before the server serves the first connection.
    crowd.iter().for_each(|&place| _ = bench.clients[place].pump());
    bench.settle();
    let given = crowd.iter().filter(|&&place| bench.clients[place].outcomes == [Ok(())]).count();
    assert_eq!(given, most / 2, "half of all places");
    assert!(crowd.iter().all(|&place| bench.clients[place].outcomes.len() == 1));
}

#[test]
fn a_host_with_a_key_for_every_place_leaves_a_user_with_one_key_the_same_share() {
    let mut bench = bench_of(PLACES);
    let most = bench.server.places.most();
    let crowd: Vec<_> = (0..most as u64)
        .map(|number| {
            // This host knows no owners, so each grant counts as one.
            let epoch = Epoch(100 + number);
            bench.host.regions.open_grant(0, epoch, AccessKey::from_bytes(KEY), GrantMode::ReadWrite);
            let place = bench.join();
            bench.attach(place, 0, epoch)
        })
        .collect();
    assert!(!bench.server.places.has_room());
    for count in 1..=most / 2 {
        let place = bench.join_unix();
        bench.attach(place, 1, OTHERS);
        let closed = bench.closed();
        assert_eq!(crowd.iter().filter(|&place| closed.contains(place)).count(), count);
    }
    let place = bench.join_unix();
    let header = RequestHeader { region: 1, epoch: OTHERS, ..request(Opcode::Attach, 0, KEY.len()) };
    bench.send(place, &[&header.encode()[..], &KEY].concat());
    bench.until(|bench| bench.clients[place].outcomes == [Err(Refusal::Exhausted)]);
    assert_eq!(bench.closed().len(), most / 2);
}

#[test]
fn a_connection_that_detaches_its_last_region_counts_as_one_without_a_key_again() {
    let mut bench = bench_of(PLACES);
    let most = bench.server.places.most();
    let first: Vec<_> = (0..most).map(|_| bench.join_attached()).collect();
    assert!(!bench.server.places.has_room());
    for &place in &first {
        bench.send(place, &request(Opcode::Detach, 0, 0).encode());
    }
    assert!(bench.all_done(&first, 1));
    (0..most).for_each(|_| _ = bench.join_attached());
    assert!(!bench.server.places.has_room());
    bench.server.now += UNATTACHED_DEADLINE + Duration::from_secs(1);
    bench.server.close_useless();
    assert_eq!(bench.closed(), first);
}

#[test]
fn connections_whose_grants_have_all_ended_make_room() {
    let mut bench = bench_of(PLACES);
    let most = bench.server.places.most();
    let dead: Vec<_> = (0..most - 1).map(|_| bench.join_attached()).collect();
    let alive = bench.join_other();
    bench.host.regions.fence(0);
    bench.server.close_useless();
    assert_eq!(bench.closed(), dead);
    assert!(!bench.clients[alive].closed);
}

#[test]
fn a_connection_whose_only_grant_has_ended_is_found() {
    let mut bench = bench_of(PLACES);
    let place = bench.join_attached();
    bench.host.regions.fence(0);
    let connection = bench.server.connections.values().next().unwrap();
    assert!(bench.server.has_only_ended_grants(connection), "it has one grant, which has ended");
    assert_eq!(bench.clients[place].outcomes, []);
}
