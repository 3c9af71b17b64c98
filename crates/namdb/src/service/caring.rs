//! The carer among a member's threads: it watches the other members, shuts out those that have died, and
//! rolls back what they left.
//!
//! It has its own thread and its own queues to far memory, because a fence asks a node by gRPC and may take
//! seconds, and a recovery may have much to undo. The member's other threads go on beating meanwhile. Waiting
//! for a fence counts as progress until the fence's deadline.

use std::ops::Range;
use std::pin::pin;

use farpool_fabric::{Endpoint, block_on};
use farpool_pool::{FENCE_DEADLINE, GrantError};
use farpool_txn::horizon::HorizonAt;
use farpool_txn::log::LogAt;
use farpool_txn::membership::{Duty, Lookout, MembersAt, Premises};
use farpool_txn::{Memory, Oracle, Shipped};
use farpool_wire::{Epoch, Slot};
use futures_util::future::{Either, select};

use super::{BEATS, ROLE_PAUSE, pause, show_pause};
use crate::database::Shared;
use crate::error::DatabaseError;

/// Looks after the other members until this member's part has ended.
pub(super) fn look_after_others(shared: &Shared, duty: &Duty) -> Result<(), DatabaseError> {
    let memory = shared.memory()?;
    let carer = Carer { shared, duty, endpoint: memory.endpoint().clone() };
    block_on(&carer.endpoint, duty.does(&memory, show_pause(shared), carer.look(&memory)))
}

/// The database, as its carer knows it.
struct Carer<'a> {
    shared: &'a Shared,
    duty: &'a Duty,
    endpoint: Endpoint,
}

impl Carer<'_> {
    /// Watches the seats. While this member lives and looks after a seat, no other member looks after that
    /// seat.
    async fn look(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let shared = self.shared;
        let mut lookout = Lookout::<_, Shipped>::new(memory, self, shared.seat, shared.patience);
        let is_over = self.duty.rounds(|| shared.is_over());
        while !is_over() {
            // While a node is stopped, members that reach it over a network cannot beat, though a member that
            // maps its memory can still read their seats. So seats are not read then: only what was read
            // counts as silence ([`Watch`](farpool_txn::membership)).
            if shared.leases.are_answered() {
                lookout
                    .look(|slot, cared| match cared {
                        Ok(Some(recovered)) => {
                            let (slot, undone) = (slot.index(), recovered.rolled_back.len());
                            tracing::warn!(
                                slot,
                                undone,
                                "a compute server was silent for too long and was shut out"
                            );
                        }
                        Ok(None) => {}                   // another carer does it
                        Err(_) if shared.is_over() => {} // another carer will
                        Err(error) => {
                            let slot = slot.index();
                            tracing::error!(slot, %error, "cannot shut out a silent compute server yet; trying again");
                        }
                    })
                    .await?;
            }
            pause(&self.endpoint, shared, shared.patience / BEATS).await;
        }
        Ok(())
    }

    /// Waits until this member's part has ended.
    async fn until_end(&self) {
        while !self.shared.is_over() {
            self.endpoint.sleep(ROLE_PAUSE).await;
        }
    }
}

impl Premises for Carer<'_> {
    type FenceError = GrantError;

    fn members(&self) -> MembersAt {
        self.shared.at().members()
    }

    fn oracle(&self) -> Oracle {
        self.shared.at().oracle()
    }

    fn horizon(&self) -> HorizonAt {
        self.shared.at().horizon()
    }

    fn workers(&self, slot: Slot) -> Range<u16> {
        self.shared.plan.workers(slot)
    }

    fn log(&self, slot: Slot) -> LogAt {
        self.shared.at().log(slot)
    }

    /// A member that leaves does not wait for its fence. Carried out later, the fence still shuts out only
    /// the member that it was meant for.
    async fn fence(&self, region: usize, grant: Epoch) -> Result<(), GrantError> {
        let region = self.shared.grants[region].region;
        let fencing = self.shared.leases.fence_grant(region, grant);
        let waiting = self.duty.waits(&self.endpoint, FENCE_DEADLINE, show_pause(self.shared), fencing);
        match select(pin!(waiting), pin!(self.until_end())).await {
            Either::Left((fenced, _)) => fenced,
            Either::Right(_) => {
                let reason = "this compute server leaves, and another one goes on".to_owned();
                Err(GrantError::NoAnswer { node: region.node, reason })
            }
        }
    }
}
