//! The table that all processes of a host share of one store, beside the words: which threads are in an
//! operation, and until when regions may be used. It is the owner's memory, which its direct clients (called
//! *guests* in the code) map.
//!
//! T1. A direct client enters an operation before it reads shared memory, and leaves it after its last
//!     access. When the owner waits, every operation that it does not wait for sees all changes that the
//!     owner made before.
//! T2. A place belongs to one thread of one direct client. The owner frees the places of a dead direct client
//!     after it has recovered the client's locks.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use farpool_fabric::{Mapping, Protection, SharedMemory};
use farpool_pool::LeasedRegion;
use farpool_pool::direct::Terms;

const WORD_BYTES: u64 = 8;
/// A cache line and its neighbour, which the processor fetches with it, so that threads do not slow each
/// other down.
const PLACE_BYTES: u64 = 128;
/// Most threads of direct clients at a time; a thread without a place asks the kernel.
const MAX_PLACES: u64 = 4096;
/// Most regions: as many as there are extents, if each were a region.
const MAX_REGIONS: u64 = 1 << 24;

/// Where the epoch lies; the only other word on its page is at [`PLACES_USED`].
const EPOCH: u64 = 0;
/// How many places were ever in use: later ones need not be checked.
const PLACES_USED: u64 = PLACE_BYTES;
const PLACES: u64 = 4096;
const REGIONS: u64 = PLACES + MAX_PLACES * PLACE_BYTES;
const TABLE_BYTES: u64 = REGIONS + Terms::bytes(MAX_REGIONS);

/// Offsets within a place.
const STATE: u64 = 0;
const GUEST: u64 = WORD_BYTES;
/// Bytes that operations of this place have moved. They stay when the place is freed: its next holder adds to
/// them.
const READ_BYTES: u64 = 2 * WORD_BYTES;
const WRITTEN_BYTES: u64 = 3 * WORD_BYTES;

/// Not in an operation.
const IDLE: u64 = 0;
const FIRST_EPOCH: u64 = 1;

/// The table, as the owner or a direct client sees it. Sparse: unused parts take no memory.
pub(crate) struct Table {
    mapping: Arc<Mapping>,
    /// This process no longer changes the table.
    abandoned: AtomicBool,
}

/// One thread's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place(u64);

/// Bytes that direct clients have read and written without the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirectBytes {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

impl Table {
    /// The owner's view, and the memory that direct clients get.
    pub(crate) fn create() -> io::Result<(Table, SharedMemory)> {
        let memory = SharedMemory::create("farpool-guests", TABLE_BYTES)?;
        let table = Table { mapping: memory.mapping().clone(), abandoned: AtomicBool::new(false) };
        table.store(EPOCH, FIRST_EPOCH);
        Ok((table, memory))
    }

    /// A direct client's view.
    pub(crate) fn open(fd: &OwnedFd) -> io::Result<Table> {
        Ok(Table { mapping: Arc::new(map(fd, TABLE_BYTES)?), abandoned: AtomicBool::new(false) })
    }

    fn load(&self, at: u64) -> u64 {
        self.mapping.load(at).expect("a place of the table lies within it")
    }

    /// From now on this view of the table changes nothing.
    pub(crate) fn abandon(&self) {
        // Relaxed, pairs with nothing: a forked process has one thread, and a simulated one runs on one.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    fn store(&self, at: u64, value: u64) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        self.mapping.store(at, value).expect("a place of the table lies within it");
    }

    fn swap(&self, at: u64, expected: u64, new: u64) -> bool {
        let found = self.mapping.compare_and_swap(at, expected, new);
        found.expect("a place of the table lies within it") == expected
    }

    /// Takes a place for a thread of a direct client.
    pub(crate) fn take_place(&self, guest: u16) -> Option<Place> {
        (0..MAX_PLACES).find_map(|index| {
            let at = PLACES + index * PLACE_BYTES;
            let taken = self.load(at + GUEST) == 0 && self.swap(at + GUEST, 0, guest.into());
            taken.then(|| {
                loop {
                    let used = self.load(PLACES_USED);
                    if used > index || self.swap(PLACES_USED, used, index + 1) {
                        break Place(at);
                    }
                }
            })
        })
    }

    /// Frees a place.
    pub(crate) fn free_place(&self, place: Place) {
        self.store(place.0 + STATE, IDLE);
        self.store(place.0 + GUEST, 0);
    }

    /// Frees the places of a dead direct client.
    pub(crate) fn free_places_of(&self, guest: u16) {
        for place in self.places_used().filter(|place| self.load(place.0 + GUEST) == u64::from(guest)) {
            self.free_place(place);
        }
    }

