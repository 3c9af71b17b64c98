//! One operation, from before it is posted to its outcome.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use farpool_wire::{Epoch, RegionId, RemoteAddr};

use super::queue::{Queue, to_result};
use super::{Shared, Table};
use crate::arena::ArenaBuf;
use crate::op::OpError;
use crate::seam::{LocalSlice, Op, Posted};

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
    /// With the ticket of who waits for a place.
    Unposted(Option<ArenaBuf>, Option<u64>),
    Posted(u32),
    Over,
}

impl<'a> Operating<'a> {
    pub(super) fn new(
        queue: &'a Queue,
        op: Op,
        target: Target,
        buffer: Option<ArenaBuf>,
        fence: bool,
    ) -> Self {
        // Also in production: another node may have lent a region of the same number under the same epoch.
        assert_eq!(target.region.node, queue.node, "an address of another node");
        Operating { queue, op, target, fence, stage: Stage::Unposted(buffer, None) }
    }
}

impl Future for Operating<'_> {
    type Output = Output;

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
            Stage::Over => panic!("polled after its outcome"),
        };
        if result.is_ready() {
            this.stage = Stage::Over;
        }
        result
    }
}

impl Operating<'_> {
    fn post(&mut self, shared: &Shared, table: &mut Table, context: &mut Context<'_>) -> Poll<Output> {
        let Stage::Unposted(buffer, ticket) = &mut self.stage else { unreachable!("the caller looked") };
        let Queue { index, node, .. } = *self.queue;
        if table.queues[index].link.is_none() {
            if let Some(ticket) = ticket.take() {
                table.leave(ticket);
            }
            return Poll::Ready((buffer.take(), Err(OpError::NotSent { node })));
        }
        if !table.admit(1, ticket, context.waker()) {
            return Poll::Pending;
        }
        let slot = table.take_place();
        let link = table.queues[index].link.as_mut().expect("checked above");
        let outcome = link.post(Posted {
            slot,
            op: self.op,
            region: self.target.region.index,
            epoch: self.target.epoch,
            offset: self.target.offset,
            local: buffer.as_ref().map_or(LocalSlice::NONE, ArenaBuf::as_local),
            fence: self.fence,
        });
        let buffer = buffer.take();
        match outcome {
            Some(outcome) => {
                table.return_place(slot);
                Poll::Ready((buffer, to_result(node, outcome)))
            }
            None => {
                // Moving the handle does not move the bytes that the link was told of.
                table.launch(slot, index, shared.deadline_from_now(), context.waker().clone(), buffer);
                self.stage = Stage::Posted(slot);
                Poll::Pending
            }
        }
    }
}

impl Drop for Operating<'_> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Unposted(_, Some(ticket)) => self.queue.endpoint.shared.table.borrow_mut().leave(ticket),
            Stage::Posted(slot) => self.queue.endpoint.shared.table.borrow_mut().abandon(slot),
            Stage::Unposted(_, None) | Stage::Over => {}
        }
    }
}
