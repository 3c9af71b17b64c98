//! What the protocol stands on.

use std::future::Future;

/// Words in shared memory, and slots in far memory. In production all futures are ready at once: the caller
/// polls once. In a simulation other processes run at every access.
pub trait Ground {
    /// Loads a word; what its writer stored before is visible to the loads that follow.
    fn load(&self, at: usize) -> impl Future<Output = u64>;

    /// Stores a word, after everything that this process has stored before.
    fn store(&self, at: usize, value: u64) -> impl Future<Output = ()>;

    /// Replaces `old` by `new`, as one step that also orders what comes before and after it. Returns whether
    /// the word held `old`.
    fn replace(&self, at: usize, old: u64, new: u64) -> impl Future<Output = bool>;

    /// Adds to a word, wrapping around, as one step that also orders what comes before and after it. Returns
    /// what it held before.
    fn add(&self, at: usize, addend: u64) -> impl Future<Output = u64>;

    /// What this process has stored is visible to all before it loads anything else.
    fn barrier(&self) -> impl Future<Output = ()>;

    /// Reads a slot, and verifies it, before anything that this process loads afterwards. False: what is there
    /// is not what was last written there, or it cannot be read.
    fn read_slot(&self, slot: u32, to: &mut [u8]) -> impl Future<Output = bool>;

    /// Writes a slot, before anything that this process stores afterwards. False: its contents are
    /// indeterminate.
    fn write_slot(&self, slot: u32, page: &[u8]) -> impl Future<Output = bool>;
}
