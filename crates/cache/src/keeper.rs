//! The process that gives slots, evicts, and cleans up. There is one at a time; its successor takes over the
//! same memory, and needs to know nothing of what this one did.
//!
//! A *sweep* looks at all slots and entries. A slot that is taken, or used by an entry that does not hold it,
//! and an entry that is claimed or pending, may belong to a call that has not ended. If they are the same once
//! every place that was occupied has been left, they belong to nobody: the call ended (an entry was emptied),
//! or its process died. So nothing is lost when a process dies, whatever it was doing.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use crate::caller::{FileRef, fresh_id};
use crate::grace::Grace;
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::places::{self, Named, Place};
use crate::policy::Sieve;
use crate::rules::{Rules, Shipped};
use crate::words::{Door, Entry, EntryState, FileWord, Header, SlotState, SlotWord};

/// One slot in so many is kept free, for pages to come,
const FREE_DIVISOR: u32 = 64;
/// but not less than this many, or half of all.
const FREE_MIN: u32 = 16;

/// The keeper.
#[derive(Debug)]
pub struct Keeper<G, R = Shipped> {
    ground: G,
    layout: Layout,
    order: Sieve,
    /// The places of words that nobody may have any more, and the words, as of the last sweep.
    suspects: Vec<Suspect>,
    /// What suspects wait for.
    swept: Grace,
    /// What the next turn of the door waits for.
    turned: Grace,
    /// Files that are being made known: their births, and what they wait for.
    adding: BTreeMap<u32, (u64, Grace)>,
    /// Valid entries may be from before the door was last closed.
    is_stale: bool,
    rules: PhantomData<fn() -> R>,
}

/// What a sweep found. The other slots are being given, or freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Census {
    /// Free slots.
    pub free: u32,
    /// Slots with pages that can be found.
    pub pages: u32,
}

#[derive(Clone, Copy, Debug)]
enum Suspect {
    Slot(u32, SlotWord),
    Entry(u32, Entry),
}

impl<G: Ground, R: Rules> Keeper<G, R> {
    /// Starts to keep a cache. Its memory is new, or another keeper had it.
    pub async fn start(ground: G, layout: Layout) -> Keeper<G, R> {
        let now = Grace::begin(&ground).await;
        // If the door is not open, the keeper before may have closed it for a while.
        let door = Door::of(ground.load(layout::DOOR).await);
        let is_stale = if R::doubts_old_entries() { door != Door::Open } else { door == Door::Closed };
        let order = Sieve::new(layout.shape().slots);
        let (suspects, adding, rules) = (Vec::new(), BTreeMap::new(), PhantomData);
        Keeper { ground, layout, order, suspects, swept: now, turned: now, adding, is_stale, rules }
    }

    /// The door's state.
    pub async fn door(&self) -> Door {
        Door::of(self.ground.load(layout::DOOR).await)
    }

    /// Makes a file known under this number, which no file has: if there was one, it was retired. `None`:
    /// places are occupied by calls that may be about that one; to be tried again.
    pub async fn add_file(&mut self, file: u32) -> Option<FileRef> {
        let (birth, grace) = match self.adding.get(&file) {
            Some(begun) => *begun,
            None => {
                let birth = self.ground.add(layout::NEXT_BIRTH, 1).await + 1;
                self.ground.store(self.layout.birth(file), birth).await;
                let grace = Grace::begin(&self.ground).await;
                self.adding.insert(file, (birth, grace));
                (birth, grace)
            }
        };
        if !grace.is_over(&self.ground, &self.layout).await {
            return None;
        }
        self.adding.remove(&file);
        let id = fresh_id(&self.ground).await;
        self.ground.store(self.layout.file(file), FileWord::open(id).0).await;
        Some(FileRef { file, birth })
    }

