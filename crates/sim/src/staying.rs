//! Counts the participants for which a run waits.

use std::cell::Cell;
use std::rc::Rc;

/// The number of participants left.
#[derive(Clone, Debug, Default)]
pub(crate) struct Left(Rc<Cell<u32>>);

/// One participant; it is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Staying(Left);

impl Left {
    pub(crate) fn get(&self) -> u32 {
        self.0.get()
    }

    /// Counts one more participant.
    pub(crate) fn stay(&self) -> Staying {
        self.0.set(self.0.get() + 1);
        Staying(self.clone())
    }
}

impl Drop for Staying {
    fn drop(&mut self) {
        self.0.0.set(self.0.0.get() - 1);
    }
}
