//! Direct clients: processes of the owner's host that work on its files without asking it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use farpool_fabric::{Endpoint, EndpointConfig, MonotonicClock, Negotiated, block_on};
use farpool_pool::direct::{GuestRegion, Owner, Server, packets};
use farpool_pool::{Extent, NODE_DEADLINE, SessionCore};
use farpool_wire::{BlockWord, NodeId, TICKET_BYTES};
use futures_util::poll;
use rustix::io::Errno;

use super::bare::Bare;
use super::*;
use crate::guest::{
    AskOwner, Given, GuestFileCore, GuestId, GuestMemory, GuestPlace, GuestStore, Host, Room,
};
use crate::map::Loss;
use crate::{FileCore, StoreCore};

/// A direct client with one thread.
pub(super) struct Client {
    pub(super) id: GuestId,
    pub(super) place: GuestPlace,
    pub(super) core: SessionCore,
    pub(super) store: Arc<GuestStore>,
}

/// The store's memory as a direct client gets it.
fn memory_of(store: &StoreCore) -> GuestMemory<OwnedFd> {
    let GuestMemory { words, table } = store.guest_memory();
    let duplicate = |memory: std::os::fd::BorrowedFd<'_>| memory.try_clone_to_owned().unwrap();
    GuestMemory { words: duplicate(words), table: duplicate(table) }
}

impl Client {
    pub(super) fn new(bare: &Bare) -> Client {
        Client::told(bare, |region| region)
    }

    /// A direct client that learns of regions what `told` makes of the owner's answers.
    fn told(bare: &Bare, told: fn(GuestRegion) -> GuestRegion) -> Client {
        let (owner, id) = (bare.store.clone(), bare.store.add_guest().unwrap());
        let ask = Box::new(move |number| owner.region_of(number).map(told));
        let (memory, per_region) = (memory_of(&bare.store), bare.store.extents_per_region());
        let store = GuestStore::new(id, &memory, per_region, Arc::new(MonotonicClock), ask).unwrap();
        let store = Arc::new(store);
        let transport = Rc::new(Negotiated::new(TransportChoice::Shm, NODE_DEADLINE));
        let endpoint = Endpoint::new(EndpointConfig::real(transport, 4 * MAX_TRANSFER_BYTES, NODE_DEADLINE));
        let place = store.place().unwrap();
        Client { id, place, core: SessionCore::new(store.regions().clone(), endpoint), store }
    }

    pub(super) fn open(&self, file: &FileCore) -> GuestFileCore {
        file.open_to_guests().unwrap();
        GuestFileCore::open(self.store.clone(), &file.guest_memory().unwrap()).unwrap()
    }

    fn read(&self, file: &GuestFileCore, offset: u64, length: usize) -> Result<Vec<u8>, AskOwner> {
        let read = file.read(&self.core, &self.place, offset, length);
        let (buffer, within) = block_on(self.core.endpoint(), read)?;
        Ok(buffer.map_or(Vec::new(), |buffer| buffer[within].to_vec()))
    }

    fn write(&self, file: &GuestFileCore, offset: u64, data: &[u8]) -> Result<(), AskOwner> {
        block_on(self.core.endpoint(), file.write(&self.core, &self.place, offset, Given::from(data)))
    }
}

pub(super) const DATA: usize = 2 * EXTENT_BYTES as usize;

#[test]
fn a_direct_client_reads_what_the_owner_wrote_and_the_owner_reads_what_it_wrote() {
    let rig = Rig::new(2, 8);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let client = Client::new(&bare);
    let seen = client.open(&file);
    assert!(client.read(&seen, 0, DATA).unwrap() == pattern(DATA, 3));
    client.write(&seen, EXTENT_BYTES - 100, &[9; 200]).unwrap();
    let mut right = pattern(DATA, 3);
    right[EXTENT_BYTES as usize - 100..][..200].fill(9);
    assert!(bare.read(&file, 0, DATA).unwrap() == right);
    bare.run(async |core| file.close_to_guests(core).await).unwrap();
    assert_eq!(client.read(&seen, 0, 1), Err(AskOwner));
}

