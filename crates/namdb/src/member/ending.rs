//! What a failure means for a member. Every part reports it in the same words.

use std::time::Duration;

use farpool_fabric::{Endpoint, OpError, Uncertain};
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{BeginError, MemoryError};
use farpool_wire::Refusal;

use super::living::IN_DOUBT;
use super::{BEATS, MemberCore};
use crate::environment::Environment;
use crate::error::{DatabaseError, Ended, TxError};

/// What a failure of far memory means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FailureKind {
    /// This member was evicted, unless it gave something up half-way itself.
    Evicted,
    /// A queue can no longer be used.
    Lost,
    Other,
}

impl FailureKind {
    fn of(error: &MemoryError) -> FailureKind {
        match error {
            MemoryError::Failed(
                OpError::Refused(Refusal::StaleEpoch | Refusal::NotAttached | Refusal::WrongKey)
                | OpError::Unknown { cause: Uncertain::EpochMoved, .. },
            ) => FailureKind::Evicted,
            MemoryError::Failed(OpError::Refused(_)) => FailureKind::Other,
            MemoryError::Failed(OpError::Unknown { .. } | OpError::NotSent { .. }) => FailureKind::Lost,
            MemoryError::NotConnected(_) | MemoryError::Short(_) => FailureKind::Other,
        }
    }
}

/// The error of far memory that caused an error.
fn memory_error(error: &DatabaseError) -> Option<&MemoryError> {
    match error {
        DatabaseError::Memory(error)
        | DatabaseError::Begin(BeginError::Memory(error))
        | DatabaseError::Recovery(RecoveryError::Memory(error)) => Some(error),
        _ => None,
    }
}

impl<E: Environment> MemberCore<E> {
    /// Ends the member after a failure. The first failure is seldom the cause. If the member was evicted, the
    /// returned error says so.
    pub(crate) fn end_after(&self, error: DatabaseError) -> DatabaseError {
        let is_refused =
            matches!(memory_error(&error), Some(found) if FailureKind::of(found) == FailureKind::Evicted);
        self.end(match (self.lost_region(), is_refused) {
            (Some(region), _) => Ended::LeaseEnded(region),
            (None, true) => Ended::TakenForDead,
            (None, false) => Ended::Failed(error.to_string()),
        });
        match self.end_reason() {
            Ended::Failed(_) => error,
            ended => DatabaseError::Ended(ended),
        }
    }

    /// Replaces an error by its cause, where that is known: an evicted member is refused first, and learns
    /// the reason a little later.
    pub(crate) async fn find_cause(&self, endpoint: &Endpoint, error: DatabaseError) -> DatabaseError {
        let Some(kind) = memory_error(&error).map(FailureKind::of) else { return error };
        self.wait_for_end(endpoint, self.cause_timeout(kind)).await;
        match (kind, self.check()) {
            (_, Err(ended)) => DatabaseError::Ended(ended),
            // A write may still land. Once the others have evicted this member, none does.
            (FailureKind::Lost, Ok(())) => {
                self.end_after(error);
                DatabaseError::Ended(self.end_reason())
            }
            (_, Ok(())) => error,
        }
    }

    /// The same for an error of a transaction.
    pub(crate) async fn find_cause_tx(&self, endpoint: &Endpoint, error: TxError) -> TxError {
        match error {
            TxError::Memory(error) => self.find_cause(endpoint, error.into()).await.into(),
            // A commit is known to be in doubt before the cause is known.
            TxError::Ended(Ended::Failed(doubt)) if doubt == IN_DOUBT => {
                self.wait_for_cause(endpoint).await;
                TxError::Ended(self.check().err().unwrap_or(Ended::Failed(doubt)))
            }
            error => error,
        }
    }

    /// Waits until the member's parts know why something has failed, for a limited time.
    pub(crate) async fn wait_for_cause(&self, endpoint: &Endpoint) {
        self.wait_for_end(endpoint, self.cause_timeout(FailureKind::Lost)).await;
    }

    async fn wait_for_end(&self, endpoint: &Endpoint, long: Duration) {
        let give_up_at = endpoint.now_ns() + long.as_nanos() as u64;
        while !self.has_ended() && endpoint.now_ns() < give_up_at {
            endpoint.sleep(self.timing().explain_pause).await;
        }
    }

    fn cause_timeout(&self, kind: FailureKind) -> Duration {
        match kind {
            FailureKind::Evicted => self.patience,
            // Other parts notice that, too, and may know the cause.
            FailureKind::Lost => self.patience / BEATS * 2,
            FailureKind::Other => Duration::ZERO,
        }
    }
}
