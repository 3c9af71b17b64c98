//! A cache that is attached to the files of a directory, and detached again, while processes use them.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farpool_cache::{
    AttachError, AttachedCache, CacheClient, CacheConfig, CacheSession, DoorFile, Leases, PAGE_BYTES,
    Replacements, collect_into,
};
use farpool_fabric::TransportChoice;
use farpool_testpool::{Rig, wait_until};

const BLOCKS: u32 = 40;
static REPLACEMENTS: Replacements = Replacements::new();
static ENABLED: AtomicBool = AtomicBool::new(true);
const SETTINGS: CacheConfig = CacheConfig { slots: 64, max_slots: 64, files: 16 };

/// A directory with a file of a database, and its door.
struct Database {
    files: tempfile::TempDir,
    doors: tempfile::TempDir,
}

/// A process of the database with the file open. (All are this process, each with a place and mappings of its
/// own.)
struct Process {
    session: CacheSession,
    file: File,
}

fn page_of(block: u32, version: u32) -> Vec<u8> {
    [block, version].map(u32::to_le_bytes).concat().repeat(PAGE_BYTES / 8)
}

impl Database {
    fn new() -> Database {
        // Doors lie in memory, as they do for users.
        let doors = tempfile::tempdir_in("/dev/shm").unwrap();
        let database = Database { files: tempfile::tempdir().unwrap(), doors };
        for block in 0..BLOCKS {
            let at = u64::from(block) * PAGE_BYTES as u64;
            let file = File::options().write(true).create(true).truncate(false).open(database.path());
            file.unwrap().write_all_at(&page_of(block, 0), at).unwrap();
        }
        database
    }

    fn path(&self) -> std::path::PathBuf {
        self.files.path().join("relation")
    }

    fn door(&self) -> DoorFile {
        DoorFile::open_in(self.doors.path(), self.files.path()).unwrap()
    }

    fn start_process(&self) -> Process {
        self.start_process_with(&ENABLED)
    }

    fn start_process_with(&self, is_enabled: &'static AtomicBool) -> Process {
        let client = CacheClient::new(self.door().into());
        let session = CacheSession::new(&client, &REPLACEMENTS, is_enabled).expect("a place");
        let file = File::options().read(true).write(true).open(self.path()).unwrap();
        Process { session, file }
    }

    fn attach(&self, rig: &Rig) -> AttachedCache {
        self.attach_over(rig, TransportChoice::Auto)
    }

    fn attach_over(&self, rig: &Rig, transport: TransportChoice) -> AttachedCache {
        let leases = Leases::connect(rig.config(transport)).unwrap();
        AttachedCache::new(self.door(), leases, SETTINGS).unwrap()
    }
}

impl Process {
    /// Reads a block, which must have this version. Returns whether it was a hit.
    fn reads(&mut self, block: u32, version: u32) -> bool {
        let (mut page, mut is_hit) = (Vec::<u8>::new(), true);
        let at = u64::from(block) * PAGE_BYTES as u64;
        let pread = |to: &mut [u8], at| {
            is_hit = false;
            self.file.read_at(to, at)
        };
        let range = at..at + PAGE_BYTES as u64;
        let read = self.session.read(self.file.as_fd(), range, pread, collect_into(&mut page));
        assert_eq!(read, Some(PAGE_BYTES as u64));
        assert!(page == page_of(block, version), "block {block}, version {version}: {is_hit}");
        is_hit
    }

    /// Reads a block, which must have this version on the disk. Returns whether the cache had nothing to do
    /// with the call.
    fn reads_past_the_cache(&mut self, block: u32, version: u32) -> bool {
        let at = u64::from(block) * PAGE_BYTES as u64;
        let mut page = vec![0; PAGE_BYTES];
        self.file.read_exact_at(&mut page, at).unwrap();
        assert!(page == page_of(block, version), "block {block}, version {version}");
        let pread = |to: &mut [u8], at| self.file.read_at(to, at);
        self.session.read(self.file.as_fd(), at..at + PAGE_BYTES as u64, pread, |_, _| ()).is_none()
    }