    fn places_used(&self) -> impl Iterator<Item = Place> + '_ {
        let used = self.load(PLACES_USED).min(MAX_PLACES);
        (0..used).map(|index| Place(PLACES + index * PLACE_BYTES))
    }

    /// Begins an operation (T1).
    pub(crate) fn enter(&self, place: Place) {
        self.store(place.0 + STATE, self.load(EPOCH));
        // Pairs with the fence in `begin_waiting`: either the owner sees this place in use, or the accesses
        // after this fence see the owner's changes.
        fence(Ordering::SeqCst);
    }

    /// Ends an operation. The store releases all its accesses.
    pub(crate) fn leave(&self, place: Place) {
        self.store(place.0 + STATE, IDLE);
    }

    /// Counts the bytes that an operation has moved. Only the place's thread changes its counts, so none is
    /// lost between load and store.
    pub(crate) fn note(&self, place: Place, moved: DirectBytes) {
        for (at, bytes) in [(READ_BYTES, moved.read), (WRITTEN_BYTES, moved.written)] {
            if bytes > 0 {
                self.store(place.0 + at, self.load(place.0 + at).wrapping_add(bytes));
            }
        }
    }

    /// The bytes that all operations have moved so far.
    pub(crate) fn moved(&self) -> DirectBytes {
        self.places_used().fold(DirectBytes::default(), |sum, place| DirectBytes {
            read: sum.read.wrapping_add(self.load(place.0 + READ_BYTES)),
            written: sum.written.wrapping_add(self.load(place.0 + WRITTEN_BYTES)),
        })
    }

    /// Begins a new epoch, and returns the one before. [`has_finished`](Self::has_finished) of that one tells
    /// whether all operations that began before have finished.
    pub(crate) fn begin_waiting(&self) -> u64 {
        fence(Ordering::SeqCst); // pairs with the one in `enter`
        self.mapping.fetch_and_add(EPOCH, 1).expect("a place of the table lies within it")
    }

    /// Whether every operation that began in this epoch or before has finished.
    pub(crate) fn has_finished(&self, epoch: u64) -> bool {
        self.places_used().all(|place| {
            let state = self.load(place.0 + STATE);
            state == IDLE || state > epoch
        })
    }

    /// Tells direct clients until when they may use a region.
    pub(crate) fn publish_region(&self, number: u64, region: &LeasedRegion) {
        if !self.abandoned.load(Ordering::Relaxed) {
            self.terms().publish(number, region);
        }
    }

    /// Until when regions may be used.
    pub(crate) fn terms(&self) -> Terms {
        Terms::new(self.mapping.clone(), REGIONS, MAX_REGIONS)
    }
}

/// Maps memory that came from another process: it must have the expected size, and be sealed against
/// shrinking.
pub(crate) fn map(fd: &OwnedFd, bytes: u64) -> io::Result<Mapping> {
    let seals = rustix::fs::fcntl_get_seals(fd)?;
    let is_right =
        rustix::fs::fstat(fd)?.st_size as u64 == bytes && seals.contains(rustix::fs::SealFlags::SHRINK);
    if !is_right {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "this memory is not that of a mount's daemon",
        ));
    }
    let fd: BorrowedFd<'_> = std::os::fd::AsFd::as_fd(fd);
    Mapping::new(fd, bytes, Protection::ReadWrite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_once_all_earlier_operations_have_ended() {
        let (table, _memory) = Table::create().unwrap();
        let (one, two) = (table.take_place(1).unwrap(), table.take_place(2).unwrap());
        assert_ne!(one, two);
        table.enter(one);
        let epoch = table.begin_waiting();
        table.enter(two);
        assert!(!table.has_finished(epoch));
        table.leave(one);
        assert!(table.has_finished(epoch));
        assert!(!table.has_finished(table.begin_waiting()), "the second operation is in progress");
    }

    #[test]
    fn places_of_a_dead_guest_are_used_again() {
        let (table, _memory) = Table::create().unwrap();
        let (one, other) = (table.take_place(1).unwrap(), table.take_place(2).unwrap());
        table.enter(one);
        table.enter(other);
        let epoch = table.begin_waiting();
        table.free_places_of(1);
        assert!(!table.has_finished(epoch));
        table.free_places_of(2);
        assert!(table.has_finished(epoch));
        assert_eq!(table.take_place(3), Some(one));
    }

    #[test]
    fn the_table_of_a_dead_process_stays_as_it_was() {
        let (owners, memory) = Table::create().unwrap();
        let table = Table::open(&memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let place = table.take_place(1).unwrap();
        table.enter(place);
        table.abandon();
        table.leave(place);
        table.free_place(place);
        assert!(!owners.has_finished(owners.begin_waiting()), "its operation counts as unfinished");
        assert_ne!(owners.take_place(2), Some(place));
    }

    #[test]
    fn moved_bytes_stay_counted_after_their_guest_has_died_and_its_place_is_reused() {
        let (table, _memory) = Table::create().unwrap();
        let (one, other) = (table.take_place(1).unwrap(), table.take_place(2).unwrap());
        table.note(one, DirectBytes { read: 3, written: 0 });
        table.note(other, DirectBytes { read: 4, written: 5 });
        table.free_places_of(1);
        let next = table.take_place(3).unwrap();
        table.note(next, DirectBytes { read: 10, written: 1 });
        assert_eq!(table.moved(), DirectBytes { read: 17, written: 6 });
    }
}
