//! Which page is evicted: SIEVE (Zhang et al., NSDI 2024).
//!
//! Slots stay in the order in which they came. (One that is freed and filled again before the hand comes by
//! keeps its position.) A hand goes from the oldest to the newest, and then begins
//! again. It passes pages that were visited since it last passed them, and evicts the first other one. So new
//! pages that nobody visits go soon, whatever number of them a scan brings, and visited ones never move.

use crate::slot_set::SlotSet;

/// No slot.
const NONE: u32 = u32::MAX;

/// The order of the slots that hold pages: a list from the oldest to the newest, linked in one direction to
/// save memory. It takes a little more than 4 bytes a slot. So a slot can be unlinked only at the hand. One
/// that is removed elsewhere is marked, and the hand unlinks it when it comes by. If it is added again
/// before, it has its old position. All operations take constant time, amortised.
#[derive(Clone, Debug)]
pub struct Sieve {
    /// Of each linked slot, the next newer one. Any other slot refers to itself.
    newer: Vec<u32>,
    /// Slots that were removed and are still linked.
    removed: SlotSet,
    newest: u32,
    oldest: u32,
    /// `NONE`: at the oldest one.
    hand: u32,
    /// The next older slot, while the hand is at another than the oldest one.
    before_hand: u32,
    len: u32,
}

impl Sieve {
    /// An order of none of `slots` slots.
    pub fn new(slots: u32) -> Sieve {
        Sieve {
            newer: (0..slots).collect(),
            removed: SlotSet::new(slots),
            newest: NONE,
            oldest: NONE,
            hand: NONE,
            before_hand: NONE,
            len: 0,
        }
    }

    /// How many slots are in the order.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether this slot is in the order.
    pub fn contains(&self, slot: u32) -> bool {
        self.newer[slot as usize] != slot && !self.removed.contains(slot)
    }

    /// Adds a slot as the newest one, or in its old position if it is still linked. One that is there already
    /// stays where it is.
    pub fn insert(&mut self, slot: u32) {
        if self.contains(slot) {
            return;
        }
        self.len += 1;
        if self.removed.contains(slot) {
            self.removed.remove(slot);
            return;
        }
        self.newer[slot as usize] = NONE;
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.newer[newest as usize] = slot,
        }
        self.newest = slot;
    }

    /// Removes a slot, if it is there.
    pub fn remove(&mut self, slot: u32) {
        if self.contains(slot) {
            self.len -= 1;
            self.removed.insert(slot);
            if slot == self.hand {
                self.unlink();
            }
        }
    }

    /// The slot at the hand: to be evicted, unless it was visited.
    pub fn hand(&mut self) -> Option<u32> {
        while self.len > 0 {
            if self.hand == NONE {
                (self.hand, self.before_hand) = (self.oldest, NONE);
            }
            if !self.removed.contains(self.hand) {
                return Some(self.hand);
            }
            self.unlink();
        }
        None
    }

    /// Unlinks the slot at the hand, and moves the hand to the next one.
    fn unlink(&mut self) {
        let slot = self.hand;
        self.hand = std::mem::replace(&mut self.newer[slot as usize], slot);
        match self.before_hand {
            NONE => self.oldest = self.hand,
            before => self.newer[before as usize] = self.hand,
        }
        if self.newest == slot {
            self.newest = self.before_hand;
        }
        self.removed.remove(slot);
    }

    /// Moves the hand past its slot, which was visited.
    pub fn pass(&mut self) {
        if let Some(at) = self.hand() {
            (self.before_hand, self.hand) = (at, self.newer[at as usize]);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
