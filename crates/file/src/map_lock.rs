//! The lock around a file's map.
//!
//! A thread that reads the map must not read it again meanwhile: if another thread waits to write it, the
//! second read waits for that thread, which waits for the first read. It takes an unlucky moment, and tests
//! rarely hit one. So with debug assertions each thread notes which maps it holds, and a second hold of one
//! panics.

use std::ops::{Deref, DerefMut};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::map::Map;

/// A file's map, which any number of threads may read, or one may write.
#[derive(Default)]
pub(crate) struct MapLock(RwLock<Map>);

impl MapLock {
    pub(crate) fn new(map: Map) -> Self {
        MapLock(RwLock::new(map))
    }

    pub(crate) fn read(&self) -> Held<RwLockReadGuard<'_, Map>> {
        let noted = Noted::new(self);
        Held { guard: self.0.read(), _noted: noted }
    }

    pub(crate) fn write(&self) -> Held<RwLockWriteGuard<'_, Map>> {
        let noted = Noted::new(self);
        Held { guard: self.0.write(), _noted: noted }
    }
}

/// The map, until this is dropped.
pub(crate) struct Held<G> {
    guard: G,
    _noted: Noted,
}

impl<G: Deref<Target = Map>> Deref for Held<G> {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.guard
    }
}

impl<G: DerefMut<Target = Map>> DerefMut for Held<G> {
    fn deref_mut(&mut self) -> &mut Map {
        &mut self.guard
    }
}

#[cfg(not(debug_assertions))]
struct Noted;

#[cfg(not(debug_assertions))]
impl Noted {
    fn new(_map: &MapLock) -> Self {
        Noted
    }
}

/// A note that this thread holds the map at an address.
#[cfg(debug_assertions)]
struct Noted(usize);

#[cfg(debug_assertions)]
thread_local! {
    static HELD: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[cfg(debug_assertions)]
impl Noted {
    fn new(map: &MapLock) -> Self {
        let address = std::ptr::from_ref(map).addr();
        HELD.with_borrow_mut(|held| {
            assert!(!held.contains(&address), "this thread holds the map already: it could wait for itself");
            held.push(address);
        });
        Noted(address)
    }
}

#[cfg(debug_assertions)]
impl Drop for Noted {
    fn drop(&mut self) {
        HELD.with_borrow_mut(|held| held.retain(|address| *address != self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
