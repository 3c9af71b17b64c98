//! Direct clients that died in mid-write.

use std::pin::pin;
use std::sync::{Arc, Weak};

use farpool_pool::Extent;
use farpool_wire::BlockWord;
use futures_util::poll;

use super::bare::Bare;
use super::direct::{Client, DATA};
use super::*;
use crate::FileCore;
use crate::guest::{Given, GuestId};

/// The blocks that the client was writing, in order: one that had data, one that is empty, one that was lost,
/// and one for whose lock the client waited. It had the locks of the others.
const OLD: u64 = 1;
const EMPTY: u64 = 2;
const LOST: u64 = 3;
const AWAITED: u64 = 4;

/// A file, and a direct client that died while it wrote to the first extent.
struct Left {
    bare: Bare,
    client: GuestId,
    file: Arc<FileCore>,
    extent: Arc<Extent>,
}

impl Left {
    fn new(rig: &Rig) -> Left {
        let bare = Bare::new(rig);
        let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
        bare.run(async |core| file.punch(core, EMPTY * BLOCK, BLOCK).await).unwrap();
        let extent = file.extent_at(0).unwrap();
        let lost = bare.store.words.place(&extent, LOST);
        bare.store.words.store(lost, bare.store.words.load(lost).lost());
        let client = die_in_mid_write(&bare, &file);
        Left { bare, client, file, extent }
    }

    fn word(&self, block: u64) -> BlockWord {
        let words = &self.bare.store.words;
        words.load(words.place(&self.extent, block))
    }

    fn recover(&self) {
        self.bare.run(async |core| self.bare.store.recover_guest(core, self.client).await);
    }

    /// Drops the file's second extent, as a move does, which waits for no direct client.
    fn drop_an_extent(&self) -> Weak<Extent> {
        let dropped = Arc::downgrade(&self.file.extent_at(EXTENT_BYTES).unwrap());
        self.file.map.write().remove(1);
        self.bare.store.maintain_guests();
        dropped
    }
}

/// A direct client writes four blocks and dies while it waits for the last one.
fn die_in_mid_write(bare: &Bare, file: &FileCore) -> GuestId {
    let client = Client::new(bare);
    let seen = client.open(file);
    let words = &bare.store.words;
    let last = words.place(&file.extent_at(0).unwrap(), AWAITED);
    let data = [9; 4 * BLOCK_BYTES];
    bare.run(async |core| {
        let word = words.lock(core.endpoint(), last).await.unwrap();
        let data = Given::from(&data[..]);
        let mut writing = pin!(seen.write(&client.core, &client.place, OLD * BLOCK, data));
        assert!(poll!(&mut writing).is_pending(), "it waits for the lock");
        client.store.abandon();
        words.store(last, word);
    });
    client.id
}

#[test]
fn blocks_that_a_dead_client_was_writing_are_unlocked_and_hold_what_lies_in_far_memory() {
    let rig = Rig::new(1, 4);
    let left = Left::new(&rig);
    assert_eq!([OLD, EMPTY, LOST].map(|block| left.word(block).guest()), [Some(left.client.0); 3]);
    let mut mixture = [9; BLOCK_BYTES];
    mixture[BLOCK_BYTES / 2..].copy_from_slice(&pattern(BLOCK_BYTES / 2, 3));
    left.bare.put(&left.extent, OLD, &mixture);
    left.recover();
    assert!(!left.bare.store.words.has_locks(&left.extent));
    let read = |block: u64| left.bare.read(&left.file, block * BLOCK, BLOCK_BYTES);
    assert!(read(OLD).unwrap() == mixture);
    assert!(read(EMPTY).unwrap() == [0; BLOCK_BYTES], "its place has bytes that nobody wrote to it");
    assert_eq!(read(LOST), Err(FileError::Lost { offset: LOST * BLOCK }));
    for other in [OLD - 1, AWAITED] {
        assert!(read(other).unwrap() == pattern(BLOCK_BYTES, 3));
    }
}

#[test]
fn what_a_dead_client_was_using_stays_until_its_locks_are_recovered() {
    let rig = Rig::new(1, 4);
    let left = Left::new(&rig);
    let dropped = left.drop_an_extent();
    assert!(dropped.upgrade().is_some(), "the client may have written to it");
    left.recover();
    assert!(dropped.upgrade().is_none());
    assert_eq!(left.bare.store.add_guest(), Ok(left.client), "its number is free again");
}
