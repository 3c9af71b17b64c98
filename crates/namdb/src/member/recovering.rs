//! The recoverer among a member's parts: it watches the other members, evicts those that have died, and rolls
//! back their commits.
//!
//! It is a future of its own with its own queues to far memory, because a fence asks a node by gRPC and may
//! take seconds, and a recovery may have much to roll back. The member's other parts go on meanwhile. Waiting
//! for a fence counts as progress until the fence's deadline.

use std::pin::pin;

use farpool_fabric::Endpoint;
use farpool_pool::GrantError;
use farpool_txn::membership::{Duty, LaterGrant, Recoverable, SeatRecoveryError, SeatWatch};
use farpool_txn::{DatabaseAt, Memory};
use farpool_wire::{Epoch, RegionId};
use futures_util::future::{Either, select};

use super::{BEATS, MemberCore};
use crate::environment::{Environment, News};
use crate::error::DatabaseError;

impl<E: Environment> MemberCore<E> {
    /// Recovers the seats of silent members until this one has ended.
    pub(super) async fn recover_others(&self, memory: &Memory, duty: &Duty) -> Result<(), DatabaseError> {
        let recoverer = Recoverer { member: self, duty, endpoint: memory.endpoint() };
        duty.run(memory, self.patience / BEATS, recoverer.watch(memory)).await
    }
}

struct Recoverer<'a, E> {
    member: &'a MemberCore<E>,
    duty: &'a Duty,
    endpoint: &'a Endpoint,
}

impl<E: Environment> Recoverer<'_, E> {
    /// Watches the seats. While this member lives and recovers a seat, no other member recovers it.
    async fn watch(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let member = self.member;
        let mut watch = SeatWatch::<_, E::Rules>::new(memory, self, member.seat, member.patience);
        let has_ended = self.duty.rounds(|| member.has_ended());
        while !has_ended() {
            // While a node is stopped, members that reach it over a network cannot send heartbeats, though a
            // member that maps its memory can still read their seats. So seats are not read then: only what
            // was read counts as silence ([`Watch`](farpool_txn::membership)).
            if member.environment.nodes_answer() {
                watch
                    .look(|slot, outcome| match outcome {
                        Ok(Some(recovered)) => {
                            member.environment.report(News::Recovered(slot, recovered.rolled_back.len()));
                        }
                        Ok(None) => {}                     // another recoverer does it
                        Err(_) if member.has_ended() => {} // another recoverer will
                        Err(error) => member.environment.report(News::RecoveryFailed(slot, &error)),
                    })
                    .await?;
            }
            member.pause(self.endpoint, member.patience / BEATS).await;
        }
        Ok(())
    }

    /// Waits until this member has ended.
    async fn until_end(&self) {
        while !self.member.has_ended() {
            self.endpoint.sleep(self.member.timing().role_pause).await;
        }
    }
}

impl<E: Environment> Recoverable for Recoverer<'_, E> {
    type FenceError = GrantError;

    fn at(&self) -> DatabaseAt<'_> {
        self.member.at()
    }

    async fn open_later_regions(&self, memory: &Memory) -> Result<(), SeatRecoveryError<GrantError>> {
        let (within, pause) = (self.member.timing().catalog_timeout, self.member.patience / BEATS);
        let opening = self.member.open_later_regions(memory);
        self.duty.wait(self.endpoint, within, pause, opening).await.map_err(|error| match error {
            DatabaseError::Memory(error) => error.into(),
            DatabaseError::Grant(error) => SeatRecoveryError::Fence(error),
            error => SeatRecoveryError::Regions(error.to_string()),
        })
    }

    async fn fence(&self, region: usize, grant: Epoch) -> Result<(), GrantError> {
        self.fence_region(self.member.layout.regions[region], grant).await
    }

    async fn fence_later(&self, place: u16, grant: LaterGrant) -> Result<(), GrantError> {
        // If the place is in another round, the region was given back, and nobody has anything there (R3).
        let region = self.member.later.read().region(place, grant.round);
        match region {
            Some(region) => self.fence_region(region, grant.epoch).await,
            None => Ok(()),
        }
    }
}

impl<E: Environment> Recoverer<'_, E> {
    /// A member that leaves does not wait for the fence that it asked for. If the fence is carried out later,
    /// it still evicts only the member that it was meant for.
    async fn fence_region(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        let (deadline, pause) = (self.member.timing().fence_deadline, self.member.patience / BEATS);
        let fencing = self.member.environment.fence_grant(region, grant);
        let waiting = self.duty.wait(self.endpoint, deadline, pause, fencing);
        match select(pin!(waiting), pin!(self.until_end())).await {
            Either::Left((fenced, _)) => fenced,
            Either::Right(_) => {
                let reason = "this compute server leaves, and another one continues the recovery".to_owned();
                Err(GrantError::NoAnswer { node: region.node, reason })
            }
        }
    }
}
