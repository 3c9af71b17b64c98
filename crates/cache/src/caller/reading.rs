//! Reads: pages from the cache, or else from the disk, and pages that are fetched before they are read.

use std::io;
use std::ops::Range;

use super::{Caller, Outcome, Token};
use crate::advice;
use crate::ahead::Allowance;
use crate::files::KnownFile;
use crate::ground::{Fetch, Ground, PageSink, collect_into};
use crate::layout::{self, LINE_WORDS};
use crate::rules::Rules;
use crate::words::{Door, Entry, EntryState, Header, Key};

/// What became of an attempt to read the page of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageRead {
    /// It is the page that was admitted.
    Admitted,
    /// It is something else (C7).
    Other,
    Unreadable,
}

impl<G: Ground, R: Rules> Caller<G, R> {
    /// Reads one block. On a hit, the outcome has the page, and `to` is unchanged. On a miss, `pread` reads
    /// the block from the disk into `to`, and returns how many bytes it found. `exists`: whether the file has
    /// a name, and was not unlinked.
    ///
    /// # Errors
    /// Those of `pread`.
    pub async fn read(
        &mut self,
        file: &mut KnownFile,
        block: u32,
        to: &mut [u8],
        exists: impl AsyncFn() -> bool,
        pread: impl AsyncFnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Outcome<Vec<u8>>> {
        let mut page = Vec::new();
        let pread = async |to: &mut [u8], _| pread(to).await;
        let read = self.read_into(file, block, &mut collect_into(&mut page), to, exists, pread).await?;
        Ok(match read {
            Outcome::Hit(()) => Outcome::Hit(page),
            Outcome::Disk(bytes) => Outcome::Disk(bytes),
        })
    }

    /// As [`read`](Self::read), but passes the page to `sink`. On a miss `sink` may have been called as well;
    /// what it got then is not the page. The second argument of `pread` is false if the block will not be
    /// admitted.
    ///
    /// # Errors
    /// Those of `pread`.
    pub async fn read_into(
        &mut self,
        file: &mut KnownFile,
        block: u32,
        sink: &mut PageSink<'_>,
        to: &mut [u8],
        exists: impl AsyncFn() -> bool,
        pread: impl AsyncFnOnce(&mut [u8], bool) -> io::Result<usize>,
    ) -> io::Result<Outcome<()>> {
        self.occupying(async |caller| {
            let door = caller.ground.load(layout::DOOR).await;
            let is_open = Door::of(door) == Door::Open && caller.load_layout().await;
            let found = if is_open { caller.find_or_ask_for(file, exists).await } else { None };
            let usable = if let Some(file) = found { caller.usable(file).await } else { None };
            let (Some(file), Some((word, id))) = (found, usable) else {
                return Ok(Outcome::Disk(pread(to, true).await?));
            };
            let (buckets, key) = (caller.layout.buckets(file.file, block), Key::new(id, block));
            if let Some(sample) = caller.layout.sample_of(key).filter(|_| caller.counts_reads) {
                advice::note_sample(&caller.ground, &caller.layout, sample).await;
            }
            let is_hit = caller.read_cached(buckets, key, sink).await;
            if caller.counts_reads {
                caller.place().count_read(is_hit).await;
            }
            if is_hit {
                return Ok(Outcome::Hit(()));
            }
            let header = caller.ground.load(caller.layout.header(buckets[0])).await;
            let is_chosen = caller.is_chosen(file, key).await;
            let read = pread(to, is_chosen).await?;
            if is_chosen && read == to.len() {
                let writers = Header(header).writers();
                caller.admit(Token { buckets, key, header, writers, file, word, door }, to).await;
            }
            Ok(Outcome::Disk(read))
        })
        .await
    }

    /// Reads a page from the cache, and marks it visited (C1). Returns whether it is there.
    async fn read_cached(&self, buckets: [u32; 2], key: Key, sink: &mut PageSink<'_>) -> bool {
        for entry in self.layout.entries(buckets) {
            let at = self.layout.entry(entry);
            let found = Entry(self.ground.load(at).await);
            if found.state() != EntryState::Valid || self.ground.load(self.layout.key(entry)).await != key.0 {
                continue;
            }
            let slot = found.slot();
            if slot >= self.layout.shape().slots {
                self.ground.replace(at, found.0, found.emptied().0).await;
                continue;
            }
            match self.read_page(found, sink).await {
                // If this process cannot read the slot, others may be able to, and the keeper empties the
                // entry if the memory is gone.
                PageRead::Unreadable => continue,
                PageRead::Other => {
                    self.ground.replace(at, found.0, found.emptied().0).await; // C7
                    continue;
                }
                PageRead::Admitted => {}
            }
            let again = Entry(self.ground.load(at).await);
            if again.unvisited() == found.unvisited() {
                if !again.is_visited() {
                    // If another process has changed the entry, the mark is lost, and nothing else.
                    self.ground.replace(at, again.0, again.visited().0).await;
                }
                return true;
            }
        }
        false
    }

    /// Reads the page of an entry: the fetched copy if there is one, else the slot.
    async fn read_page(&self, found: Entry, sink: &mut PageSink<'_>) -> PageRead {
        let slot = found.slot();
        let expected = self.ground.load(self.layout.checksum(slot)).await;
        if self.gains_by_fetching() {
            let read = async |to: &mut PageSink<'_>| self.ground.read_fetched(fetch_of(found), to);
            let fetched = self.verify(expected, sink, read).await;
            self.change_allowance(|allowance| allowance.note_read(fetched != PageRead::Unreadable));
            // If it is another page, the entry's generation has come round again meanwhile.
            if fetched == PageRead::Admitted {
                return fetched;
            }
        }
        self.verify(expected, sink, async |to| self.ground.read_slot(slot, to).await).await
    }

    /// Passes the page that `read` reads on to `sink`, and compares it with the checksum `expected` (C7).
    async fn verify(
        &self,
        expected: u64,
        sink: &mut PageSink<'_>,
        read: impl AsyncFnOnce(&mut PageSink<'_>) -> bool,
    ) -> PageRead {
        let mut digest = R::digest();
        let mut digest_and_pass_on = |at: usize, piece: &[u8]| {
            if at == 0 {
                digest = R::digest();
            }
            digest.update(piece);
            sink(at, piece);
        };
        match read(&mut digest_and_pass_on).await {
            false => PageRead::Unreadable,
            true if R::finish(&digest) == expected => PageRead::Admitted,
            true => PageRead::Other,
        }
    }

    /// Whether [`fetch`](Self::fetch) saves time.
    pub fn gains_by_fetching(&self) -> bool {
        self.ground.gains_by_fetching()
    }

    /// Fetches the pages of these blocks that are in the cache, all at once, for later reads by this caller.
    /// The caller is about to read the first `needed` of them. The others are a guess: fewer of them are
    /// fetched if earlier guesses were not read.
    pub async fn fetch(&mut self, file: &mut KnownFile, blocks: Range<u32>, needed: u32) {
        self.occupying(async |caller| {
            let Some(file) = caller.find_known(file).await else { return };
            let Some((_, id)) = caller.usable(file).await else { return };
            let (allowed, mut fetches) = (caller.allowance.get().pages(), Vec::with_capacity(blocks.len()));
            for (number, block) in (0..).zip(blocks) {
                if number >= needed && fetches.len() >= allowed {
                    break;
                }
                let buckets = caller.layout.buckets(file.file, block);
                if let Some(found) = caller.find_entry(buckets, Key::new(id, block)).await {
                    fetches.push(fetch_of(found));
                }
            }
            // A single page is read as soon without.
            if fetches.len() > 1 {
                caller.change_allowance(|allowance| allowance.take(fetches.len()));
                caller.ground.fetch_slots(&fetches).await;
            }
        })
        .await;
    }

    fn change_allowance(&self, change: impl FnOnce(&mut Allowance)) {
        let mut allowance = self.allowance.get();
        change(&mut allowance);
        self.allowance.set(allowance);
    }

    /// The valid entry of a page, if there is one.
    async fn find_entry(&self, buckets: [u32; 2], key: Key) -> Option<Entry> {
        for entry in self.layout.entries(buckets) {
            let found = Entry(self.ground.load(self.layout.entry(entry)).await);
            if found.state() == EntryState::Valid
                && found.slot() < self.layout.shape().slots
                && self.ground.load(self.layout.key(entry)).await == key.0
            {
                return Some(found);
            }
        }
        None
    }

    /// Has the processor fetch the checksum of the page that a read of this block is likely to find. Its home
    /// bucket should have been [prefetched](Self::prefetch) a while ago.
    pub(crate) fn prefetch_checksum(&self, file: &KnownFile, block: u32) {
        let Some(number) = file.last_number() else { return };
        let mut entries = self.layout.entries_of(self.layout.home(number, block));
        let is_it = |entry: &u32| {
            self.ground.peek(self.layout.key(*entry)).is_some_and(|key| Key(key).block() == block)
        };
        if let Some(found) = entries.find(is_it).and_then(|entry| self.ground.peek(self.layout.entry(entry)))
        {
            self.ground.prefetch(self.layout.checksum(Entry(found).slot()));
        }
    }

    /// Has the processor fetch what a read of this block is likely to look at first: the lines of its home
    /// bucket.
    pub(crate) fn prefetch(&self, file: &KnownFile, block: u32) {
        if let Some(number) = file.last_number() {
            let header = self.layout.header(self.layout.home(number, block));
            [header, header + LINE_WORDS].into_iter().for_each(|at| self.ground.prefetch(at));
        }
    }
}

/// Names the page of a valid entry: an entry gets another generation with each page.
fn fetch_of(found: Entry) -> Fetch {
    Fetch { slot: found.slot(), entry: found.unvisited().0 }
}
