//! Hands the pages of one server's cache over to the cache of the server that takes its place.
//!
//! A primary and its standby have the same pages at the same position of the log, apart from hint bits. After
//! the primary has shut down, its cache is *handed over*: the standby's cache takes over the memory with the
//! pages, and a list of them. No page is copied.
//!
//! H1. The list is made when the primary has shut down and no process uses its cache any more. The door is
//!     closed first: entries that were valid at that moment have the last versions that were written through
//!     the cache. A file is in the list only if it is as the server has signed it at its end (R1): nothing
//!     has changed it since in another way.
//! H2. A page is taken over only if its position in the log (LSN) is not beyond the new server's last
//!     restartpoint. Such a page is on the new server's disk, too, apart from hint bits. A newer page may not
//!     be. Once it was evicted, a read from the disk would return an older version, and recovery would not
//!     repair it, because it skips records up to the position that a page already has.
//! H3. A page is taken over only if the new server has written neither its block nor its whole file since the
//!     daemon looked at the index ([`watch`](Caller::watch)). Afterwards it checks that the server is still a
//!     standby, so what the server wrote before the look comes from the primary's log. The index is new: the
//!     header of a home bucket is 0 as long as none of its blocks was written.
//!
//! A page is admitted like one that was read from the disk when the server was looked at (C2). What is read
//! from its slot is compared with its checksum, as for every page (C7).

mod giving;
mod leases;
mod list;
mod taking;

use std::collections::{BTreeMap, HashMap};

use crate::caller::{Caller, Token};
use crate::files::{FileId, FileRef, KnownFile, load_id};
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::resuming::Signature;
use crate::rules::Rules;
use crate::words::{Door, Entry, EntryState, FileWord, Key, SlotState};

pub use giving::ask_for_handover;
pub(crate) use giving::{HandoverError, HandoverRequests, give};
pub use leases::Leases;
pub use list::{HandoverList, ListError, ListedFile, ListedPage, ServerEnd};
pub(crate) use taking::Taker;
pub use taking::{TakeOverResult, TakeOverState};

/// A page of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandedPage {
    /// Its file: an index of [`HandedPages::files`].
    pub file: u32,
    /// Its block.
    pub block: u32,
    /// Where it lies.
    pub slot: u32,
    /// Its checksum.
    pub checksum: u64,
}

/// The pages of a cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HandedPages {
    /// The files to which they belong.
    pub files: Vec<FileId>,
    /// In no order.
    pub pages: Vec<HandedPage>,
}

/// Closes the door of a cache that nobody uses any more, and lists the pages of those files that still have
/// the signatures which the database has left (H1). `None`: the door was not open, so that entries may be
/// older than a change of their blocks.
pub async fn close_and_list<G: Ground, R: Rules>(
    ground: &G,
    layout: &Layout,
    signatures: &BTreeMap<FileId, Signature>,
) -> Option<HandedPages> {
    let door = ground.load(layout::DOOR).await;
    if Door::of(door) != Door::Open || !ground.replace(layout::DOOR, door, Door::Closed.next_word(door)).await
    {
        return None;
    }
    let mut handed = HandedPages::default();
    let mut by_content: HashMap<u32, u32> = HashMap::new();
    for file in 0..layout.shape().files {
        let Some(content) = FileWord(ground.load(layout.file(file)).await).usable_id() else { continue };
        let id = load_id(ground, layout, file).await;
        let signed = ground.load(layout.signature(file)).await;
        if R::keeps_pages(signed, signatures.get(&id).copied()) {
            by_content.insert(content, handed.files.len() as u32);
            handed.files.push(id);
        }
    }
    for number in 0..layout.all_entries() {
        let entry = Entry(ground.load(layout.entry(number)).await);
        let key = Key(ground.load(layout.key(number)).await);
        let is_page = entry.state() == EntryState::Valid && entry.slot() < layout.shape().slots;
        if let Some(&file) = by_content.get(&key.id()).filter(|_| is_page) {
            let checksum = ground.load(layout.checksum(entry.slot())).await;
            handed.pages.push(HandedPage { file, block: key.block(), slot: entry.slot(), checksum });
        }
    }
    Some(handed)
}

/// Files of the new server, as they were when it was looked at.
#[derive(Clone, Debug)]
pub struct WatchedFiles {
    door: u64,
    /// `None`: the cache does not know it.
    files: Vec<Option<(FileRef, FileWord)>>,
}

impl WatchedFiles {
    /// How many files the cache does not know yet.
    pub fn unknown(&self) -> usize {
        self.files.iter().filter(|file| file.is_none()).count()
    }
}

impl<G: Ground, R: Rules> Caller<G, R> {
    /// Looks at files of the new server, in the order of [`HandedPages::files`], and asks the keeper for
    /// those that the cache does not know: look again after its next rounds. `None`: the door is not open.
    pub async fn watch(&mut self, files: &mut [KnownFile]) -> Option<WatchedFiles> {
        self.occupying(async |caller| {
            let door = caller.ground.load(layout::DOOR).await;
            if Door::of(door) != Door::Open || !caller.load_layout().await {
                return None;
            }
            let mut seen = Vec::new();
            for file in files {
                let found = caller.find_or_ask_for(file, async || true).await;
                let usable = if let Some(found) = found { caller.usable(found).await } else { None };
                seen.push(found.zip(usable.map(|(word, _)| word)));
            }
            Some(WatchedFiles { door, files: seen })
        })
        .await
    }

    /// Takes over a page that lies in a slot of this cache: the keeper has just been told that the slot has
    /// memory, and has made no round since. `lsn_of` finds the page's position in the log. Returns whether
    /// readers find the page from now on.
    pub async fn take_over(
        &mut self,
        files: &WatchedFiles,
        page: &HandedPage,
        restartpoint: u64,
        lsn_of: impl Fn([u8; 8]) -> u64,
    ) -> bool {
        self.occupying(async |caller| {
            let Some(token) = caller.token_of(files, page).await else { return false };
            if !caller.is_wanted(token).await {
                return false;
            }
            // The slot may still be absent: the keeper frees it only in its next lap.
            let is_idle = |state| matches!(state, SlotState::Free | SlotState::Absent);
            let Some(taken) = caller.take_slot_if(page.slot, is_idle).await else { return false };
            let head = caller.ground.read_head(page.slot).await;
            if head.is_none_or(|head| !R::takes_over(lsn_of(head), restartpoint)) {
                caller.free_slot(page.slot, taken).await;
                return false;
            }
            caller.ground.store(caller.layout.checksum(page.slot), page.checksum).await;
            caller.enter(token, page.slot, taken).await
        })
        .await
    }

    /// What the admission of a page rests on (H3).
    async fn token_of(&mut self, files: &WatchedFiles, page: &HandedPage) -> Option<Token> {
        let (file, seen) = files.files.get(page.file as usize).copied().flatten()?;
        if Door::of(files.door) != Door::Open
            || !self.load_layout().await
            || page.slot >= self.layout.shape().slots
        {
            return None;
        }
        let buckets = self.layout.buckets(file.file, page.block);
        let (header, word) = match R::skips_written_pages() {
            true => (0, seen),
            false => (
                self.ground.load(self.layout.header(buckets[0])).await,
                FileWord(self.ground.load(self.layout.file(file.file)).await),
            ),
        };
        let key = Key::new(word.usable_id()?, page.block);
        Some(Token { buckets, key, header, writers: 0, file, word, door: files.door })
    }
}
