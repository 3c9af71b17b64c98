//! Transactions of nothing but timestamps (paper 3, section 7.2: *t-trx*): they measure the oracle by itself.

use farpool_wire::Version;

use super::{SessionState, Worker};
use crate::cut::Cut;
use crate::error::{BeginError, CommitError};
use crate::rules::Rules;

/// A timestamp transaction that has finished.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamped {
    /// The cut from which it began.
    pub begun_from: Cut,
    /// The version as which it was committed.
    pub version: Version,
}

/// Why a timestamp transaction was not committed.
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
    /// Begins, takes a commit timestamp, and raises the watermark: all of a transaction except its records.
    /// The session does not go back, and does not wait until its commit is published.
    ///
    /// # Errors
    /// As [`begin`](Self::begin) and [`commit`](crate::Transaction::commit).
    pub async fn stamp(&self, session: &mut SessionState) -> Result<Stamped, StampError> {
        let begun_from = self.snapshot(session).await?.cut;
        let mut commit = self.begin_commit(0)?;
        let version = commit.version();
        if !commit.finish().await {
            return Err(CommitError::Unknown(version).into());
        }
        Ok(Stamped { begun_from, version })
    }
}