#[test]
fn a_direct_client_asks_the_owner_while_a_block_of_the_file_is_lost() {
    let rig = Rig::new(1, 4);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let client = Client::new(&bare);
    let seen = client.open(&file);
    file.map.write().lose(EXTENT_BYTES, 1, Loss::Gone);
    assert_eq!(client.read(&seen, 0, 1), Err(AskOwner));
    bare.run(async |core| file.write(core, EXTENT_BYTES, &[9; BLOCK_BYTES]).await).unwrap();
    assert_eq!(client.read(&seen, EXTENT_BYTES, 1), Ok(vec![9]));
}

#[test]
fn a_direct_client_uses_only_the_lease_that_the_table_names() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let of_another_epoch = |told: GuestRegion| GuestRegion { epoch: Epoch(told.epoch.0 + 1), ..told };
    let of_another_node = |told: GuestRegion| {
        let node = NodeId(told.id.node.0 + 1);
        GuestRegion { id: RegionId { node, ..told.id }, ..told }
    };
    for told in [of_another_epoch, of_another_node] {
        let client = Client::told(&bare, told);
        assert_eq!(client.read(&client.open(&file), 0, 1), Err(AskOwner));
    }
}

#[test]
fn a_direct_client_uses_an_extent_of_a_new_region_at_once() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let client = Client::new(&bare);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    assert!(client.read(&client.open(&file), 0, DATA).unwrap() == pattern(DATA, 3));
}

#[test]
fn a_direct_client_does_not_write_to_a_file_with_rows() {
    let rig = Rig::new(2, 4);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Mirror, &pattern(DATA, 3));
    let client = Client::new(&bare);
    let seen = client.open(&file);
    assert!(client.read(&seen, 0, DATA).unwrap() == pattern(DATA, 3));
    assert_eq!(client.write(&seen, 0, &[9; BLOCK_BYTES]), Err(AskOwner));
    assert!(bare.read(&file, 0, DATA).unwrap() == pattern(DATA, 3));
}

#[test]
fn a_direct_client_asks_the_owner_if_the_extent_has_changed_while_it_waited_for_a_lock() {
    let rig = Rig::new(1, 4);
    let bare = Bare::new(&rig);
    let client = Client::new(&bare);
    let words = &bare.store.words;
    type Change<'a> = &'a dyn Fn(&FileCore, &Extent, BlockWord) -> BlockWord;
    let nothing = |_: &FileCore, _: &Extent, word| word;
    let dropped = |file: &FileCore, _: &Extent, word| {
        file.map.write().remove(0);
        word
    };
    let doubted = |_: &FileCore, extent: &Extent, word| {
        words.doubt(extent);
        word
    };
    let lost = |_: &FileCore, _: &Extent, word: BlockWord| word.lost();
    let written = |change: Change<'_>| {
        let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
        let seen = client.open(&file);
        let extent = file.extent_at(0).unwrap();
        let first = words.place(&extent, 0);
        bare.run(async |core| {
            let word = words.lock(core.endpoint(), first).await.unwrap();
            let data = Given::from(&[9; BLOCK_BYTES][..]);
            let mut writing = pin!(seen.write(&client.core, &client.place, 0, data));
            assert!(poll!(&mut writing).is_pending(), "it waits for the lock");
            words.store(first, change(&file, &extent, word));
            block_on(client.core.endpoint(), writing)
        })
    };
    assert_eq!(written(&nothing), Ok(()));
    assert_eq!([&dropped as Change<'_>, &doubted, &lost].map(written), [Err(AskOwner); 3]);
}

#[test]
fn a_copy_of_a_direct_client_in_a_forked_process_writes_nothing() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let client = Client::new(&bare);
    let seen = client.open(&file);
    client.write(&seen, 0, &[9; 100]).unwrap();
    client.store.abandon();
    assert_eq!(client.write(&seen, 0, &[7; 100]), Err(AskOwner));
    assert_eq!(bare.read(&file, 0, 100).unwrap(), [9; 100]);
}

