//! Sweeps: the keeper frees slots that belong to nobody, evicts pages, and publishes hints that name free
//! slots.
//!
//! A *sweep* looks at the slots that callers have taken since the last sweep, and at the next slice of all
//! slots and entries. A *lap* is the sweeps that bring it round to every slot once. A *suspect* is something
//! that may belong to a call that has not ended: a taken slot, a slot whose entry does not hold it, a
//! claimed or pending entry. If a suspect's word is unchanged after every occupied place has been left, it
//! belongs to nobody: the call has ended, or its process has died. So nothing is lost when a process dies,
//! whatever it was doing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::Keeper;
use crate::grace::Grace;
use crate::ground::Ground;
use crate::layout::{HINTS_MAX, Layout};
use crate::policy::Sieve;
use crate::rules::Rules;
use crate::slot_set::SlotSet;
use crate::words::{Entry, EntryState, Key, SlotState, SlotWord};

/// The keeper keeps one slot in this many free.
const FREE_DIVISOR: u32 = 64;
/// Fewest slots that it keeps free, or half of all slots if that is less, but one at least.
const FREE_MIN: u32 = 16;
/// Most slots that it keeps free: twice as many as callers are expected to take between two sweeps.
const FREE_MAX: u32 = 4_096;
const _: () = assert!(FREE_MAX < HINTS_MAX);

/// Entries that a sweep looks at for each slot of its slice: at least as many as a large cache has.
const ENTRIES_PER_SLOT: u32 = 2;

/// A lap over a small cache takes so many sweeps, so that no sweep costs as much as a whole lap.
const SLICES: u32 = 4;
/// Fewest slots of a slice: below that, a sweep's fixed work costs more.
const SLICE_MIN: u32 = 1 << 10;

/// While the cache is idle, a sweep looks at no more than this part of the largest slice: the sweep then
/// costs little processor time, and laps still end.
const IDLE_DIVISOR: u32 = 16;

/// The entry of a slot is prefetched so many slots ahead: about as many cache misses as a processor keeps in
/// flight.
const PREFETCHED_SLOTS: u32 = 12;

/// With so many suspects for the next wait, a lap adds no more, so that their memory is bounded. A later lap
/// finds the others.
const MAX_SUSPECTS: usize = 1 << 16;

/// Pins count for nothing if they leave less than this part of the pages to other files, whose pages would
/// then be evicted as soon as they come.
const UNPINNED_DIVISOR: u32 = 8;

/// How many of the pages that the hand has passed belong to pinned files.
#[derive(Debug, Default)]
struct Pins {
    passed: u32,
    pinned: u32,
    are_too_many: bool,
}

impl Pins {
    /// The hand passes one of `pages` pages. Returns whether a pin spares it.
    fn pass(&mut self, is_pinned: bool, pages: u32) -> bool {
        self.passed += 1;
        self.pinned += u32::from(is_pinned);
        if self.passed >= pages {
            let are_too_many = self.pinned > self.passed - self.passed / UNPINNED_DIVISOR;
            *self = Pins { are_too_many, ..Pins::default() };
        }
        is_pinned && !self.are_too_many
    }
}

/// What a lap has found. Slots that are being filled or freed are in none of the counts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Census {
    /// Free slots.
    pub free: u32,
    /// Slots with pages, including pages of files that have another id by now.
    pub pages: u32,
    /// Slots without memory.
    pub absent: u32,
}

/// Something that may belong to nobody.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Suspect {
    Slot(u32),
    Entry(u32),
}

