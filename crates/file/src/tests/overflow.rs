//! Files of which a part lies in a directory, because the pool has no room for it.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use farpool_pool::{Extent, OverflowConfig};

use super::bare::Bare;
use super::*;

/// A directory on a disk: that of this program.
pub(super) fn disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

/// A pool with overflow into a directory.
pub(super) fn pool(rig: &Rig, dir: &tempfile::TempDir, limit_bytes: Option<u64>) -> Pool {
    let broker = rig.broker.to_string();
    let config = PoolConfig { broker, tls: None, transport: TransportChoice::Shm.into(), limit_bytes: None };
    let overflow = OverflowConfig { dir: dir.path().to_owned(), limit_bytes };
    Pool::connect_with_overflow(config, Some(&overflow)).unwrap()
}

/// A store with overflow into a directory.
pub(super) fn overflowing(
    rig: &Rig,
    dir: &tempfile::TempDir,
    limit_bytes: Option<u64>,
) -> (FileStore, Session) {
    let store = FileStore::new(pool(rig, dir, limit_bytes)).unwrap();
    let session = store.session();
    (store, session)
}

/// Writes bytes in pieces that one call may have.
fn write(file: &FarFile, session: &Session, offset: u64, bytes: &[u8]) -> Result<(), FileError> {
    let mut pieces = (offset..).step_by(MAX_TRANSFER_BYTES).zip(bytes.chunks(MAX_TRANSFER_BYTES));
    pieces.try_for_each(|(at, piece)| file.write(session, at, piece))
}

/// Reads in pieces that one call may have.
fn read(file: &FarFile, session: &Session, offset: u64, length: usize) -> Result<Vec<u8>, FileError> {
    let starts = (0..length).step_by(MAX_TRANSFER_BYTES);
    let pieces: Result<Vec<_>, _> = starts
        .map(|start| {
            let length = (length - start).min(MAX_TRANSFER_BYTES);
            super::read(file, session, offset + start as u64, length)
        })
        .collect();
    Ok(pieces?.concat())
}

fn overflow_bytes(store: &FileStore) -> u64 {
    store.volume_status().overflow_bytes.unwrap()
}

#[test]
fn what_the_pool_has_no_room_for_lies_in_the_directory_and_moves_back_once_there_is_room() {
    let (mut rig, dir) = (Rig::new(1, 2), disk());
    let (store, session) = overflowing(&rig, &dir, None);
    let bytes = 3 * REGION_BYTES as usize + 5;
    let file = store.create();
    write(&file, &session, 0, &pattern(bytes, 3)).unwrap();
    assert_eq!(overflow_bytes(&store), REGION_BYTES + EXTENT_BYTES);
    assert!(read(&file, &session, 0, bytes).unwrap() == pattern(bytes, 3));
    write(&file, &session, 2 * REGION_BYTES + 7, b"newer").unwrap();
    let mut right = pattern(bytes, 3);
    right[2 * REGION_BYTES as usize + 7..][..5].copy_from_slice(b"newer");
    assert!(read(&file, &session, 0, bytes).unwrap() == right);
    rig.start_node(8);
    wait_until(|| overflow_bytes(&store) == 0);
    assert!(read(&file, &session, 0, bytes).unwrap() == right);
}

#[test]
fn writes_fail_only_when_pool_and_directory_are_full_and_what_was_written_stays_readable() {
    let (rig, dir) = (Rig::new(1, 2), disk());
    let (store, session) = overflowing(&rig, &dir, Some(REGION_BYTES));
    let file = store.create();
    let fits = 3 * REGION_BYTES as usize;
    wait_until(|| store.capacity().total_bytes == fits as u64);
    write(&file, &session, 0, &pattern(fits, 3)).unwrap();
    let capacity = store.capacity();
    assert_eq!((capacity.total_bytes, capacity.free_bytes), (fits as u64, 0));
    assert_eq!(write(&file, &session, fits as u64, &[1]), Err(FileError::NoSpace));
    assert!(read(&file, &session, 0, fits).unwrap() == pattern(fits, 3));
    drop(file);
    write(&store.create(), &session, 0, &pattern(fits, 5)).unwrap();
}

#[test]
fn regions_that_are_taken_back_from_a_full_pool_move_into_the_directory() {
    let (rig, dir) = (Rig::new(2, 4), disk());
    let (store, session) = overflowing(&rig, &dir, None);
    let bytes = 8 * REGION_BYTES as usize;
    let file = store.create();
    write(&file, &session, 0, &pattern(bytes, 3)).unwrap();
    let stripes = 0..bytes as u64 / EXTENT_BYTES;
    let extents = || stripes.clone().map(|stripe| file.inner.extent_at(stripe * EXTENT_BYTES).unwrap());
    let before: Vec<_> = extents().collect();
    let is_leaving = |extent: &Arc<Extent>| extent.region().is_leaving();
    rig.take_back(&store, 4, Duration::from_secs(600));
    wait_until(|| before.iter().filter(|extent| is_leaving(extent)).count() == 16);
    // Once the regions are given back, the pool has room again, and extents move back to it.
    wait_until(|| !extents().any(|extent| is_leaving(&extent)));
    assert!(read(&file, &session, 0, bytes).unwrap() == pattern(bytes, 3));
}