#[test]
fn what_a_direct_client_may_be_using_stays_until_its_operation_ends() {
    let rig = Rig::new(1, 4);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let client = Client::new(&bare);
    let seen = client.open(&file);
    let words = &bare.store.words;
    let first = words.place(&file.extent_at(0).unwrap(), 0);
    let dropped = Arc::downgrade(&file.extent_at(EXTENT_BYTES).unwrap());
    bare.run(async |core| {
        let word = words.lock(core.endpoint(), first).await.unwrap();
        let mut emptying = pin!(file.set_size(core, 0));
        {
            let mut reading = pin!(seen.read(&client.core, &client.place, 0, 1));
            assert!(poll!(&mut reading).is_pending(), "it waits for the lock");
            // As a move does, which waits for no direct client.
            file.map.write().remove(1);
            bare.store.maintain_guests();
            assert!(dropped.upgrade().is_some(), "its memory could be another file's by now");
            assert!(poll!(&mut emptying).is_pending(), "the client may read what would be cleared");
            assert!(!seen.is_open(), "no other operation begins meanwhile");
        }
        words.store(first, word);
        emptying.await.unwrap();
    });
    bare.store.maintain_guests();
    assert!(seen.is_open() && dropped.upgrade().is_none() && file.allocated_bytes() == 0);
}

#[test]
fn only_nodes_of_the_owner_s_regions_are_connected_to() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let peer = file.extent_at(0).unwrap().region().node.peer.clone();
    let socket = peer.shm_socket.as_deref().unwrap();
    assert_eq!(bare.store.stock.peer_of_guests(peer.node, socket), Some(peer.clone()));
    assert_eq!(bare.store.stock.peer_of_guests(NodeId(peer.node.0 + 1), socket), None);
    assert_eq!(bare.store.stock.peer_of_guests(peer.node, Path::new("/elsewhere")), None);
}

#[test]
fn what_is_sent_to_a_direct_client_arrives_as_it_was() {
    let rig = Rig::new(1, 2);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let number = file.extent_at(0).unwrap().number() / bare.store.extents_per_region();
    let sent = bare.store.region_of(number).unwrap();
    let received = GuestRegion::from_wire(&sent.to_wire(), None).unwrap();
    assert_eq!((received.id, received.epoch), (sent.id, sent.epoch));
    assert_eq!(received.key.as_bytes(), sent.key.as_bytes());
    assert_eq!((received.peer.tcp, received.peer.shm_socket), (sent.peer.tcp, sent.peer.shm_socket));
    for number in [1, 2, 300] {
        assert_eq!(GuestId::from_number(number).map(GuestId::number), Some(number));
    }
    assert_eq!(GuestId::from_number(0), None, "that is the owner");
    assert_eq!(packets::refusal(Errno::STALE).errno, Errno::STALE.raw_os_error() as u32);
}

/// The ticket for which the daemon gives out its file.
const TICKET: [u8; TICKET_BYTES] = [7; TICKET_BYTES];

/// A daemon with one file.
struct Daemon {
    name: String,
    server: Option<Server>,
    /// The inodes of the connections to nodes that it gave out.
    connected: mpsc::Receiver<u64>,
}

struct OfOneFile {
    store: FileStore,
    file: FarFile,
    connected: mpsc::Sender<u64>,
}

impl Daemon {
    fn start(name: &str, store: &FileStore, file: &FarFile) -> Daemon {
        let name = format!("farpool-test-{}-{name}", std::process::id());
        let (sender, connected) = mpsc::channel();
        let owner = OfOneFile { store: store.clone(), file: file.clone(), connected: sender };
        let server = Some(Server::start(&name, owner).unwrap());
        Daemon { name, server, connected }
    }
}

impl Owner for OfOneFile {
    type Guest = GuestId;

    fn trusts(&self, uid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw()
    }

    fn admit(&mut self) -> Option<GuestId> {
        self.store.core().add_guest().ok()
    }

    fn number(guest: GuestId) -> u32 {
        guest.number().into()
    }

