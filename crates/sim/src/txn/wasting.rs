//! Sessions that prepare transactions and abandon them. Such a transaction uses a count of its slot and
//! leaves no trace in far memory.

use farpool_txn::{CommitError, ReadError, SessionState, Table, Worker};

use super::broken::Chosen;
use super::{FAR_TO_THE_EDGE, TIMESTAMP_BITS};

/// The most transactions to begin: as many as it takes to reach the edge, and some more, because some prepare
/// nothing.
const MOST: u64 = FAR_TO_THE_EDGE + 20;

/// Prepares and abandons transactions until the slot gives out counts of its next generation. If the edge is
/// farther than [`FAR_TO_THE_EDGE`], prepares only one.
pub(super) async fn use_up_counts(worker: &Worker<Chosen>, table: &Table) -> Result<(), String> {
    let mut session = SessionState::new();
    for _ in 0..MOST {
        let begun = worker.begin(&mut session).await;
        let transaction = begun.map_err(|error| error.to_string())?;
        match transaction.write(table, 0, None).await {
            Ok(_) => {}
            // The write is not tried again: the next transaction begins.
            Err(ReadError::Conflict | ReadError::NoSpace { .. }) => continue,
            Err(ReadError::SnapshotTooOld | ReadError::Damaged) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        match transaction.prepare() {
            Ok(Some(prepared)) => {
                let timestamp = prepared.version().count() % (1 << TIMESTAMP_BITS);
                if (1 << TIMESTAMP_BITS) - timestamp > FAR_TO_THE_EDGE {
                    return Ok(());
                }
            }
            Ok(None) | Err(CommitError::Busy | CommitError::LogFull) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}
