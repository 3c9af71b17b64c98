//! The memory under the protocol: a trait that production and simulation implement.

use std::future::Future;

/// Words in shared memory, and slots in far memory. In production all futures are ready at once: the caller
/// polls once. In a simulation other processes run at every access.
pub trait Ground {
    /// Loads a word (acquire).
    fn load(&self, at: usize) -> impl Future<Output = u64>;

    /// Stores a word (release: after all that this process has loaded and stored before).
    fn store(&self, at: usize, value: u64) -> impl Future<Output = ()>;

    /// Compare-and-swap (acquire and release). Returns whether the word held `old`.
    fn replace(&self, at: usize, old: u64, new: u64) -> impl Future<Output = bool>;

    /// Adds to a word, wrapping around (acquire and release). Returns the old value.
    fn add(&self, at: usize, addend: u64) -> impl Future<Output = u64>;

    /// A sequentially consistent fence.
    fn barrier(&self) -> impl Future<Output = ()>;

    /// Reads a slot, and verifies it, before anything that this process loads afterwards. False: what is
    /// there is not what was last written there, or it cannot be read.
    fn read_slot(&self, slot: u32, to: &mut [u8]) -> impl Future<Output = bool>;

    /// Writes a slot, before anything that this process stores afterwards. False: its contents are
    /// indeterminate.
    fn write_slot(&self, slot: u32, page: &[u8]) -> impl Future<Output = bool>;
}