    /// Turns the door to the next or the previous state (C5). False: places are occupied that saw the state
    /// before this one; to be tried again.
    pub async fn turn_door(&mut self, to: Door) -> bool {
        let word = self.ground.load(layout::DOOR).await;
        let from = Door::of(word);
        assert!((to as u8).abs_diff(from as u8) == 1, "the door goes from {from:?} to {to:?}");
        if R::door_waits() && !self.turned.is_over(&self.ground, &self.layout).await {
            return false;
        }
        if to == Door::Open && self.is_stale {
            self.empty_all().await;
        }
        self.is_stale |= to == Door::Closed;
        self.ground.store(layout::DOOR, to.next_word(word)).await;
        self.turned = Grace::begin(&self.ground).await;
        true
    }

    /// Empties all entries. The door is not open, and has not been for long: nobody admits a page.
    async fn empty_all(&mut self) {
        for entry in 0..self.layout.all_entries() {
            let at = self.layout.entry(entry);
            loop {
                let found = Entry(self.ground.load(at).await);
                if found.state() == EntryState::Empty
                    || self.ground.replace(at, found.0, found.emptied().0).await
                {
                    break;
                }
            }
        }
        self.is_stale = false;
    }

    /// Clears the places of processes that have died: `is_alive` tells of a holder whether it lives. A dead
    /// one must do nothing any more. Places that cannot be cleared yet are left to the next call.
    pub async fn clear_dead(&self, is_alive: impl Fn(u64) -> bool) {
        for number in 0..self.layout.shape().places {
            let place = Place { ground: &self.ground, at: self.layout.place(number) };
            let holder = place.holder().await;
            if holder == 0 || is_alive(holder) || !self.undo(number, &place, &is_alive).await {
                continue;
            }
            place.withdraw().await;
            self.ground.store(place.at + places::ERA, 0).await;
            place.free().await;
        }
    }

    /// Repairs what a dead process may have left in headers and files. False: a living process works there.
    async fn undo(&self, number: u32, place: &Place<'_, G>, is_alive: &impl Fn(u64) -> bool) -> bool {
        let Some(named) = place.named().await else { return true };
        if let Named::File { file } = named {
            let at = self.layout.file(file);
            let word = FileWord(self.ground.load(at).await);
            let works_there = async |other| matches!(other, Named::File { file: named } if named == file);
            if word.usable_id().is_none() {
                let id = fresh_id(&self.ground).await;
                return !self.any_living(number, is_alive, works_there).await
                    && self.ground.replace(at, word.0, word.cleared(id).0).await;
            }
            return true;
        }
        let buckets: BTreeSet<u32> = named.buckets(&self.layout).collect();
        for bucket in buckets {
            let at = self.layout.header(bucket);
            let header = Header(self.ground.load(at).await);
            if header.writers() == 0 {
                continue;
            }
            if !R::clears_headers() {
                self.ground.add(at, Header::END.wrapping_neg()).await;
                continue;
            }
            self.ground.barrier().await;
            let works_there = async |other: Named| other.covers(&self.layout, bucket);
            if self.any_living(number, is_alive, works_there).await
                || !self.ground.replace(at, header.0, header.cleared().0).await
            {
                return false;
            }
        }
        true
    }

    /// Whether a living process other than the one at `except` has named something like that.
    async fn any_living(
        &self,
        except: u32,
        is_alive: &impl Fn(u64) -> bool,
        is_like: impl AsyncFn(Named) -> bool,
    ) -> bool {
        for number in (0..self.layout.shape().places).filter(|number| *number != except) {
            let place = Place { ground: &self.ground, at: self.layout.place(number) };
            let holder = place.holder().await;
            if holder != 0
                && is_alive(holder)
                && let Some(named) = place.named().await
                && is_like(named).await
            {
                return true;
            }
        }
        false
    }