    fn memory(&self) -> Vec<BorrowedFd<'_>> {
        let GuestMemory { words, table } = self.store.core().guest_memory();
        vec![words, table]
    }

    fn extents_per_region(&self) -> u64 {
        self.store.core().extents_per_region()
    }

    fn redeem(&mut self, ticket: &[u8]) -> Result<OwnedFd, Errno> {
        if ticket != TICKET {
            return Err(Errno::STALE);
        }
        Ok(self.file.core().guest_memory().unwrap())
    }

    fn region(&self, number: u64) -> Option<GuestRegion> {
        self.store.core().region_of(number)
    }

    fn connect(&self, node: NodeId, shm_socket: &Path) -> io::Result<OwnedFd> {
        let connection = self.store.core().stock.connect_guest(node, shm_socket)?;
        self.connected.send(rustix::fs::fstat(&connection)?.st_ino).unwrap();
        Ok(connection)
    }

    fn warn_out_of_reach(&self, node: NodeId, _: &str, error: &io::Error) {
        panic!("{node} cannot be reached: {error}");
    }

    fn bury(&mut self, _: GuestId) {
        unreachable!("the direct clients are this process");
    }
}

#[test]
fn a_process_that_joined_a_daemon_reads_and_writes_until_the_daemon_ends() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &pattern(DATA, 3)).unwrap();
    file.core().open_to_guests().unwrap();
    let mut daemon = Daemon::start("joined", &store, &file);
    let host = Host::join(&daemon.name).unwrap();
    let refused = host.open(&[8; TICKET_BYTES]).err().unwrap();
    assert_eq!(refused.raw_os_error(), Some(Errno::STALE.raw_os_error()));
    let (seen, thread) = (host.open(&TICKET).unwrap(), host.session().unwrap());

    let mut right = pattern(DATA, 3);
    right[50..350].fill(9);
    let several = [Given::from(&[9; 100][..]), Given::from(&[9; 200][..])];
    assert_eq!(file.core().take_guests_written_ns(), None);
    let before = coarse_now_ns();
    assert_eq!(seen.write_at(&thread, 50, &several), Some(300));
    let written = file.core().take_guests_written_ns().unwrap();
    assert!((before..=coarse_now_ns()).contains(&written), "{written}");
    assert_eq!(file.core().take_guests_written_ns(), None, "not since the last call");
    assert!(read(&file, &session, 0, DATA).unwrap() == right);

    let read_at = |offset, length: usize| {
        let (mut first, mut second) = (vec![0; length], vec![0; length]);
        let rooms = [Room::from(&mut first[..]), Room::from(&mut second[..])];
        let count = seen.read_at(&thread, offset, &rooms)?;
        first.extend(second);
        first.truncate(count);
        Some(first)
    };
    assert!(read_at(40, 200).unwrap() == right[40..440]);
    assert!(read_at(DATA as u64 - 300, 200).unwrap() == right[DATA - 300..], "the file ends there");
    assert_eq!(read_at(DATA as u64, 200).unwrap(), []);

    let nothing: [u8; 0] = [];
    assert_eq!(seen.write_at(&thread, 0, &[Given::from(&nothing[..])]), None, "only the kernel knows");
    let too_long = vec![0; MAX_TRANSFER_BYTES + 1];
    assert_eq!(seen.write_at(&thread, 0, &[Given::from(&too_long[..])]), None);
    assert_eq!(read_at(0, MAX_TRANSFER_BYTES), None, "twice what one transfer can be");

    assert!(!host.notice_end());
    drop(daemon.server.take());
    wait_until(|| host.notice_end());
    assert_eq!(read_at(0, 1), None);
    assert_eq!(seen.write_at(&thread, 0, &several), None);
    assert!(read(&file, &session, 0, DATA).unwrap() == right);
}