    fn writes(&mut self, block: u32, version: u32) {
        let (page, at) = (page_of(block, version), u64::from(block) * PAGE_BYTES as u64);
        let fill = |to: &mut [u8]| to.copy_from_slice(&page);
        let pwrite = |copy: Option<&[u8]>| self.file.write_at(copy.unwrap_or(&page), at);
        let range = at..at + PAGE_BYTES as u64;
        let written = self.session.write(self.file.as_fd(), range, Some(fill), pwrite);
        assert_eq!(written.unwrap(), PAGE_BYTES);
    }

    fn hits(&mut self, version: u32) -> usize {
        (0..BLOCKS).filter(|block| self.reads(*block, version)).count()
    }
}

#[test]
fn processes_find_pages_from_attaching_to_detaching_whenever_they_started() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let mut early = database.start_process();
    assert_eq!(early.hits(0), 0);
    for version in 1..3 {
        let attached = database.attach(&rig);
        let mut late = database.start_process();
        wait_until(|| early.hits(version - 1) == BLOCKS as usize);
        assert_eq!(late.hits(version - 1), BLOCKS as usize);
        for block in 0..BLOCKS {
            let (writer, reader) =
                if block % 2 == 0 { (&mut early, &mut late) } else { (&mut late, &mut early) };
            writer.writes(block, version);
            reader.reads(block, version);
        }
        wait_until(|| early.hits(version) == BLOCKS as usize);
        wait_until(|| attached.census().pages >= BLOCKS);
        drop(attached);
        assert_eq!((early.hits(version), late.hits(version)), (0, 0));
    }
}

#[test]
fn pages_of_files_that_nobody_has_changed_outlast_a_restart_of_the_database() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let _cache = database.attach(&rig);
    let client = || CacheClient::new(database.door().into());
    let has_all = |version| database.start_process().hits(version) == BLOCKS as usize;
    wait_until(|| has_all(0));
    assert_eq!((client().sign_files(), client().resume_files()), (1, 1));
    assert!(has_all(0));

    // A signature is used once, and the database has not ended cleanly since then.
    assert_eq!(client().resume_files(), 0);
    assert!(!has_all(0));
    wait_until(|| has_all(0));

    // Somebody changes the file while the database is not there, and tells nobody.
    assert_eq!(client().sign_files(), 1);
    let file = File::options().write(true).open(database.path()).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&page_of(block, 1), u64::from(block) * PAGE_BYTES as u64).unwrap();
    }
    assert_eq!(client().resume_files(), 0);
    wait_until(|| has_all(1));
}

#[test]
fn a_process_that_is_switched_off_finds_and_admits_nothing_and_invalidates_what_it_writes() {
    static SWITCH: AtomicBool = AtomicBool::new(true);
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let (mut switched, mut other) = (database.start_process_with(&SWITCH), database.start_process());
    let _cache = database.attach(&rig);
    wait_until(|| other.hits(0) == BLOCKS as usize && switched.hits(0) == BLOCKS as usize);

    SWITCH.store(false, Ordering::Relaxed);
    let hits_before = database.door().status().hits;
    assert!((0..BLOCKS).all(|block| switched.reads_past_the_cache(block, 0)));
    assert_eq!(database.door().status().hits, hits_before);
    (0..BLOCKS).for_each(|block| switched.writes(block, 1));
    assert!((0..BLOCKS).all(|block| switched.reads_past_the_cache(block, 1)));

    SWITCH.store(true, Ordering::Relaxed);
    // What it wrote is found by nobody: the first reads are misses with the new bytes.
    assert_eq!(switched.hits(1), 0);
    wait_until(|| other.hits(1) == BLOCKS as usize && switched.hits(1) == BLOCKS as usize);
}

