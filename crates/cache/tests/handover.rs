//! The cache of a server that has shut down, and the server that takes its place.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use farpool_cache::{
    AttachedCache, CacheClient, CacheConfig, CacheSession, Checkpoint, DoorFile, HandoverList, Leases,
    PAGE_BYTES, Replacements, ServerEnd, TakeOverResult, ask_for_handover, collect_into,
};
use farpool_fabric::TransportChoice;
use farpool_testpool::{Rig, wait_until};

const BLOCKS: u32 = 40;
const SETTINGS: CacheConfig = CacheConfig { slots: 256, max_slots: 256, files: 16 };
static REPLACEMENTS: Replacements = Replacements::new();
static ENABLED: AtomicBool = AtomicBool::new(true);

/// Fields of `pg_control`.
const SYSTEM: Range<usize> = 0..8;
const VERSION: Range<usize> = 8..12;
const STATE: Range<usize> = 16..20;
const CHECKPOINT: Range<usize> = 32..40;
const TIMELINE: Range<usize> = 48..52;
const MIN_RECOVERY: Range<usize> = 136..144;
const BLOCK_BYTES: Range<usize> = 216..220;
const LOG_PAGE_BYTES: Range<usize> = 224..228;
const SEGMENT_BYTES: Range<usize> = 228..232;
const CHECKSUMS: Range<usize> = 252..256;
const SHUT_DOWN: u32 = 1;
const CRASH_RECOVERY: u32 = 4;
const STANDBY: u32 = 5;
const IN_PRODUCTION: u32 = 6;
/// Where the old server has shut down.
const END: u64 = 0x5000_0028;

/// A server's data directory with one table.
struct Server {
    files: tempfile::TempDir,
    doors: tempfile::TempDir,
}

/// A page, whose position in the log comes first.
fn page_of(block: u32) -> Vec<u8> {
    let mut page = [0, 100 + block].map(u32::to_ne_bytes).concat();
    page.resize(PAGE_BYTES, block as u8);
    page
}

impl Server {
    fn new(state: u32) -> Server {
        let (files, doors) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        for dir in ["global", "base/5", "pg_wal"] {
            std::fs::create_dir_all(files.path().join(dir)).unwrap();
        }
        std::fs::write(files.path().join("PG_VERSION"), "15\n").unwrap();
        let server = Server { files, doors };
        (0..BLOCKS).for_each(|block| server.write_to_disk(block, &page_of(block)));
        server.set_control(state, END, END + 120);
        server
    }

    fn table(&self) -> PathBuf {
        self.files.path().join("base/5/16384")
    }

    fn write_to_disk(&self, block: u32, page: &[u8]) {
        let file = File::options().write(true).create(true).truncate(false).open(self.table()).unwrap();
        file.write_all_at(page, u64::from(block) * PAGE_BYTES as u64).unwrap();
    }

    fn set_control(&self, state: u32, checkpoint: u64, min_recovery: u64) {
        let mut control = vec![0; 512];
        let mut put = |field: Range<usize>, bytes: &[u8]| control[field].copy_from_slice(bytes);
        put(SYSTEM, &9_u64.to_ne_bytes());
        put(VERSION, &1300_u32.to_ne_bytes());
        put(STATE, &state.to_ne_bytes());
        put(CHECKPOINT, &checkpoint.to_ne_bytes());
        put(TIMELINE, &1_u32.to_ne_bytes());
        put(MIN_RECOVERY, &min_recovery.to_ne_bytes());
        put(BLOCK_BYTES, &8192_u32.to_ne_bytes());
        put(LOG_PAGE_BYTES, &8192_u32.to_ne_bytes());
        put(SEGMENT_BYTES, &(16_u32 << 20).to_ne_bytes());
        put(CHECKSUMS, &1_u32.to_ne_bytes());
        std::fs::write(self.files.path().join("global/pg_control"), control).unwrap();
    }

    /// Writes the beginning of a record to the log, which follows that of a checkpoint.
    fn write_record_after(&self, checkpoint: u64) {
        let name = format!("00000001{:08X}{:08X}", checkpoint >> 32, (checkpoint as u32) >> 24);
        let file = File::create(self.files.path().join("pg_wal").join(name)).unwrap();
        file.write_all_at(&checkpoint.to_ne_bytes(), checkpoint % (16 << 20) + 120 + 8).unwrap();
    }

    fn door(&self) -> DoorFile {
        DoorFile::open_in(self.doors.path(), self.files.path()).unwrap()
    }

    fn start_process(&self) -> (CacheSession, File) {
        let client = CacheClient::new(self.door().into());
        let session = CacheSession::new(&client, &REPLACEMENTS, &ENABLED).expect("a place");
        (session, File::options().read(true).write(true).open(self.table()).unwrap())
    }

