//! The collector among a member's parts: it publishes which versions no snapshot needs.

use farpool_txn::Memory;
use farpool_txn::horizon::collect;
use farpool_txn::membership::{Duty, Role, fill_role};

use super::{BEATS, MemberCore};
use crate::environment::Environment;
use crate::error::DatabaseError;

impl<E: Environment> MemberCore<E> {
    /// Collects, while no other member does.
    pub(super) async fn collect_if_role_is_free(
        &self,
        memory: Memory,
        duty: &Duty,
    ) -> Result<(), DatabaseError> {
        let (at, oracle, horizon) = (self.at().members(), self.at().oracle(), self.at().horizon());
        let timing = self.timing();
        let work = async || {
            let has_ended = duty.rounds(|| self.has_ended());
            Ok(collect::<E::Rules>(&memory, &oracle, &horizon, timing.collect_pauses, has_ended).await?)
        };
        let role = (Role::Collector, self.seat.claim);
        let collected = fill_role(&memory, &at, role, timing.role_pause, || self.has_ended(), work);
        duty.run(&memory, self.patience / BEATS, collected).await
    }
}
