//! Sessions that prepare transactions and abandon them. These use counts of their slot and leave no trace in
//! far memory.

use farpool_txn::{CommitError, ReadError, Session, Table, Worker};

use super::broken::Chosen;
use super::{FAR_TO_THE_EDGE, TIMESTAMP_BITS};

/// Transactions to abandon, at most: the edge may be so far away, and others of the slot commit meanwhile.
const MOST: u64 = FAR_TO_THE_EDGE + 20;

/// Prepares and abandons transactions until the slot gives out counts of its next generation. If that is far
/// away, prepares only one.
pub(super) async fn use_up_counts(worker: &Worker<Chosen>, table: &Table) -> Result<(), String> {
    let mut session = Session::new();
    for _ in 0..MOST {
        let begun = worker.begin(&mut session).await;
        let mut transaction = begun.map_err(|error| error.to_string())?;
        match transaction.write(table, 0, None).await {
            Ok(_) => {}
            // Like a transaction that does nothing else, the write is not tried again.
            Err(ReadError::Conflict | ReadError::RingFull | ReadError::NoSpace { .. }) => continue,
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
            Ok(None) | Err(CommitError::Busy) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}