    /// The blocks that a new process finds in the cache, with the pages that they have there.
    fn hits(&self) -> Vec<(u32, Vec<u8>)> {
        let (mut session, file) = self.start_process();
        let read = |block: u32| {
            let (mut page, at) = (Vec::new(), u64::from(block) * PAGE_BYTES as u64);
            let (range, mut is_hit) = (at..at + PAGE_BYTES as u64, true);
            let pread = |to: &mut [u8], at| {
                is_hit = false;
                file.read_at(to, at)
            };
            session.read(file.as_fd(), range, pread, collect_into(&mut page));
            is_hit.then_some((block, page))
        };
        (0..BLOCKS).filter_map(read).collect()
    }

    /// Ends as a primary, after all its processes.
    fn shut_down(&self, checkpoint: u64) {
        self.set_control(SHUT_DOWN, checkpoint, 0);
        assert_eq!(CacheClient::new(self.door().into()).sign_files(), 1);
    }

    fn attach(&self, leases: Leases) -> AttachedCache {
        AttachedCache::new(self.door(), leases, SETTINGS).unwrap()
    }
}

fn leases(rig: &Rig) -> Leases {
    Leases::connect(rig.config(TransportChoice::Auto)).unwrap()
}

/// A server that has shut down, with all pages in its cache.
fn shut_down(rig: &Rig) -> (Server, AttachedCache) {
    let old = Server::new(IN_PRODUCTION);
    let cache = old.attach(leases(rig));
    wait_until(|| old.hits().len() == BLOCKS as usize);
    old.shut_down(END);
    (old, cache)
}

fn hand_over(old: &Server) -> HandoverList {
    HandoverList::decode(&ask_for_handover(&old.door()).unwrap()).unwrap()
}

fn take_over(rig: &Rig, new: &Server, list: HandoverList) -> (AttachedCache, TakeOverResult) {
    let cache = new.attach(Leases::take_over(rig.config(TransportChoice::Auto), list).unwrap());
    let taken = rig.runtime.block_on(cache.taken_over()).unwrap();
    (cache, taken)
}

#[test]
fn pages_of_a_server_that_has_shut_down_are_found_by_its_standby_without_a_copy() {
    let rig = Rig::new(1, 4);
    let (old, cache) = shut_down(&rig);
    let new = Server::new(STANDBY);
    // Hint bits differ, which are not in the log.
    let hinted = |block: u32| [&page_of(block)[..8], &[0xAA; PAGE_BYTES - 8]].concat();
    (0..BLOCKS).for_each(|block| new.write_to_disk(block, &hinted(block)));
    let list = hand_over(&old);
    assert_eq!((list.pages(), list.server.checkpoint.position), (BLOCKS.into(), END));
    let owner = cache.pool().owner();
    drop(cache);
    assert!(old.hits().is_empty());

    let (cache, taken) = take_over(&rig, &new, list);
    assert_eq!(
        taken,
        TakeOverResult { pages: BLOCKS.into(), listed: BLOCKS.into(), ..TakeOverResult::default() }
    );
    assert_eq!(cache.pool().owner(), owner);
    assert_eq!(new.hits(), (0..BLOCKS).map(|block| (block, page_of(block))).collect::<Vec<_>>());

    // And back again.
    new.shut_down(END + 512);
    old.set_control(STANDBY, END + 512, END + 512 + 120);
    let list = hand_over(&new);
    drop(cache);
    let (_cache, taken) = take_over(&rig, &old, list);
    assert_eq!((taken.pages, old.hits().len()), (BLOCKS.into(), BLOCKS as usize));
}

#[test]
fn a_cache_is_handed_over_only_after_the_server_and_all_processes_have_ended() {
    let rig = Rig::new(1, 4);
    let (old, _cache) = shut_down(&rig);
    let refused = |what: &str| {
        let refusal = ask_for_handover(&old.door()).unwrap_err().to_string();
        assert!(refusal.contains(what), "{refusal}");
        wait_until(|| old.hits().len() == BLOCKS as usize);
    };
    old.set_control(IN_PRODUCTION, END, 0);
    refused("stop the primary");
    old.set_control(SHUT_DOWN, END, 0);
    std::fs::write(old.files.path().join("postmaster.pid"), "1").unwrap();
    refused("stop the primary");
    std::fs::remove_file(old.files.path().join("postmaster.pid")).unwrap();
    let process = old.start_process();
    refused("uses the cache");
    drop(process);
    std::fs::remove_file(old.files.path().join("global/pg_control")).unwrap();
    refused("pg_control");
    old.set_control(SHUT_DOWN, END, 0);
    assert_eq!(hand_over(&old).pages(), BLOCKS.into());
}

#[test]
fn a_cache_without_recorded_leases_is_not_handed_over() {
    let (rig, server) = (Rig::new(1, 4), Server::new(SHUT_DOWN));
    let pool = rig.pool(TransportChoice::Auto);
    let _cache = server.attach(pool.into());
    assert!(ask_for_handover(&server.door()).unwrap_err().to_string().contains("leases"));
}

