//! Places that operations avoid: slow nodes, nodes that were lost, and extents on which a late write may
//! land.

use std::pin::pin;
use std::sync::Arc;

use farpool_pool::{OVERFLOW_NODE, Where};
use farpool_wire::BlockWord;
use futures_util::poll;

use super::bare::Bare;
use super::only_copy::{COLUMN, HALF, OneRow, PARITY};
use super::overflow::{disk, pool};
use super::*;

/// Ends the lease of the region in which a member lies.
fn end_lease(row: &OneRow, member: u64) {
    let region = row.extent(member).region().clone();
    row.bare.store.stock.lease_lost(region.id, region.epoch);
}

#[test]
fn a_read_does_not_ask_a_slow_node_for_what_the_other_members_can_give() {
    let rig = Rig::new(3, 1);
    let row = OneRow::new(&rig, 2 * HALF);
    row.extent(0).region().node.set_slow_until(u64::MAX);
    row.spoil_block(0, COLUMN); // a read that asks the node finds this
    assert!(row.is_readable(0, HALF));
    assert_eq!(row.bare.store.volume_status().wrong_blocks, 0);
}

#[test]
fn a_write_during_which_two_members_are_lost_finds_another_place() {
    let rig = Rig::new(5, 1);
    let bare = Bare::over(&rig, TransportChoice::Tcp);
    let contents = pattern(2 * HALF, 3);
    let file = bare.filled(PARITY, &contents);
    let row = OneRow { bare, file, contents };
    let (at, data) = (COLUMN * BLOCK, [9; BLOCK_BYTES]);
    row.bare.run(async |core| {
        let mut write = pin!(row.file.write(core, at, &data));
        assert!(poll!(write.as_mut()).is_pending(), "it reads the second member for the parity");
        end_lease(&row, 0);
        end_lease(&row, row.parity());
        write.await.unwrap();
    });
    assert_eq!(row.bare.read(&row.file, at, BLOCK_BYTES).unwrap(), data);
    assert!(row.is_readable(HALF, 2 * HALF));
}

#[test]
fn a_member_lies_on_the_node_of_a_lost_one_only_if_no_other_node_has_room() {
    let rig = Rig::new(3, 2);
    let row = OneRow::new(&rig, 2 * HALF);
    let (rows, store) = (row.file.rows().unwrap(), &row.bare.store);
    let nodes = [0, 1].map(|member| row.extent(member).region().id.node);
    end_lease(&row, 1);
    let take = async || row.file.take_member(rows, 0, None).await.map(|extent| extent.region().id.node);
    row.bare.run(async |_| {
        assert_eq!(take().await, Ok(nodes[0]));
        let mut full = Vec::new();
        while let Ok(extent) = store.take_extent(0, &Where::On(nodes[0])).await {
            full.push(extent);
        }
        assert_eq!(take().await, Ok(nodes[1]));
    });
}

#[test]
fn a_member_lies_on_the_node_of_a_lost_one_rather_than_in_the_overflow_directory() {
    let (rig, dir) = (Rig::new(3, 2), disk());
    let (bare, contents) = (Bare::of(pool(&rig, &dir, None)), pattern(2 * HALF, 3));
    let file = bare.filled(PARITY, &contents);
    let row = OneRow { bare, file, contents };
    let (rows, store) = (row.file.rows().unwrap(), &row.bare.store);
    let nodes = [0, 1].map(|member| row.extent(member).region().id.node);
    let fresh = row.bare.run(async |_| {
        let mut taken = Vec::new();
        while let Ok(extent) = store.take_extent(0, &Where::NotOn(vec![OVERFLOW_NODE])).await {
            taken.push(extent);
        }
        taken.retain(|extent| extent.region().id.node == nodes[0]); // only this node is full now
        end_lease(&row, 1);
        row.file.take_member(rows, 0, None).await
    });
    assert_eq!(fresh.map(|extent| extent.region().id.node), Ok(nodes[1]));
}

#[test]
fn an_extent_on_which_a_late_write_may_land_moves_before_a_lost_or_empty_block_is_written() {
    let rig = Rig::new(1, 8);
    let bare = Bare::new(&rig);
    let words = &bare.store.words;
    type Change = fn(BlockWord) -> BlockWord;
    let changes: [(Change, bool); 3] =
        [(|word| word, false), (BlockWord::lost, true), (|_| BlockWord::EMPTY, true)];
    for (change, moves) in changes {
        let file = bare.filled(Redundancy::Stripe, &pattern(HALF, 3));
        let old = file.extent_at(0).unwrap();
        let place = words.place(&old, COLUMN);
        words.store(place, change(words.load(place)));
        old.doubt();
        bare.run(async |core| file.write(core, COLUMN * BLOCK, &[9; BLOCK_BYTES]).await).unwrap();
        assert_eq!(!Arc::ptr_eq(&old, &file.extent_at(0).unwrap()), moves);
        let mut right = pattern(HALF, 3);
        right[COLUMN as usize * BLOCK_BYTES..][..BLOCK_BYTES].fill(9);
        assert!(bare.read(&file, 0, HALF).unwrap() == right);
    }
}
