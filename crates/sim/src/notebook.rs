//! What the participants of a run take from it, and leave for its judge: names, streams of randomness, and
//! complaints.

use std::cell::{Cell, RefCell};

use farpool_fabric::sim::{Random, World};

/// Streams of randomness with smaller numbers are the scenario's own.
const FIRST_STREAM: u64 = 1_000;

pub(crate) struct Notebook {
    pub(crate) world: World,
    seed: u64,
    /// The last name given to a session, a grant, a stream of randomness or a written value.
    names: Cell<u64>,
    pub(crate) complaints: RefCell<Vec<String>>,
}

impl Notebook {
    pub(crate) fn new(world: World, seed: u64) -> Self {
        Notebook { world, seed, names: Cell::new(0), complaints: RefCell::default() }
    }

    pub(crate) fn next_name(&self) -> u64 {
        self.names.set(self.names.get() + 1);
        self.names.get()
    }

    /// A new stream of randomness for each caller.
    pub(crate) fn random(&self) -> Random {
        Random::new(self.seed, FIRST_STREAM + self.next_name())
    }

    pub(crate) fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.complaints.borrow_mut().push(what);
    }
}
