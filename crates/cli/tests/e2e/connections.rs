//! Clients keep their data while all connections of a node are taken: by floods without a key, by connections
//! that dribble, by another user on the node's socket, and by more honest clients than the node can serve.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::TransportChoice;
use farpool_wire::{Hello, Incarnation, NodeId, Opcode, RequestHeader, SessionId};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{Gid, Uid};

use crate::support::{Mount, Pool, PoolOptions, eventually, pattern, read_from_far, root, write_new};

const MIB: usize = 1 << 20;
/// Connections of a flood; a node serves 1,024.
const FLOOD: usize = 1_040;
/// Descriptors that a flood needs; the default limit of many systems is 1,024.
const DESCRIPTORS: u64 = 8_192;
/// The attack itself: a connection that dribbles sends one byte per interval. An earlier node closed
/// connections without a key only after 100 ms of silence, so each byte came just in time.
const DRIBBLE_EVERY: Duration = Duration::from_millis(80);
/// Pause between rounds of the other floods: short, but it leaves the node under test some processor time.
const FLOOD_EVERY: Duration = Duration::from_millis(1);
/// How long a flood lasts at least: longer than a client waits for a silent node, and longer than several
/// intervals of renewal.
const FLOOD_LASTS: Duration = Duration::from_secs(7);
/// Lines that a node may log about a flood: a few kinds of lines, each once in ten seconds.
const LINES_OF_A_FLOOD: usize = 20;
/// The crowd of everyday runs: with so few descriptors the node serves about thirty connections.
const CROWD: Crowd =
    Crowd { mounts: 6, threads: 8, node_descriptors: 400, memory: "64MiB", mount_bytes: 8 * MIB as u64 };
/// `FARPOOL_CROWD=18x64` asks for a crowd of 18 mounts with 64 threads each, and a node that serves as many
/// connections as nodes can.
const CROWD_OPTION: &str = "FARPOOL_CROWD";
/// What each thread writes and reads back in a round.
const CROWD_BYTES: usize = 64 << 10;
const CROWD_ROUNDS: u64 = 40;
/// A user without rights on this machine: `nobody`, by custom.
const STRANGER: u32 = 65_534;

fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(DESCRIPTORS);
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }).unwrap();
    }
}

/// Where a flood goes.
#[derive(Clone)]
enum Target {
    Tcp(String),
    /// As a user without rights, if this is root.
    Unix(PathBuf),
}

/// What the connections of a flood do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Habit {
    /// Greet, then send one byte at a time, and connect again when closed.
    Dribble,
    /// Only connect, and connect again when closed.
    Come,
    /// Greet and ask for echoes as fast as they are answered.
    Echo,
}

impl Habit {
    /// Pause between rounds over all connections.
    fn interval(self) -> Duration {
        match self {
            Habit::Dribble => DRIBBLE_EVERY,
            Habit::Come | Habit::Echo => FLOOD_EVERY,
        }
    }
}

/// Connections without a key, which are opened again and again until this is dropped.
struct Flood {
    stop: &'static AtomicBool,
    thread: Option<JoinHandle<()>>,
    opened: &'static AtomicU64,
}

impl Flood {
    fn start(target: Target, node: NodeId, habit: Habit) -> Self {
        let stop: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let opened: &'static AtomicU64 = Box::leak(Box::default());
        let thread = std::thread::spawn(move || flood(&target, node, habit, stop, opened));
        Flood { stop, thread: Some(thread), opened }
    }

    fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed) // a count
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed); // the thread reads it every round; it guards nothing
        let ended = self.thread.take().expect("taken here only").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the flood ended by itself");
    }
}

fn flood(target: &Target, node: NodeId, habit: Habit, stop: &AtomicBool, opened: &AtomicU64) {
    if matches!(target, Target::Unix(_)) && root() {
        // Changes this thread only: the socket checks the user that connects.
        let (user, group) = (Uid::from_raw(STRANGER), Gid::from_raw(STRANGER));
        rustix::thread::set_thread_res_gid(group, group, group).unwrap();
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    }
    let mut connections: Vec<Option<File>> = (0..FLOOD).map(|_| None).collect();
    let mut next_session = 1 << 40;
    while !stop.load(Ordering::Relaxed) {
        for connection in &mut connections {
            if connection.is_none() {
                next_session += 1;
                *connection = open(target, node, habit, next_session);
                opened.fetch_add(u64::from(connection.is_some()), Ordering::Relaxed);
            }
            let Some(stream) = connection else { continue };
            if !keep_up(stream, habit) {
                *connection = None;
            }
        }
        std::thread::sleep(habit.interval());
    }
}

