//! Versions of records, and the header word in front of each record: which commit wrote the version, and its
//! state (paper 3, 5.1).

use std::fmt;

/// Bits of a [`Version`] for the count, the number of a commit within its slot.
const COUNT_BITS: u32 = 49;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
/// Bits of a count that are the paper's commit timestamp. The 17 bits above, together with the slot's 12, are
/// the paper's thread id.
const TIMESTAMP_BITS: u32 = 32;
/// Bits of a [`RecordHeader`] below the version.
const FLAG_BITS: u32 = 3;
const LOCKED: u64 = 1;
const DELETED: u64 = 1 << 1;

/// A slot: a place in the timestamp vector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(u16);

impl Slot {
    /// Number of slots of one oracle.
    pub const MOST: u16 = 1 << 12;

    /// The slot with this index; `None` if there is none.
    pub const fn new(index: u16) -> Option<Slot> {
        if index < Self::MOST { Some(Slot(index)) } else { None }
    }

    /// Its index in the timestamp vector.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The commit that wrote something: the `count`-th of a slot. It has 61 bits, like the paper's thread id (29)
/// and timestamp (32) together.
///
/// ```text
///  60 ..... 49 48 ........... 32 31 .................... 0
///     slot        generation            timestamp
///                 '------------- count --------------'
/// ```
/// The paper's thread id is a slot with a generation. When a slot's timestamps are used up, or another member
/// takes the slot over, the slot continues with the next generation, which is a fresh id. The counts of a
/// slot only grow. So comparing counts tells which of two versions is older, and nothing has to be stored
/// about old ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// The version of data from before the first transaction. Every snapshot sees it.
    pub const INITIAL: Version = Version(0);

    /// The `count`-th commit of a slot; `None`: a slot has no such commit.
    pub const fn new(slot: Slot, count: u64) -> Option<Version> {
        if count > COUNT_MASK { None } else { Some(Version((slot.0 as u64) << COUNT_BITS | count)) }
    }

    /// The slot that committed it.
    pub const fn slot(self) -> Slot {
        Slot((self.0 >> COUNT_BITS) as u16)
    }

    /// The number of the commit within its slot.
    pub const fn count(self) -> u64 {
        self.0 & COUNT_MASK
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (generation, timestamp) = (self.count() >> TIMESTAMP_BITS, self.count() as u32);
        write!(out, "{}.{generation}.{timestamp}", self.slot().0)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

/// The first count of the generation after that of `last_count`. `None`: there is none, and the slot is used
/// up for good.
pub const fn next_generation(last_count: u64) -> Option<u64> {
    let generation = (last_count >> TIMESTAMP_BITS) + 1;
    if generation > COUNT_MASK >> TIMESTAMP_BITS { None } else { Some(generation << TIMESTAMP_BITS) }
}

/// The word in front of a record (paper 3, 5.1: 29 + 32 + 3 bits), changed by compare-and-swap.
///
/// ```text
///  63 ......................... 3     2       1       0
///             version               spare  deleted  locked
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader(pub u64);

impl RecordHeader {
    /// The header of a version that is neither locked nor deleted.
    pub const fn of(version: Version) -> RecordHeader {
        RecordHeader(version.0 << FLAG_BITS)
    }

    /// The commit that wrote the record behind the header.
    pub const fn version(self) -> Version {
        Version(self.0 >> FLAG_BITS)
    }

    /// The commit that the header names is about to install its version here.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// The version deletes the record.
    pub const fn is_deleted(self) -> bool {
        self.0 & DELETED != 0
    }

    /// The same with the flag *locked*: for a commit that is about to be installed.
    #[must_use]
    pub const fn locked(self) -> RecordHeader {
        RecordHeader(self.0 | LOCKED)
    }

    /// The part that does not change while the version exists: the same without the flag *locked*.
    #[must_use]
    pub const fn unlocked(self) -> RecordHeader {
        RecordHeader(self.0 & !LOCKED)
    }

    /// The same with the flag *deleted*: the record ends with this version.
    #[must_use]
    pub const fn deleted(self) -> RecordHeader {
        RecordHeader(self.0 | DELETED)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(index: u16) -> Slot {
        Slot::new(index).unwrap()
    }

    #[test]
    fn layout_of_the_record_header_is_fixed() {
        let version = Version::new(slot(0xABC), 0x1_2345_6789_ABCD).unwrap();
        assert_eq!(version.0, 0x1579_2345_6789_ABCD);
        assert_eq!(RecordHeader::of(version).0, 0xABC9_1A2B_3C4D_5E68);
        assert_eq!(RecordHeader::of(Version::INITIAL).locked().deleted().0, 3);
        assert_eq!(version.to_string(), "2748.74565.1737075661");
    }

    #[test]
    fn a_slot_whose_timestamp_is_used_up_goes_on_with_the_next_generation() {
        let last = Version::new(slot(7), u64::from(u32::MAX)).unwrap();
        let next = Version::new(slot(7), last.count() + 1).unwrap();
        assert_eq!((last.to_string(), next.to_string()), ("7.0.4294967295".into(), "7.1.0".into()));
        assert!(last < next && RecordHeader::of(next).version().slot() == slot(7));
    }

    #[test]
    fn the_last_generation_has_no_next_one() {
        assert_eq!(next_generation(0), Some(1 << 32));
        assert_eq!(next_generation((1 << 32) + 5), Some(2 << 32));
        assert_eq!((next_generation(COUNT_MASK), next_generation(u64::MAX)), (None, None));
        assert_eq!(Version::new(slot(0), COUNT_MASK + 1), None);
        assert_eq!(Slot::new(Slot::MOST), None);
    }

    proptest! {
        #[test]
        fn a_header_keeps_its_version_whatever_its_flags(index in 0..Slot::MOST, count in 0..=COUNT_MASK) {
            let version = Version::new(slot(index), count).unwrap();
            prop_assert_eq!((version.slot().index(), version.count()), (index.into(), count));
            let plain = RecordHeader::of(version);
            for header in [plain, plain.locked(), plain.deleted(), plain.locked().deleted()] {
                prop_assert_eq!(header.version(), version);
            }
            prop_assert!(plain.locked().is_locked() && plain.deleted().is_deleted());
            prop_assert_eq!(plain.locked().unlocked(), plain);
            prop_assert_eq!(plain.locked().deleted().unlocked(), plain.deleted());
        }
    }
}
