//! The index in real shared memory.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use farpool_fabric::Mapping;

use crate::ground::Ground;

/// Slots in far memory.
pub trait Slots {
    /// As [`Ground::read_slot`].
    fn read(&self, slot: u32, to: &mut [u8]) -> bool;

    /// As [`Ground::write_slot`].
    fn write(&self, slot: u32, page: &[u8]) -> bool;
}

/// An index in memory that several processes have mapped, and slots that they all can use.
#[derive(Clone, Debug)]
pub struct Shared<S> {
    words: Arc<Mapping>,
    slots: S,
}

impl<S: Slots> Shared<S> {
    /// An index of so many words, and its slots. `None`: the memory is too small, or read-only.
    pub fn new(words: Arc<Mapping>, needed: usize, slots: S) -> Option<Shared<S>> {
        let last = (needed as u64).checked_sub(1)? * 8;
        // Adding nothing shows whether the last word is there and may be changed.
        words.fetch_and_add(last, 0).ok()?;
        Some(Shared { words, slots })
    }
}

/// The reason for which accesses succeed: [`Shared::new`] has checked the bounds, and all words lie within
/// them.
const WITHIN: &str = "words of the layout are within the memory";

impl<S: Slots> Ground for Shared<S> {
    async fn load(&self, at: usize) -> u64 {
        self.words.load(at as u64 * 8).expect(WITHIN)
    }

    async fn store(&self, at: usize, value: u64) {
        self.words.store(at as u64 * 8, value).expect(WITHIN);
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        self.words.compare_and_swap(at as u64 * 8, old, new).expect(WITHIN) == old
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        self.words.fetch_and_add(at as u64 * 8, addend).expect(WITHIN)
    }

    async fn barrier(&self) {
        // Pairs with the other process's barrier: a writer's with an admitter's (C2), a call's with the
        // keeper's (C4).
        fence(Ordering::SeqCst);
    }

    async fn read_slot(&self, slot: u32, to: &mut [u8]) -> bool {
        self.slots.read(slot, to)
    }

    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        self.slots.write(slot, page)
    }
}
