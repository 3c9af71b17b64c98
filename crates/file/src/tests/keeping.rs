//! Files that outlive their owner.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use farpool_fabric::create_sealed;
use farpool_keep::{Kept, MemoryJournal};
use farpool_pool::{EXTENT_BYTES, Pool, PoolConfig};
use farpool_wire::BlockWord;

use super::{BLOCK, Rig, pattern, read};
use crate::{FarFile, FileStore, KEPT_WORDS_BYTES, Redundancy};

/// What outlives an owner, and how the next one comes by it.
struct Keep {
    journal: Arc<MemoryJournal>,
    words: OwnedFd,
}

impl Keep {
    fn new() -> Keep {
        let words = create_sealed("kept", KEPT_WORDS_BYTES).unwrap();
        Keep { journal: Arc::default(), words }
    }

    fn kept(&self) -> Kept {
        self.journal.kept()
    }

    /// An owner, with the files that the one before has left.
    fn store(&mut self, rig: &Rig, ids: &[u64]) -> (FileStore, Vec<FarFile>) {
        self.journal.abandon();
        let kept = self.kept();
        self.journal = Arc::new(self.journal.successor());
        let (broker, transport) = (rig.broker.to_string(), farpool_fabric::TransportChoice::Tcp.into());
        let config = PoolConfig { broker, tls: None, transport, limit_bytes: None };
        let (pool, adoption) = Pool::connect_keeping(config, self.journal.clone(), &kept).unwrap();
        let words = self.words.try_clone().unwrap();
        let (store, mut files) =
            FileStore::keeping(pool, words, &kept, adoption, |id| ids.contains(&id)).unwrap();
        let found = ids.iter().map(|id| files.remove(id).expect("it is found")).collect();
        assert!(files.is_empty());
        (store, found)
    }
}

/// As if the process were killed: nothing that it does from now on changes what it leaves.
fn kill(store: FileStore, files: Vec<FarFile>) -> Vec<u64> {
    store.core().abandon();
    files.iter().map(|file| file.core().kept_id().unwrap()).collect()
}

const KINDS: [Redundancy; 4] =
    [Redundancy::None, Redundancy::Stripe, Redundancy::Mirror, Redundancy::Parity { data: 2 }];

#[test]
fn a_successor_finds_files_as_they_were_and_goes_on_with_them() {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (mut store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(3 * EXTENT_BYTES as usize + 12_345, 7);
    let mut files: Vec<FarFile> = KINDS.iter().map(|kind| store.create_as(*kind)).collect();
    for file in &files {
        file.write(&session, 5, &data[5..]).unwrap();
        file.punch(&session, 0, 3 * BLOCK).unwrap();
        file.core().keep_written_ns(99);
    }
    files[0].set_size(&session, 2 * EXTENT_BYTES + 77).unwrap();
    let dropped = store.create();
    dropped.write(&session, 0, &data).unwrap();
    drop(dropped);
    drop(session);
    for round in 0..2u8 {
        let ids = kill(store.clone(), files);
        let (next, found) = keep.store(&rig, &ids);
        let session = next.session();
        for (file, kind) in found.iter().zip(KINDS) {
            assert_eq!(
                (file.redundancy(), file.core().kept_written_ns(), file.core().lost_bytes()),
                (kind, 99, 0)
            );
            let mut right = data.clone();
            right[..3 * BLOCK as usize].fill(0);
            if round == 1 {
                right[100..200].fill(1);
            }
            if kind == Redundancy::None {
                right.truncate(2 * EXTENT_BYTES as usize + 77);
            }
            assert!(read(file, &session, 0, 1 << 20).unwrap() == right, "{kind}, round {round}");
            file.write(&session, 100, &[1; 100]).unwrap();
        }
        // A file of the successor's gets nothing of theirs.
        let fresh = next.create();
        fresh.write(&session, 0, &pattern(900_000, 3)).unwrap();
        drop(session);
        (store, files) = (next, found);
    }
}

#[test]
fn a_lock_that_was_left_is_settled_to_what_lies_there() {
    let rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(2 * EXTENT_BYTES as usize, 7);
    let files: Vec<FarFile> = KINDS.iter().map(|kind| store.create_as(*kind)).collect();
    let words = &store.core().words;
    for file in &files {
        file.write(&session, 0, &data).unwrap();
        let extent = file.core().extent_at(0).unwrap();
        let place = words.place(&extent, 1);
        words.store(place, words.load(place).locked());
        // Of this one nobody knows what it held: the word is of other data.
        let place = words.place(&extent, 2);
        words.store(place, BlockWord::EMPTY.written(5).locked());
        if let Some(rows) = file.core().rows() {
            let parity = file.core().map.read().extent(rows.parity_of(0)).unwrap();
            for block in 1..3 {
                let place = words.place(&parity, block);
                words.store(place, words.load(place).locked());
            }
        }
    }
    drop(session);
    let ids = kill(store.clone(), files);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    for file in &found {
        assert!(read(file, &session, 0, data.len()).unwrap() == data, "{}", file.redundancy());
        file.write(&session, BLOCK, &data[BLOCK as usize..3 * BLOCK as usize]).unwrap();
        assert!(read(file, &session, 0, data.len()).unwrap() == data);
    }
    super::wait_until(|| store.core().is_whole());
}

#[test]
fn what_lay_on_a_node_that_ended_meanwhile_is_lost_unless_others_have_it() {
    let mut rig = Rig::new(3, 16);
    let mut keep = Keep::new();
    let (store, _) = keep.store(&rig, &[]);
    let session = store.session();
    let data = pattern(4 * EXTENT_BYTES as usize, 7);
    // The rows first: they have something of every node leased, over which the last one is striped.
    let files: Vec<FarFile> = KINDS[1..].iter().rev().map(|kind| store.create_as(*kind)).collect();
    files.iter().for_each(|file| file.write(&session, 0, &data).unwrap());
    drop(session);
    let ids = kill(store.clone(), files);
    rig.kill_node(0);
    let (store, found) = keep.store(&rig, &ids);
    let session = store.session();
    assert!(read(&found[2], &session, 0, data.len()).is_err());
    assert!(found[2].core().lost_bytes() >= EXTENT_BYTES);
    for file in &found[..2] {
        assert_eq!(file.core().lost_bytes(), 0);
        assert!(read(file, &session, 0, data.len()).unwrap() == data, "{}", file.redundancy());
    }
}
