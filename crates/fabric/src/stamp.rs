//! A process that accesses shared memory directly cannot be refused. This is how it finds out that the memory
//! was taken away: by a word beside the memory, and by the order in which the two sides access both.
//!
//! P1. An access counts only if the word, loaded after it and a barrier, still holds the stamp that was
//!     handed out with the memory.
//! P2. The side that takes the memory away changes the word, passes a full barrier, and only then reads the
//!     memory, copies it or lets others store there.
//! P3. So a store that counts is wholly visible to whatever reads the memory after the barrier of P2, and a
//!     load that counts sees nothing that is stored after that barrier. It pairs with the barrier of P1.
//! The code is generic over the word, so that models of all interleavings run the very same code.

#[cfg(test)]
mod models;

use std::sync::atomic::Ordering;

/// A word that two processes share, and the barriers that go with it.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn barrier(order: Ordering);
}

/// What an access does to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Touch {
    /// Loads, or a sequentially consistent atomic.
    LoadOrAtomic,
    /// Plain stores.
    Store,
}

/// The word holds another value than the stamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Moved {
    /// The access had begun: it may have taken effect.
    pub begun: bool,
}

/// Runs an access under the rule (P1). One that returns an error has touched nothing.
#[inline]
pub(crate) fn guarded<W: Word, T, E>(
    word: &W,
    stamp: u64,
    touch: Touch,
    access: impl FnOnce() -> Result<T, E>,
) -> Result<Result<T, E>, Moved> {
    // Sequentially consistent, as are the atomics of an access: pairs with the store in `change`.
    if word.load(Ordering::SeqCst) != stamp {
        return Err(Moved { begun: false });
    }
    let value = match access() {
        Ok(value) => value,
        Err(error) => return Ok(Err(error)),
    };
    // P3; pairs with the full barrier of `barrier`. The word is loaded after the access. If the access was
    // plain loads, an acquire is enough; if it was stores, it takes the full barrier. Atomics are
    // sequentially consistent, as is the load of the word.
    W::barrier(match touch {
        Touch::LoadOrAtomic => Ordering::Acquire,
        Touch::Store => Ordering::SeqCst,
    });
    if word.load(Ordering::SeqCst) == stamp { Ok(Ok(value)) } else { Err(Moved { begun: true }) }
}

/// Takes the memory away from the processes that know the current stamp, once [`barrier`] is passed (P2).
pub(crate) fn change<W: Word>(word: &W, value: u64) {
    word.store(value, Ordering::SeqCst);
}

/// To be passed after words were changed, and before the memory is read or anyone is told.
pub(crate) fn barrier<W: Word>() {
    W::barrier(Ordering::SeqCst); // pairs with the barrier in `guarded`
}
