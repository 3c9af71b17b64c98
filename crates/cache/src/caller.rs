//! A process of the database, or one of its threads, as a user of the cache.

mod reading;

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;

use crate::admission;
use crate::ahead::Allowance;
use crate::files::{self, FileRef, KnownFile};
use crate::grace;
use crate::ground::Ground;
use crate::layout::{self, Layout, Shape};
use crate::outside::close_door;
use crate::places::{Named, Place};
use crate::rules::{Rules, Shipped, checksum};
use crate::words::{Door, Entry, EntryState, FileWord, Header, Key, SlotState, SlotWord};

/// Longest write that invalidates block by block. A longer one changes the file as a whole.
pub(crate) const MAX_BLOCKS: u32 = 64;

/// What became of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome<P> {
    /// The page came from the cache.
    Hit(P),
    /// The disk was read; this is how many bytes it gave.
    Disk(usize),
}

impl<P: Deref<Target = [u8]>> Outcome<P> {
    /// The page from the cache, or else what the disk gave of `read`.
    pub fn page_or<'a>(&'a self, read: &'a [u8]) -> &'a [u8] {
        match self {
            Outcome::Hit(page) => page,
            Outcome::Disk(bytes) => read.get(..*bytes).unwrap_or_default(),
        }
    }

    /// The same without the page.
    pub fn without_page(self) -> Outcome<()> {
        match self {
            Outcome::Hit(_) => Outcome::Hit(()),
            Outcome::Disk(bytes) => Outcome::Disk(bytes),
        }
    }
}

/// A user of the cache. It owns one place, so it runs one call at a time. Run each call's future to its end:
/// a dropped future leaves the place occupied until the keeper clears it as that of a dead process.
#[derive(Debug)]
pub struct Caller<G, R = Shipped> {
    pub(crate) ground: G,
    /// The layout of the index that this process used last.
    pub(crate) layout: Layout,
    place: u32,
    /// Where the next free slot is looked for.
    next_hint: u32,
    /// Whether it never leaves its place any more ([`keep_door_closed`](Self::keep_door_closed)).
    keeps_door_closed: bool,
    /// Whether its reads count as those of the database.
    counts_reads: bool,
    /// How many pages it may fetch on a guess.
    allowance: Cell<Allowance>,
    rules: PhantomData<fn() -> R>,
}

/// What a page's admission rests on: all of it must be the same when the entry is taken.
#[derive(Clone, Copy)]
pub(crate) struct Token {
    /// The block's buckets, its home bucket first.
    pub(crate) buckets: [u32; 2],
    pub(crate) key: Key,
    /// The home bucket's header when the page was about to be read or written.
    pub(crate) header: u64,
    /// Number of writers other than this process that `header` counts.
    pub(crate) writers: u64,
    pub(crate) file: FileRef,
    /// The file's word when the page was about to be read or written.
    pub(crate) word: FileWord,
    pub(crate) door: u64,
}

impl<G: Ground, R: Rules> Caller<G, R> {
    /// Takes one of so many places for `holder`, a number that names this process and is not 0. `None`: all
    /// are taken.
    pub async fn join(ground: G, places: u32, holder: u64) -> Option<Caller<G, R>> {
        for place in 0..places {
            if Place::new(&ground, place).take(holder).await {
                let layout = Layout::new(Shape { places, files: 0, slots: 0 });
                let (next_hint, keeps_door_closed) = (place, false);
                return Some(Caller {
                    ground,
                    layout,
                    place,
                    next_hint,
                    keeps_door_closed,
                    counts_reads: true,
                    allowance: Cell::new(Allowance::new()),
                    rules: PhantomData,
                });
            }
        }
        None
    }

    /// Gives the place back.
    pub async fn leave(self) {
        self.free_place().await;
    }

    /// Gives the place back, unless it keeps the door closed until the process has ended.
    pub(crate) async fn free_place(&self) {
        if !self.keeps_door_closed {
            self.place().free().await;
        }
    }