#[test]
fn nothing_is_taken_over_unless_the_standby_has_replayed_just_what_the_old_server_wrote() {
    let rig = Rig::new(1, 4);
    let (old, _cache) = shut_down(&rig);
    let list = hand_over(&old);
    type Change = fn(&Server);
    let cases: [(Change, &str); 6] = [
        (|new| new.set_control(IN_PRODUCTION, END, END), "promoted"),
        (|new| std::fs::write(new.files.path().join("pg_wal/00000002.history"), "").unwrap(), "promoted"),
        (|new| new.set_control(STANDBY, END, END + 144), "started again"),
        (|new| new.set_control(STANDBY, END + 120, END + 240), "started again"),
        (|new| new.write_record_after(END), "started again"),
        (|new| std::fs::remove_file(new.files.path().join("global/pg_control")).unwrap(), "data directory"),
    ];
    for (change, why) in cases {
        let new = Server::new(STANDBY);
        change(&new);
        let (cache, taken) = take_over(&rig, &new, list.clone());
        assert!(taken.refusal.as_ref().is_some_and(|found| found.contains(why)), "{taken:?}");
        // It begins empty, and all its memory can be used.
        assert!(new.hits().is_empty());
        wait_until(|| new.hits().len() == BLOCKS as usize);
        wait_until(|| cache.census().absent == 0);
    }
    let server = list.server;
    let others = [
        (ServerEnd { system: 1, ..server }, "not a standby of"),
        (ServerEnd { checksums: 0, ..server }, "checksums"),
        (ServerEnd { checkpoint: Checkpoint { time: 7, ..server.checkpoint }, ..server }, "another server"),
    ];
    for (server, why) in others {
        let other = HandoverList { server, ..list.clone() };
        let (_cache, taken) = take_over(&rig, &Server::new(STANDBY), other);
        assert!(taken.refusal.as_ref().is_some_and(|found| found.contains(why)), "{taken:?}");
    }
}

#[test]
fn pages_are_taken_over_once_the_standby_has_made_its_restartpoint() {
    let rig = Rig::new(1, 4);
    let (old, _cache) = shut_down(&rig);
    let new = Server::new(STANDBY);
    new.set_control(CRASH_RECOVERY, END - 4096, END - 1024);
    let leases = Leases::take_over(rig.config(TransportChoice::Auto), hand_over(&old)).unwrap();
    let cache = new.attach(leases);
    // A block that the standby writes while it catches up: the page on its disk is the newest.
    let (mut session, file) = new.start_process();
    let (page, at) = (page_of(7), 7 * PAGE_BYTES as u64);
    let write = |_: Option<&[u8]>| file.write_at(&page, at);
    session.write(file.as_fd(), at..at + PAGE_BYTES as u64, None::<fn(&mut [u8])>, write).unwrap();
    drop((session, file));
    new.set_control(STANDBY, END - 4096, END - 1024);
    std::thread::sleep(Duration::from_millis(100));
    new.set_control(STANDBY, END, END + 120);
    let taken = rig.runtime.block_on(cache.taken_over()).unwrap();
    assert_eq!(taken.refusal, None);
    assert!((1..=u64::from(BLOCKS)).contains(&taken.pages), "{taken:?}");
    let hits = new.hits();
    assert!(hits.iter().all(|(block, page)| *page == page_of(*block)));
}

#[test]
fn a_cache_whose_leases_have_ended_begins_empty() {
    let mut rig = Rig::new(1, 4);
    let (old, cache) = shut_down(&rig);
    let list = hand_over(&old);
    drop(cache);
    rig.kill_node(0);
    rig.start_node(4);
    let new = Server::new(STANDBY);
    let (_cache, taken) = take_over(&rig, &new, list);
    let all = u64::from(BLOCKS);
    assert_eq!(taken, TakeOverResult { listed: all, lost: all, ..TakeOverResult::default() });
    wait_until(|| new.hits().len() == BLOCKS as usize);
}

#[test]
fn a_cache_that_is_too_small_for_what_is_handed_over_is_refused() {
    let rig = Rig::new(1, 4);
    let (old, _cache) = shut_down(&rig);
    let list = HandoverList { slots: 1 << 20, ..hand_over(&old) };
    let leases = Leases::take_over(rig.config(TransportChoice::Auto), list).unwrap();
    let refused = AttachedCache::new(Server::new(STANDBY).door(), leases, SETTINGS);
    assert!(refused.is_err_and(|error| error.to_string().contains("--max-memory")));
}

#[test]
fn a_file_that_was_changed_after_the_server_had_signed_it_is_left_out() {
    let rig = Rig::new(1, 4);
    let (old, _cache) = shut_down(&rig);
    // A server without the module, or another program, announces nothing.
    std::thread::sleep(Duration::from_millis(100));
    old.write_to_disk(3, &page_of(4));
    assert_eq!(hand_over(&old).pages(), 0);
}

#[test]
fn unlogged_tables_are_left_out() {
    let rig = Rig::new(1, 4);
    let old = Server::new(IN_PRODUCTION);
    let _cache = old.attach(leases(&rig));
    wait_until(|| old.hits().len() == BLOCKS as usize);
    old.shut_down(END);
    std::fs::write(old.files.path().join("base/5/16384_init"), "").unwrap();
    assert_eq!(hand_over(&old).pages(), 0);
}
