//! The lock around a file's map.
//!
//! A thread that holds the map must not lock it again. If another thread waits to write meanwhile, the
//! second read waits for that writer, and the writer waits for the first read. This needs a writer between
//! the two reads, so tests rarely show it. With debug assertions, each thread therefore notes which maps it
//! holds, and panics when it locks one of them again.

use std::ops::{Deref, DerefMut};

use rustix_futex_sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::map::Map;

/// A file's map, which any number of threads may read, or one may write.
#[derive(Default)]
pub(crate) struct MapLock(RwLock<Map>);

impl MapLock {
    pub(crate) fn new(map: Map) -> Self {
        MapLock(RwLock::new(map))
    }

    pub(crate) fn read(&self) -> MapGuard<RwLockReadGuard<'_, Map>> {
        let note = HoldNote::new(self);
        MapGuard { guard: self.0.read(), _note: note }
    }

    pub(crate) fn write(&self) -> MapGuard<RwLockWriteGuard<'_, Map>> {
        let note = HoldNote::new(self);
        MapGuard { guard: self.0.write(), _note: note }
    }
}

/// The map, until this is dropped.
pub(crate) struct MapGuard<G> {
    guard: G,
    _note: HoldNote,
}

impl<G: Deref<Target = Map>> Deref for MapGuard<G> {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.guard
    }
}

impl<G: DerefMut<Target = Map>> DerefMut for MapGuard<G> {
    fn deref_mut(&mut self) -> &mut Map {
        &mut self.guard
    }
}

#[cfg(not(debug_assertions))]
struct HoldNote;

#[cfg(not(debug_assertions))]
impl HoldNote {
    fn new(_map: &MapLock) -> Self {
        HoldNote
    }
}

/// A note that this thread holds the map at an address.
#[cfg(debug_assertions)]
struct HoldNote(usize);

#[cfg(debug_assertions)]
thread_local! {
    static HELD: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[cfg(debug_assertions)]
impl HoldNote {
    fn new(map: &MapLock) -> Self {
        let address = std::ptr::from_ref(map).addr();
        HELD.with_borrow_mut(|held| {
            assert!(!held.contains(&address), "this thread holds the map already: it could wait for itself");
            held.push(address);
        });
        HoldNote(address)
    }
}

#[cfg(debug_assertions)]
impl Drop for HoldNote {
    fn drop(&mut self) {
        HELD.with_borrow_mut(|held| held.retain(|address| *address != self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "could wait for itself")]
    fn a_thread_that_holds_the_map_must_not_read_it_again() {
        let map = MapLock::default();
        let _held = map.read();
        map.read();
    }

    #[test]
    fn a_thread_may_hold_the_maps_of_several_files_and_each_again_later() {
        let (one, other) = (MapLock::default(), MapLock::default());
        for _ in 0..2 {
            let (held, also_held) = (one.read(), other.write());
            assert!(held.is_empty() && also_held.is_empty());
        }
        assert!(one.write().is_empty());
    }
}