#[test]
fn rows_of_a_lost_node_are_rebuilt_in_the_directory_if_no_node_has_room() {
    let data = 4 * EXTENT_BYTES as usize;
    for redundancy in [Redundancy::Mirror, Redundancy::Parity { data: 2 }] {
        let (mut rig, dir) = (Rig::new(3, 8), disk());
        let (store, session) = overflowing(&rig, &dir, None);
        let file = store.create_as(redundancy);
        write(&file, &session, 0, &pattern(data, 3)).unwrap();
        let filling = store.create();
        let free = store.capacity().free_bytes - overflow_room(&store);
        write(&filling, &session, 0, &pattern(free as usize, 5)).unwrap();
        rig.kill_node(0);
        wait_until(|| {
            let status = store.volume_status();
            let found = read(&file, &session, 0, data);
            assert!(found.is_ok_and(|found| found == pattern(data, 3)));
            status.rebuild.finished > 0 && status.missing_extents == 0 && !status.to_rebuild
        });
        rig.kill_node(0);
        let found = || read(&file, &session, 0, data);
        wait_until(|| found().is_ok_and(|found| found == pattern(data, 3)));
    }
}

/// Bytes that the directory could give.
fn overflow_room(store: &FileStore) -> u64 {
    let capacity = store.capacity();
    capacity.total_bytes - 24 * REGION_BYTES
}

#[test]
fn one_file_lies_on_one_node_and_then_in_the_directory_and_all_of_it_is_written() {
    let (mut rig, dir) = (Rig::new(1, 1), disk());
    let (store, session) = overflowing(&rig, &dir, None);
    let file = store.create_as(Redundancy::None);
    let bytes = 2 * REGION_BYTES as usize;
    write(&file, &session, 0, &pattern(bytes, 3)).unwrap();
    assert_eq!(overflow_bytes(&store), REGION_BYTES);
    file.punch(&session, 0, REGION_BYTES).unwrap(); // now its first extent lies in the directory
    rig.start_node(4);
    wait_until(|| overflow_bytes(&store) == 0);
    let half = bytes / 2;
    assert!(read(&file, &session, half as u64, half).unwrap() == pattern(bytes, 3)[half..]);
}

#[test]
fn a_damaged_block_of_the_directory_is_not_returned_as_data() {
    let (rig, dir) = (Rig::new(1, 1), disk());
    let (store, session) = overflowing(&rig, &dir, None);
    let file = store.create();
    let bytes = 2 * REGION_BYTES as usize;
    write(&file, &session, 0, &pattern(bytes, 3)).unwrap();
    // The files of the directory have no names, but this process has descriptors of them.
    let of_directory = |path: &std::path::Path| path.starts_with(dir.path()) && path != dir.path();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        std::fs::read_link(&path).ok().filter(|target| of_directory(target)).map(|_| path)
    });
    for path in open {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[0xee; 4096], 0).unwrap();
    }
    let found: Vec<bool> = (0..bytes as u64 / BLOCK)
        .map(|block| read(&file, &session, block * BLOCK, BLOCK_BYTES).is_err())
        .collect();
    assert_eq!(found.iter().filter(|is_error| **is_error).count(), 1);
}

#[test]
fn moving_back_ends_when_it_is_told_to_after_failures_and_while_less_than_two_regions_are_free() {
    let (mut rig, dir) = (Rig::new(1, 1), disk());
    let bare = Bare::of(pool(&rig, &dir, None));
    let file = bare.filled(Redundancy::None, &[]);
    for at in (0..4 * REGION_BYTES).step_by(MAX_TRANSFER_BYTES) {
        bare.run(async |core| file.write(core, at, &pattern(MAX_TRANSFER_BYTES, 3)).await).unwrap();
    }
    let used = || bare.store.volume_status().overflow_bytes.unwrap();
    assert_eq!(used(), 3 * REGION_BYTES);
    rig.start_node(3);
    // To take an extent makes the pool ask the broker again.
    wait_until(|| {
        drop(bare.filled(Redundancy::None, &[1]));
        bare.store.stock.is_to_move_back()
    });
    bare.run(async |core| bare.store.maintain(core, || true).await).unwrap();
    assert_eq!(used(), 3 * REGION_BYTES);
    let maintain = || bare.run(async |core| bare.store.maintain(core, || false).await).unwrap();
    let (retry, now) = (&bare.store.move_back_retry, bare.store.stock.now());
    (0..10).for_each(|_| retry.lock().ended(now, Some(FileError::NoSpace), false));
    maintain();
    assert_eq!(used(), 3 * REGION_BYTES, "after failures it pauses");
    retry.lock().now();
    wait_until(|| {
        maintain();
        used() < 3 * REGION_BYTES && !bare.store.stock.is_to_move_back()
    });
    maintain();
    assert!(used() > REGION_BYTES, "only {} bytes are left", used());
}
