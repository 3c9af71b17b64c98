use super::*;

const REGION_BYTES: u64 = 1 << 20;

/// A directory on a disk: that of this program. A temporary directory may lie in memory.
fn disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

fn wait_until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(30), "the condition did not hold in time");
        std::thread::yield_now();
    }
}

#[test]
fn a_region_reads_what_was_written_there_and_has_no_name() {
    let dir = disk();
    let directory = Directory::open(dir.path(), None).unwrap();
    run(async {
        let region = directory.allocate(REGION_BYTES).await.unwrap();
        let data: Vec<u8> = (0..EXTENT_BYTES).map(|at| (at / 512 * 7 + at) as u8).collect();
        let writes = (0..4).map(|extent| region.write(extent * EXTENT_BYTES, &data));
        assert!(futures_util::future::join_all(writes).await.into_iter().all(|written| written.is_ok()));
        let mut found = vec![0; 8192];
        region.read(3 * EXTENT_BYTES + 8192, &mut found).await.unwrap();
        assert!(found == data[8192..16384]);
        let beyond = region.read(REGION_BYTES, &mut found).await;
        assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        region.read(0, &mut found).await.unwrap();
        assert!(found == data[..8192], "an error concerns only its own blocks");
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn regions_are_given_up_to_the_limit_and_their_room_is_there_again_once_they_are_dropped() {
    let dir = disk();
    let directory = Directory::open(dir.path(), Some(2 * REGION_BYTES + 1)).unwrap();
    assert_eq!(directory.room_bytes(), 2 * REGION_BYTES + 1);
    run(async {
        let first = directory.allocate(REGION_BYTES).await.unwrap();
        let second = directory.allocate(REGION_BYTES).await;
        assert!(second.is_some() && directory.allocate(REGION_BYTES).await.is_none());
        wait_until(|| directory.room_bytes() == 1);
        drop(first);
        wait_until(|| directory.room_bytes() == REGION_BYTES + 1);
        assert!(directory.allocate(REGION_BYTES).await.is_some());
    });
}

#[test]
fn the_storage_of_a_region_is_allocated_before_it_is_given() {
    use std::os::unix::fs::MetadataExt;
    let dir = disk();
    let file = allocate(&File::open(dir.path()).unwrap(), true, REGION_BYTES, None, 0).unwrap();
    let found = file.metadata().unwrap();
    assert!(found.blocks() * 512 >= REGION_BYTES && found.len() == REGION_BYTES, "{}", found.blocks());
    assert_eq!(found.mode() & 0o777, 0o600);
}

#[test]
fn a_tenth_of_the_file_system_stays_free() {
    let dir = disk();
    let mut found = rustix::fs::statvfs(dir.path()).unwrap();
    (found.f_frsize, found.f_blocks) = (4096, 1_000);
    for (available, right) in [(1_000, 900), (101, 1), (100, 0), (0, 0)] {
        found.f_bavail = available;
        assert_eq!(room(&found, None, 0), right * 4096);
    }
    found.f_bavail = 1_000;
    assert_eq!(room(&found, Some(100 * 4096), 40 * 4096), 60 * 4096);
    assert_eq!(room(&found, Some(100 * 4096), 101 * 4096), 0);
    let too_much = rustix::fs::statvfs(dir.path()).unwrap();
    let too_much = too_much.f_bavail * too_much.f_frsize;
    let refused = allocate(&File::open(dir.path()).unwrap(), true, too_much, None, 0).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_with_the_reason() {
    let in_memory = Directory::open(Path::new("/dev/shm"), None).err().unwrap();
    assert!(matches!(in_memory, OverflowError::InMemory { .. }), "{in_memory}");
    let missing = Directory::open(&disk().path().join("none"), None).err().unwrap();
    assert!(missing.to_string().contains("No such file"), "{missing}");
    let unnamed = Directory::open(Path::new("/proc"), None).err().unwrap();
    assert!(matches!(unnamed, OverflowError::NotInPlace { .. }), "{unnamed}");
}

#[test]
fn while_one_allocation_hangs_no_other_begins() {
    let dir = disk();
    let directory = Directory::open(dir.path(), None).unwrap();
    directory.allocating.store(true, Ordering::Relaxed);
    assert!(run(directory.allocate(REGION_BYTES)).is_none());
    directory.allocating.store(false, Ordering::Relaxed);
    assert!(run(directory.allocate(REGION_BYTES)).is_some());
}