#[test]
fn a_process_that_joined_a_daemon_reads_and_writes_what_lies_in_the_overflow_directory() {
    let (rig, dir) = (Rig::new(1, 1), super::overflow::disk());
    let (store, session) = super::overflow::overflowing(&rig, &dir, None);
    let file = store.create();
    let bytes = (REGION_BYTES + 2 * EXTENT_BYTES) as usize;
    let mut right = pattern(bytes, 3);
    for (at, piece) in (0..).step_by(EXTENT_BYTES as usize).zip(right.chunks(EXTENT_BYTES as usize)) {
        file.write(&session, at, piece).unwrap();
    }
    let is_there = |offset| file.inner.extent_at(offset).unwrap().region().is_overflow();
    assert!(!is_there(REGION_BYTES - 1) && is_there(REGION_BYTES));
    file.core().open_to_guests().unwrap();
    let mut daemon = Daemon::start("overflow", &store, &file);
    let host = Host::join(&daemon.name).unwrap();
    let (seen, thread) = (host.open(&TICKET).unwrap(), host.session().unwrap());
    let found = |offset: u64, length: usize| {
        let mut found = vec![0; length];
        assert_eq!(seen.read_at(&thread, offset, &[Room::from(&mut found[..])]), Some(length));
        found
    };
    // Across the edge of far memory, and of two extents of the directory.
    for edge in [REGION_BYTES, REGION_BYTES + EXTENT_BYTES] {
        let around = edge as usize - 10_000..edge as usize + 10_000;
        assert!(found(around.start as u64, around.len()) == right[around.clone()]);
        right[around.clone()].fill(9);
        let given = [Given::from(&right[around.clone()])];
        assert_eq!(seen.write_at(&thread, around.start as u64, &given), Some(around.len()));
        assert!(found(around.start as u64, around.len()) == right[around.clone()]);
        assert!(read(&file, &session, around.start as u64, around.len()).unwrap() == right[around]);
    }
    assert!(store.core().guests.moved().written >= 40_000, "not by way of the owner");
    let files = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let is_there = |target: std::path::PathBuf| target.starts_with(dir.path()) && target != dir.path();
        // Direct clients' have high numbers.
        let is_ours = |fd: &std::fs::DirEntry| {
            fd.file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
                .is_some_and(|number: u32| number >= 256)
        };
        open.filter(is_ours).filter(|fd| std::fs::read_link(fd.path()).is_ok_and(is_there)).count()
    };
    assert_eq!(files(), 1);
    drop(daemon.server.take());
    wait_until(|| host.notice_end());
    assert_eq!(files(), 0);
}

/// Nanoseconds since 1970 by the clock that gives files their times.
fn coarse_now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}

#[test]
fn a_copy_of_a_host_in_a_forked_process_writes_nothing_and_asks_nothing() {
    let rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &pattern(DATA, 3)).unwrap();
    file.core().open_to_guests().unwrap();
    let daemon = Daemon::start("forked", &store, &file);
    let host = Host::join(&daemon.name).unwrap();
    let (seen, thread) = (host.open(&TICKET).unwrap(), host.session().unwrap());
    let write = |byte| seen.write_at(&thread, 0, &[Given::from(&[byte; 100][..])]);
    assert_eq!(write(9), Some(100));
    host.abandon();
    assert_eq!(write(7), None);
    assert!(host.open(&TICKET).is_err(), "the connection is the parent's");
    assert_eq!(read(&file, &session, 0, 100).unwrap(), [9; 100]);
}

fn is_open_socket(inode: u64) -> bool {
    let link = format!("socket:[{inode}]");
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links.into_iter().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|found| found == Path::new(&link)))
}

#[test]
fn a_thread_that_lets_go_closes_its_connection_to_a_lost_node() {
    let mut rig = Rig::new(1, 4);
    let (store, session) = rig.store(TransportChoice::Shm);
    let file = store.create();
    file.write(&session, 0, &pattern(DATA, 3)).unwrap();
    file.core().open_to_guests().unwrap();
    let daemon = Daemon::start("lets-go", &store, &file);
    let host = Host::join(&daemon.name).unwrap();
    let seen = host.open(&TICKET).unwrap();
    let [busy, idle] = [0, 1].map(|_| host.session().unwrap());
    let read = |thread| seen.read_at(thread, 0, &[Room::from(&mut [0][..])]);
    assert_eq!([&busy, &idle].map(read), [Some(1); 2]);
    let of_idle = daemon.connected.iter().nth(1).unwrap();
    idle.let_go();
    assert!(is_open_socket(of_idle), "the node is not lost");
    rig.kill_node(0);
    wait_until(|| read(&busy).is_none());
    assert!(is_open_socket(of_idle), "this thread has not noticed");
    wait_until(|| {
        let _ = read(&busy);
        idle.let_go();
        !is_open_socket(of_idle)
    });
}