    fn place(&self) -> Place<'_, G> {
        Place::new(&self.ground, self.place)
    }

    /// Enters this process's place, runs a call, and leaves the place (C4).
    pub(crate) async fn occupying<T>(&mut self, call: impl AsyncFnOnce(&mut Self) -> T) -> T {
        if self.keeps_door_closed {
            return call(self).await;
        }
        let place = Layout::place(self.place);
        grace::enter(&self.ground, place).await;
        let done = call(self).await;
        grace::leave(&self.ground, place).await;
        done
    }

    /// Whether this process can use the index until it leaves its place. The door is not closed.
    pub(crate) async fn load_layout(&mut self) -> bool {
        let layout = self.ground.layout().await;
        self.layout = layout.unwrap_or(self.layout);
        layout.is_some()
    }

    /// The door, for a call that changes what the cache may have. `None`: it is closed, if need be by this
    /// process, so that the index does not matter (C8).
    pub(crate) async fn door_for_changes(&mut self) -> Option<u64> {
        loop {
            let door = self.ground.load(layout::DOOR).await;
            if Door::of(door) == Door::Closed {
                return None;
            }
            if self.load_layout().await {
                return Some(door);
            }
            if !R::closes_door()
                || self.ground.replace(layout::DOOR, door, Door::Closed.next_word(door)).await
            {
                return None;
            }
        }
    }

    /// Finds a file. Asks the keeper to open it if it is not there.
    pub(crate) async fn find_or_ask_for(
        &self,
        file: &mut KnownFile,
        exists: impl AsyncFn() -> bool,
    ) -> Option<FileRef> {
        let found = file.find(&self.ground, &self.layout).await;
        match found {
            Some(found) => files::note_use(&self.ground, &self.layout, found).await,
            None => files::ask_for(&self.ground, &self.layout, file.id(), exists).await,
        }
        found
    }

    /// Finds a file of which nothing is changed. `None`: the cache does not know it, or is closed.
    async fn find_known(&mut self, file: &mut KnownFile) -> Option<FileRef> {
        let is_closed = Door::of(self.ground.load(layout::DOOR).await) == Door::Closed;
        if is_closed || !self.load_layout().await {
            return None;
        }
        file.find(&self.ground, &self.layout).await
    }

    /// Finds a file that is to be changed, and the door. `None`: the cache has nothing to do with the change.
    async fn find_for_changes(&mut self, file: &mut KnownFile) -> Option<(FileRef, u64)> {
        let door = self.door_for_changes().await?;
        Some((file.find(&self.ground, &self.layout).await?, door))
    }

    /// The file's word and id, if its pages may be found now.
    pub(crate) async fn usable(&self, file: FileRef) -> Option<(FileWord, u32)> {
        let word = FileWord(self.ground.load(self.layout.file(file.file)).await);
        word.usable_id().map(|id| (word, id))
    }

    /// Writes a slot that this process has taken, and stores the checksum (C7).
    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        let is_written = self.ground.write_slot(slot, page).await;
        if is_written {
            self.ground.store(self.layout.checksum(slot), checksum::<R>(page)).await;
        }
        is_written
    }

    /// Makes a page that was read from the disk, or written there, findable (C2).
    async fn admit(&mut self, token: Token, page: &[u8]) {
        if !self.is_wanted(token).await {
            return;
        }
        let Some((slot, taken)) = self.take_slot().await else { return };
        if self.write_slot(slot, page).await {
            self.enter(token, slot, taken).await;
        } else {
            self.free_slot(slot, taken).await;
        }
    }

    /// Whether the page is to be admitted (`admission`).
    async fn is_chosen(&self, file: FileRef, key: Key) -> bool {
        !self.counts_reads
            || admission::admits(&self.ground, &self.layout, key).await
            || self.ground.load(self.layout.file_pinned(file.file)).await != 0
    }

    /// Whether a page may be admitted, and is not there already.
    pub(crate) async fn is_wanted(&self, token: Token) -> bool {
        R::may_admit(token.header, token.header, token.writers) && !self.is_cached_or_pending(token).await
    }

    /// Makes the page in a slot that this process has taken findable (C2). Returns whether it is.
    pub(crate) async fn enter(&mut self, token: Token, slot: u32, taken: SlotWord) -> bool {
        let Some((entry, claimed)) = self.take_entry(token.buckets, slot).await else {
            self.free_slot(slot, taken).await;
            return false;
        };
        let (at, pending) = (self.layout.entry(entry), claimed.pending());
        self.ground.store(self.layout.key(entry), token.key.0).await;
        if R::claims_entries() {
            self.ground.store(at, pending.0).await;
        }
        let used = taken.next(SlotState::Used, entry);
        self.ground.store(self.layout.slot(slot), used.0).await;
        self.ground.barrier().await;
        if self.still_holds(token).await && self.ground.replace(at, pending.0, pending.validated().0).await {
            return true;
        }
        // A writer may have emptied it already.
        self.ground.replace(at, pending.0, pending.emptied().0).await;
        self.free_slot(slot, used).await;
        false
    }

    async fn still_holds(&self, token: Token) -> bool {
        let header = self.ground.load(self.layout.header(token.buckets[0])).await;
        R::may_admit(token.header, header, token.writers)
            && self.ground.load(self.layout.file(token.file.file)).await == token.word.0
            && self.ground.load(layout::DOOR).await == token.door
    }

    /// Whether the page is there already, or is being admitted.
    async fn is_cached_or_pending(&self, token: Token) -> bool {
        for entry in self.layout.entries(token.buckets) {
            let state = Entry(self.ground.load(self.layout.entry(entry)).await).state();
            if state != EntryState::Empty && self.ground.load(self.layout.key(entry)).await == token.key.0 {
                return true;
            }
        }
        false
    }

    /// Takes a slot if `may_take` allows its state. Allow only states in which nobody has the slot.
    pub(crate) async fn take_slot_if(&self, slot: u32, may_take: fn(SlotState) -> bool) -> Option<SlotWord> {
        let found = SlotWord(self.ground.load(self.layout.slot(slot)).await);
        let taken = found.next(SlotState::Taken, self.place);
        let is_taken =
            may_take(found.state()) && self.ground.replace(self.layout.slot(slot), found.0, taken.0).await;
        is_taken.then_some(taken)
    }

    /// Takes a free slot, if a hint names one.
    async fn take_slot(&mut self) -> Option<(u32, SlotWord)> {
        let (first, hints) = (self.next_hint, self.layout.hints());
        for number in 0..hints {
            let hint = (first + number) % hints;
            let at = self.layout.hint(hint);
            let found = self.ground.load(at).await;
            if found == 0 || !self.ground.replace(at, found, 0).await {
                continue;
            }
            self.next_hint = (hint + 1) % hints;
            let Some(slot) = self.layout.hinted(found) else { continue };
            if let Some(taken) = self.take_slot_if(slot, |state| state == SlotState::Free).await {
                return Some((slot, taken));
            }
        }
        None
    }

    /// Frees a slot that no reader can have found.
    pub(crate) async fn free_slot(&self, slot: u32, word: SlotWord) {
        self.ground.store(self.layout.slot(slot), word.next(SlotState::Free, 0).0).await;
        // If the hint has been filled meanwhile, the keeper finds the slot.
        // Before this process has taken a slot, `next_hint` is its place, which may be beyond the last hint.
        let hint = self.layout.hint(self.next_hint % self.layout.hints());
        self.ground.replace(hint, 0, u64::from(slot) + 1).await;
    }

    /// How many empty entries a bucket has. Does not count beyond [`Rules::ENOUGH_EMPTY`], which makes no
    /// difference to the choice of a bucket.
    async fn empty_entries(&self, bucket: u32) -> usize {
        let mut empty = 0;
        for entry in self.layout.entries_of(bucket) {
            let found = Entry(self.ground.load(self.layout.entry(entry)).await);
            empty += usize::from(found.state() == EntryState::Empty);
            if empty == R::ENOUGH_EMPTY {
                break;
            }
        }
        empty
    }

    /// Claims an empty entry of a block's buckets, or else the first valid one without a visited mark. Clears
    /// the marks that it passes. `None`: no entry was free to claim.
    async fn take_entry(&self, [home, other]: [u32; 2], slot: u32) -> Option<(u32, Entry)> {
        let empty = [self.empty_entries(home).await, self.empty_entries(other).await];
        let is_other_better = layout::is_other_better(empty, R::ENOUGH_EMPTY);
        let buckets = if is_other_better { [other, home] } else { [home, other] };
        for entry in self.layout.entries(buckets) {
            let at = self.layout.entry(entry);
            let empty = Entry(self.ground.load(at).await);
            let claimed = claim::<R>(empty, slot);
            if empty.state() == EntryState::Empty && self.ground.replace(at, empty.0, claimed.0).await {
                return Some((entry, claimed));
            }
        }
        for entry in self.layout.entries(buckets) {
            let at = self.layout.entry(entry);
            let found = Entry(self.ground.load(at).await);
            if found.state() != EntryState::Valid {
                continue;
            }
            let claimed = claim::<R>(found, slot);
            let next = if found.is_visited() { found.unvisited() } else { claimed };
            if self.ground.replace(at, found.0, next.0).await && next == claimed {
                return Some((entry, next));
            }
        }
        None
    }

    /// Writes `blocks` blocks from `first` on, whole or in part, and returns what `pwrite` returned. `page`:
    /// what is written, if it is one whole block; then it is admitted.
    ///
    /// # Errors
    /// Those of `pwrite`.
    pub async fn write(
        &mut self,
        file: &mut KnownFile,
        (first, blocks): (u32, u32),
        page: Option<&[u8]>,
        pwrite: impl AsyncFnOnce() -> io::Result<usize>,
    ) -> io::Result<usize> {
        if blocks > MAX_BLOCKS || first.checked_add(blocks).is_none() {
            return self.change(file, pwrite).await;
        }
        self.occupying(async |caller| {
            let Some((file, door)) = caller.find_for_changes(file).await else { return pwrite().await };
            let named = Named::Blocks { file: file.file, first, blocks };
            caller.place().name(named).await;
            let page = page.filter(|_| blocks == 1).map(|page| (first, page));
            let written = caller.write_invalidating(file, named, page, door, pwrite).await;
            caller.place().withdraw().await;
            written
        })
        .await
    }

    async fn write_invalidating(
        &mut self,
        file: FileRef,
        named: Named,
        page: Option<(u32, &[u8])>,
        door: u64,
        pwrite: impl AsyncFnOnce() -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut begun = 0;
        for bucket in named.home_buckets(&self.layout) {
            begun = self.ground.add(self.layout.header(bucket), Header::BEGIN).await;
        }
        self.ground.barrier().await;
        if R::writers_invalidate() {
            for block in named.blocks() {
                self.invalidate(file.file, block).await;
            }
        }
        let usable = self.usable(file).await;
        let written = pwrite().await;
        if let (Some((block, page)), Some((word, id)), Ok(bytes)) = (page, usable, &written)
            && *bytes == page.len()
            && Door::of(door) == Door::Open
        {
            let buckets = self.layout.buckets(file.file, block);
            let key = Key::new(id, block);
            // There is one block, so `begun` is the header of its home bucket.
            let (header, writers) = (begun.wrapping_add(Header::BEGIN), Header(begun).writers());
            self.admit(Token { buckets, key, header, writers, file, word, door }, page).await;
        }
        for bucket in named.home_buckets(&self.layout) {
            self.ground.add(self.layout.header(bucket), Header::END.wrapping_neg()).await;
        }
        written
    }

    /// Empties the entries of a block, whatever id they have: the file may get another id meanwhile.
    async fn invalidate(&self, file: u32, block: u32) {
        let [home, other] = self.layout.buckets(file, block);
        let other = if R::writers_look_in_both_buckets() { other } else { home };
        for entry in self.layout.entries([home, other]) {
            loop {
                let at = self.layout.entry(entry);
                let found = Entry(self.ground.load(at).await);
                let key = Key(self.ground.load(self.layout.key(entry)).await);
                if !found.may_be_emptied()
                    || key.block() != block
                    || self.ground.replace(at, found.0, found.emptied().0).await
                {
                    break;
                }
            }
        }
    }

    /// Changes a file as a whole, by `change`: truncates it, or writes more than a few blocks (C3).
    ///
    /// # Errors
    /// Those of `change`.
    pub async fn change<T>(
        &mut self,
        file: &mut KnownFile,
        change: impl AsyncFnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.occupying(async |caller| {
            let Some((file, _)) = caller.find_for_changes(file).await else { return change().await };
            caller.place().name(Named::File { file: file.file }).await;
            files::update(&caller.ground, &caller.layout, file.file, FileWord::change_begun).await;
            let changed = change().await;
            let id = fresh_content_id(&caller.ground).await;
            let reopened =
                |word: FileWord| word.change_ended(if R::changes_ids() { id } else { word.content_id() });
            files::update(&caller.ground, &caller.layout, file.file, reopened).await;
            caller.place().withdraw().await;
            changed
        })
        .await
    }

    /// Runs a change of which it is not known which file it changes.
    pub async fn change_unknown<T>(&mut self, change: impl AsyncFnOnce() -> T) -> T {
        self.occupying(async |caller| {
            close_door(&caller.ground).await;
            change().await
        })
        .await
    }

    /// Closes the door until this process has ended, for changes that no call announces, such as those by a
    /// mapping. The keeper does not open a door over a place that is not left (C4).
    pub async fn keep_door_closed(&mut self) {
        if !self.keeps_door_closed {
            grace::enter(&self.ground, Layout::place(self.place)).await;
            self.keeps_door_closed = true;
            close_door(&self.ground).await;
        }
    }

    /// From now on, its reads are no hits or misses, and no samples: they are not those of the database.
    pub fn count_no_reads(&mut self) {
        self.counts_reads = false;
    }

    /// Pins a file, or unpins it. The keeper evicts pages of pinned files last. `false`: the cache does not
    /// know the file.
    pub async fn set_pinned(&mut self, file: &mut KnownFile, is_pinned: bool) -> bool {
        self.occupying(async |caller| {
            let Some(file) = caller.find_known(file).await else { return false };
            caller.ground.store(caller.layout.file_pinned(file.file), is_pinned.into()).await;
            true
        })
        .await
    }

    /// Whether the cache knows the file.
    pub async fn knows(&mut self, file: &mut KnownFile) -> bool {
        self.occupying(async |caller| caller.find_known(file).await.is_some()).await
    }

    /// Makes a file's pages unreachable for good. The file has been unlinked before.
    pub async fn retire(&mut self, file: &mut KnownFile) {
        self.occupying(async |caller| {
            // Pairs with the barrier of a process that asks for the file.
            caller.ground.barrier().await;
            if caller.door_for_changes().await.is_some() && R::retires_files() {
                files::retire(&caller.ground, &caller.layout, file.id()).await;
            }
        })
        .await;
    }
}

/// The word with which an entry is taken for a slot.
fn claim<R: Rules>(entry: Entry, slot: u32) -> Entry {
    let claimed = entry.claimed(slot, R::GENERATION_MASK);
    if R::claims_entries() { claimed } else { claimed.pending() }
}

/// An id that no file has had, or 0, which finds nothing, once all ids are used up. (Ids have 32 bits, enough
/// for four billion changes of whole files. After that, files that change are not cached until the cache is
/// attached again.)
pub(crate) async fn fresh_content_id<G: Ground>(ground: &G) -> u32 {
    u32::try_from(ground.add(layout::NEXT_CONTENT_ID, 1).await.wrapping_add(1)).unwrap_or(0)
}
