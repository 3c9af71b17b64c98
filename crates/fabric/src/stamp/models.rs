//! Models of the stamps: the code of `stamp.rs` itself, in every interleaving and with every outdated value
//! that the memory model allows a load to find (by `loom`).
//!
//! One client accesses a byte while its grant is fenced. Not modelled: atomics, since `loom` takes
//! sequentially consistent accesses for weaker than they are.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed};

use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use super::*;

const STAMP: u64 = 7;
const CLOSED: u64 = 0;
/// What the memory holds at first, and what is stored there later.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;

struct Shared {
    word: AtomicU64,
    memory: AtomicU64,
}

/// The rule as it should be.
struct Sound<'a>(&'a Shared);

impl Word for Sound<'_> {
    fn load(&self, order: Ordering) -> u64 {
        self.0.word.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.word.store(value, order);
    }

    fn barrier(order: Ordering) {
        fence(order);
    }
}

/// No barriers.
struct Unfenced<'a>(&'a Shared);

impl Word for Unfenced<'_> {
    fn load(&self, order: Ordering) -> u64 {
        self.0.word.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.word.store(value, order);
    }

    fn barrier(_: Ordering) {}
}

/// Full barriers are weakened to acquire barriers.
struct Halved<'a>(&'a Shared);

impl Word for Halved<'_> {
    fn load(&self, order: Ordering) -> u64 {
        self.0.word.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.word.store(value, order);
    }

    fn barrier(_: Ordering) {
        fence(Ordering::Acquire);
    }
}

/// The word is checked before the access only.
struct LookedAtOnce<'a>(&'a Shared, Cell<bool>);

impl Word for LookedAtOnce<'_> {
    fn load(&self, order: Ordering) -> u64 {
        if self.1.replace(true) { STAMP } else { self.0.word.load(order) }
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.word.store(value, order);
    }

    fn barrier(order: Ordering) {
        fence(order);
    }
}

/// How a side of a model sees the word: made there, since words are borrowed.
trait Side {
    type Word<'a>: Word;
    fn word(shared: &Shared) -> Self::Word<'_>;
}

macro_rules! side {
    ($name:ident, $word:ident, $($rest:expr)?) => {
        struct $name;
        impl Side for $name {
            type Word<'a> = $word<'a>;
            fn word(shared: &Shared) -> $word<'_> {
                $word(shared $(, $rest)?)
            }
        }
    };
}

side!(Right, Sound,);
side!(NoBarrier, Unfenced,);
side!(HalfBarrier, Halved,);
side!(OneLook, LookedAtOnce, Cell::new(false));

fn shared() -> Arc<Shared> {
    Arc::new(Shared { word: AtomicU64::new(STAMP), memory: AtomicU64::new(BEFORE) })
}

/// The memory is given to others, which store there, while a client loads.
fn a_load_meets_a_fence<Client: Side, Node: Side>() {
    loom::model(|| {
        let client = shared();
        let node = client.clone();
        let node = thread::spawn(move || {
            change(&Node::word(&node), CLOSED);
            barrier::<Node::Word<'_>>();
            node.memory.store(AFTER, Relaxed);
        });
        let load = || Ok::<_, ()>(client.memory.load(Relaxed));
        if let Ok(Ok(found)) = guarded(&Client::word(&client), STAMP, Touch::LoadOrAtomic, load) {
            assert_eq!(found, BEFORE, "a load counts that found what was stored after the fence");
        }
        node.join().expect("it only stores");
    });
}

/// The memory is copied for the other sharers while a client stores.
fn a_store_meets_a_fence<Client: Side, Node: Side>() {
    loom::model(|| {
        let client = shared();
        let node = client.clone();
        let node = thread::spawn(move || {
            change(&Node::word(&node), CLOSED);
            barrier::<Node::Word<'_>>();
            node.memory.load(Relaxed)
        });
        let store = || {
            client.memory.store(AFTER, Relaxed);
            Ok::<_, ()>(())
        };
        let counts = guarded(&Client::word(&client), STAMP, Touch::Store, store).is_ok();
        let copied = node.join().expect("it only loads");
        assert!(!counts || copied == AFTER, "a store counts that is not in the copy");
    });
}

#[track_caller]
fn is_caught(model: fn()) {
    assert!(std::panic::catch_unwind(model).is_err(), "a fault went unnoticed");
}

#[test]
fn a_load_that_counts_found_nothing_that_was_stored_after_the_fence() {
    a_load_meets_a_fence::<Right, Right>();
}

#[test]
fn a_store_that_counts_is_in_what_the_fencer_copies() {
    a_store_meets_a_fence::<Right, Right>();
}

#[test]
fn a_client_that_does_not_look_at_the_word_again_is_caught() {
    is_caught(a_load_meets_a_fence::<OneLook, Right>);
    is_caught(a_store_meets_a_fence::<OneLook, Right>);
}

#[test]
fn a_client_that_passes_no_barrier_is_caught() {
    is_caught(a_load_meets_a_fence::<NoBarrier, Right>);
    is_caught(a_store_meets_a_fence::<NoBarrier, Right>);
}

#[test]
fn a_client_whose_barrier_behind_a_store_only_acquires_is_caught() {
    is_caught(a_store_meets_a_fence::<HalfBarrier, Right>);
}

#[test]
fn a_fencer_that_passes_no_barrier_is_caught() {
    is_caught(a_load_meets_a_fence::<Right, NoBarrier>);
    is_caught(a_store_meets_a_fence::<Right, NoBarrier>);
}