fn open(target: &Target, node: NodeId, habit: Habit, session: u64) -> Option<File> {
    let stream: OwnedFd = match target {
        Target::Tcp(address) => TcpStream::connect(address).ok()?.into(),
        Target::Unix(path) => {
            let stream = UnixStream::connect(path);
            assert!(
                !matches!(&stream, Err(error) if error.kind() == ErrorKind::PermissionDenied),
                "the user may not reach the socket"
            );
            stream.ok()?.into()
        }
    };
    rustix::io::ioctl_fionbio(&stream, true).unwrap();
    let mut stream = File::from(stream);
    if habit != Habit::Come {
        let hello = Hello { session: SessionId(session), incarnation: Incarnation(1), node };
        let _ = stream.write_all(&hello.encode()); // a connection that was closed is noticed later
    }
    Some(stream)
}

/// Performs one round of a connection with this habit; returns whether it is still open.
fn keep_up(stream: &mut File, habit: Habit) -> bool {
    let wants_more = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
    let sent = match habit {
        Habit::Come => Ok(0),
        // Never a whole request at once.
        Habit::Dribble => stream.write(&echo()[..1]),
        Habit::Echo => stream.write(&echo()),
    };
    if sent.is_err_and(|error| !wants_more(&error)) {
        return false;
    }
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return wants_more(&error),
        }
    }
}

/// A request to echo four bytes.
fn echo() -> Vec<u8> {
    let header = RequestHeader {
        opcode: Opcode::Call,
        fence: false,
        payload: 4,
        token: 1,
        region: 0,
        length: 4,
        epoch: farpool_wire::Epoch(0),
        offset: 0,
    };
    [&header.encode()[..], b"echo"].concat()
}

/// The pool's only node.
fn node_of(pool: &Pool) -> (NodeId, String, PathBuf) {
    let status = pool.status();
    let node = &status["nodes"][0];
    let id = node["id"].as_str().unwrap();
    let number = u64::from_str_radix(id, 16).unwrap();
    assert_eq!(NodeId(number).to_string(), id);
    (NodeId(number), node["tcp"].as_str().unwrap().into(), node["shm_socket"].as_str().unwrap().into())
}

/// Floods a node that two mounts use, one of them idle. The busy mount goes on, a third mount can be started,
/// and all have their data afterwards.
fn nothing_is_lost(habit: Habit, transport: &str) {
    raise_descriptors();
    // Each mount holds at least 32 MiB in reserve.
    let pool = Pool::start(PoolOptions { nodes: 1, memory: "256MiB", ..PoolOptions::default() });
    let (node, tcp, socket) = node_of(&pool);
    fs::set_permissions(socket.parent().unwrap(), fs::Permissions::from_mode(0o711)).unwrap();
    let mut idle = Mount::of(&pool, &["--transport", transport]);
    let mut busy = Mount::of(&pool, &["--transport", transport]);
    let data = pattern(3 * MIB, 1);
    write_new(&idle.file("data"), &data).unwrap();
    write_new(&busy.file("data"), &data).unwrap();

    let target = if transport == "shm" { Target::Unix(socket) } else { Target::Tcp(tcp) };
    let flood = Flood::start(target, node, habit);
    let began = Instant::now();
    let mut round = 0;
    eventually("the flood has come, and lasted", || {
        round += 1;
        let written = pattern(MIB, round);
        let done = write_new(&busy.file("more"), &written);
        done.unwrap_or_else(|error| panic!("{error}: {}", busy.process.complaints()));
        assert!(read_from_far(&busy.file("more")).unwrap() == written);
        assert!(read_from_far(&busy.file("data")).unwrap() == data);
        // On a busy machine the node may close the first silent connections before the last ones come. Then
        // it takes several rounds until all places are taken, which the log reports.
        let is_full = pool.nodes[0].complaints().contains("left_out=");
        began.elapsed() > FLOOD_LASTS && flood.opened() > FLOOD as u64 && is_full
    });
    assert!(read_from_far(&idle.file("data")).unwrap() == data, "during the flood");
    let mut late = Mount::of(&pool, &["--transport", transport]);
    write_new(&late.file("data"), &data).unwrap();
    drop(flood);
    for mount in [&idle, &busy, &late] {
        assert!(read_from_far(&mount.file("data")).unwrap() == data);
    }
    assert_eq!(pool.status()["nodes"][0]["alive"], true);
    // The log reports the flood, but is not flooded itself.
    let said = pool.nodes[0].complaints();
    assert!(said.lines().count() <= LINES_OF_A_FLOOD, "{said}");
    for mount in [&mut idle, &mut busy, &mut late] {
        mount.unmount();
    }
}

