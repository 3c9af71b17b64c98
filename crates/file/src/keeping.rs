//! The records by which a successor finds files again: their extents, their lost blocks, and their
//! redundancy. Sizes and times change with every write, so they lie in kept memory, beside the words of
//! blocks.
//!
//! ```text
//! F file               KeptFile                 (file, stripe, block: 8 bytes, big-endian)
//! F file 1 stripe      number of its extent     (8 bytes, little-endian)
//! F file 2 block       1 byte: the block is lost, and why (0: gone, 1: there was no room)
//! ```
//!
//! K1. An extent is recorded before anything of it is acknowledged, and its removal before it can be used
//!     again.
//! K2. Once the words are abandoned, nothing is recorded: a successor finds the files as they were when the
//!     process died.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_keep::{Change, Journal, Kept, tables};
use prost::Message;
use rustix_futex_sync::Mutex;

use crate::blocks::{BlockWords, KEPT_FILES, KeptSize};
use crate::file_core::MAX_FILE_BYTES;
use crate::map::Loss;
use crate::redundancy::Redundancy;

const EXTENT: u8 = 1;
const LOST: u8 = 2;
const GONE: u8 = 0;
const NO_SPACE: u8 = 1;

/// A file as it is recorded.
#[derive(Clone, PartialEq, Message)]
struct KeptHead {
    #[prost(uint64, tag = "1")]
    start: u64,
    #[prost(string, tag = "2")]
    redundancy: String,
    #[prost(uint64, tag = "3")]
    slot: u64,
}

/// Where files of a store are recorded.
#[derive(Debug)]
pub(crate) struct Keeping {
    journal: Arc<dyn Journal>,
    words: Arc<BlockWords>,
    next_file: AtomicU64,
    slots: Mutex<Slots>,
}

/// Places for sizes and times in kept memory.
#[derive(Debug, Default)]
struct Slots {
    free: Vec<u64>,
    next: u64,
}

/// One file's part of the records. Dropping it forgets the file.
#[derive(Debug)]
pub(crate) struct KeptFile {
    keeping: Arc<Keeping>,
    id: u64,
    start: u64,
    slot: u64,
    /// A simulation turns this off, to check that its checker notices.
    journals_frees: bool,
    /// Truncations in progress: some bytes beyond the end are not cleared yet.
    cuts: u32,
}

/// A file found in kept state.
#[derive(Debug, Default)]
pub(crate) struct FoundFile {
    pub(crate) start: u64,
    pub(crate) redundancy: Redundancy,
    pub(crate) slot: u64,
    /// Numbers of extents, by stripe.
    pub(crate) extents: BTreeMap<u64, u64>,
    /// Lost blocks, and why.
    pub(crate) lost: BTreeMap<u64, Loss>,
}

fn key_of(file: u64) -> Vec<u8> {
    let mut key = vec![tables::FILE];
    key.extend_from_slice(&file.to_be_bytes());
    key
}

