//! Violations of snapshot isolation, with the names of the literature where there are any.

use super::history::Record;

/// A violation of snapshot isolation in a history. Numbers of transactions are their places in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// Long fork.
    #[error("transactions {one} and {other} began from cuts, and neither cut sees all that the other sees")]
    CrossingCuts {
        /// One of them.
        one: usize,
        /// The other.
        other: usize,
    },
    /// A cut that is not a consistent snapshot (observed transaction vanishes, PMP).
    #[error(
        "the cut of transaction {by} sees transaction {of}, but not all that transaction {of} began from"
    )]
    CutWithoutCause {
        /// The transaction that began from the cut.
        by: usize,
        /// The transaction that the cut sees.
        of: usize,
    },
    /// Two commits have the same version.
    #[error("transactions {one} and {other} were committed as the same version")]
    SameVersion {
        /// One of them.
        one: usize,
        /// The other.
        other: usize,
    },
    /// P4.
    #[error(
        "transactions {one} and {other} replaced the same version of record {record}: one update is lost"
    )]
    LostUpdate {
        /// One of them.
        one: usize,
        /// The other.
        other: usize,
        /// The record.
        record: Record,
    },
    /// Validation missed a conflict.
    #[error("transaction {by} replaced a version of record {record} that its cut does not see")]
    ReplacedUnseen {
        /// The transaction.
        by: usize,
        /// The record.
        record: Record,
    },
    /// G0, or a write on top of one that was never committed.
    #[error("the versions of record {record} do not follow each other")]
    BrokenChain {
        /// The record.
        record: Record,
    },
    /// G1a.
    #[error("transaction {by} read a version of record {record} that was never committed")]
    DirtyRead {
        /// The transaction.
        by: usize,
        /// The record.
        record: Record,
    },
    /// G1b, or bytes of several versions.
    #[error("transaction {by} read a value of record {record} that the version it found did not write")]
    WrongValue {
        /// The transaction.
        by: usize,
        /// The record.
        record: Record,
    },
    /// G1c and G-single, from one side.
    #[error("transaction {by} read a version of record {record} that its cut does not see")]
    ReadFromTheFuture {
        /// The transaction.
        by: usize,
        /// The record.
        record: Record,
    },
    /// G-single from the other side: a commit is seen in part.
    #[error("transaction {by} read a version of record {record} though its cut sees a later one")]
    StaleRead {
        /// The transaction.
        by: usize,
        /// The record.
        record: Record,
    },
    /// A session misses its own commit, or begins from an older cut than before.
    #[error("transaction {after} does not see what transaction {before} of the same session saw or did")]
    SessionWentBack {
        /// The earlier one.
        before: usize,
        /// The later one.
        after: usize,
    },
}