#[test]
fn connections_that_dribble_take_all_connections_and_no_file_is_lost() {
    nothing_is_lost(Habit::Dribble, "tcp");
}

#[test]
fn a_plain_flood_takes_all_connections_and_no_file_is_lost() {
    nothing_is_lost(Habit::Come, "tcp");
}

#[test]
fn calls_without_a_key_take_all_connections_and_no_file_is_lost() {
    nothing_is_lost(Habit::Echo, "tcp");
}

#[test]
fn another_user_on_the_nodes_socket_takes_all_connections_and_no_file_is_lost() {
    nothing_is_lost(Habit::Dribble, "shm");
}

/// Honest clients that work at the same time.
struct Crowd {
    mounts: usize,
    /// Threads of each mount.
    threads: usize,
    /// Descriptors of the node, which limit the connections that it serves.
    node_descriptors: u64,
    /// Memory of the node.
    memory: &'static str,
    /// Most far memory of a mount.
    mount_bytes: u64,
}

/// The crowd that `FARPOOL_CROWD` asks for.
fn crowd() -> Crowd {
    let Ok(asked) = std::env::var(CROWD_OPTION) else { return CROWD };
    let (mounts, threads) = asked.split_once('x').expect("as 18x64");
    let (mounts, threads) = (mounts.parse().unwrap(), threads.parse().unwrap());
    let mount_bytes = 32 * MIB as u64;
    Crowd { mounts, threads, node_descriptors: DESCRIPTORS, memory: "1GiB", mount_bytes }
}

/// The work of one thread: writes and reads back, round after round. Returns how long each round took.
fn write_and_read(pool: &farpool_pool::Pool, seed: u64, start: &Barrier) -> Vec<Duration> {
    let session = pool.session();
    let extent = session.lock().block_on(pool.take_extent(seed)).expect("there is room for all");
    start.wait();
    let round = |round: u64| {
        let (began, data) = (Instant::now(), pattern(CROWD_BYTES, seed << 32 | round));
        let guard = session.lock(); // one request at a time, as threads of a mount do
        // SAFETY: `core` asks that nothing obtained from it outlives the guard. Buffers and futures end in
        // `block_on`, which returns before `guard` is dropped; until then `guard` is locked, so no other
        // thread uses the session.
        let core = unsafe { guard.core() };
        let transferred = guard.block_on(async {
            let mut buffer = core.buffer(CROWD_BYTES).unwrap();
            buffer.copy_from_slice(&data);
            let (mut buffer, written) = core.write(&extent, 0, buffer).await;
            written?;
            buffer.fill(0);
            let (buffer, read) = core.read(&extent, 0, buffer).await;
            assert!(read.is_err() || buffer[..] == data[..], "other bytes");
            read
        });
        transferred.expect("slower, not lost");
        began.elapsed()
    };
    (0..CROWD_ROUNDS).map(round).collect()
}

fn more_honest_connections_than_places(transport: TransportChoice) {
    raise_descriptors();
    let Crowd { mounts, threads, node_descriptors, memory, mount_bytes } = crowd();
    let mut pool = Pool::start(PoolOptions { nodes: 0, memory, ..PoolOptions::default() });
    pool.add_node_with_descriptors(node_descriptors);
    let connect = || {
        farpool_pool::Pool::connect(farpool_pool::PoolConfig {
            broker: pool.address.clone(),
            tls: None,
            transport: transport.into(),
            limit_bytes: Some(mount_bytes),
        })
    };
    let pools: Vec<_> = (0..mounts).map(|_| connect().unwrap()).collect();
    let start = Barrier::new(mounts * threads);
    let mut took: Vec<Duration> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..mounts * threads)
            .map(|number| {
                let (pool, start) = (&pools[number % mounts], &start);
                scope.spawn(move || write_and_read(pool, number as u64, start))
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no thread lost anything")).collect()
    });
    took.sort();
    let at = |permille: usize| took[took.len() * permille / 1000];
    let (half, most, longest) = (at(500), at(990), at(999));
    println!("{mounts} x {threads}: rounds took {half:?} (median), {most:?} (p99), {longest:?} (p99.9)");
    assert_eq!(pool.status()["nodes"][0]["alive"], true);
}

#[test]
fn more_honest_clients_than_connections_over_tcp_are_slower_and_lose_nothing() {
    more_honest_connections_than_places(TransportChoice::Tcp);
}

#[test]
fn more_honest_clients_than_connections_over_shared_memory_are_slower_and_lose_nothing() {
    more_honest_connections_than_places(TransportChoice::Shm);
}