/// What the keeper knows from its sweeps.
#[derive(Debug)]
pub(super) struct Sweep {
    order: Sieve,
    /// Slots whose memory has gone.
    absent: SlotSet,
    /// Slots that were free when last looked at.
    free: SlotSet,
    /// Slots that hints name.
    hinted: SlotSet,
    /// The hints as the last sweep left them.
    hints: Vec<u64>,
    /// Where free slots for the next hints are looked for.
    next_free: u32,
    /// Visited and pinned pages that the hand has spared since it last evicted as many pages as were wanted.
    spared: u64,
    pins: Pins,
    /// Whether callers have taken slots since the last sweep, or slots are short.
    is_busy: bool,
    /// Slots to look at in the next sweep: callers have taken them, or their entries are not valid yet.
    pending: BTreeSet<u32>,
    /// Suspects with their words.
    suspects: BTreeMap<Suspect, u64>,
    /// What they wait for.
    grace: Grace,
    next_suspects: BTreeMap<Suspect, u64>,
    next_slot: u32,
    next_entry: u32,
    lap: Census,
    last_lap: Census,
}

impl Sweep {
    pub(super) fn new(layout: &Layout, now: Grace) -> Sweep {
        let slots = layout.shape().slots;
        Sweep {
            order: Sieve::new(slots),
            absent: SlotSet::new(slots),
            free: SlotSet::new(slots),
            hinted: SlotSet::new(slots),
            hints: vec![0; layout.hints() as usize],
            next_free: 0,
            spared: 0,
            pins: Pins::default(),
            is_busy: false,
            pending: BTreeSet::new(),
            suspects: BTreeMap::new(),
            grace: now,
            next_suspects: BTreeMap::new(),
            next_slot: 0,
            next_entry: 0,
            lap: Census::default(),
            last_lap: Census::default(),
        }
    }

    fn add_suspect(&mut self, suspect: Suspect, word: u64) {
        if !self.suspects.contains_key(&suspect) {
            self.next_suspects.insert(suspect, word);
        }
    }

    /// Slots that are free or soon will be. Suspects that were used count: evicting more pages would not free
    /// them sooner. Taken slots do not count, because most of them soon hold pages.
    fn estimate_free(&self) -> u32 {
        let will_be_free = |(suspect, word): &(&Suspect, &u64)| match suspect {
            Suspect::Slot(slot) => {
                SlotWord(**word).state() == SlotState::Used && !self.absent.contains(*slot)
            }
            Suspect::Entry(_) => false,
        };
        let suspects = self.suspects.iter().chain(&self.next_suspects).filter(will_be_free);
        self.free.len().saturating_add(suspects.count() as u32)
    }

    /// A hint has another word than the last sweep left there.
    fn note_hint(&mut self, layout: &Layout, hint: u32, word: u64) {
        let before = std::mem::replace(&mut self.hints[hint as usize], word);
        if let Some(slot) = layout.hinted(before) {
            self.hinted.remove(slot);
        }
        if let Some(slot) = layout.hinted(word) {
            self.hinted.insert(slot);
        }
    }
}

impl<G: Ground, R: Rules> Keeper<G, R> {
    /// Takes slots out of use: their memory has gone. The next lap drops their pages, and nothing is admitted
    /// there from then on.
    ///
    /// # Panics
    /// If a slot is not below [`Shape::slots`](crate::Shape::slots).
    pub fn withdraw_slots(&mut self, slots: Range<u32>) {
        assert!(slots.end <= self.layout.shape().slots, "slots {slots:?}");
        for slot in slots {
            self.sweep.absent.insert(slot);
            self.sweep.free.remove(slot);
            self.sweep.order.remove(slot);
        }
    }

    /// Puts slots back into use, which the next lap does: their memory is there again.
    ///
    /// # Panics
    /// If a slot is not below [`Shape::slots`](crate::Shape::slots).
    pub fn restore_slots(&mut self, slots: Range<u32>) {
        assert!(slots.end <= self.layout.shape().slots, "slots {slots:?}");
        slots.for_each(|slot| self.sweep.absent.remove(slot));
    }

    /// Frees what nobody has, evicts if too little is free, and publishes hints. Call it regularly: a later
    /// call frees what an earlier one found. Returns what the last complete lap has found.
    pub async fn sweep(&mut self) -> Census {
        self.sweep_slice(self.slice()).await
    }

