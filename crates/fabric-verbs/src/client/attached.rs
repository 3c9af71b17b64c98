//! Regions attached on a link. Operations on them are checked before they go to the card, since the card
//! refuses an operation only by closing the queue.

use farpool_fabric::{Op, Posted};
use farpool_wire::{Epoch, MAX_TRANSFER_BYTES, Refusal, VerbsAttached};

/// Most regions of one node that a link attaches: 64 Ki regions of 64 MiB are 4 TiB.
const MAX_REGIONS: u32 = 1 << 16;

/// Regions by their number.
#[derive(Default)]
pub(super) struct AttachedRegions {
    regions: Vec<Option<(Epoch, VerbsAttached)>>,
}

/// Where an operation goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) remote_key: u32,
}

impl AttachedRegions {
    pub(super) fn insert(
        &mut self,
        region: u32,
        epoch: Epoch,
        attached: VerbsAttached,
    ) -> Result<(), Refusal> {
        if region >= MAX_REGIONS {
            return Err(Refusal::Exhausted);
        }
        let place = region as usize;
        if place >= self.regions.len() {
            self.regions.resize(place + 1, None);
        }
        self.regions[place] = Some((epoch, attached));
        Ok(())
    }

    pub(super) fn remove(&mut self, region: u32) {
        if let Some(place) = self.regions.get_mut(region as usize) {
            *place = None;
        }
    }

    /// Where a READ, WRITE or atomic goes, or why it is refused. The refusals are those of every transport.
    pub(super) fn target(&self, posted: &Posted) -> Result<Target, Refusal> {
        let place = self.regions.get(posted.region as usize).and_then(Option::as_ref);
        let (epoch, attached) = place.ok_or(Refusal::NotAttached)?;
        if *epoch != posted.epoch {
            return Err(Refusal::StaleEpoch);
        }
        let bytes = match posted.op {
            Op::Read | Op::Write => posted.local.bytes,
            _ => 8,
        };
        if bytes > MAX_TRANSFER_BYTES {
            return Err(Refusal::TooLong);
        }
        if !attached.writable && !matches!(posted.op, Op::Read) {
            return Err(Refusal::ReadOnly);
        }
        let atomic = matches!(posted.op, Op::CompareAndSwap { .. } | Op::FetchAndAdd { .. });
        if atomic && !posted.offset.is_multiple_of(8) {
            return Err(Refusal::Misaligned);
        }
        match posted.offset.checked_add(bytes as u64) {
            Some(end) if end <= attached.region_bytes => {
                Ok(Target { address: attached.address + posted.offset, remote_key: attached.remote_key })
            }
            _ => Err(Refusal::OutOfBounds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_fabric::LocalSlice;

    const EPOCH: Epoch = Epoch(7);
    const ATTACHED: VerbsAttached =
        VerbsAttached { address: 0x1000, region_bytes: 4096, remote_key: 9, writable: true };

    fn posted(op: Op, offset: u64, bytes: usize) -> Posted {
        let local = LocalSlice { start: std::ptr::null_mut(), bytes };
        Posted { slot: 0, op, region: 3, epoch: EPOCH, offset, local, fence: false }
    }

    fn regions(attached: VerbsAttached) -> AttachedRegions {
        let mut regions = AttachedRegions::default();
        regions.insert(3, EPOCH, attached).unwrap();
        regions
    }

    #[test]
    fn an_operation_within_the_region_goes_to_its_address() {
        let target = regions(ATTACHED).target(&posted(Op::Read, 96, 4000)).unwrap();
        assert_eq!(target, Target { address: 0x1060, remote_key: 9 });
    }

    #[test]
    fn an_operation_past_the_end_is_out_of_bounds_even_if_the_sum_wraps() {
        let regions = regions(ATTACHED);
        for offset in [97, 4096, u64::MAX - 3999, u64::MAX] {
            assert_eq!(regions.target(&posted(Op::Write, offset, 4000)), Err(Refusal::OutOfBounds));
        }
        let add = Op::FetchAndAdd { addend: 1 };
        assert_eq!(regions.target(&posted(add, 4096, 0)), Err(Refusal::OutOfBounds));
        assert_eq!(regions.target(&posted(add, 12, 0)), Err(Refusal::Misaligned));
    }

    #[test]
    fn a_read_only_grant_allows_reads_alone() {
        let regions = regions(VerbsAttached { writable: false, ..ATTACHED });
        assert!(regions.target(&posted(Op::Read, 0, 8)).is_ok());
        for op in [Op::Write, Op::FetchAndAdd { addend: 1 }, Op::CompareAndSwap { expected: 0, new: 1 }] {
            assert_eq!(regions.target(&posted(op, 0, 8)), Err(Refusal::ReadOnly));
        }
    }

    #[test]
    fn another_epoch_and_another_region_are_refused() {
        let mut regions = regions(ATTACHED);
        let stale = Posted { epoch: Epoch(6), ..posted(Op::Read, 0, 8) };
        assert_eq!(regions.target(&stale), Err(Refusal::StaleEpoch));
        let other = Posted { region: 4, ..posted(Op::Read, 0, 8) };
        assert_eq!(regions.target(&other), Err(Refusal::NotAttached));
        regions.remove(3);
        assert_eq!(regions.target(&posted(Op::Read, 0, 8)), Err(Refusal::NotAttached));
        assert_eq!(regions.insert(MAX_REGIONS, EPOCH, ATTACHED), Err(Refusal::Exhausted));
    }
}
