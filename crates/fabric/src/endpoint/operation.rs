//! One operation, from before it is posted to its outcome.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_wire::{Epoch, MAX_TRANSFER_BYTES, NodeId, Refusal, RegionId, RemoteAddr};

use super::queue::{NO_SLOT, Queue, to_result};
use super::{Shared, Table};
use crate::arena::ArenaBuf;
use crate::op::OpError;
use crate::seam::{LocalSlice, Op, Outcome, Posted};

/// Where an operation acts.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) region: RegionId,
    pub(super) epoch: Epoch,
    pub(super) offset: u64,
}

impl Target {
    pub(super) fn of(at: RemoteAddr, epoch: Epoch) -> Self {
        Target { region: at.region, epoch, offset: at.offset }
    }
}

/// The buffer comes back with the outcome.
type Output = (Option<ArenaBuf>, Result<u64, OpError>);

/// The future of one operation.
pub(super) struct Operating<'a> {
    queue: &'a Queue,
    op: Op,
    target: Target,
    fence: bool,
    stage: Stage,
}

enum Stage {
    /// The ticket is that of an operation that waits for a place.
    Unposted(Option<ArenaBuf>, Option<u64>),
    Posted(u32),
    Finished,
}

impl<'a> Operating<'a> {
    #[inline]
    pub(super) fn new(
        queue: &'a Queue,
        op: Op,
        target: Target,
        buffer: Option<ArenaBuf>,
        fence: bool,
    ) -> Self {
        // Checked in release builds, too: another node may have lent a region of the same number under the
        // same epoch.
        assert_eq!(target.region.node, queue.node, "an address of another node");
        Operating { queue, op, target, fence, stage: Stage::Unposted(buffer, None) }
    }
}

impl Future for Operating<'_> {
    type Output = Output;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Output> {
        let this = &mut *self;
        let shared = &*this.queue.endpoint.shared;
        let mut table = shared.table.borrow_mut();
        let result = match &mut this.stage {
            Stage::Unposted(..) => this.post(shared, &mut table, context),
            Stage::Posted(slot) => {
                let Some((outcome, buffer)) = table.take_finished(*slot, context.waker()) else {
                    return Poll::Pending;
                };
                Poll::Ready((buffer, to_result(this.queue.node, outcome)))
            }
            Stage::Finished => panic!("polled after its outcome"),
        };
        if result.is_ready() {
            this.stage = Stage::Finished;
        }
        result
    }
}

impl Operating<'_> {
    fn post(&mut self, shared: &Shared, table: &mut Table, context: &mut Context<'_>) -> Poll<Output> {
        let Stage::Unposted(buffer, ticket) = &mut self.stage else { unreachable!("the caller looked") };
        let Queue { index, node, .. } = *self.queue;
        let Some(link) = table.queues[index].link.as_mut() else {
            if let Some(ticket) = ticket.take() {
                table.leave(ticket);
            }
            return Poll::Ready((buffer.take(), Err(OpError::NotSent { node })));
        };
        let is_transfer = matches!(self.op, Op::Read | Op::Write);
        if is_transfer && buffer.as_ref().is_some_and(|buffer| buffer.len() > MAX_TRANSFER_BYTES) {
            return Poll::Ready((buffer.take(), Err(OpError::Refused(Refusal::TooLong))));
        }
        let mut posted = Posted {
            slot: NO_SLOT,
            op: self.op,
            region: self.target.region.index,
            epoch: self.target.epoch,
            offset: self.target.offset,
            local: buffer.as_ref().map_or(LocalSlice::NONE, ArenaBuf::as_local),
            fence: self.fence,
        };
        if let Some(outcome) = link.run_now(&posted) {
            if let Some(ticket) = ticket.take() {
                table.leave(ticket);
            }
            return completed_at_once(shared, table, node, buffer.take(), outcome);
        }
        if !table.admit(1, ticket, context.waker()) {
            return Poll::Pending;
        }
        posted.slot = table.take_place();
        let link = table.queues[index].link.as_mut().expect("checked above");
        let outcome = link.post(posted);
        let buffer = buffer.take();
        match outcome {
            Some(outcome) => {
                table.return_place(posted.slot);
                completed_at_once(shared, table, node, buffer, outcome)
            }
            None => {
                // Moving the handle does not move the bytes whose address the link knows.
                let deadline_ns = shared.deadline_from_now();
                table.launch(posted.slot, index, deadline_ns, context.waker().clone(), buffer);
                self.stage = Stage::Posted(posted.slot);
                Poll::Pending
            }
        }
    }
}

fn completed_at_once(
    shared: &Shared,
    table: &mut Table,
    node: NodeId,
    buffer: Option<ArenaBuf>,
    outcome: Outcome,
) -> Poll<Output> {
    if table.note_completed_at_once(1) {
        table.poll(shared.clock.now_ns());
    }
    Poll::Ready((buffer, to_result(node, outcome)))
}

impl Drop for Operating<'_> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Unposted(_, Some(ticket)) => self.queue.endpoint.shared.table.borrow_mut().leave(ticket),
            Stage::Posted(slot) => self.queue.endpoint.shared.table.borrow_mut().abandon(slot),
            Stage::Unposted(_, None) | Stage::Finished => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::fakes::{at, queues};

    #[test]
    fn operations_that_complete_at_once_leave_other_queues_their_turns_and_deadlines() {
        let [(at_once, busy), (never, slow)] = queues();
        at_once.at_once.set(u32::MAX);
        let mut waiting = Box::pin(slow.detach(at(2, 0).region, Epoch(1)));
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        for _ in 0..1000 {
            let mut done = Box::pin(busy.detach(at(1, 0).region, Epoch(1)));
            assert!(done.as_mut().poll(&mut context).is_ready());
        }
        assert!(never.polls.get() > 0, "nothing would have been sent");
        assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Ready(Err(OpError::Unknown { .. }))));
    }
}