    /// Looks at all slots and entries: frees what nobody has, evicts if too little is free, and publishes
    /// hints. To be called again and again; each call completes what the last one began. Returns what it
    /// found.
    pub async fn sweep(&mut self) -> Census {
        if self.swept.is_over(&self.ground, &self.layout).await || !R::slots_wait() {
            for suspect in std::mem::take(&mut self.suspects) {
                self.free(suspect).await;
            }
        }
        let notes = self.suspects.is_empty();
        if notes {
            self.note_unfinished_entries().await;
        }
        let free = self.look_at_slots(notes).await;
        if notes {
            self.swept = Grace::begin(&self.ground).await;
        }
        let census = Census { free: free.len() as u32, pages: self.order.len() };
        let slots = self.layout.shape().slots;
        let wanted = (slots / FREE_DIVISOR).max(FREE_MIN.min(slots / 2));
        let coming = self.suspects.iter().filter(|suspect| matches!(suspect, Suspect::Slot(..))).count();
        self.evict(wanted.saturating_sub(free.len() as u32 + coming as u32)).await;
        self.publish(free).await;
        census
    }

    /// Frees a suspect that is still what it was.
    async fn free(&self, suspect: Suspect) {
        match suspect {
            Suspect::Slot(slot, word) => {
                let free = word.next(SlotState::Free, 0);
                self.ground.replace(self.layout.slot(slot), word.0, free.0).await;
            }
            Suspect::Entry(entry, found) => {
                self.ground.replace(self.layout.entry(entry), found.0, found.emptied().0).await;
            }
        }
    }

    async fn note_unfinished_entries(&mut self) {
        for entry in 0..self.layout.all_entries() {
            let found = Entry(self.ground.load(self.layout.entry(entry)).await);
            if matches!(found.state(), EntryState::Claimed | EntryState::Pending) {
                self.suspects.push(Suspect::Entry(entry, found));
            }
        }
    }

    /// Learns which slots hold pages, and, if `notes` is set, which ones nobody may have. Returns the free
    /// ones.
    async fn look_at_slots(&mut self, notes: bool) -> Vec<u32> {
        let mut free = Vec::new();
        for slot in 0..self.layout.shape().slots {
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            if word.state() == SlotState::Free {
                free.push(slot);
            } else if word.state() == SlotState::Used {
                let entry = Entry(self.ground.load(self.layout.entry(word.whom())).await);
                if entry.holds(slot) {
                    match entry.state() {
                        EntryState::Valid => self.order.insert(slot),
                        _ => self.order.remove(slot),
                    }
                    continue;
                }
            }
            self.order.remove(slot);
            if word.state() != SlotState::Free && notes {
                self.suspects.push(Suspect::Slot(slot, word));
            }
        }
        free
    }

    /// Empties the entries of some pages that were not visited lately. Their slots are suspects from the next
    /// sweep on.
    async fn evict(&mut self, pages: u32) {
        let mut left = pages;
        // Once around all pages clears all marks.
        for _ in 0..2 * self.order.len() {
            let Some(slot) = self.order.hand().filter(|_| left > 0) else { return };
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            if word.state() != SlotState::Used {
                self.order.remove(slot);
                continue;
            }
            let at = self.layout.entry(word.whom());
            let entry = Entry(self.ground.load(at).await);
            if entry.state() == EntryState::Valid && entry.holds(slot) && entry.is_visited() {
                self.ground.replace(at, entry.0, entry.unvisited().0).await;
                self.order.pass();
                continue;
            }
            if entry.state() == EntryState::Valid
                && entry.holds(slot)
                && self.ground.replace(at, entry.0, entry.emptied().0).await
            {
                left -= 1;
            }
            self.order.remove(slot);
        }
    }

    /// Publishes the numbers of free slots where hints are missing.
    async fn publish(&self, free: Vec<u32>) {
        let mut empty = Vec::new();
        let mut known = BTreeSet::new();
        for hint in 0..self.layout.hints() {
            match self.ground.load(self.layout.hint(hint)).await {
                0 => empty.push(hint),
                slot => drop(known.insert(slot - 1)),
            }
        }
        let unknown = free.into_iter().map(u64::from).filter(|slot| !known.contains(slot));
        for (hint, slot) in empty.into_iter().zip(unknown) {
            self.ground.replace(self.layout.hint(hint), 0, slot + 1).await;
        }
    }
}
