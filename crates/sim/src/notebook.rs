//! What a run gives its parts (names and streams of randomness), and what they report to its judge
//! (complaints).

use std::cell::{Cell, RefCell};

use farpool_fabric::sim::{Random, World};

/// Streams of randomness with smaller numbers are the scenario's own.
const FIRST_STREAM: u64 = 1_000;

pub(crate) struct Notebook {
    pub(crate) world: World,
    seed: u64,
    /// A name is a number that is given once in a run: to a session, a grant, a stream of randomness, a
    /// value or a moment. This is the last one.
    last_name: Cell<u64>,
    pub(crate) complaints: RefCell<Vec<String>>,
}

impl Notebook {
    pub(crate) fn new(world: World, seed: u64) -> Self {
        Notebook { world, seed, last_name: Cell::new(0), complaints: RefCell::default() }
    }

    pub(crate) fn next_name(&self) -> u64 {
        self.last_name.set(self.last_name.get() + 1);
        self.last_name.get()
    }

    /// A stream of randomness that no other caller gets.
    pub(crate) fn random(&self) -> Random {
        Random::new(self.seed, FIRST_STREAM + self.next_name())
    }

    pub(crate) fn complain(&self, what: String) {
        self.world.note("violation", &[]);
        self.complaints.borrow_mut().push(what);
    }
}
