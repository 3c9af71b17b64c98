//! The regions opened on one connection.

use farpool_wire::{Epoch, Refusal};

use crate::copy;
use crate::memory::Mapping;

/// Translations are looked up, and the processor fetches ahead by itself, page by page.
const PAGE_BYTES: u64 = 4 << 10;
/// Of longer places nothing is fetched: the first lines of many requests together would drive each other out.
const PREFETCHED_BYTES: usize = 64 << 10;

/// Found by number, since every request looks its region up.
#[derive(Default)]
pub(super) struct Attached {
    /// By region. As long as the highest region opened, which the host has: it let it be opened.
    regions: Vec<Option<Attachment>>,
    count: usize,
}

pub(super) struct Attachment {
    epoch: Epoch,
    /// Where the memory lay when it was last accessed. Only ever prefetched from, which touches nothing: the memory
    /// may have moved since.
    hint: *const u8,
    hint_bytes: u64,
}

// SAFETY: the pointer, all that is not `Send` of itself, is never dereferenced.
unsafe impl Send for Attachment {}

impl Attachment {
    pub(super) fn new(epoch: Epoch) -> Self {
        Attachment { epoch, hint: std::ptr::null(), hint_bytes: 0 }
    }
}

impl Attached {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn contains(&self, region: u32) -> bool {
        self.get(region).is_some()
    }

    /// Whether the region was opened under this epoch.
    #[inline]
    pub(super) fn check(&self, region: u32, epoch: Epoch) -> Result<(), Refusal> {
        match self.get(region) {
            None => Err(Refusal::NotAttached),
            Some(attached) if attached.epoch != epoch => Err(Refusal::StaleEpoch),
            Some(_) => Ok(()),
        }
    }

    /// Notes where a region's memory lies.
    #[inline]
    pub(super) fn remember(&mut self, region: u32, memory: &Mapping) {
        if let Some(Some(attached)) = self.regions.get_mut(region as usize) {
            (attached.hint, attached.hint_bytes) = (memory.base(), memory.len());
        }
    }

    /// Starts to fetch the beginning of each page of a place into the cache, if it is known where it lies.
    #[inline]
    pub(super) fn prefetch(&self, region: u32, offset: u64, length: usize) {
        let Some(attached) = self.get(region) else { return };
        let end = offset.checked_add(length as u64).filter(|&end| end <= attached.hint_bytes);
        let Some(end) = end.filter(|_| length <= PREFETCHED_BYTES) else { return };
        let mut at = offset;
        while at < end {
            let next = (at / PAGE_BYTES + 1) * PAGE_BYTES;
            copy::prefetch(attached.hint.wrapping_add(at as usize), (next.min(end) - at) as usize);
            at = next;
        }
    }

    /// Notes that the host has let the region be opened.
    pub(super) fn insert(&mut self, region: u32, attachment: Attachment) {
        let at = region as usize;
        if self.regions.len() <= at {
            self.regions.resize_with(at + 1, || None);
        }
        self.count += usize::from(self.regions[at].replace(attachment).is_none());
    }

    pub(super) fn remove(&mut self, region: u32) {
        let removed = self.regions.get_mut(region as usize).and_then(Option::take);
        self.count -= usize::from(removed.is_some());
    }

    fn get(&self, region: u32) -> Option<&Attachment> {
        self.regions.get(region as usize)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::SharedMemory;

    #[test]
    fn regions_are_counted_once_and_found_under_their_epoch_only() {
        let mut attached = Attached::default();
        attached.insert(7, Attachment::new(Epoch(1)));
        attached.insert(7, Attachment::new(Epoch(2)));
        assert_eq!(attached.len(), 1);
        assert_eq!(attached.check(7, Epoch(2)), Ok(()));
        assert_eq!(attached.check(7, Epoch(1)), Err(Refusal::StaleEpoch));
        assert_eq!(attached.check(3, Epoch(2)), Err(Refusal::NotAttached));
        attached.remove(7);
        attached.remove(u32::MAX);
        assert!(attached.is_empty() && !attached.contains(7));
    }

    #[test]
    fn fetching_ahead_from_memory_that_has_gone_is_harmless() {
        let mut attached = Attached::default();
        attached.insert(0, Attachment::new(Epoch(1)));
        attached.prefetch(0, 0, 64); // nobody knows yet where it lies
        let memory = SharedMemory::create("test", 16 << 10).unwrap();
        attached.remember(0, memory.mapping());
        drop(memory);
        for (offset, length) in [(0, 8), (4090, 8192), (16 << 10, 1), (u64::MAX, 64), (0, usize::MAX)] {
            attached.prefetch(0, offset, length);
        }
        attached.prefetch(1, 0, 64);
    }
}
