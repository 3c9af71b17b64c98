//! Pages of another server's cache.

use std::collections::BTreeMap;

use super::*;
use crate::handover::{HandedPage, HandedPages, close_and_list};

/// Ends the database behind a cache, and lists its pages.
fn sign_and_export(old: &Cache, caller: &mut Caller<Memory>) -> Option<HandedPages> {
    let signatures = BTreeMap::from([(old.file.id(), 7)]);
    at_once(caller.sign_files(&signatures));
    at_once(close_and_list::<_, Shipped>(&old.memory, &old.layout, &signatures))
}

#[test]
fn pages_of_another_server_are_found_unless_they_are_newer_or_were_written_since() {
    const BLOCKS: u32 = 8;
    const RESTARTPOINT: u32 = 5;
    const WRITTEN: u32 = 2;
    let mut old = Cache::open();
    let mut caller = old.join(1);
    for block in 0..BLOCKS {
        old.read(&mut caller, block);
    }
    let mut handed = sign_and_export(&old, &mut caller).unwrap();
    handed.pages.sort_by_key(|page| page.block);
    assert_eq!((&handed.files[..], handed.pages.len()), (&[old.file.id()][..], BLOCKS as usize));

    let mut new = Cache::open();
    new.memory.slots.borrow_mut().clone_from(&old.memory.slots.borrow());
    let mut caller = new.join(2);
    let mut files = [new.file, KnownFile::new(FileId { device: 1, inode: 9, generation: 9 })];
    let seen = at_once(caller.watch(&mut files)).unwrap();
    assert_eq!(seen.unknown(), 1);
    at_once(caller.write(&mut { new.file }, (WRITTEN, 1), None, async || Ok(0))).unwrap();
    // A page has its block's number, and was written at that position of the log.
    let lsn_of = |head: [u8; 8]| head[0].into();
    let mut take_over = |page| at_once(caller.take_over(&seen, page, RESTARTPOINT.into(), lsn_of));
    let taken: Vec<u32> = handed.pages.iter().filter(|page| take_over(page)).map(|page| page.block).collect();
    let homes = |block| new.layout.home(0, block);
    let expected = (0..=RESTARTPOINT).filter(|block| homes(*block) != homes(WRITTEN));
    assert_eq!(taken, expected.collect::<Vec<_>>());
    assert!(taken.len() > 1 && handed.pages.iter().all(|page| !take_over(page)), "each page once");
    for block in 0..BLOCKS {
        let outcome = if taken.contains(&block) { Outcome::Hit(()) } else { Outcome::Disk(1) };
        assert_eq!(new.read(&mut caller, block), outcome, "block {block}");
    }
}

#[test]
fn no_page_is_taken_over_into_a_file_that_was_changed_or_is_not_known_nor_out_of_a_closed_cache() {
    let mut old = Cache::open();
    let mut caller = old.join(1);
    old.read(&mut caller, 0);
    let handed = sign_and_export(&old, &mut caller).unwrap();
    let mut new = Cache::open();
    let mut caller = new.join(2);
    let seen = at_once(caller.watch(&mut [new.file])).unwrap();
    at_once(caller.change(&mut { new.file }, async || Ok(()))).unwrap();
    let lsn_of = |_| 0;
    let page = handed.pages[0];
    assert!(!at_once(caller.take_over(&seen, &page, 0, lsn_of)), "the file was changed");
    let seen = at_once(caller.watch(&mut [new.file])).unwrap();
    for wrong in [HandedPage { file: 1, ..page }, HandedPage { slot: u32::MAX, ..page }] {
        assert!(!at_once(caller.take_over(&seen, &wrong, 0, lsn_of)), "{wrong:?}");
    }
    at_once(old.keeper.turn_door(Door::Invalidating));
    let mut caller = old.join(3);
    assert_eq!(sign_and_export(&old, &mut caller), None, "the door is not open");
}

#[test]
fn pages_of_a_file_are_not_handed_over_if_it_was_not_signed_or_has_another_signature() {
    for (signed, found, expected) in [(0, 7, 0), (7, 8, 0), (7, 7, 1)] {
        let mut old = Cache::open();
        let mut caller = old.join(1);
        old.read(&mut caller, 0);
        at_once(caller.sign_files(&BTreeMap::from([(old.file.id(), signed)])));
        let now = BTreeMap::from([(old.file.id(), found)]);
        let handed = at_once(close_and_list::<_, Shipped>(&old.memory, &old.layout, &now)).unwrap();
        assert_eq!(handed.pages.len(), expected, "{signed} {found}");
    }
}