#[test]
fn a_cache_says_how_often_pages_would_be_found_if_it_had_another_size() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let mut process = database.start_process();
    let attached = database.attach(&rig);
    let client = CacheClient::new(database.door().into());
    assert_eq!(client.advice(), None);
    // All blocks fit into this cache, and not into one of half the size, where a loop finds none of them.
    wait_until(|| {
        process.hits(0);
        client.advice().is_some_and(|advice| advice.samples > 100 && advice.hit_rates[1] > 0.9)
    });
    let advice = client.advice().unwrap();
    assert_eq!(advice.sizes(), [32, 64, 128, 256]);
    assert!(advice.hit_rates.is_sorted() && advice.hit_rates[0] < 0.5, "{advice:?}");
    drop(attached);
    assert_eq!(client.advice(), None);
}

#[test]
fn pages_that_were_written_while_no_cache_was_attached_are_current_afterwards() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let mut process = database.start_process();
    let attached = database.attach(&rig);
    wait_until(|| process.hits(0) == BLOCKS as usize);
    drop(attached);
    (0..BLOCKS).for_each(|block| process.writes(block, 1));
    let _attached = database.attach(&rig);
    wait_until(|| process.hits(1) == BLOCKS as usize);
}

#[test]
fn after_a_node_is_lost_reads_are_current_and_come_from_the_disk() {
    let (mut rig, database) = (Rig::new(1, 4), Database::new());
    let mut process = database.start_process();
    let attached = database.attach(&rig);
    wait_until(|| process.hits(0) == BLOCKS as usize);
    rig.kill_node(0);
    wait_until(|| process.hits(0) == 0);
    wait_until(|| attached.census().absent == SETTINGS.slots);
    (0..BLOCKS).for_each(|block| process.writes(block, 1));
    assert_eq!(process.hits(1), 0);
    rig.start_node(4);
    wait_until(|| process.hits(1) == BLOCKS as usize);
}

#[test]
fn one_daemon_at_a_time_has_a_door() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let attached = database.attach(&rig);
    let again = AttachedCache::new(database.door(), rig.pool(TransportChoice::Auto), SETTINGS);
    assert!(matches!(again, Err(AttachError::InUse)));
    drop(attached);
    let attached = database.attach(&rig);
    let mut process = database.start_process();
    wait_until(|| process.hits(0) == BLOCKS as usize);
    drop(attached);
    let slots = u32::MAX;
    let pool = rig.pool(TransportChoice::Auto);
    let too_large = AttachedCache::new(database.door(), pool, CacheConfig { slots, ..SETTINGS });
    assert!(matches!(too_large, Err(AttachError::TooLarge { .. })));
}

#[test]
fn a_door_that_was_removed_is_closed() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let mut process = database.start_process();
    let _attached = database.attach(&rig);
    wait_until(|| process.hits(0) == BLOCKS as usize);
    for door in std::fs::read_dir(database.doors.path()).unwrap() {
        std::fs::remove_file(door.unwrap().path()).unwrap();
    }
    wait_until(|| process.hits(0) == 0);
}

#[test]
fn regions_that_are_taken_back_are_released_before_the_grace_ends() {
    let (rig, database) = (Rig::new(2, 1), Database::new());
    let attached = database.attach(&rig);
    let mut process = database.start_process();
    wait_until(|| process.hits(0) == BLOCKS as usize);
    let taken_back = rig.take_back_from(attached.pool().owner(), 1, Duration::from_secs(60));
    assert!(taken_back > 0);
    // Long before the grace has ended.
    wait_until(|| attached.pool().stock().regions().iter().all(|region| !region.is_leaving()));
    wait_until(|| process.hits(0) == BLOCKS as usize);
}

