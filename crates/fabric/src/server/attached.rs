//! The regions opened on one connection.

use farpool_wire::{Epoch, Refusal};

use crate::copy;
use crate::memory::Mapping;

/// Addresses are translated, and the processor prefetches by itself, page by page.
const PAGE_BYTES: u64 = 4 << 10;
/// Longest range that is prefetched: the first lines of many longer requests would evict each other from the
/// cache.
const PREFETCHED_BYTES: usize = 64 << 10;

/// Regions in one page of the table: enough that the list of pages is short, few enough that a page for a
/// single attachment costs little.
const PAGE_REGIONS: usize = 64;

/// The regions opened on a connection, indexed by number, since every request looks its region up. Takes a
/// word for every 64 regions up to the highest, and 2 KiB for each 64 regions of which any are open.
#[derive(Default)]
pub(super) struct Attached {
    /// Indexed by page. The host bounds how many there are: it let their regions be opened.
    pages: Vec<Option<Box<Page>>>,
    count: usize,
}

struct Page {
    regions: [Option<Attachment>; PAGE_REGIONS],
    count: usize,
}

pub(super) struct Attachment {
    epoch: Epoch,
    /// An access was refused because the memory was being moved: all are refused until the client attaches
    /// again.
    is_shut: bool,
    /// Where the memory lay when it was last accessed. Used only to prefetch, which accesses nothing: the
    /// memory may have moved since.
    hint: *const u8,
    hint_bytes: u64,
}

// SAFETY: the pointer, the only field that is not `Send` by itself, is never dereferenced.
unsafe impl Send for Attachment {}

impl Attachment {
    pub(super) fn new(epoch: Epoch) -> Self {
        Attachment { epoch, is_shut: false, hint: std::ptr::null(), hint_bytes: 0 }
    }
}

impl Attached {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Regions and epochs of all attachments.
    pub(super) fn grants(&self) -> impl Iterator<Item = (u32, Epoch)> {
        let pages = (0..).step_by(PAGE_REGIONS).zip(&self.pages);
        let pages = pages.filter_map(|(first, page)| Some((first, page.as_ref()?)));
        let regions = pages.flat_map(|(first, page)| (first..).zip(&page.regions));
        regions.filter_map(|(region, attached)| Some((region, attached.as_ref()?.epoch)))
    }

    pub(super) fn contains(&self, region: u32) -> bool {
        self.get(region).is_some()
    }

    /// Whether the region was opened under this epoch, and not [shut](Self::shut) since.
    #[inline]
    pub(super) fn check(&self, region: u32, epoch: Epoch) -> Result<(), Refusal> {
        match self.get(region) {
            None => Err(Refusal::NotAttached),
            Some(attached) if attached.epoch != epoch => Err(Refusal::StaleEpoch),
            Some(attached) if attached.is_shut => Err(Refusal::NotAttached),
            Some(_) => Ok(()),
        }
    }

    /// Refuses every access to the region until it is opened again. It still counts as attached: the client
    /// will attach it again.
    pub(super) fn shut(&mut self, region: u32) {
        let (page, place) = split(region);
        if let Some(Some(page)) = self.pages.get_mut(page)
            && let Some(attached) = &mut page.regions[place]
        {
            attached.is_shut = true;
        }
    }

    /// Notes where a region's memory lies.
    #[inline]
    pub(super) fn remember(&mut self, region: u32, memory: &Mapping) {
        let (page, place) = split(region);
        if let Some(Some(page)) = self.pages.get_mut(page)
            && let Some(attached) = &mut page.regions[place]
        {
            (attached.hint, attached.hint_bytes) = (memory.base(), memory.len());
        }
    }

    /// Prefetches the beginning of each page of a range into the cache, if the memory's address is known.
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
        let (page, place) = split(region);
        if self.pages.len() <= page {
            self.pages.reserve_exact(page + 1 - self.pages.len());
            self.pages.resize_with(page + 1, || None);
        }
        let empty = || Box::new(Page { regions: [const { None }; PAGE_REGIONS], count: 0 });
        let page = self.pages[page].get_or_insert_with(empty);
        let is_new = page.regions[place].replace(attachment).is_none();
        page.count += usize::from(is_new);
        self.count += usize::from(is_new);
    }

    pub(super) fn remove(&mut self, region: u32) {
        let (at, place) = split(region);
        let Some(Some(page)) = self.pages.get_mut(at) else { return };
        if page.regions[place].take().is_some() {
            page.count -= 1;
            self.count -= 1;
        }
        if page.count == 0 {
            self.pages[at] = None;
        }
    }

    fn get(&self, region: u32) -> Option<&Attachment> {
        let (page, place) = split(region);
        self.pages.get(page)?.as_ref()?.regions[place].as_ref()
    }
}

/// A region's page, and its place there.
#[inline]
fn split(region: u32) -> (usize, usize) {
    (region as usize / PAGE_REGIONS, region as usize % PAGE_REGIONS)
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
    fn regions_far_apart_take_little_memory_and_give_it_back() {
        const FAR: u32 = 65_535;
        let mut attached = Attached::default();
        let bytes = |attached: &Attached| {
            let pages = attached.pages.iter().flatten().count();
            attached.pages.capacity() * size_of::<Option<Box<Page>>>() + pages * size_of::<Page>()
        };
        for round in 1..4 {
            attached.insert(FAR, Attachment::new(Epoch(round)));
            attached.insert(0, Attachment::new(Epoch(round)));
            attached.insert(63, Attachment::new(Epoch(round)));
            assert!(bytes(&attached) <= 13 << 10, "{}", bytes(&attached));
            let grants = [0, 63, FAR].map(|region| (region, Epoch(round)));
            assert!(attached.grants().eq(grants));
            attached.remove(FAR);
            attached.remove(FAR - 1);
            assert_eq!(attached.check(FAR, Epoch(round)), Err(Refusal::NotAttached));
            assert_eq!(attached.check(0, Epoch(round)), Ok(()));
            attached.remove(0);
            attached.remove(63);
            assert!(attached.is_empty() && bytes(&attached) <= 8 << 10);
        }
    }

    #[test]
    fn fetching_ahead_from_memory_that_has_gone_is_harmless() {
        let mut attached = Attached::default();
        attached.insert(0, Attachment::new(Epoch(1)));
        attached.prefetch(0, 0, 64); // its address is not known yet
        let memory = SharedMemory::create("test", 16 << 10).unwrap();
        attached.remember(0, memory.mapping());
        drop(memory);
        for (offset, length) in [(0, 8), (4090, 8192), (16 << 10, 1), (u64::MAX, 64), (0, usize::MAX)] {
            attached.prefetch(0, offset, length);
        }
        attached.prefetch(1, 0, 64);
    }
}
