//! The memory under the protocol: a trait that production and simulation implement.

use std::future::Future;

use crate::layout::Layout;

/// Receives a page as it is read: each piece, with its offset in the page. Pieces come in order, without
/// gaps. A piece at offset 0 starts the page again; the pieces before it are to be discarded.
pub type PageSink<'a> = dyn FnMut(usize, &[u8]) + 'a;

/// A sink that collects what it gets in a vector.
pub fn collect_into(page: &mut Vec<u8>) -> impl FnMut(usize, &[u8]) {
    |at, piece| {
        page.truncate(at);
        page.extend_from_slice(piece);
    }
}

/// Names a page to fetch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Fetch {
    /// The slot in which it lies.
    pub slot: u32,
    /// The word of its entry without the visited mark: with another page, the entry has another word.
    pub entry: u64,
}

/// Words in shared memory, and slots in far memory. The door and the places can always be accessed, the other
/// words while there is an index ([`layout`](Self::layout)). In production all futures are ready at once: the
/// caller polls once. In a simulation other processes run at every access.
pub trait Ground {
    /// Loads a word (acquire).
    fn load(&self, at: usize) -> impl Future<Output = u64>;

    /// Stores a word (release: after all that this process has loaded and stored before).
    fn store(&self, at: usize, value: u64) -> impl Future<Output = ()>;

    /// Compare-and-swap (acquire and release). Returns whether the word held `old`.
    fn replace(&self, at: usize, old: u64, new: u64) -> impl Future<Output = bool>;

    /// Adds to a word, wrapping around (acquire and release). Returns the old value.
    fn add(&self, at: usize, addend: u64) -> impl Future<Output = u64>;

    /// The layout of the index that belongs to the door's present state, which is not closed. From now until
    /// the place is left, its words can be accessed. `None`: this process cannot use the index.
    fn layout(&self) -> impl Future<Output = Option<Layout>>;

    /// Has the processor fetch a line of words that may be loaded soon. Accesses nothing, so any word may be
    /// named at any time.
    fn prefetch(&self, _at: usize) {}

    /// What a word behind the door may hold, for a guess at what else to [`prefetch`](Self::prefetch). Any
    /// word may be named at any time. `None`: no guess.
    fn peek(&self, _at: usize) -> Option<u64> {
        None
    }

    /// A sequentially consistent fence.
    fn barrier(&self) -> impl Future<Output = ()>;

    /// Reads a slot, after all that this process has loaded before, and before anything that it loads
    /// afterwards. False: it cannot be read. What is read need not be what was last written (C7).
    fn read_slot(&self, slot: u32, sink: &mut PageSink<'_>) -> impl Future<Output = bool>;

    /// Reads the first eight bytes of a slot, like [`read_slot`](Self::read_slot). `None` also if there are
    /// fewer.
    fn read_head(&self, slot: u32) -> impl Future<Output = Option<[u8; 8]>> {
        async move {
            let mut page = Vec::new();
            self.read_slot(slot, &mut collect_into(&mut page)).await.then_some(())?;
            page.first_chunk().copied()
        }
    }

    /// Whether slots are read sooner if [`fetch_slots`](Self::fetch_slots) has fetched them.
    fn gains_by_fetching(&self) -> bool {
        false
    }

    /// Reads slots together, and keeps the pages for [`read_fetched`](Self::read_fetched). The caller has
    /// found their entries valid since it entered its place. The oldest pages may be dropped to make room,
    /// and slots that cannot be read are left out.
    fn fetch_slots(&self, _fetches: &[Fetch]) -> impl Future<Output = ()> {
        async {}
    }

    /// Passes on the page that was fetched under this name, and forgets it. False: there is none.
    fn read_fetched(&self, _fetch: Fetch, _sink: &mut PageSink<'_>) -> bool {
        false
    }

    /// Writes a slot, before anything that this process stores afterwards. False: its contents are
    /// indeterminate, and the write may still take effect later.
    fn write_slot(&self, slot: u32, page: &[u8]) -> impl Future<Output = bool>;
}
