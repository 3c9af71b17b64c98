//! Memory that no table needs any more. The collector frees it, since dropped tables are to be cleared once
//! the horizon has their drop.

use std::sync::atomic::Ordering;

use farpool_txn::Memory;
use farpool_txn::membership::{Role, role_of};

use super::MemberCore;
use crate::catalog::{Turn, Waste, look_for_waste, tidy};
use crate::environment::Environment;
use crate::error::DatabaseError;

/// If nothing could be freed, the next pause is twice as long, up to this many times the first one: each try
/// uses up a generation of the catalog's slot.
const MOST_PAUSES: u32 = 64;
/// A region without tables goes back to the pool after so many pauses, if nothing else is to be freed: a
/// database leases more regions than it needs at once.
const PAUSES_EMPTY: u32 = 64;

impl<E: Environment> MemberCore<E> {
    /// Frees memory while this member is the collector, until it has ended.
    pub(super) async fn free_memory(&self, memory: &Memory) -> Result<(), DatabaseError> {
        let (endpoint, members, first) = (memory.endpoint(), self.at().members(), self.timing().tidy_pause);
        let (mut pause, mut empty_since_ns) = (first, None);
        while !self.has_ended() {
            self.pause(endpoint, pause).await;
            let collects = role_of(memory, &members, Role::Collector).await? == Some(self.seat.claim);
            let found = if collects { look_for_waste(self, memory).await? } else { Waste::default() };
            let now_ns = endpoint.now_ns();
            empty_since_ns = found.has_empty_region.then(|| empty_since_ns.unwrap_or(now_ns));
            let long_ns = (first * PAUSES_EMPTY).as_nanos() as u64;
            let is_long_empty = empty_since_ns.is_some_and(|since| now_ns - since > long_ns);
            if !found.can_be_freed && !is_long_empty {
                pause = first;
                continue;
            }
            // Before it is checked that the member has not ended: see `has_ended_publishing`.
            self.frees_memory.store(true, Ordering::SeqCst);
            let freed = match Turn::wait_for(self, endpoint).await {
                Ok(turn) => tidy(turn, self, endpoint, is_long_empty).await,
                Err(ended) => Err(ended),
            };
            self.frees_memory.store(false, Ordering::SeqCst);
            if let Err(error) = &freed {
                tracing::debug!(%error, "cannot free the memory of dropped tables yet");
            }
            let next = if freed.is_ok() && found.can_be_freed { first } else { pause * 2 };
            pause = next.min(first * MOST_PAUSES);
        }
        Ok(())
    }

    /// Whether this member publishes no more: it has ended, and its main part waits for no publication.
    /// (Either this finds that the main part frees memory, or the main part finds that the member has ended,
    /// and begins nothing.)
    pub(super) fn has_ended_publishing(&self) -> bool {
        self.has_ended() && !self.frees_memory.load(Ordering::SeqCst)
    }
}
