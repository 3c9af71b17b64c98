//! Why something cannot be done: one variant for each thing that the caller may do.

use std::path::PathBuf;

use farpool_control::ControlError;
use farpool_pool::{GrantError, JointError};
use farpool_txn::hash::IndexError;
use farpool_txn::recovery::RecoveryError;
use farpool_txn::{BeginError, CommitError, KeyError, LayoutError, MemoryError, ReadError};
use farpool_wire::{RegionId, Version};

/// Why a database cannot be made, opened or worked on.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// Its memory is not to be had.
    #[error(transparent)]
    Leases(#[from] JointError),
    /// Mend the certificates, or the folder where they were looked for.
    #[error(transparent)]
    Credentials(#[from] ControlError),
    /// A node does not let this process in.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// Name another file, or mend its permissions.
    #[error("{}: {reason}", .file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// What the system says.
        reason: std::io::Error,
    },
    /// Remove the file.
    #[error(
        "the lease of region {region} has ended: what lay there is gone, and with it the database; remove {} to make another one",
        .file.display()
    )]
    Gone {
        /// Which names it.
        file: PathBuf,
        /// One of its regions.
        region: RegionId,
    },
    /// Name the file that `farpool db up` has written.
    #[error("{} is not the file of a database, or was damaged", .0.display())]
    NotADatabase(PathBuf),
    /// Ask for other numbers, or lend larger regions.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Try again when a compute server has gone.
    #[error("all {0} seats for compute servers are taken")]
    NoSeat(u16),
    /// Drop a client first.
    #[error("a compute server has {0} clients at most")]
    TooManyClients(u16),
    /// Nobody publishes what was committed.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// What a slot's earlier client left cannot be undone.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Raise the limits on processes and open files.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// Open it again: this process is not one of its compute servers any more.
    #[error(transparent)]
    Ended(#[from] Ended),
}

/// Why a process is not a compute server of a database any more. What it had under way was undone by the
/// others, or will be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Ended {
    /// Open the database again.
    #[error(
        "the other compute servers took this one for dead, since it was silent for too long, and shut it out"
    )]
    TakenForDead,
    /// Open the database again: that tells which it is.
    #[error(
        "the lease of region {0} could not be renewed in time: its node is gone, and with it the database; or this process was held up \
         for so long that the others have shut it out"
    )]
    LeaseEnded(RegionId),
    /// It was closed by this process.
    #[error("the database was closed")]
    Closed,
    /// Something that should not happen.
    #[error("{0}")]
    Failed(String),
}

/// Why a transaction did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// Others were first, again and again: try later.
    #[error("others were first to write what this transaction writes, again and again")]
    Conflict,
    /// A snapshot has been open for long, and the table has no room for another old version of what was to be
    /// written: end that transaction, or make the table with more overflow.
    #[error(
        "table {0} has no room for another old version of a row that an open snapshot needs: end long transactions, or make the table with \
         more overflow"
    )]
    NoRoomForVersions(String),
    /// It was given up by what it was to do, for that reason. Nothing of it is left.
    #[error("{0}")]
    RolledBack(Box<dyn std::error::Error + Send + Sync>),
    /// There is a row of that key already.
    #[error("duplicate key in table {0}")]
    Duplicate(String),
    /// There is no row of that key.
    #[error("no such key in table {0}")]
    NoSuchKey(String),
    /// A key that is longer than those for which its table was created.
    #[error("a key of table {table} takes more than {most} bytes: create the table with longer keys")]
    KeyTooLong {
        /// Which.
        table: String,
        /// What there is.
        most: usize,
    },
    /// The table has no room for another key.
    #[error("table {0} is full")]
    Full(String),
    /// A row that is larger than the rows of its table.
    #[error("a row of {found} bytes, where table {table} has {most}")]
    RowTooLarge {
        /// Which.
        table: String,
        /// What it takes.
        found: usize,
        /// What there is.
        most: usize,
    },
    /// A row that is not of the type that was asked for.
    #[error("a row of table {0} is not of the type as which it was read")]
    WrongType(String),
    /// The table was dropped.
    #[error("table {0} was dropped")]
    Dropped(String),
    /// The table's keys or rows are other ones than the caller believes.
    #[error("table {table} has {what}")]
    OtherShape {
        /// Which.
        table: String,
        /// What it has.
        what: String,
    },
    /// There is none of that name.
    #[error("there is no table {0}")]
    NoSuchTable(String),
    /// There is one of that name.
    #[error("there is a table {0} already")]
    TableExists(String),
    /// A name that no table can have.
    #[error("{0:?} is no name for a table: 1 to 64 bytes")]
    BadName(String),
    /// Drop something, or make the database with more memory.
    #[error("no space: {0}")]
    NoSpace(String),
    /// Begin again: the version that the snapshot has is not kept any more.
    #[error("the snapshot is too old: a version that it has is not kept any more")]
    SnapshotTooOld,
    /// Write less at a time.
    #[error(transparent)]
    TooLarge(CommitError),
    /// Nobody knows yet whether it took effect. This process's part in the database ends by that; open it
    /// again, and ask with [`Client::outcome`](crate::Client::outcome) once others have looked after what was
    /// left.
    #[error("nobody knows yet whether commit {0} took effect")]
    Unknown(Version),
    /// This process is not one of the database's compute servers any more. Nothing of this transaction is
    /// left.
    #[error(transparent)]
    Ended(Ended),
    /// Far memory does not answer. Nothing of this transaction is left.
    #[error(transparent)]
    Memory(MemoryError),
    /// Far memory holds what nobody has written there.
    #[error("{0}")]
    Damaged(String),
    /// Drop a client first: changes of tables need the place of one.
    #[error("a compute server has {0} clients at most, and changes tables as one of them")]
    TooManyClients(u16),
    /// Somebody else changes the catalog, for long.
    #[error("another compute server changes tables, and does not come to an end")]
    CatalogBusy,
}

