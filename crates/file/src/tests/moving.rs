//! Moves out of regions that are being taken back, without the thread that does them in a mount.

use std::cell::Cell;
use std::sync::Arc;

use farpool_pool::Extent;
use farpool_wire::BlockWord;

use super::bare::Bare;
use super::*;
use crate::{FileCore, Rules, Shipped};

const DATA: usize = 4 * EXTENT_BYTES as usize;

fn members(file: &FileCore) -> Vec<(u64, Arc<Extent>)> {
    let map = file.map.read();
    map.stripes(0, u64::MAX).into_iter().filter_map(|member| Some((member, map.extent(member)?))).collect()
}

#[test]
fn extents_whose_loss_would_lose_data_move_first() {
    let mut rig = Rig::new(2, 8);
    let bare = Bare::new(&rig);
    let (mirror, plain) = (
        bare.filled(Redundancy::Mirror, &pattern(DATA, 3)),
        bare.filled(Redundancy::Stripe, &pattern(DATA, 3)),
    );
    bare.lose_all_regions(&rig);
    rig.start_node(8);
    rig.start_node(8);
    wait_until(|| rig.pool(TransportChoice::Auto).capacity().total_bytes >= 16 * REGION_BYTES);
    // One copy of each of the four rows, and the four extents without a copy.
    let moves = Cell::new(0);
    let stopped = || moves.replace(moves.get() + 1) == 8;
    bare.run(async |core| bare.store.move_out(core, stopped).await).unwrap();
    let is_leaving = |(_, extent): &(u64, Arc<Extent>)| extent.region().is_leaving();
    assert!(!members(&plain).iter().any(is_leaving));
    let rows = mirror.rows().unwrap();
    let left: Vec<u64> =
        members(&mirror).iter().filter(|it| is_leaving(it)).map(|it| rows.row_of(it.0)).collect();
    assert_eq!(left, [0, 1, 2, 3], "one copy of each row");
    bare.run(async |core| bare.store.move_out(core, || false).await).unwrap();
    assert!(!members(&mirror).iter().any(is_leaving));
    for file in [mirror, plain] {
        assert!(bare.read(&file, 0, DATA).unwrap() == pattern(DATA, 3));
    }
}

#[test]
fn a_damaged_block_is_lost_in_a_move_and_its_neighbours_are_not() {
    let mut rig = Rig::new(1, 8);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let words = &bare.store.words;
    let place = |block| words.place(&file.extent_at(0).unwrap(), block);
    bare.run(async |core| file.punch(core, 5 * BLOCK, BLOCK).await).unwrap();
    words.store(place(3), BlockWord::EMPTY.written(Shipped::checksum(&[7; BLOCK_BYTES])));
    words.store(place(4), words.load(place(4)).lost());
    bare.lose_all_regions(&rig);
    rig.start_node(8);
    wait_until(|| bare.run(async |core| bare.store.move_out(core, || false).await).is_ok());
    assert!(!file.extent_at(0).unwrap().region().is_leaving());
    for block in 0..8 {
        let found = bare.read(&file, block * BLOCK, BLOCK_BYTES);
        match block {
            3 | 4 => assert_eq!(found, Err(FileError::Lost { offset: block * BLOCK })),
            5 => assert_eq!(found, Ok(vec![0; BLOCK_BYTES])),
            _ => {
                assert!(found.unwrap()[..] == pattern(DATA, 3)[block as usize * BLOCK_BYTES..][..BLOCK_BYTES])
            }
        }
    }
}

#[test]
fn files_move_out_while_a_rebuild_pauses() {
    let mut rig = Rig::new(3, 8);
    let (store, session) = rig.store(TransportChoice::Shm);
    store.limit_rebuild(1); // after each extent it pauses for days
    let mirror = store.create_as(Redundancy::Mirror);
    mirror.write(&session, 0, &pattern(DATA, 3)).unwrap();
    let plain = store.create_as(Redundancy::None);
    plain.write(&session, 0, &pattern(DATA, 4)).unwrap();
    let parity = mirror.inner.rows().unwrap().parity_of(0);
    for row in 0..4 {
        mirror.inner.map.read().extent(parity + row).unwrap().doubt();
    }
    store.start_rebuild();
    wait_until(|| store.volume_status().rebuild.done > 0);
    assert!(store.volume_status().rebuild.running);
    rig.start_node(8);
    let old = plain.inner.extent_at(0).unwrap().region().clone();
    wait_until(|| {
        rig.take_back(&store, 64, Duration::from_secs(600));
        old.is_leaving()
    });
    wait_until(|| plain.inner.extent_at(0).unwrap().region().id != old.id);
    assert!(store.volume_status().rebuild.running, "the rebuild still pauses");
    assert!(read(&plain, &session, 0, DATA).unwrap() == pattern(DATA, 4));
}
