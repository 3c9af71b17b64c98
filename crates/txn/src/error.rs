//! Why a transaction cannot go on: one variant for each thing that its caller may do.

use farpool_wire::Version;

use crate::memory::MemoryError;

/// Why no transaction begins.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// The publisher has to be looked after.
    #[error("the oracle publishes nothing that this session can begin from")]
    OracleStopped,
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a record cannot be read, or taken for a write.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Begin again: somebody else has written the record since the transaction's snapshot.
    #[error("a record was written by another transaction since this one began")]
    Conflict,
    /// Begin again in a moment: nothing may be written over the oldest version in the record's ring yet,
    /// since a snapshot may need it.
    #[error("the record's ring is full of versions that somebody may need")]
    RingFull,
    /// Begin again: the version that the snapshot has is not kept any more. That does not happen to a worker
    /// that [announces](crate::Worker::announcing) itself, unless it is taken for dead.
    #[error("the snapshot is too old: a version that it has is not kept any more")]
    SnapshotTooOld,
    /// The table has no such record.
    #[error("there is no record {0} in this table")]
    OutOfRange(u64),
    /// Data of another length than the table's records have.
    #[error("{found} bytes for a record of {wanted}")]
    WrongSize {
        /// What a record has.
        wanted: usize,
        /// What was given.
        found: usize,
    },
    /// Give a shorter one, or make the table for longer ones.
    #[error("a payload of {found} bytes, where the longest of the table has {most}")]
    TooLong {
        /// What the table has room for.
        most: usize,
        /// What was given.
        found: usize,
    },
    /// Begin again later, when others were deleted or snapshots have ended, or make the table larger: nothing
    /// of it was written.
    #[error("the table's slab has no room for a payload of {bytes} bytes")]
    NoSpace {
        /// What was given.
        bytes: usize,
    },
    /// The bytes there are those of no version: memory was damaged.
    #[error("a record holds what no transaction has written there")]
    Damaged,
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a transaction was not committed.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// Begin again: nothing of it is left.
    #[error("another transaction was first to write one of the records")]
    Conflict,
    /// Begin again later: so many commits of this worker are under way.
    #[error("too many commits are under way")]
    Busy,
    /// In several smaller ones: the slot's log has no room for what it writes.
    #[error("a transaction that writes {bytes} bytes with their places, where the slot's log has {most}")]
    TooLarge {
        /// What it would take in the log.
        bytes: u64,
        /// What the log has.
        most: u64,
    },
    /// By another worker: nobody knows what became of an earlier commit of this one, and it commits nothing
    /// behind it.
    #[error("an earlier commit of this worker is in doubt")]
    Stuck,
    /// Nothing of it has happened: far memory does not answer.
    #[error("nothing was committed: {0}")]
    Nothing(MemoryError),
    /// Nobody knows yet: whoever looks after this worker's slot finds out.
    #[error("nobody knows yet whether commit {0} took effect")]
    Unknown(Version),
}

/// Why a slot cannot be given up.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// Try again when it has ended.
    #[error("commits of this slot are under way")]
    UnderWay,
    /// Have the slot looked after: nobody knows what became of a commit, or of a payload that was being
    /// written.
    #[error("a commit of this slot, or a write, is in doubt")]
    Stuck,
    /// Have the slot looked after: far memory does not answer.
    #[error(transparent)]
    Memory(MemoryError),
}
