//! Door, places and index in real shared memory.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use farpool_fabric::Mapping;

use crate::ground::{Fetch, Ground, PageSink, collect_into};
use crate::layout::{self, Layout, Shape, WORD_BYTES};

/// Slots in far memory.
pub trait Slots {
    /// As [`Ground::read_slot`].
    fn read(&self, slot: u32, sink: &mut PageSink<'_>) -> bool;

    /// As [`Ground::read_head`].
    fn read_head(&self, slot: u32) -> Option<[u8; 8]> {
        let mut page = Vec::new();
        self.read(slot, &mut collect_into(&mut page)).then_some(())?;
        page.first_chunk().copied()
    }

    /// As [`Ground::gains_by_fetching`].
    fn gains_by_fetching(&self) -> bool {
        false
    }

    /// As [`Ground::fetch_slots`].
    fn fetch(&self, _fetches: &[Fetch]) {}

    /// As [`Ground::read_fetched`].
    fn read_fetched(&self, _fetch: Fetch, _sink: &mut PageSink<'_>) -> bool {
        false
    }

    /// As [`Ground::write_slot`].
    fn write(&self, slot: u32, page: &[u8]) -> bool;
}

/// An index that this process has mapped, and its slots.
#[derive(Debug)]
pub struct Index<S> {
    words: Arc<Mapping>,
    layout: Layout,
    slots: S,
}

impl<S: Slots> Index<S> {
    /// An index of this shape. `None`: the memory is too small, or read-only.
    pub fn new(words: Arc<Mapping>, shape: Shape, slots: S) -> Option<Index<S>> {
        let layout = Layout::new(shape);
        is_usable(&words, layout.index_words()).then_some(Index { words, layout, slots })
    }
}

/// Whether the memory has so many words, and may be changed.
fn is_usable(memory: &Mapping, words: usize) -> bool {
    let last = (words as u64).checked_sub(1).map(|last| last * WORD_BYTES);
    // Adding nothing shows whether the last word is there and may be changed.
    last.is_some_and(|last| memory.fetch_and_add(last, 0).is_ok())
}

/// Finds the index with a number, and of this shape. `None`: this process cannot use it now.
pub type FindIndex<S> = Box<dyn Fn(u64, Shape) -> Option<Index<S>>>;

/// The shared memory of a cache as one thread sees it: door and places, and an index behind the door.
pub struct Shared<S> {
    door: Arc<Mapping>,
    places: u32,
    find: FindIndex<S>,
    /// The last index that was found, with its number.
    index: RefCell<Option<(u64, Index<S>)>>,
}

/// The reason for which accesses succeed: [`Shared::new`] and [`Index::new`] have checked the bounds, and all
/// words lie within them. Words of the index are accessed only while there is one ([`Ground::layout`]).
const WITHIN: &str = "words of the layout are within the memory";

impl<S: Slots> Shared<S> {
    /// Door and so many places. `find` is called when a call needs an index that this thread has not found
    /// yet. `None`: the memory is too small, or read-only.
    pub fn new(door: Arc<Mapping>, places: u32, find: FindIndex<S>) -> Option<Shared<S>> {
        let is_usable = is_usable(&door, Layout::place(places));
        is_usable.then_some(Shared { door, places, find, index: RefCell::default() })
    }

    /// With this index behind the door, for its keeper.
    pub fn with_index(self, number: u64, index: Index<S>) -> Shared<S> {
        self.index.replace(Some((number, index)));
        self
    }

    /// Runs an operation on the memory in which a word lies.
    fn at<T>(&self, at: usize, operation: impl FnOnce(&Mapping, u64) -> T) -> T {
        match at.checked_sub(Layout::place(self.places)) {
            None => operation(&self.door, at as u64 * WORD_BYTES),
            Some(at) => self.behind(|index| operation(&index.words, at as u64 * WORD_BYTES)),
        }
    }

    fn behind<T>(&self, operation: impl FnOnce(&Index<S>) -> T) -> T {
        let index = self.index.borrow();
        operation(&index.as_ref().expect("an index was found").1)
    }

    /// As [`at`](Self::at), for guesses. `None`: there is no index, or the word does not lie behind the door.
    fn at_if_there<T>(&self, at: usize, operation: impl FnOnce(&Mapping, u64) -> T) -> Option<T> {
        let index = self.index.borrow();
        let ((_, index), at) = index.as_ref().zip(at.checked_sub(Layout::place(self.places)))?;
        Some(operation(&index.words, at as u64 * WORD_BYTES))
    }
}

impl<S: Slots> Ground for Shared<S> {
    async fn load(&self, at: usize) -> u64 {
        self.at(at, |words, offset| words.load(offset)).expect(WITHIN)
    }

    async fn store(&self, at: usize, value: u64) {
        self.at(at, |words, offset| words.store(offset, value)).expect(WITHIN);
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        self.at(at, |words, offset| words.compare_and_swap(offset, old, new)).expect(WITHIN) == old
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        self.at(at, |words, offset| words.fetch_and_add(offset, addend)).expect(WITHIN)
    }

    async fn layout(&self) -> Option<Layout> {
        let number = self.load(layout::INDEX).await;
        let mut index = self.index.borrow_mut();
        if index.as_ref().is_none_or(|(found, _)| *found != number) {
            *index = None; // its memory is given back first
            let shape = layout::shape_of(self.door.load(layout::SHAPE as u64 * WORD_BYTES).expect(WITHIN));
            let shape = Shape { places: self.places, ..shape };
            *index = (self.find)(number, shape).map(|found| (number, found));
        }
        index.as_ref().map(|(_, index)| index.layout)
    }

    fn prefetch(&self, at: usize) {
        self.at_if_there(at, |words, offset| words.prefetch(offset, WORD_BYTES as usize));
    }

    fn peek(&self, at: usize) -> Option<u64> {
        self.at_if_there(at, |words, offset| words.load(offset).ok())?
    }

    async fn barrier(&self) {
        // Pairs with the other process's barrier: a writer's with an admitter's (C2), a call's with the
        // keeper's (C4).
        fence(Ordering::SeqCst);
    }

    async fn read_slot(&self, slot: u32, sink: &mut PageSink<'_>) -> bool {
        self.behind(|index| index.slots.read(slot, sink))
    }

    async fn read_head(&self, slot: u32) -> Option<[u8; 8]> {
        self.behind(|index| index.slots.read_head(slot))
    }

    fn gains_by_fetching(&self) -> bool {
        let index = self.index.borrow();
        index.as_ref().is_some_and(|(_, index)| index.slots.gains_by_fetching())
    }

    async fn fetch_slots(&self, fetches: &[Fetch]) {
        self.behind(|index| index.slots.fetch(fetches));
    }

    fn read_fetched(&self, fetch: Fetch, sink: &mut PageSink<'_>) -> bool {
        self.behind(|index| index.slots.read_fetched(fetch, sink))
    }

    async fn write_slot(&self, slot: u32, page: &[u8]) -> bool {
        self.behind(|index| index.slots.write(slot, page))
    }
}
