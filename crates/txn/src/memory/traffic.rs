//! What a thread has asked of far memory.

use std::cell::Cell;
use std::ops::{Add, Sub};

/// Operations that were posted, and the bytes that they move, an atomic's word counted once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// READs, WRITEs and atomics.
    pub operations: u64,
    /// Their data, without what a transport puts around them.
    pub bytes: u64,
}

impl Traffic {
    /// Of one operation.
    pub(crate) fn of(bytes: usize) -> Traffic {
        Traffic { operations: 1, bytes: bytes as u64 }
    }

    pub(crate) fn count(self, total: &Cell<Traffic>) {
        total.set(total.get() + self);
    }
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        Traffic { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, other: Traffic) -> Traffic {
        Traffic { operations: self.operations - other.operations, bytes: self.bytes - other.bytes }
    }
}
