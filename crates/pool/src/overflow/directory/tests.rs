use std::collections::BTreeSet;

use farpool_wire::OwnerId;

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
    let directory = Directory::open(dir.path(), None, None).unwrap();
    run(async {
        let region = directory.allocate(0, REGION_BYTES).await.unwrap();
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
    let directory = Directory::open(dir.path(), Some(2 * REGION_BYTES + 1), None).unwrap();
    assert_eq!(directory.room_bytes(), 2 * REGION_BYTES + 1);
    run(async {
        let first = directory.allocate(0, REGION_BYTES).await.unwrap();
        let second = directory.allocate(0, REGION_BYTES).await;
        assert!(second.is_some() && directory.allocate(0, REGION_BYTES).await.is_none());
        wait_until(|| directory.room_bytes() == 1);
        drop(first);
        wait_until(|| directory.room_bytes() == REGION_BYTES + 1);
        assert!(directory.allocate(0, REGION_BYTES).await.is_some());
    });
}

#[test]
fn direct_clients_may_use_only_regions_that_no_later_process_gets() {
    let (dir, state) = (disk(), disk());
    let by = KeptBy { owner: OWNER, dir: state.path().to_owned(), named: BTreeSet::new() };
    let keeping = Directory::open(dir.path(), None, Some(&by)).unwrap();
    let directory = Directory::open(dir.path(), None, None).unwrap();
    run(async {
        let kept = keeping.allocate(0, REGION_BYTES).await.unwrap();
        assert!(!kept.guests_may_use() && kept.file().is_none());
        let region = directory.allocate(0, REGION_BYTES).await.unwrap();
        assert!(region.guests_may_use() && region.file().is_some());
    });
}

#[test]
fn dropping_a_region_frees_its_storage_even_if_others_have_its_file_open() {
    let dir = disk();
    let directory = Directory::open(dir.path(), None, None).unwrap();
    run(async {
        let first = directory.allocate(0, REGION_BYTES).await.unwrap();
        let last = directory.allocate(1, REGION_BYTES).await.unwrap();
        let [of_first, of_last] =
            [&first, &last].map(|region| File::from(region.file().unwrap().try_clone_to_owned().unwrap()));
        assert_eq!(of_first.metadata().unwrap().len(), REGION_BYTES);
        drop(first);
        wait_until(|| of_first.metadata().unwrap().len() == 0);
        for _ in 0..THREADS {
            directory.workers.post(|| std::thread::sleep(Duration::from_millis(100)));
        }
        drop(directory);
        drop(last);
        assert_eq!(of_last.metadata().unwrap().len(), 0, "now the process may end");
    });
}

#[test]
fn the_storage_of_a_region_is_allocated_before_it_is_given() {
    use std::os::unix::fs::MetadataExt;
    let dir = disk();
    let folder = Arc::new(File::open(dir.path()).unwrap());
    let file = allocate(&folder, None, REGION_BYTES, None, 0).unwrap();
    let found = file.file().metadata().unwrap();
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
    let folder = Arc::new(File::open(dir.path()).unwrap());
    let refused = allocate(&folder, None, too_much, None, 0).err().unwrap();
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn a_directory_that_cannot_be_used_is_refused_with_the_reason() {
    let in_memory = Directory::open(Path::new("/dev/shm"), None, None).err().unwrap();
    assert!(matches!(in_memory, OverflowError::InMemory { .. }), "{in_memory}");
    let missing = Directory::open(&disk().path().join("none"), None, None).err().unwrap();
    assert!(missing.to_string().contains("No such file"), "{missing}");
    let unnamed = Directory::open(Path::new("/proc"), None, None).err().unwrap();
    assert!(matches!(unnamed, OverflowError::NotInPlace { .. }), "{unnamed}");
}

#[test]
fn the_room_is_looked_at_once_a_second_by_one_thread_at_a_time() {
    let dir = disk();
    let directory = Directory::open(dir.path(), Some(REGION_BYTES), None).unwrap();
    let found = |looked_at: Option<Instant>| {
        directory.room.bytes.store(7, Ordering::Relaxed);
        *directory.room.looked_at.lock() = looked_at;
        directory.room_bytes();
        // What was posted before has begun by now.
        run(directory.workers.run(|| Ok(()))).unwrap();
        wait_until(|| directory.workers.queue.jobs.lock().waiting.is_empty());
        directory.room_bytes()
    };
    assert_eq!(found(Some(Instant::now())), 7, "looked at just now");
    wait_until(|| found(None) == REGION_BYTES);
    let long_ago = Instant::now().checked_sub(2 * ROOM_COUNTS_FOR).unwrap();
    wait_until(|| found(Some(long_ago)) == REGION_BYTES);
    wait_until(|| !directory.room.looking.swap(true, Ordering::Relaxed));
    assert_eq!(found(None), 7, "another thread looks, perhaps for long");
}

#[test]
fn a_region_whose_caller_has_given_up_leaves_no_name() {
    let (dir, state) = (disk(), disk());
    let by = KeptBy { owner: OWNER, dir: state.path().to_owned(), named: BTreeSet::new() };
    let directory = Directory::open(dir.path(), None, Some(&by)).unwrap();
    drop(directory.allocate(0, REGION_BYTES));
    wait_until(|| !directory.allocating.load(Ordering::Relaxed));
    wait_until(|| listed(&dir.path().join(format!("farpool-{OWNER}"))) == ["kept-by"]);
}

#[test]
fn buffers_are_used_again_and_threads_end_with_the_directory() {
    let dir = disk();
    let directory = Directory::open(dir.path(), None, None).unwrap();
    run(async {
        let region = directory.allocate(0, REGION_BYTES).await.unwrap();
        for _ in 0..3 {
            region.write(0, &[1; 8192]).await.unwrap();
            wait_until(|| directory.workers.spare.lock().len() == 1);
        }
    });
    let queue = Arc::downgrade(&directory.workers.queue);
    drop(directory);
    wait_until(|| queue.strong_count() == 0);
}

#[test]
fn while_one_allocation_hangs_no_other_begins() {
    let dir = disk();
    let directory = Directory::open(dir.path(), None, None).unwrap();
    directory.allocating.store(true, Ordering::Relaxed);
    assert!(run(directory.allocate(0, REGION_BYTES)).is_none());
    directory.allocating.store(false, Ordering::Relaxed);
    assert!(run(directory.allocate(0, REGION_BYTES)).is_some());
}

/// Removes what nothing refers to.
fn clear(dir: &Path) {
    folder::clear_others(&File::open(dir).unwrap(), None);
}

const OWNER: OwnerId = OwnerId(7);

/// What lies in a folder, sorted.
fn listed(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn kept_regions_are_found_again_with_their_contents_until_they_are_discarded() {
    use std::os::unix::fs::MetadataExt;
    let (dir, state) = (disk(), disk());
    let folder = dir.path().join(format!("farpool-{OWNER}"));
    let open = |named: &[u32]| {
        let named = named.iter().copied().collect();
        let by = KeptBy { owner: OWNER, dir: state.path().to_owned(), named };
        Directory::open(dir.path(), None, Some(&by)).unwrap()
    };
    run(async {
        let directory = open(&[]);
        for index in [0, 1, 2] {
            let region = directory.allocate(index, REGION_BYTES).await.unwrap();
            region.write(0, &[index as u8 + 1; 8192]).await.unwrap();
            if index == 1 {
                region.discard();
            }
        }
        assert!(directory.allocate(2, REGION_BYTES).await.is_none(), "it exists already");
    });
    let modes =
        [folder.clone(), folder.join("0")].map(|path| std::fs::metadata(path).unwrap().mode() & 0o777);
    assert_eq!(modes, [0o700, 0o600]);
    wait_until(|| listed(&folder) == ["0", "2", "kept-by"]);
    std::fs::write(folder.join("9"), "nothing names this one").unwrap();
    run(async {
        let directory = open(&[0, 2, 3]);
        assert_eq!(listed(&folder), ["0", "2", "kept-by"]);
        let mut found = [0; 8192];
        directory.find(2, REGION_BYTES).unwrap().unwrap().read(0, &mut found).await.unwrap();
        assert_eq!(found, [3; 8192]);
        assert!(directory.find(2, REGION_BYTES).unwrap().is_none(), "it was taken");
        assert!(directory.find(3, REGION_BYTES).unwrap().is_none());
        assert!(directory.find(0, REGION_BYTES + 1).unwrap().is_none(), "it was cut off");
    });
}

#[test]
fn folders_of_owners_that_live_or_whose_state_is_there_stay_and_others_are_removed() {
    let (dir, state, other) = (disk(), disk(), disk());
    let by =
        |owner: u64, dir: &Path| KeptBy { owner: OwnerId(owner), dir: dir.into(), named: BTreeSet::new() };
    let open = |by: KeptBy| Directory::open(dir.path(), None, Some(&by));
    let folder = |owner: u64| dir.path().join(format!("farpool-{}", OwnerId(owner)));
    let is_there = |owner: u64| folder(owner).exists();
    let living = open(by(1, other.path())).unwrap();
    drop(open(by(2, state.path())).unwrap());
    std::fs::create_dir_all(dir.path().join("farpool-of-somebody-else/theirs")).unwrap();
    clear(dir.path());
    assert!(is_there(1) && is_there(2), "their states are there");
    // The directory of the state has been emptied, and has another owner's state now.
    let next = open(by(3, state.path())).unwrap();
    wait_until(|| !is_there(2));
    assert!(is_there(1) && is_there(3));
    let in_use = open(by(3, state.path())).err().unwrap();
    assert!(in_use.to_string().contains("is in use"), "{in_use}");
    drop(state);
    clear(dir.path());
    assert!(is_there(3), "its owner lives");
    drop((living, next));
    wait_until(|| {
        clear(dir.path());
        !is_there(3)
    });
    let kept_by = folder(1).join("kept-by");
    let mut bytes = std::fs::read(&kept_by).unwrap();
    for cut in [0, 36, 40, bytes.len() - other.path().as_os_str().len()] {
        std::fs::write(&kept_by, &bytes[..cut]).unwrap();
        clear(dir.path());
        assert!(is_there(1), "what is cut off says nothing");
    }
    bytes[0] ^= 1;
    std::fs::write(kept_by, bytes).unwrap();
    clear(dir.path());
    assert_eq!(listed(dir.path()), ["farpool-of-somebody-else"], "its state is from an earlier boot");
}

#[test]
fn an_empty_folder_without_a_note_is_removed_and_one_with_contents_stays() {
    use std::os::unix::fs::DirBuilderExt;
    let dir = disk();
    for name in ["farpool-empty", "farpool-theirs"] {
        std::fs::DirBuilder::new().mode(0o700).create(dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("farpool-theirs/data"), "theirs").unwrap();
    clear(dir.path());
    assert_eq!(listed(dir.path()), ["farpool-theirs"]);
}

#[test]
fn what_has_the_folder_s_name_but_is_open_to_others_or_no_folder_is_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, state, elsewhere) = (disk(), disk(), disk());
    let folder = dir.path().join(format!("farpool-{OWNER}"));
    let open = || {
        let by = KeptBy { owner: OWNER, dir: state.path().to_owned(), named: BTreeSet::new() };
        Directory::open(dir.path(), None, Some(&by)).err().unwrap().to_string()
    };
    let advice = "belongs to another user, or is open to others: remove it";
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(open().contains(advice), "{}", open());
    std::fs::remove_dir(&folder).unwrap();
    std::fs::set_permissions(elsewhere.path(), PermissionsExt::from_mode(0o700)).unwrap();
    symlink(elsewhere.path(), &folder).unwrap();
    assert!(open().contains(advice), "{}", open());
    std::fs::remove_file(&folder).unwrap();
    std::fs::write(&folder, "").unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o600)).unwrap();
    assert!(open().contains(advice), "{}", open());
}

