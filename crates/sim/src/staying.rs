//! Those for whom a run waits.

use std::cell::Cell;
use std::rc::Rc;

/// How many there are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Left(Rc<Cell<u32>>);

/// One of them, for as long as he is there.
#[derive(Debug)]
pub(crate) struct Staying(Left);

impl Left {
    pub(crate) fn get(&self) -> u32 {
        self.0.get()
    }

    /// One more.
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
