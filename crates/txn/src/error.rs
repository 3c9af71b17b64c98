//! Why a transaction cannot go on: one variant for each thing that its caller can do about it.

use farpool_wire::Version;

use crate::memory::MemoryError;

/// Why a transaction did not begin.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// No cut to begin from came in time, or the fetch thread has ended: the publisher has to be recovered.
    #[error("the oracle publishes nothing that this session can begin from")]
    OracleStopped,
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a record cannot be read, or taken to be written.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Begin again: another transaction has written the record since this one's snapshot.
    #[error("a record was written by another transaction since this one began")]
    Conflict,
    /// Begin again: the version that the snapshot needs is not kept any more. That does not happen to a
    /// worker that [announces](crate::Worker::announcing) itself, unless it is declared dead.
    #[error("the snapshot is too old: a version that it needs is not kept any more")]
    SnapshotTooOld,
    /// The table has no such record.
    #[error("there is no record {0} in this table")]
    OutOfRange(u64),
    /// Data of another length than the table's records have.
    #[error("{found} bytes were given for a record of {wanted}")]
    WrongSize {
        /// The length of the table's records.
        wanted: usize,
        /// The length of what was given.
        found: usize,
    },
    /// Give a shorter payload, or make the table for longer ones.
    #[error("the payload has {found} bytes, and this table takes {most} at most")]
    TooLong {
        /// The longest payload that the table has room for.
        most: usize,
        /// The length of what was given.
        found: usize,
    },
    /// Begin again later, when other payloads were deleted or snapshots have ended, or make the table larger.
    /// Nothing of the payload was written.
    #[error("the table's slab has no room for a payload of {bytes} bytes")]
    NoSpace {
        /// The length of the payload.
        bytes: usize,
    },
    /// The bytes there are those of no version: memory was damaged.
    #[error("memory was damaged: a record holds what no transaction has written")]
    Damaged,
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a transaction was not committed.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Begin again: nothing of this transaction is left.
    #[error("another transaction was first to write one of the records")]
    Conflict,
    /// Begin again later: too many commits of this slot are in flight.
    #[error("too many commits are in flight: begin again later")]
    Busy,
    /// Begin again in a moment: no part of the slot's log is free that is large enough. A snapshot may need
    /// the versions there, or their commits are in flight.
    #[error(
        "the log has no room: open snapshots or commits in flight need what is there; begin again in a moment"
    )]
    LogFull,
    /// Commit several smaller transactions: one must not take so much of the slot's log, or of the thread's
    /// buffers.
    #[error("the transaction takes {bytes} bytes of {of}, and may take {most}: commit several smaller ones")]
    TooLarge {
        /// Of what it would take too much.
        of: &'static str,
        /// How much it would take.
        bytes: u64,
        /// How much one may take: about half of the log, and no more than one transfer has; or three quarters
        /// of the buffers.
        most: u64,
    },
    /// Use a worker of another slot: the outcome of an earlier commit of this one is unknown, and nothing is
    /// committed after it.
    #[error("an earlier commit of this worker is in doubt")]
    Stuck,
    /// Nothing of it has taken effect: far memory does not answer.
    #[error("nothing was committed: {0}")]
    Nothing(MemoryError),
    /// The outcome is unknown until this worker's slot has been recovered.
    #[error("commit {0} is in doubt: it may have taken effect or not")]
    Unknown(Version),
}

/// Why a slot cannot be given up.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// Try again when they have ended.
    #[error("commits of this slot are in flight")]
    InFlight,
    /// Have the slot recovered: the outcome of a commit is unknown, or that of writing a payload.
    #[error("a commit of this slot, or a write, is in doubt")]
    Stuck,
    /// Have the slot recovered: far memory does not answer.
    #[error(transparent)]
    Memory(MemoryError),
}