    /// Like [`sweep`](Self::sweep), for an idle cache: looks at fewer slots.
    pub async fn sweep_idly(&mut self) -> Census {
        self.sweep_slice(R::SLOTS_PER_SWEEP.div_ceil(IDLE_DIVISOR).min(self.slice())).await
    }

    /// How many slots a sweep looks at, besides those that callers have taken.
    pub(super) fn slice(&self) -> u32 {
        (self.layout.shape().slots / SLICES).max(SLICE_MIN).min(R::SLOTS_PER_SWEEP)
    }

    async fn sweep_slice(&mut self, slice: u32) -> Census {
        self.reclaim_suspects().await;
        self.update_taken().await;
        self.look_at_slice(slice).await;
        let present = self.layout.shape().slots - self.sweep.absent.len();
        let wanted = (present / FREE_DIVISOR).clamp(FREE_MIN.min(present / 2), FREE_MAX).max(1);
        let missing = wanted.saturating_sub(self.sweep.estimate_free());
        self.sweep.is_busy |= missing > 0;
        self.evict(missing).await;
        self.wait_for_suspects().await;
        self.publish_hints().await;
        self.sweep.last_lap
    }

    /// Looks at all hints and slots once, to learn which slots have pages.
    pub(super) async fn look_at_all(&mut self, has_memory: impl Fn(u32) -> bool) {
        // The hints first: a caller that takes a slot afterwards changes one.
        self.load_hints().await;
        let mut found = Census::default();
        for slot in 0..self.layout.shape().slots {
            if !has_memory(slot) {
                self.sweep.absent.insert(slot);
                found.absent += 1;
                continue;
            }
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            let entry = self.entry_of(slot, word).await;
            if word.state() == SlotState::Free {
                self.sweep.free.insert(slot);
                found.free += 1;
            } else if entry.is_some_and(|(_, entry)| entry.state() == EntryState::Valid) {
                self.sweep.order.insert(slot);
                found.pages += 1;
            }
        }
        self.sweep.last_lap = found;
    }

    /// Whether the last call has left something to do beside the next slice, or callers have been busy.
    pub(super) fn sweep_has_work(&self) -> bool {
        let Sweep { is_busy, pending, suspects, next_suspects, .. } = &self.sweep;
        *is_busy || !(pending.is_empty() && suspects.is_empty() && next_suspects.is_empty())
    }

    /// Frees the suspects whose words have not changed, once every place that was occupied has been left.
    async fn reclaim_suspects(&mut self) {
        if self.sweep.grace.is_over(&self.ground, self.layout.shape().places).await || !R::slot_reuse_waits()
        {
            for (suspect, word) in std::mem::take(&mut self.sweep.suspects) {
                match suspect {
                    Suspect::Slot(slot) => {
                        self.release(slot, SlotWord(word)).await;
                        self.update_slot(slot).await;
                    }
                    Suspect::Entry(entry) => {
                        let emptied = Entry(word).emptied().0;
                        self.ground.replace(self.layout.entry(entry), word, emptied).await;
                    }
                }
            }
        }
    }

    /// Begins to wait for the next suspects, if none are waited for.
    async fn wait_for_suspects(&mut self) {
        if self.sweep.suspects.is_empty() {
            self.sweep.suspects = std::mem::take(&mut self.sweep.next_suspects);
            self.sweep.grace = Grace::begin(&self.ground).await;
        }
    }

    /// Makes a slot free, or absent if its memory has gone, unless its word has changed.
    async fn release(&mut self, slot: u32, word: SlotWord) {
        let is_absent = self.sweep.absent.contains(slot);
        let next = word.next(if is_absent { SlotState::Absent } else { SlotState::Free }, 0);
        if !self.ground.replace(self.layout.slot(slot), word.0, next.0).await {
            self.sweep.pending.insert(slot);
        } else if !is_absent {
            self.sweep.free.insert(slot);
        }
    }

