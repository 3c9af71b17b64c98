//! Packets between clients and nodes, and the division of a transfer into parts.

use std::ops::Range;
use std::os::fd::OwnedFd;

use farpool_wire::{Epoch, Hello, ShmAttached};

use crate::host::AccessKind;
use crate::op::Uncertain;
use crate::seam::{Op, Outcome, Posted};
use crate::sim::Random;
use crate::sim::settings::Mutation;

/// Bytes of a packet besides its payload.
pub(super) const HEADER_BYTES: usize = 48;
const WORD: usize = 8;

/// From a client to a node.
pub(super) enum Request {
    Hello(Hello),
    Operation(Box<Order>),
    /// The connection ends.
    Goodbye,
}

/// From a node to a client.
pub(super) enum Reply {
    Outcome { slot: u32, outcome: Outcome, data: Vec<u8>, shared: Option<Box<Handed>> },
    Closed(Uncertain),
}

/// A region's memory on its way to a process of the same host.
pub(super) struct Handed {
    pub(super) region: u32,
    pub(super) epoch: Epoch,
    pub(super) memory: OwnedFd,
    pub(super) words: OwnedFd,
    pub(super) layout: ShmAttached,
}

/// An operation, detached from its caller's memory.
pub(super) struct Order {
    pub(super) slot: u32,
    pub(super) op: Op,
    pub(super) region: u32,
    pub(super) epoch: Epoch,
    pub(super) offset: u64,
    /// Bytes to read, or room for a call's answer. For all other operations, the length of `data`.
    pub(super) length: usize,
    /// Bytes to write, or a call's request.
    pub(super) data: Vec<u8>,
    pub(super) fence: bool,
}

impl Order {
    /// Copies what the operation needs of the caller's memory.
    pub(super) fn of(posted: &Posted) -> Self {
        let from_local = match posted.op {
            Op::Write => posted.local.bytes,
            Op::Call { request } => request,
            _ => 0,
        };
        let mut data = vec![0; from_local];
        if from_local > 0 {
            // SAFETY: in bounds: `request` fits the buffer, by the endpoint. Exclusive and alive: the buffer
            // belongs to the operation, which is just being posted.
            unsafe { std::ptr::copy_nonoverlapping(posted.local.start, data.as_mut_ptr(), from_local) };
        }
        let length = match posted.op {
            Op::Read | Op::Call { .. } => posted.local.bytes,
            _ => from_local,
        };
        let Posted { slot, op, region, epoch, offset, fence, .. } = *posted;
        Order { slot, op, region, epoch, offset, length, data, fence }
    }

    /// Whether later operations may pass it (contract, ordering).
    pub(super) fn may_be_passed(&self) -> bool {
        matches!(self.op, Op::Read | Op::CompareAndSwap { .. } | Op::FetchAndAdd { .. })
    }

    /// Whether it changes memory.
    pub(super) fn kind(&self) -> AccessKind {
        if let Op::Read = self.op { AccessKind::Read } else { AccessKind::Write }
    }

    /// Whether it waits for everything posted before it.
    pub(super) fn waits_for_all(&self, mutation: Option<Mutation>) -> bool {
        let is_fenced = self.fence && mutation != Some(Mutation::FenceFlagIgnored);
        is_fenced || matches!(self.op, Op::Attach(_) | Op::Detach)
    }

    /// Cuts the transfer into at most `most` parts at aligned far words, in an order that the seed
    /// determines. The first part to be carried out comes last. An operation that is no transfer is one part.
    pub(super) fn parts(&self, most: usize, random: &mut Random) -> Vec<Range<usize>> {
        if !matches!(self.op, Op::Read | Op::Write) || most <= 1 {
            return std::iter::once(0..self.length).collect();
        }
        let head = (WORD - (self.offset % WORD as u64) as usize) % WORD;
        let cuts = self.length.saturating_sub(head + 1) / WORD;
        let wanted = cuts.min(most - 1);
        let mut places: Vec<usize> = if cuts <= 2 * wanted {
            let mut all: Vec<usize> = (0..cuts).collect();
            random.shuffle(&mut all);
            all.truncate(wanted);
            all
        } else {
            (0..wanted).map(|_| random.index(cuts)).collect()
        };
        places.sort_unstable();
        places.dedup();
        let first = if head == 0 { WORD } else { head };
        let edges = places.into_iter().map(|cut| first + cut * WORD);
        let mut parts = Vec::with_capacity(wanted + 1);
        let mut start = 0;
        for edge in edges.filter(|&edge| edge < self.length).chain([self.length]) {
            parts.push(start..edge);
            start = edge;
        }
        random.shuffle(&mut parts);
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(offset: u64, length: usize) -> Order {
        Order {
            slot: 0,
            op: Op::Read,
            region: 0,
            epoch: Epoch(1),
            offset,
            length,
            data: Vec::new(),
            fence: false,
        }
    }

    #[test]
    fn parts_cover_the_transfer_once_and_cut_no_aligned_word() {
        let mut random = Random::new(3, 3);
        for round in 0..2_000 {
            let order = transfer(random.below(40), random.index(120));
            let mut parts = order.parts(1 + round % 9, &mut random);
            assert!(parts.len() <= 1 + round % 9);
            parts.sort_by_key(|part| (part.start, part.end));
            let mut end = 0;
            for part in &parts {
                assert_eq!(part.start, end);
                let aligned = (order.offset as usize + part.start).is_multiple_of(WORD);
                assert!(part.start == 0 || aligned, "{order:?}", order = (order.offset, order.length, part));
                end = part.end;
            }
            assert_eq!(end, order.length);
        }
    }

    #[test]
    fn a_transfer_of_two_words_can_be_torn_either_way() {
        let mut random = Random::new(1, 1);
        let orders: Vec<_> = (0..50).map(|_| transfer(0, 16).parts(4, &mut random)).collect();
        assert!(orders.contains(&vec![0..8, 8..16]));
        assert!(orders.contains(&vec![8..16, 0..8]));
    }
}
