//! A set of slots, a bit each.

/// Some of a cache's slots.
#[derive(Clone, Debug)]
pub(crate) struct SlotSet {
    words: Vec<u64>,
    len: u32,
}

impl SlotSet {
    /// No slots, of a cache with so many.
    pub(crate) fn new(slots: u32) -> SlotSet {
        SlotSet { words: vec![0; slots.div_ceil(u64::BITS) as usize], len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.words[(slot / u64::BITS) as usize] >> (slot % u64::BITS) & 1 == 1
    }

    pub(crate) fn insert(&mut self, slot: u32) {
        self.len += u32::from(!self.contains(slot));
        self.words[(slot / u64::BITS) as usize] |= 1 << (slot % u64::BITS);
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        self.len -= u32::from(self.contains(slot));
        self.words[(slot / u64::BITS) as usize] &= !(1 << (slot % u64::BITS));
    }

    /// The slots of this set that are not in `others`, beginning anywhere: once round from `first`.
    pub(crate) fn without<'a>(&'a self, others: &'a SlotSet, first: u32) -> impl Iterator<Item = u32> + 'a {
        let (count, start) = (self.words.len(), (first / u64::BITS) as usize);
        (0..count).map(move |number| (start + number) % count).flat_map(move |at| {
            let mut left = self.words[at] & !others.words[at];
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(at as u32 * u64::BITS + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_counted_once_and_found_from_anywhere() {
        let (mut set, mut others) = (SlotSet::new(130), SlotSet::new(130));
        for slot in [0, 63, 64, 129, 129, 65] {
            set.insert(slot);
        }
        [65, 65].into_iter().for_each(|slot| set.remove(slot));
        others.insert(63);
        assert_eq!((set.len(), set.contains(129), set.contains(65)), (4, true, false));
        assert_eq!(set.without(&others, 70).collect::<Vec<_>>(), [64, 129, 0]);
    }
}