#[test]
fn what_a_killed_process_has_left_of_its_note_is_overwritten() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, state) = (disk(), disk());
    let by = || KeptBy { owner: OWNER, dir: state.path().to_owned(), named: BTreeSet::new() };
    drop(Directory::open(dir.path(), None, Some(&by())).unwrap());
    let folder = dir.path().join(format!("farpool-{OWNER}"));
    let (note, right) = (folder.join("kept-by"), std::fs::read(folder.join("kept-by")).unwrap());
    assert_eq!(std::fs::metadata(&note).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::remove_file(&note).unwrap();
    std::fs::write(folder.join("kept-by.new"), [7; 1000]).unwrap();
    drop(Directory::open(dir.path(), None, Some(&by())).unwrap());
    assert_eq!(std::fs::read(&note).unwrap(), right);
    assert_eq!(listed(&folder), ["kept-by"]);
}

#[test]
fn a_directory_without_the_folder_in_which_kept_data_lie_is_refused_and_left_as_it_was() {
    let (dir, state) = (disk(), disk());
    let by = KeptBy { owner: OWNER, dir: state.path().to_owned(), named: BTreeSet::from([4]) };
    let refused = Directory::open(dir.path(), None, Some(&by)).err().unwrap();
    assert!(refused.to_string().contains("name the directory of before"), "{refused}");
    assert!(listed(dir.path()).is_empty());
}
