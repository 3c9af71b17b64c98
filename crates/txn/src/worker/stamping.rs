//! Transactions of nothing but timestamps (paper 3, section 7.2: *t-trx*): what an oracle bears by itself.

use farpool_wire::Version;

use super::{Session, Worker};
use crate::cut::Cut;
use crate::error::{BeginError, CommitError};
use crate::rules::Rules;

/// A timestamp transaction that is over.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamped {
    /// From which it began.
    pub begun_from: Cut,
    /// As which it was committed.
    pub version: Version,
}

/// Why one was not.
#[derive(Debug, thiserror::Error)]
pub enum StampError {
    /// It has not begun.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// It was not committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl<R: Rules> Worker<R> {
    /// Begins, takes a commit timestamp, and shows it: all of a transaction but its records. The session does
    /// not go back, and does not wait for the publication of what it has stamped.
    ///
    /// # Errors
    /// As [`begin`](Self::begin) and [`commit`](crate::Transaction::commit).
    pub async fn stamp(&self, session: &mut Session) -> Result<Stamped, StampError> {
        let begun_from = self.snapshot(session).await?.cut;
        let mut under_way = self.begin_commit(0)?;
        let version = under_way.version();
        if !under_way.finish().await {
            return Err(CommitError::Unknown(version).into());
        }
        Ok(Stamped { begun_from, version })
    }
}