impl TxError {
    /// Gives a transaction up, for that reason: nothing of it is left.
    pub fn roll_back(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TxError {
        TxError::RolledBack(reason.into())
    }
}

/// Why one try of a transaction has ended.
pub(crate) enum Stop {
    /// Begin again, at once or a little later. If that was done too often, this is why.
    Again(TxError),
    /// Do not.
    For(TxError),
}

impl From<TxError> for Stop {
    fn from(error: TxError) -> Stop {
        Stop::For(error)
    }
}

impl From<DatabaseError> for TxError {
    fn from(error: DatabaseError) -> TxError {
        match error {
            DatabaseError::Memory(error)
            | DatabaseError::Begin(BeginError::Memory(error))
            | DatabaseError::Recovery(RecoveryError::Memory(error)) => TxError::Memory(error),
            DatabaseError::Ended(ended) => TxError::Ended(ended),
            DatabaseError::TooManyClients(most) => TxError::TooManyClients(most),
            DatabaseError::Grant(GrantError::LeaseLost { region }) => {
                TxError::Ended(Ended::LeaseEnded(region))
            }
            error => TxError::Ended(Ended::Failed(error.to_string())),
        }
    }
}

impl From<BeginError> for TxError {
    fn from(error: BeginError) -> TxError {
        match error {
            BeginError::OracleStopped => {
                TxError::Ended(Ended::Failed("nobody publishes what was committed".to_owned()))
            }
            BeginError::Memory(error) => TxError::Memory(error),
        }
    }
}

/// What a read or a write by key has met.
pub(crate) fn of_key(error: KeyError, table: &str) -> Stop {
    Stop::For(match error {
        KeyError::Duplicate => TxError::Duplicate(table.to_owned()),
        KeyError::NoSuchKey => TxError::NoSuchKey(table.to_owned()),
        KeyError::Index(IndexError::Full) => TxError::Full(table.to_owned()),
        KeyError::Index(IndexError::Memory(error)) => TxError::Memory(error),
        KeyError::Index(error) => TxError::Damaged(format!("table {table}: {error}")),
        KeyError::Record(error) => return of_read(error, table),
    })
}

/// What a read, or the look at what is to be written, has met.
pub(crate) fn of_read(error: ReadError, table: &str) -> Stop {
    Stop::For(match error {
        ReadError::Conflict => return Stop::Again(TxError::Conflict),
        ReadError::RingFull => return Stop::Again(TxError::NoRoomForVersions(table.to_owned())),
        // Of what others have replaced or deleted, something is free in a moment.
        ReadError::NoSpace { .. } => return Stop::Again(TxError::NoSpace(format!("table {table}: {error}"))),
        ReadError::SnapshotTooOld => TxError::SnapshotTooOld,
        ReadError::Memory(error) => TxError::Memory(error),
        error => TxError::Damaged(format!("table {table}: {error}")),
    })
}
