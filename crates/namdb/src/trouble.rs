//! What a failure means for a compute server, in the same words wherever it is noticed.

use std::time::Duration;

use farpool_fabric::{Endpoint, OpError, Uncertain};
use farpool_pool::GrantError;
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{BeginError, MemoryError};
use farpool_wire::Refusal;

use crate::database::Shared;
use crate::error::{DatabaseError, Ended, TxError};
use crate::service::{BEATS, IN_DOUBT};

/// The interval of checks whether this process was shut out.
const EXPLAIN_PAUSE: Duration = Duration::from_millis(5);

/// What a failure of far memory means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    /// This process was shut out, unless it has itself given something up half-way.
    ShutOut,
    /// A queue can no longer be used.
    Lost,
    Other,
}

impl Trouble {
    fn of(error: &MemoryError) -> Trouble {
        match error {
            MemoryError::Failed(
                OpError::Refused(Refusal::StaleEpoch | Refusal::NotAttached | Refusal::WrongKey)
                | OpError::Unknown { cause: Uncertain::EpochMoved, .. },
            ) => Trouble::ShutOut,
            MemoryError::Failed(OpError::Refused(_)) => Trouble::Other,
            MemoryError::Failed(OpError::Unknown { .. } | OpError::NotSent { .. }) => Trouble::Lost,
            MemoryError::NotConnected(_) | MemoryError::Short(_) => Trouble::Other,
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

/// Ends the process's part in the database after a failure. What fails first is seldom the cause; if the
/// process was shut out, the error says so.
pub(crate) fn failed(shared: &Shared, error: DatabaseError) -> DatabaseError {
    let is_refused = matches!(memory_error(&error), Some(found) if Trouble::of(found) == Trouble::ShutOut);
    shared.end(match (shared.leases.lost().first(), is_refused) {
        (Some(region), _) => Ended::LeaseEnded(*region),
        (None, true) => Ended::TakenForDead,
        (None, false) => Ended::Failed(error.to_string()),
    });
    match shared.ended() {
        Ended::Failed(_) => error,
        ended => DatabaseError::Ended(ended),
    }
}

impl Shared {
    /// Replaces an error by its cause, where that is known: a process that was shut out is refused first, and
    /// learns the reason a little later.
    pub(crate) async fn explained(&self, endpoint: &Endpoint, error: DatabaseError) -> DatabaseError {
        let Some(trouble) = memory_error(&error).map(Trouble::of) else { return error };
        let give_up_at = endpoint.now_ns() + self.patience_with(trouble).as_nanos() as u64;
        while !self.is_over() && endpoint.now_ns() < give_up_at {
            endpoint.sleep(EXPLAIN_PAUSE).await;
        }
        self.explain(trouble, error)
    }

    /// The same, for callers without access to far memory.
    pub(crate) fn explained_here(&self, error: DatabaseError) -> DatabaseError {
        let Some(trouble) = memory_error(&error).map(Trouble::of) else { return error };
        self.wait_for_end(self.patience_with(trouble));
        self.explain(trouble, error)
    }

    /// The same for an error of a transaction.
    pub(crate) async fn explained_tx(&self, endpoint: &Endpoint, error: TxError) -> TxError {
        match error {
            TxError::Memory(error) => told(self.explained(endpoint, error.into()).await),
            // The doubt is known before its cause.
            TxError::Ended(Ended::Failed(doubt)) if doubt == IN_DOUBT => {
                self.learns_why(endpoint).await;
                TxError::Ended(self.check().err().unwrap_or(Ended::Failed(doubt)))
            }
            error => error,
        }
    }

    /// Waits until the service threads know why something of this process has failed, for a limited time.
    pub(crate) async fn learns_why(&self, endpoint: &Endpoint) {
        let give_up_at = endpoint.now_ns() + self.patience_with(Trouble::Lost).as_nanos() as u64;
        while !self.is_over() && endpoint.now_ns() < give_up_at {
            endpoint.sleep(EXPLAIN_PAUSE).await;
        }
    }

    fn patience_with(&self, trouble: Trouble) -> Duration {
        match trouble {
            Trouble::ShutOut => self.patience,
            // Other threads find that, too, and may know the cause.
            Trouble::Lost => self.patience / BEATS * 2,
            Trouble::Other => Duration::ZERO,
        }
    }

    fn explain(&self, trouble: Trouble, error: DatabaseError) -> DatabaseError {
        match (trouble, self.check()) {
            (_, Err(ended)) => DatabaseError::Ended(ended),
            // It is unknown what may still land; once the others have shut this process out, nothing does.
            (Trouble::Lost, Ok(())) => {
                failed(self, error);
                DatabaseError::Ended(self.ended())
            }
            (_, Ok(())) => error,
        }
    }
}

/// The error as transactions return it.
pub(crate) fn told(error: DatabaseError) -> TxError {
    match error {
        DatabaseError::Memory(error)
        | DatabaseError::Begin(BeginError::Memory(error))
        | DatabaseError::Recovery(RecoveryError::Memory(error)) => TxError::Memory(error),
        DatabaseError::Ended(ended) => TxError::Ended(ended),
        DatabaseError::Grant(GrantError::LeaseLost { region }) => TxError::Ended(Ended::LeaseEnded(region)),
        error => TxError::Ended(Ended::Failed(error.to_string())),
    }
}
