//! What snapshot isolation forbids, by the names of the literature where there are any.

use super::history::Record;

/// What a history does that snapshot isolation forbids. Numbers of transactions are their places in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// Long fork.
    #[error("transactions {one} and {other} began from cuts of which neither sees all of the other")]
    CrossingCuts {
        /// One of them.
        one: usize,
        /// The other.
        other: usize,
    },
    /// A snapshot that is none (observed transaction vanishes, PMP).
    #[error("the cut of transaction {by} sees transaction {of}, and not all that this one began from")]
    CutWithoutCause {
        /// Who began from it.
        by: usize,
        /// Whom it sees.
        of: usize,
    },
    /// Two commits have one version.
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
        /// Of what.
        record: Record,
    },
    /// Validation that did not validate.
    #[error("transaction {by} replaced a version of record {record} that its cut does not see")]
    ReplacedUnseen {
        /// Who did.
        by: usize,
        /// Of what.
        record: Record,
    },
    /// G0, or a write on top of one that never was committed.
    #[error("the versions of record {record} do not follow each other")]
    BrokenChain {
        /// Whose.
        record: Record,
    },
    /// G1a.
    #[error("transaction {by} read a version of record {record} that nobody has committed")]
    DirtyRead {
        /// Who did.
        by: usize,
        /// What.
        record: Record,
    },
    /// G1b, or bytes of several versions.
    #[error(
        "transaction {by} read something of record {record} that the version it found did not leave there"
    )]
    WrongValue {
        /// Who did.
        by: usize,
        /// What.
        record: Record,
    },
    /// G1c and G-single, from one side.
    #[error("transaction {by} read a version of record {record} that its cut does not see")]
    ReadFromTheFuture {
        /// Who did.
        by: usize,
        /// What.
        record: Record,
    },
    /// G-single from the other side; a commit of which half is seen.
    #[error("transaction {by} read a version of record {record} though its cut sees a later one")]
    StaleRead {
        /// Who did.
        by: usize,
        /// What.
        record: Record,
    },
    /// A session that misses its own commit, or an older cut than before.
    #[error("transaction {after} does not see what transaction {before} of the same session saw or did")]
    SessionWentBack {
        /// The earlier one.
        before: usize,
        /// The later one.
        after: usize,
    },
}
