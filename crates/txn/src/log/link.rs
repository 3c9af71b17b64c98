//! Links from a version of a record to the version before it.

use farpool_wire::Slot;

use super::WORD_BYTES;

/// Bits of a link for a place in a log.
const PLACE_BITS: u32 = 52;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

/// Where the version before a version of a record lies: the place, in the log of the commit that wrote this
/// version, where that commit saved the version before it.
///
/// ```text
///  63 ..... 52 51 ........................... 0
///     slot      place in the log, in words, + 1
/// ```
/// A link proves nothing: whoever follows it checks the record and the number of the version found there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link(u64);

impl Link {
    /// There is no version before: the record was never written before.
    pub const NONE: Link = Link(0);

    /// The link to the intent that starts at this byte of the intents in a slot's log. `None`: a log has no
    /// such place.
    pub fn to(slot: Slot, start: u64) -> Option<Link> {
        let place = start / WORD_BYTES + 1;
        (start.is_multiple_of(WORD_BYTES) && place <= PLACE_MASK)
            .then_some(Link((slot.index() as u64) << PLACE_BITS | place))
    }

    /// The slot, and at which byte of the intents in its log the intent starts. `None`: there is no version
    /// before.
    pub fn target(self) -> Option<(Slot, u64)> {
        let place = (self.0 & PLACE_MASK).checked_sub(1)?;
        Some((Slot::new((self.0 >> PLACE_BITS) as u16)?, place * WORD_BYTES))
    }

    /// The link in a word of far memory.
    pub const fn from_word(word: u64) -> Link {
        Link(word)
    }

    /// As it lies in far memory.
    pub const fn word(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_of_links_is_fixed() {
        let link = |slot, start| Link::to(Slot::new(slot).unwrap(), start).map(Link::word);
        assert_eq!((link(0, 0), link(5, 24)), (Some(1), Some(5 << 52 | 4)));
        assert_eq!(link(0xFFF, (PLACE_MASK - 1) * 8), Some(u64::MAX));
        assert_eq!((link(0, PLACE_MASK * 8), link(0, 12)), (None, None));
        assert_eq!(Link::NONE.target(), None);
    }

    proptest! {
        #[test]
        fn a_link_leads_to_where_it_was_made_for(slot in 0..Slot::MOST, place in 0..PLACE_MASK) {
            let slot = Slot::new(slot).unwrap();
            prop_assert_eq!(Link::to(slot, place * 8).unwrap().target(), Some((slot, place * 8)));
        }

        #[test]
        fn any_word_is_a_link_or_none(word in any::<u64>()) {
            let link = Link::from_word(word);
            prop_assert!(link.target().is_none_or(|(slot, start)| Link::to(slot, start) == Some(link)));
        }
    }
}
