//! What it means for a compute server that something of it has failed, said in the same words by whatever finds it.

use std::time::Duration;

use farpool_fabric::{Endpoint, OpError, Uncertain};
use farpool_pool::GrantError;
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{BeginError, MemoryError};

use crate::database::Shared;
use crate::error::{DatabaseError, Ended, TxError};
use crate::service::{BEATS, IN_DOUBT};

/// Between two looks at whether this process was shut out.
const EXPLAIN_PAUSE: Duration = Duration::from_millis(5);

/// What it means that far memory has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    /// This process was shut out, unless it has given up something half-way itself.
    ShutOut,
    /// A queue is of no use any more.
    Lost,
    Other,
}

impl Trouble {
    fn of(error: &MemoryError) -> Trouble {
        match error {
            MemoryError::Failed(
                OpError::Refused(_) | OpError::Unknown { cause: Uncertain::EpochMoved, .. },
            ) => Trouble::ShutOut,
            MemoryError::Failed(OpError::Unknown { .. } | OpError::NotSent { .. }) => Trouble::Lost,
            MemoryError::NotConnected(_) | MemoryError::Short(_) => Trouble::Other,
        }
    }
}

/// The trouble with far memory that an error comes from.
fn memory_error(error: &DatabaseError) -> Option<&MemoryError> {
    match error {
        DatabaseError::Memory(error)
        | DatabaseError::Begin(BeginError::Memory(error))
        | DatabaseError::Recovery(RecoveryError::Memory(error)) => Some(error),
        _ => None,
    }
}

/// Ends the process's part in the database: something of it has failed. What that finds is seldom the reason itself; where it was shut
/// out, it says so.
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
    /// What a failure comes from, where that can be told: a process that was shut out is refused first, and knows a little later.
    pub(crate) async fn explained(&self, endpoint: &Endpoint, error: DatabaseError) -> DatabaseError {
        let Some(trouble) = memory_error(&error).map(Trouble::of) else { return error };
        let give_up_at = endpoint.now_ns() + self.patience_with(trouble).as_nanos() as u64;
        while !self.is_over() && endpoint.now_ns() < give_up_at {
            endpoint.sleep(EXPLAIN_PAUSE).await;
        }
        self.explain(trouble, error)
    }

    /// The same, for whoever has no way to far memory.
    pub(crate) fn explained_here(&self, error: DatabaseError) -> DatabaseError {
        let Some(trouble) = memory_error(&error).map(Trouble::of) else { return error };
        let give_up_at = std::time::Instant::now() + self.patience_with(trouble);
        while !self.is_over() && std::time::Instant::now() < give_up_at {
            std::thread::sleep(EXPLAIN_PAUSE);
        }
        self.explain(trouble, error)
    }

    /// The same for what a transaction has met.
    pub(crate) async fn explained_tx(&self, endpoint: &Endpoint, error: TxError) -> TxError {
        match error {
            TxError::Memory(error) => told(self.explained(endpoint, error.into()).await),
            // That is known before its reason.
            TxError::Ended(Ended::Failed(doubt)) if doubt == IN_DOUBT => {
                self.learns_why(endpoint).await;
                TxError::Ended(self.check().err().unwrap_or(Ended::Failed(doubt)))
            }
            error => error,
        }
    }

    /// Waits until the service threads have found out why something of this process has failed, if they do.
    pub(crate) async fn learns_why(&self, endpoint: &Endpoint) {
        let give_up_at = endpoint.now_ns() + self.patience_with(Trouble::Lost).as_nanos() as u64;
        while !self.is_over() && endpoint.now_ns() < give_up_at {
            endpoint.sleep(EXPLAIN_PAUSE).await;
        }
    }

    fn patience_with(&self, trouble: Trouble) -> Duration {
        match trouble {
            Trouble::ShutOut => self.patience,
            // Others find that, too, and may know why.
            Trouble::Lost => self.patience / BEATS * 2,
            Trouble::Other => Duration::ZERO,
        }
    }

    fn explain(&self, trouble: Trouble, error: DatabaseError) -> DatabaseError {
        match (trouble, self.check()) {
            (_, Err(ended)) => DatabaseError::Ended(ended),
            // Nobody knows what may still land, and nothing of it does once the others have shut this process out.
            (Trouble::Lost, Ok(())) => {
                failed(self, error);
                DatabaseError::Ended(self.ended())
            }
            (_, Ok(())) => error,
        }
    }
}

/// As whoever runs transactions is told of it.
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