    /// Loads the hints. A caller has taken a slot if its hint has changed.
    async fn load_hints(&mut self) {
        for hint in 0..self.layout.hints() {
            let found = self.ground.load(self.layout.hint(hint)).await;
            let before = self.sweep.hints[hint as usize];
            if before != found {
                self.sweep.is_busy = true;
                self.sweep.pending.extend(self.layout.hinted(before));
                self.sweep.note_hint(&self.layout, hint, found);
            }
        }
    }

    /// Updates the slots that callers have taken, and the other pending ones.
    async fn update_taken(&mut self) {
        self.sweep.is_busy = false;
        self.load_hints().await;
        for slot in std::mem::take(&mut self.sweep.pending) {
            self.update_slot(slot).await;
        }
    }

    /// Looks at the next `slice` slots, and at [`ENTRIES_PER_SLOT`] times as many entries.
    async fn look_at_slice(&mut self, slice: u32) {
        let (slots, entries) = (self.layout.shape().slots, self.layout.all_entries());
        for slot in self.sweep.next_slot..slots.min(self.sweep.next_slot.saturating_add(slice)) {
            self.prefetch_entry_of(slot.saturating_add(PREFETCHED_SLOTS)).await;
            let is_full = self.sweep.next_suspects.len() >= MAX_SUSPECTS;
            match self.update_slot(slot).await {
                Some(SlotState::Free) => self.sweep.lap.free += 1,
                Some(SlotState::Used) => self.sweep.lap.pages += 1,
                Some(SlotState::Absent) => self.sweep.lap.absent += 1,
                None if is_full => {
                    self.sweep.next_suspects.remove(&Suspect::Slot(slot));
                    self.sweep.pending.remove(&slot);
                }
                Some(SlotState::Taken) | None => {}
            }
            self.sweep.next_slot = slot + 1;
        }
        let entry_slice = slice.saturating_mul(ENTRIES_PER_SLOT);
        for entry in self.sweep.next_entry..entries.min(self.sweep.next_entry.saturating_add(entry_slice)) {
            let found = Entry(self.ground.load(self.layout.entry(entry)).await);
            let is_unfinished = matches!(found.state(), EntryState::Claimed | EntryState::Pending);
            if is_unfinished && self.sweep.next_suspects.len() < MAX_SUSPECTS {
                self.sweep.add_suspect(Suspect::Entry(entry), found.0);
            }
            self.sweep.next_entry = entry + 1;
        }
        if self.sweep.next_entry == entries {
            self.sweep.next_entry = 0;
        }
        if self.sweep.next_slot == slots {
            self.sweep.next_slot = 0;
            self.sweep.last_lap = std::mem::take(&mut self.sweep.lap);
        }
    }

    /// Loads a slot's word and sorts the slot: into the order of eviction, the pending or the free slots, or
    /// the suspects. Empties its entry if its memory has gone. Returns its state if the census counts it;
    /// `None` while it is being filled or freed.
    async fn update_slot(&mut self, slot: u32) -> Option<SlotState> {
        let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
        let is_absent = self.sweep.absent.contains(slot);
        self.sweep.pending.remove(&slot);
        self.sweep.next_suspects.remove(&Suspect::Slot(slot));
        self.sweep.free.remove(slot);
        if let Some((at, entry)) = self.entry_of(slot, word).await {
            if entry.state() == EntryState::Valid && !is_absent {
                self.sweep.order.insert(slot);
                return Some(SlotState::Used);
            }
            self.sweep.order.remove(slot);
            let is_dropped = is_absent
                && entry.may_be_emptied()
                && self.ground.replace(at, entry.0, entry.emptied().0).await;
            if is_dropped {
                self.sweep.add_suspect(Suspect::Slot(slot), word.0);
            } else {
                self.sweep.pending.insert(slot);
            }
            return None;
        }
        self.sweep.order.remove(slot);
        match word.state() {
            SlotState::Free if !is_absent => self.sweep.free.insert(slot),
            SlotState::Absent if is_absent => {}
            SlotState::Free | SlotState::Absent => {
                self.release(slot, word).await;
                return None;
            }
            state @ (SlotState::Taken | SlotState::Used) => {
                self.sweep.add_suspect(Suspect::Slot(slot), word.0);
                if state == SlotState::Taken {
                    self.sweep.pending.insert(slot); // it soon holds a page
                }
                return None;
            }
        }
        Some(word.state())
    }