#[test]
fn reads_of_any_range_give_what_the_file_has() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let mut process = database.start_process();
    let _attached = database.attach(&rig);
    wait_until(|| process.hits(0) == BLOCKS as usize);
    let whole: Vec<u8> = (0..BLOCKS).flat_map(|block| page_of(block, 0)).collect();
    let (page, end) = (PAGE_BYTES as u64, whole.len() as u64);
    for range in
        [0..1, 100..page, page - 1..page + 1, 3 * page + 7..9 * page - 7, end - 1..end + page, end..end + 1]
    {
        let mut found = Vec::<u8>::new();
        let pread = |to: &mut [u8], at| process.file.read_at(to, at);
        let read = process.session.read(process.file.as_fd(), range.clone(), pread, collect_into(&mut found));
        let expected = &whole[range.start as usize..range.end.min(end) as usize];
        assert!(found == expected && read == Some(expected.len() as u64), "{range:?}: {read:?}");
    }
}

#[test]
fn blocks_that_are_fetched_together_are_as_on_the_disk() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let (rig, database) = (Rig::new(2, 4), Database::new());
        let mut process = database.start_process();
        let _attached = database.attach_over(&rig, transport);
        wait_until(|| process.hits(0) == BLOCKS as usize);
        let whole: Vec<u8> = (0..BLOCKS).flat_map(|block| page_of(block, 0)).collect();
        let page = PAGE_BYTES as u64;
        for (range, missing) in [
            (0..16 * page, vec![]),
            (0..u64::from(BLOCKS) * page, vec![0, 15, 16, 17, 39]),
            (3 * page..9 * page, vec![3, 4, 5, 6, 7, 8]),
            (page / 2..20 * page + 1, vec![2, 19]),
        ] {
            // A write of a part of a block empties its entry, also if the page was fetched before.
            for block in &missing {
                let at = block * page;
                let pwrite = |_: Option<&[u8]>| process.file.write_at(&page_of(*block as u32, 0)[..8], at);
                let fill = None::<fn(&mut [u8])>;
                process.session.write(process.file.as_fd(), at..at + 8, fill, pwrite).unwrap();
            }
            let (mut found, mut from_disk) = (Vec::new(), Vec::new());
            let pread = |to: &mut [u8], at| {
                from_disk.push(at / page);
                process.file.read_at(to, at)
            };
            let sink = collect_into(&mut found);
            let read = process.session.read(process.file.as_fd(), range.clone(), pread, sink);
            let expected = &whole[range.start as usize..range.end as usize];
            assert!(found == expected && read == Some(expected.len() as u64), "{range:?}: {read:?}");
            assert_eq!(from_disk, missing, "{transport:?}");
        }
    }
}

#[test]
fn pages_that_are_written_after_they_were_fetched_are_current() {
    let (rig, database) = (Rig::new(2, 4), Database::new());
    let [mut reader, mut writer] = [database.start_process(), database.start_process()];
    let _attached = database.attach_over(&rig, TransportChoice::Tcp);
    wait_until(|| reader.hits(0) == BLOCKS as usize);
    for version in 1..20 {
        // The reader goes through the file, so it has fetched the blocks after this one.
        for block in 0..BLOCKS / 2 {
            reader.reads(block, version - 1);
        }
        (0..BLOCKS).for_each(|block| writer.writes(block, version));
        for block in BLOCKS / 2..BLOCKS {
            reader.reads(block, version);
        }
    }
}

#[test]
fn a_file_that_is_changed_in_ways_that_are_not_announced_switches_the_cache_off_until_the_process_ends() {
    let (rig, database) = (Rig::new(1, 4), Database::new());
    let (mut process, mut other) = (database.start_process(), database.start_process());
    let _attached = database.attach(&rig);
    wait_until(|| other.hits(0) == BLOCKS as usize);
    process.session.close_door_for(process.file.as_fd());
    assert_eq!(other.hits(0), 0);
    process.file.write_all_at(&page_of(0, 1), 0).unwrap();
    assert!(!process.reads(0, 1) && !other.reads(0, 1));
}
