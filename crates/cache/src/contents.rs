//! What is in the cache, for `farpool cache status`. Processes use the cache while it is counted, so the
//! counts belong to no single moment.

use std::collections::HashMap;

use crate::admission::admits_one_in;
use crate::at_once;
use crate::files::{FileId, load_id};
use crate::ground::Ground;
use crate::layout::Layout;
use crate::words::{Entry, EntryState, FileWord, Key, SlotState, SlotWord};

/// What is in the cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contents {
    /// Slots of the index: the most pages that the cache can hold.
    pub slots: u32,
    /// Slots to which the pool has given no memory, or from which it has taken it back.
    pub absent: u32,
    /// Bytes of the index, all in shared memory. The keeper's sweeps touch nearly all of it.
    pub index_bytes: u64,
    /// One block in so many is admitted: 1 unless hardly any read is a hit (`docs/src/cache.md`).
    pub admits_one_in: u64,
    /// Files of which pages can be found, those with most pages first.
    pub files: Vec<FilePages>,
}

/// The pages of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePages {
    /// Which file it is.
    pub id: FileId,
    /// How many of its pages can be found.
    pub pages: u32,
    /// Whether it is pinned.
    pub is_pinned: bool,
}

impl Contents {
    /// How many pages can be found.
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| u64::from(file.pages)).sum()
    }

    /// Looks at each entry, slot and file of an index.
    pub(crate) fn of<G: Ground>(ground: &G, layout: &Layout) -> Contents {
        let load = |at| at_once(ground.load(at));
        let mut by_content: HashMap<u32, u32> = HashMap::new();
        for entry in 0..layout.all_entries() {
            if Entry(load(layout.entry(entry))).state() == EntryState::Valid {
                *by_content.entry(Key(load(layout.key(entry))).id()).or_default() += 1;
            }
        }
        let mut files: Vec<FilePages> = (0..layout.shape().files)
            .filter_map(|file| {
                let id = FileWord(load(layout.file(file))).usable_id()?;
                let pages = by_content.remove(&id)?;
                let is_pinned = load(layout.file_pinned(file)) != 0;
                Some(FilePages { id: at_once(load_id(ground, layout, file)), pages, is_pinned })
            })
            .collect();
        files.sort_by(|one, other| other.pages.cmp(&one.pages).then(one.id.cmp(&other.id)));
        let (slots, absent) = (layout.shape().slots, absent_slots(ground, layout));
        let admits_one_in = at_once(admits_one_in(ground, layout));
        Contents { slots, absent, index_bytes: layout.index_bytes(), admits_one_in, files }
    }
}

/// How many slots have no memory.
pub(crate) fn absent_slots<G: Ground>(ground: &G, layout: &Layout) -> u32 {
    let is_absent = |slot: &u32| {
        let word = SlotWord(at_once(ground.load(layout.slot(*slot))));
        word.state() == SlotState::Absent
    };
    (0..layout.shape().slots).filter(is_absent).count() as u32
}