    /// Has the processor fetch the entry that a slot's word names. Entries lie anywhere in the index, unlike
    /// the words of slots.
    async fn prefetch_entry_of(&self, slot: u32) {
        if slot < self.layout.shape().slots {
            let owner = SlotWord(self.ground.load(self.layout.slot(slot)).await).owner();
            if owner < self.layout.all_entries() {
                self.ground.prefetch(self.layout.entry(owner));
            }
        }
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

    /// Empties the entries of some pages that were not visited lately, and are not of pinned files. Their
    /// slots become suspects.
    async fn evict(&mut self, pages: u32) {
        let mut left = pages;
        let pinned = if left == 0 { BTreeSet::new() } else { self.pinned_ids().await };
        // The hand clears marks as it goes, so the second round evicts, unless all pages were visited again
        // meanwhile, or belong to pinned files. Then marks and pins count for nothing until enough is
        // evicted.
        let two_rounds = self.sweep.order.len().saturating_mul(2);
        for _ in 0..two_rounds.min(R::CONSIDERED_PER_SWEEP) {
            if left == 0 {
                break;
            }
            let Some(slot) = self.sweep.order.hand() else { return };
            let word = SlotWord(self.ground.load(self.layout.slot(slot)).await);
            if let Some((at, entry)) = self.entry_of(slot, word).await
                && entry.state() == EntryState::Valid
            {
                let is_pinned = !pinned.is_empty() && {
                    let key = Key(self.ground.load(self.layout.key(word.owner())).await);
                    pinned.contains(&key.id())
                };
                let is_pinned = self.sweep.pins.pass(is_pinned, self.sweep.order.len());
                if (is_pinned || entry.is_visited()) && self.sweep.spared < u64::from(two_rounds) {
                    // The mark also protects a pinned page from the next caller that needs an entry of its
                    // bucket.
                    let spared = if is_pinned { entry.visited() } else { entry.unvisited() };
                    self.ground.replace(at, entry.0, spared.0).await;
                    self.sweep.order.pass();
                    self.sweep.spared += 1;
                    continue;
                }
                self.ground.replace(at, entry.0, entry.emptied().0).await;
            }
            self.update_slot(slot).await;
            left -= u32::from(!self.sweep.order.contains(slot));
        }
        if left == 0 {
            self.sweep.spared = 0;
        }
    }

    /// Fills hints that name no slot, or one without memory.
    async fn publish_hints(&mut self) {
        let is_vacant = |sweep: &Sweep, layout: &Layout, word: u64| {
            layout.hinted(word).is_none_or(|slot| sweep.absent.contains(slot))
        };
        let vacant: Vec<u32> = (0..self.layout.hints())
            .filter(|hint| is_vacant(&self.sweep, &self.layout, self.sweep.hints[*hint as usize]))
            .collect();
        let first = self.sweep.next_free;
        let free: Vec<u32> = self.sweep.free.without(&self.sweep.hinted, first).take(vacant.len()).collect();
        let mut free = free.into_iter();
        for hint in vacant {
            let (found, slot) = (self.sweep.hints[hint as usize], free.next());
            let next = slot.map_or(0, |slot| u64::from(slot) + 1);
            if next != found && self.ground.replace(self.layout.hint(hint), found, next).await {
                self.sweep.note_hint(&self.layout, hint, next);
                self.sweep.next_free = slot.unwrap_or(first);
            }
        }
    }
}
