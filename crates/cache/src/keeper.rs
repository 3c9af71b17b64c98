//! The process that hands out slots, evicts pages, and cleans up. There is one at a time; its successor
//! takes over the same memory, and needs to know only which slots have memory.

mod files;
mod sweep;

use std::marker::PhantomData;

use crate::caller::fresh_content_id;
use crate::grace::{self, Grace};
use crate::ground::Ground;
use crate::layout::{self, Layout};
use crate::places::{Named, Place};
use crate::rules::{Rules, Shipped};
use crate::words::{Door, Entry, EntryState, FileWord, Header};
use files::Files;
pub use sweep::Census;
use sweep::Sweep;

/// Hands out slots, evicts pages, and cleans up after dead processes.
#[derive(Debug)]
pub struct Keeper<G, R = Shipped> {
    ground: G,
    layout: Layout,
    sweep: Sweep,
    /// What the next turn of the door waits for.
    door_grace: Grace,
    files: Files,
    /// Valid entries may be from before the door was last closed.
    is_stale: bool,
    rules: PhantomData<fn() -> R>,
}

impl<G: Ground, R: Rules> Keeper<G, R> {
    /// Starts to keep a cache. Its memory is new, or another keeper had it. `has_memory` says which slots
    /// have memory now. The answer replaces what earlier keepers were told.
    pub async fn start(ground: G, layout: Layout, has_memory: impl Fn(u32) -> bool) -> Keeper<G, R> {
        let now = Grace::begin(&ground).await;
        // If the door is not open, the keeper before may have closed it for a while.
        let door = Door::of(ground.load(layout::DOOR).await);
        let is_stale = if R::empties_old_entries() { door != Door::Open } else { door == Door::Closed };
        let mut keeper = Keeper {
            sweep: Sweep::new(&layout, now),
            ground,
            layout,
            door_grace: now,
            files: Files::new(&layout),
            is_stale,
            rules: PhantomData,
        };
        keeper.look_at_all(has_memory).await;
        keeper
    }

    /// The memory that it keeps.
    pub(crate) fn ground(&self) -> &G {
        &self.ground
    }

    /// The door's state.
    pub async fn door(&self) -> Door {
        Door::of(self.ground.load(layout::DOOR).await)
    }

    /// Whether the last [`sweep`](Self::sweep) and [`maintain_files`](Self::maintain_files) have left
    /// something to do, or callers have taken slots since the calls before. If so, the next calls should
    /// follow soon.
    pub fn has_work(&self) -> bool {
        self.files_have_work() || self.sweep_has_work()
    }

    /// How many calls of [`sweep`](Self::sweep) look at each slot once.
    pub fn sweeps_per_lap(&self) -> u32 {
        self.layout.shape().slots.div_ceil(self.slice())
    }

    /// Turns the door one state towards `to` (C5). Returns whether it is at `to` now. While calls that saw an
    /// earlier state are running, the door does not move: try again.
    pub async fn turn_door(&mut self, to: Door) -> bool {
        let word = self.ground.load(layout::DOOR).await;
        let from = Door::of(word);
        // A caller may have closed it (C8).
        self.is_stale |= from == Door::Closed && R::notices_closed_door();
        let next = from.towards(to);
        if next == from {
            return true;
        }
        if R::door_waits() && !self.door_grace.is_over(&self.ground, self.layout.shape().places).await {
            return false;
        }
        // After the door's word was loaded: an outsider that is not counted yet changes that word (C9).
        if next == Door::Open && R::heeds_outsiders() && self.ground.load(layout::OUTSIDERS).await != 0 {
            return false;
        }
        if next == Door::Open && self.is_stale {
            self.retire_all_files().await;
            self.empty_all().await;
        }
        self.is_stale |= next == Door::Closed;
        if !R::door_compares() {
            self.ground.store(layout::DOOR, next.next_word(word)).await;
        } else if !self.ground.replace(layout::DOOR, word, next.next_word(word)).await {
            return false; // a caller has closed it (C8)
        }
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
            let place = Place::new(&self.ground, number);
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
        let Some(named) = place.named(&self.layout).await else { return true };
        if let Named::File { file } = named {
            return self.reopen(file, number, is_alive).await;
        }
        for bucket in named.home_buckets(&self.layout) {
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
        if word.changes() == 0 {
            return true;
        }
        // A process that this word counts has stored its name before: the load makes it visible.
        if self.any_living(dead, is_alive, |other| other == Named::File { file }).await {
            return false;
        }
        let id = fresh_content_id(&self.ground).await;
        self.ground.replace(at, word.0, word.without_changes(id).0).await
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
        let is_there = |other: Named| other.home_buckets(&self.layout).any(|named| named == bucket);
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
            let place = Place::new(&self.ground, number);
            let holder = place.holder().await;
            if holder != 0
                && is_alive(holder)
                && let Some(named) = place.named(&self.layout).await
                && conflicts(named)
            {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests;
