//! The regions opened on one connection.

use std::sync::Arc;

use farpool_wire::{Epoch, Refusal};

/// Found by number, since every request looks its region up.
#[derive(Default)]
pub(super) struct Attached {
    /// By region. As long as the highest region opened, which the host has: it let it be opened.
    regions: Vec<Option<Attachment>>,
    count: usize,
}

pub(super) struct Attachment {
    pub(super) epoch: Epoch,
    /// Keeps shared memory marked as somebody's.
    pub(super) _holder: Option<Arc<dyn Send + Sync>>,
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