fn key_in(file: u64, kind: u8, number: u64) -> Vec<u8> {
    let mut key = key_of(file);
    key.push(kind);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

impl Keeping {
    pub(crate) fn new(journal: Arc<dyn Journal>, words: Arc<BlockWords>) -> Arc<Self> {
        let (next_file, slots) = (AtomicU64::new(1), Mutex::default());
        Arc::new(Keeping { journal, words, next_file, slots })
    }

    /// The files of a store that kept state names. Files that are not wanted are forgotten.
    pub(crate) fn find(&self, kept: &Kept, wanted: impl Fn(u64) -> bool) -> BTreeMap<u64, FoundFile> {
        let mut files: BTreeMap<u64, FoundFile> = BTreeMap::new();
        let mut slots = BTreeSet::new();
        let mut last = 0;
        for (key, value) in kept.under(&[tables::FILE]) {
            let Some((file, rest)) = key.split_first_chunk() else { continue };
            let file = u64::from_be_bytes(*file);
            last = last.max(file);
            if rest.is_empty() {
                let found = KeptHead::decode(value).ok().and_then(found_of);
                match found.filter(|found| wanted(file) && slots.insert(found.slot)) {
                    Some(found) => drop(files.insert(file, found)),
                    None => self.append(&[Change::RemoveAll { prefix: key_of(file) }]),
                }
                continue;
            }
            // This entry comes after that of the file itself, whose key is shorter.
            let Some(found) = files.get_mut(&file) else { continue };
            let number = rest.get(1..).and_then(|number| number.try_into().ok()).map(u64::from_be_bytes);
            match (rest[0], number, value.try_into().map(u64::from_le_bytes)) {
                (EXTENT, Some(stripe), Ok(extent)) => drop(found.extents.insert(stripe, extent)),
                (LOST, Some(block), _) if block < MAX_FILE_BYTES => {
                    let loss = if value == [NO_SPACE] { Loss::NoSpace } else { Loss::Gone };
                    found.lost.insert(block, loss);
                }
                _ => {}
            }
        }
        // Limited, so that a damaged number cannot make later ones overflow. Relaxed, pairs with nothing: no
        // other thread has the counter yet.
        self.next_file.store(last.saturating_add(1).min(u64::MAX / 2), Ordering::Relaxed);
        let next = slots.last().map_or(0, |last| last + 1);
        *self.slots.lock() = Slots { free: (0..next).filter(|slot| !slots.contains(slot)).collect(), next };
        files
    }

    /// A place for a new file. `None`: there is no more room, and the file is not kept.
    pub(crate) fn file(
        self: &Arc<Self>,
        start: u64,
        redundancy: Redundancy,
        journals_frees: bool,
    ) -> Option<KeptFile> {
        let slot = {
            let mut slots = self.slots.lock();
            match slots.free.pop() {
                Some(free) => free,
                None if slots.next < KEPT_FILES && self.words.reserve_slot(slots.next) => {
                    slots.next += 1;
                    slots.next - 1
                }
                None => {
                    tracing::error!(
                        "no room to record a file's size: a later daemon will not find the file again"
                    );
                    return None;
                }
            }
        };
        let id = self.next_file.fetch_add(1, Ordering::Relaxed); // only has to be unique
        self.words.set_file_size(slot, KeptSize { bytes: 0, is_being_cut: false });
        self.words.set_file_written_ns(slot, 0);
        let file = KeptFile { keeping: self.clone(), id, start, slot, journals_frees, cuts: 0 };
        file.is(redundancy);
        Some(file)
    }

    /// The place of a file that was found.
    pub(crate) fn found(self: &Arc<Self>, id: u64, found: &FoundFile, journals_frees: bool) -> KeptFile {
        KeptFile { keeping: self.clone(), id, start: found.start, slot: found.slot, journals_frees, cuts: 0 }
    }

    fn append(&self, changes: &[Change]) {
        if !self.words.is_abandoned() {
            // In parts: the changes of one file may be too many for one record.
            self.journal.append_in_parts(changes);
        }
    }
}

fn found_of(head: KeptHead) -> Option<FoundFile> {
    let redundancy = head.redundancy.parse().ok()?;
    let slot = Some(head.slot).filter(|slot| *slot < KEPT_FILES)?;
    Some(FoundFile { start: head.start, redundancy, slot, ..FoundFile::default() })
}

impl KeptFile {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Records the file's redundancy.
    pub(crate) fn is(&self, redundancy: Redundancy) {
        let head = KeptHead { start: self.start, redundancy: redundancy.to_string(), slot: self.slot };
        self.keeping.append(&[Change::Put { key: key_of(self.id), value: head.encode_to_vec() }]);
    }

    /// Records the extent in which a stripe lies now, or that it has none.
    pub(crate) fn lies(&self, stripe: u64, extent: Option<u64>) {
        let key = key_in(self.id, EXTENT, stripe);
        match extent {
            Some(number) => {
                self.keeping.append(&[Change::Put { key, value: number.to_le_bytes().to_vec() }]);
            }
            None if self.journals_frees => self.keeping.append(&[Change::Remove { key }]),
            None => {}
        }
    }

    /// Records that blocks are lost, and why.
    pub(crate) fn lost(&self, blocks: &[u64], loss: Loss) {
        let why = match loss {
            Loss::Gone => GONE,
            Loss::NoSpace => NO_SPACE,
        };
        let put = |block: &u64| Change::Put { key: key_in(self.id, LOST, *block), value: vec![why] };
        self.keeping.append(&blocks.iter().map(put).collect::<Vec<_>>());
    }

    /// Records that blocks are no longer lost.
    pub(crate) fn unlost(&self, blocks: &[u64]) {
        let remove = |block: &u64| Change::Remove { key: key_in(self.id, LOST, *block) };
        self.keeping.append(&blocks.iter().map(remove).collect::<Vec<_>>());
    }

    /// Records where the file ends.
    pub(crate) fn ends_at(&self, size: u64) {
        let size = KeptSize { bytes: size, is_being_cut: self.cuts > 0 };
        self.keeping.words.set_file_size(self.slot, size);
    }

    /// Whether an earlier process died while it truncated the file.
    pub(crate) fn was_being_cut(&self) -> bool {
        self.keeping.words.file_size(self.slot).is_some_and(|size| size.is_being_cut)
    }

    /// A truncation begins: the bytes beyond the end are not cleared yet.
    pub(crate) fn cut_begins(&mut self) {
        self.cuts += 1;
    }

    /// A truncation ends: the bytes beyond the end are cleared. If a truncation is given up halfway, a
    /// successor completes it.
    pub(crate) fn cut_ends(&mut self, size: u64) {
        self.cuts -= 1;
        self.ends_at(size);
    }

    /// When the file was written, in nanoseconds since 1970; zero: never.
    pub(crate) fn written_ns(&self) -> u64 {
        self.keeping.words.file_written_ns(self.slot)
    }

    pub(crate) fn set_written_ns(&self, ns: u64) {
        self.keeping.words.set_file_written_ns(self.slot, ns);
    }
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        if !self.keeping.words.is_abandoned() {
            self.keeping.append(&[Change::RemoveAll { prefix: key_of(self.id) }]);
            self.keeping.slots.lock().free.push(self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use farpool_keep::MemoryJournal;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn keeping(journal: &Arc<MemoryJournal>) -> Arc<Keeping> {
        let (words, _memory) = BlockWords::create().unwrap();
        Keeping::new(journal.clone(), Arc::new(words))
    }

    #[test]
    fn files_are_found_as_they_were_and_dropped_ones_are_not() {
        let journal = Arc::new(MemoryJournal::default());
        let first = keeping(&journal);
        let file = first.file(3, Redundancy::Stripe, true).unwrap();
        file.is(Redundancy::Parity { data: 4 });
        file.lies(0, Some(100));
        file.lies(1, Some(101));
        file.lies(1, None);
        file.lost(&[5, 6], Loss::NoSpace);
        file.lost(&[7], Loss::Gone);
        file.unlost(&[6]);
        let dropped = first.file(4, Redundancy::Stripe, true).unwrap();
        dropped.lies(0, Some(102));
        let (id, dropped_slot) = (file.id(), dropped.slot);
        drop(dropped);
        let unnamed = first.file(5, Redundancy::Stripe, true).unwrap();
        assert_eq!(unnamed.slot, dropped_slot);

        let second = keeping(&journal);
        let found = second.find(&journal.kept(), |file| file == id);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [id]);
        let found = &found[&id];
        assert_eq!((found.start, found.redundancy), (3, Redundancy::Parity { data: 4 }));
        assert_eq!(found.extents, BTreeMap::from([(0, 100)]));
        assert_eq!(found.lost, BTreeMap::from([(5, Loss::NoSpace), (7, Loss::Gone)]));
        let fresh = second.file(0, Redundancy::None, true).unwrap();
        assert!(fresh.id() > unnamed.id() && fresh.slot != found.slot);
    }

    #[test]
    fn after_the_words_are_abandoned_nothing_is_recorded() {
        let journal = Arc::new(MemoryJournal::default());
        let keeping = keeping(&journal);
        let file = keeping.file(3, Redundancy::Stripe, true).unwrap();
        let before = journal.kept();
        keeping.words.abandon();
        file.lies(0, Some(100));
        drop(file);
        assert_eq!(journal.kept(), before);
    }

    proptest! {
        #[test]
        fn reading_arbitrary_kept_state_terminates(
            entries in vec((0..3u64, vec(any::<u8>(), 0..12), vec(any::<u8>(), 0..20)), 0..20),
        ) {
            let mut kept = Kept::default();
            for (file, rest, value) in entries {
                let mut key = key_of(file);
                key.extend(rest);
                let head = KeptHead { start: 0, redundancy: "stripe".to_owned(), slot: file };
                kept.apply([
                    Change::Put { key: key_of(file), value: head.encode_to_vec() },
                    Change::Put { key, value },
                ]);
            }
            let _found = keeping(&Arc::default()).find(&kept, |_| true);
        }
    }

    #[test]
    fn a_file_for_whose_size_there_is_no_place_is_not_kept() {
        let journal = Arc::new(MemoryJournal::default());
        let keeping = keeping(&journal);
        keeping.slots.lock().next = KEPT_FILES - 1;
        let last = keeping.file(3, Redundancy::Stripe, true).unwrap();
        assert!(keeping.file(3, Redundancy::Stripe, true).is_none());
        drop(last);
        assert!(keeping.file(3, Redundancy::Stripe, true).is_some());
    }
}
