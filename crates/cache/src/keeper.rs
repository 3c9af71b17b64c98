//! The process that hands out slots, evicts pages, and cleans up. There is one at a time; its successor
//! takes over the same memory, and needs to know nothing of what this one did.
//!
//! A *sweep* looks at all slots and entries. A slot that is taken, or used by an entry that does not hold it,
//! and an entry that is claimed or pending, may belong to a call that has not ended. If they are the same
//! once every place that was occupied has been left, they belong to nobody: the call ended (an entry was
//! emptied), or its process died. So nothing is lost when a process dies, whatever it was doing.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use crate::caller::{FileRef, fresh_id};
use crate::grace::{self, Grace};
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::places::{Named, Place};
use crate::policy::Sieve;
use crate::rules::{Rules, Shipped};
use crate::words::{Door, Entry, EntryState, FileWord, Header, SlotState, SlotWord};

/// The keeper keeps one slot in so many free for new pages.
const FREE_DIVISOR: u32 = 64;
/// It keeps at least this many free, or half of the slots if there are fewer than twice as many.
const FREE_MIN: u32 = 16;

/// Hands out slots, evicts pages, and cleans up after dead processes.
#[derive(Debug)]
pub struct Keeper<G, R = Shipped> {
    ground: G,
    layout: Layout,
    order: Sieve,
    /// Slots and entries that seemed to belong to nobody in a sweep, with their words.
    suspects: Vec<Suspect>,
    /// What suspects wait for.
    suspects_grace: Grace,
    /// What the next turn of the door waits for.
    door_grace: Grace,
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
    /// Slots with pages, those of files that have another id now among them.
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
        let is_stale = if R::empties_old_entries() { door != Door::Open } else { door == Door::Closed };
        let order = Sieve::new(layout.shape().slots);
        let (suspects, adding, rules) = (Vec::new(), BTreeMap::new(), PhantomData);
        Keeper {
            ground,
            layout,
            order,
            suspects,
            suspects_grace: now,
            door_grace: now,
            adding,
            is_stale,
            rules,
        }
    }

    /// The door's state.
    pub async fn door(&self) -> Door {
        Door::of(self.ground.load(layout::DOOR).await)
    }

    /// Makes a file known under a number below the shape's. No file is known under two, nor again after it
    /// was retired, while processes have it open. A file that had the number before must have been retired.
    /// `None`: calls that may mean the old file are still running; try again.
    ///
    /// # Panics
    /// If the number is too high.
    pub async fn add_file(&mut self, file: u32) -> Option<FileRef> {
        assert!(file < self.layout.shape().files, "file {file} of {}", self.layout.shape().files);
        let (birth, grace) = match self.adding.get(&file) {
            Some(begun) => *begun,
            None => {
                let birth = self.ground.add(layout::NEXT_BIRTH, 1).await.wrapping_add(1);
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

    /// Turns the door by one state towards `to`, and returns whether it has that state now (C5). It stays
    /// where it is while calls that saw an earlier state are running; try again.
    pub async fn turn_door(&mut self, to: Door) -> bool {
        let word = self.ground.load(layout::DOOR).await;
        let from = Door::of(word);
        let next = from.towards(to);
        if next == from {
            return true;
        }
        if R::door_waits() && !self.door_grace.is_over(&self.ground, &self.layout).await {
            return false;
        }
        if next == Door::Open && self.is_stale {
            self.empty_all().await;
        }
        self.is_stale |= next == Door::Closed;
        self.ground.store(layout::DOOR, next.next_word(word)).await;
        self.door_grace = Grace::begin(&self.ground).await;
        next == to
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

    /// Clears the places of processes that have died. `is_alive` finds out whether a holder lives when it is
    /// called; a dead one must do nothing any more. Places that cannot be cleared yet are left to the next
    /// call.
    pub async fn clear_dead(&self, is_alive: impl Fn(u64) -> bool) {
        for number in 0..self.layout.shape().places {
            let place = Place::new(&self.ground, &self.layout, number);
            let holder = place.holder().await;
            if holder == 0 || is_alive(holder) || !self.undo(number, &place, &is_alive).await {
                continue;
            }
            place.withdraw().await;
            grace::leave(&self.ground, place.at).await;
            place.free().await;
        }
    }

    /// Repairs what a dead process may have left. False: a living process works there; to be tried again.
    async fn undo(&self, number: u32, place: &Place<'_, G>, is_alive: &impl Fn(u64) -> bool) -> bool {
        let Some(named) = place.named().await else { return true };
        if let Named::File { file } = named {
            return self.reopen(file, number, is_alive).await;
        }
        for bucket in named.buckets(&self.layout) {
            if !self.clear_header(bucket, number, is_alive).await {
                return false;
            }
            // So that the next try goes on here, and needs one bucket at a time to be idle.
            place.withdraw_first().await;
        }
        true
    }

    /// Reopens a file that the dead process at a place may have closed (C3).
    async fn reopen(&self, file: u32, dead: u32, is_alive: &impl Fn(u64) -> bool) -> bool {
        let at = self.layout.file(file);
        let word = FileWord(self.ground.load(at).await);
        // A retired file stays as it is: its word has no version, so that a living closer could be
        // overlooked.
        if word.usable_id().is_some() || word.id() == 0 {
            return true;
        }
        // A process that this word counts has stored its name before: the load makes it visible.
        if self.any_living(dead, is_alive, |other| other == Named::File { file }).await {
            return false;
        }
        let id = fresh_id(&self.ground).await;
        self.ground.replace(at, word.0, word.cleared(id).0).await
    }

    /// Clears the header of a bucket to which the dead process at a place may have added itself (C6).
    async fn clear_header(&self, bucket: u32, dead: u32, is_alive: &impl Fn(u64) -> bool) -> bool {
        let at = self.layout.header(bucket);
        let header = Header(self.ground.load(at).await);
        if header.writers() == 0 {
            return true;
        }
        if !R::replaces_dead_headers() {
            self.ground.add(at, Header::END.wrapping_neg()).await;
            return true;
        }
        // A writer that this header counts has stored its name before: the load makes it visible.
        let is_there = |other: Named| other.buckets(&self.layout).any(|named| named == bucket);
        !self.any_living(dead, is_alive, is_there).await
            && self.ground.replace(at, header.0, header.cleared().0).await
    }

    /// Whether a living process, at another place than `except`, has named something that conflicts.
    async fn any_living(
        &self,
        except: u32,
        is_alive: &impl Fn(u64) -> bool,
        conflicts: impl Fn(Named) -> bool,
    ) -> bool {
        for number in (0..self.layout.shape().places).filter(|number| *number != except) {
            let place = Place::new(&self.ground, &self.layout, number);
            let holder = place.holder().await;
            if holder != 0
                && is_alive(holder)
                && let Some(named) = place.named().await
                && conflicts(named)
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
        if self.suspects_grace.is_over(&self.ground, &self.layout).await || !R::slot_reuse_waits() {
            for suspect in std::mem::take(&mut self.suspects) {
                self.reclaim(suspect).await;
            }
        }
        let (free, suspects) = self.scan_slots().await;
        // They come free once nobody is in the way: evicting more pages would not bring slots any sooner.
        let coming = suspects.len() as u32;
        if self.suspects.is_empty() {
            self.suspects = suspects;
            self.suspect_unfinished_entries().await;
            self.suspects_grace = Grace::begin(&self.ground).await;
        }
        let census = Census { free: free.len() as u32, pages: self.order.len() };
        let slots = self.layout.shape().slots;
        let wanted = (slots / FREE_DIVISOR).max(FREE_MIN.min(slots / 2)).max(1);
        self.evict(wanted.saturating_sub(free.len() as u32 + coming)).await;
        self.publish_hints(free).await;
        census
    }

    /// Frees a suspect that is still what it was.
    async fn reclaim(&self, suspect: Suspect) {
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

    /// Makes suspects of all entries that are claimed or pending.
    async fn suspect_unfinished_entries(&mut self) {
        for entry in 0..self.layout.all_entries() {
            let found = Entry(self.ground.load(self.layout.entry(entry)).await);
            if matches!(found.state(), EntryState::Claimed | EntryState::Pending) {
                self.suspects.push(Suspect::Entry(entry, found));
            }
        }
    }

    /// Updates the order of eviction from all slots. Returns the free slots, and those that may belong to
    /// nobody.
    async fn scan_slots(&mut self) -> (Vec<u32>, Vec<Suspect>) {
        let (mut free, mut suspects) = (Vec::new(), Vec::new());
        for slot in 0..self.layout.shape().slots {
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            if let Some((_, entry)) = self.entry_of(slot, word).await {
                match entry.state() {
                    EntryState::Valid => self.order.insert(slot),
                    _ => self.order.remove(slot),
                }
                continue;
            }
            self.order.remove(slot);
            match word.state() {
                SlotState::Free => free.push(slot),
                SlotState::Taken | SlotState::Used => suspects.push(Suspect::Slot(slot, word)),
            }
        }
        (free, suspects)
    }

    /// The entry that a slot's word names, and where it lies, if it holds the slot.
    async fn entry_of(&self, slot: u32, word: SlotWord) -> Option<(usize, Entry)> {
        let is_used = word.state() == SlotState::Used && word.owner() < self.layout.all_entries();
        if !is_used {
            return None;
        }
        let at = self.layout.entry(word.owner());
        let entry = Entry(self.ground.load(at).await);
        entry.holds(slot).then_some((at, entry))
    }

    /// Empties the entries of some pages that were not visited lately. Their slots are suspects from the next
    /// sweep on.
    async fn evict(&mut self, pages: u32) {
        let mut left = pages;
        // The first round clears all marks, the second one evicts.
        for _ in 0..2 * self.order.len() {
            if left == 0 {
                return;
            }
            let Some(slot) = self.order.hand() else { return };
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            if let Some((at, entry)) = self.entry_of(slot, word).await
                && entry.state() == EntryState::Valid
            {
                if entry.is_visited() {
                    self.ground.replace(at, entry.0, entry.unvisited().0).await;
                    self.order.pass();
                    continue;
                }
                left -= u32::from(self.ground.replace(at, entry.0, entry.emptied().0).await);
            }
            self.order.remove(slot);
        }
    }

    /// Publishes the numbers of free slots where hints are missing or outdated.
    async fn publish_hints(&self, free: Vec<u32>) {
        let mut unknown: BTreeSet<u64> = free.into_iter().map(|slot| u64::from(slot) + 1).collect();
        let mut vacant = Vec::new();
        for hint in 0..self.layout.hints() {
            let at = self.layout.hint(hint);
            let found = self.ground.load(at).await;
            if !unknown.remove(&found) {
                vacant.push((at, found));
            }
        }
        let mut unknown = unknown.into_iter();
        for (at, found) in vacant {
            let next = unknown.next().unwrap_or(0);
            if next != found {
                self.ground.replace(at, found, next).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
