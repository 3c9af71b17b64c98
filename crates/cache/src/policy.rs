//! Which page is evicted: SIEVE (Zhang et al., NSDI 2024).
//!
//! Pages stay in the order in which they came. A hand goes from the oldest to the newest, and then begins
//! again. It passes pages that were visited since it last passed them, and evicts the first other one. So new
//! pages that nobody visits go soon, whatever number of them a scan brings, and visited ones never move.

/// No slot.
const NONE: u32 = u32::MAX;

/// The order of the slots that hold pages. All operations take constant time; 8 bytes a slot.
#[derive(Clone, Debug)]
pub struct Sieve {
    /// Of each slot, the next newer one. A slot that is not in the order refers to itself.
    newer: Vec<u32>,
    /// Of each slot, the next older one.
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    hand: u32,
    len: u32,
}

impl Sieve {
    /// An order of none of `slots` slots.
    pub fn new(slots: u32) -> Sieve {
        let itself = (0..slots).collect();
        Sieve {
            newer: itself,
            older: vec![NONE; slots as usize],
            newest: NONE,
            oldest: NONE,
            hand: NONE,
            len: 0,
        }
    }

    /// How many slots are in the order.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether this slot is in the order.
    pub fn contains(&self, slot: u32) -> bool {
        self.newer[slot as usize] != slot
    }

    /// Adds a slot as the newest one. One that is there already stays where it is.
    pub fn insert(&mut self, slot: u32) {
        if self.contains(slot) {
            return;
        }
        self.newer[slot as usize] = NONE;
        self.older[slot as usize] = self.newest;
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.newer[newest as usize] = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    /// Removes a slot, if it is there.
    pub fn remove(&mut self, slot: u32) {
        if !self.contains(slot) {
            return;
        }
        let (newer, older) = (self.newer[slot as usize], self.older[slot as usize]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        if self.hand == slot {
            self.hand = newer;
        }
        self.newer[slot as usize] = slot;
        self.len -= 1;
    }

    /// The slot at the hand: to be evicted, unless it was visited.
    pub fn hand(&self) -> Option<u32> {
        let at = if self.hand == NONE { self.oldest } else { self.hand };
        (at != NONE).then_some(at)
    }

    /// Moves the hand past its slot, which was visited.
    pub fn pass(&mut self) {
        self.hand = self.hand().map_or(NONE, |at| self.newer[at as usize]);
    }
}

#[cfg(test)]
mod tests;
