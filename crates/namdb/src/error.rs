//! Errors: one variant for each remedy that the caller has.

use std::path::PathBuf;

use farpool_control::ControlError;
use farpool_pool::{GrantError, JointError};
use farpool_txn::hash::IndexError;
use farpool_txn::recovery::RecoveryError;
use farpool_txn::tree::TreeError;
use farpool_txn::{BadRow, BeginError, CommitError, KeyError, LayoutError, MemoryError, ReadError};
use farpool_wire::{RegionId, Version};

use crate::database::LEAST_LOG_BYTES;
use crate::dynamic::ShapeError;

/// Why a database cannot be made, opened or worked on.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// Ask for larger logs.
    #[error("a log of {0} bytes is too small: at least {LEAST_LOG_BYTES} are possible (--log-size)")]
    SmallLog(u64),
    /// Its memory cannot be leased or reached.
    #[error(transparent)]
    Leases(#[from] JointError),
    /// Correct the certificates, or the folder where they were looked for.
    #[error(transparent)]
    Credentials(#[from] ControlError),
    /// A node does not let this process in.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// Name another file, or correct its permissions.
    #[error("{}: {reason}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What the system says.
        reason: std::io::Error,
    },
    /// Remove the file.
    #[error(
        "the lease of region {region} has ended: its data are lost, and with them the database; \
         remove {} to make another one",
        .file.display()
    )]
    Gone {
        /// The file of the database.
        file: PathBuf,
        /// One of its regions.
        region: RegionId,
    },
    /// Try again if the node comes back. If it was started anew, or its pool was, remove the file.
    #[error(
        "{reason}; if this node or the whole pool was started anew, the database is lost: remove {} to create \
         another one",
        .file.display()
    )]
    NoAnswer {
        /// The file of the database.
        file: PathBuf,
        /// The node that does not answer.
        reason: GrantError,
    },
    /// Name the file that `farpool db up` has written.
    #[error(
        "{} is not the file of a database, or was damaged: name the file that `farpool db up` wrote",
        .0.display()
    )]
    NotADatabase(PathBuf),
    /// Ask for other numbers, or lend larger regions.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Try again when a compute server has left.
    #[error("all {0} seats for compute servers are taken: try again when one has left")]
    NoSeat(u16),
    /// Drop a client first.
    #[error("a compute server has {0} clients at most: drop one first")]
    TooManyClients(u16),
    /// No member publishes cuts.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// The commits of the slot's earlier client cannot be rolled back.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
    /// Far memory does not answer.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Raise the limits on processes and open files.
    #[error("cannot start a thread: {0}; raise the limits on processes and open files")]
    Thread(std::io::Error),
    /// Open it again: this process is not one of its compute servers any more.
    #[error(transparent)]
    Ended(#[from] Ended),
}

/// Why a process is no longer a compute server of a database. The others have rolled back its commits in
/// flight, or will.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Ended {
    /// Open the database again.
    #[error(
        "the other compute servers took this one for dead, since it missed its heartbeats, and evicted it"
    )]
    TakenForDead,
    /// Open the database again: if that fails, the node is gone.
    #[error(
        "the lease of region {0} could not be renewed in time: its node is gone, and with it the \
         database; or this process was held up for so long that the others have evicted it"
    )]
    LeaseEnded(RegionId),
    /// It was closed by this process.
    #[error("the database was closed")]
    Closed,
    /// A part of this compute server failed, or a commit is in doubt; the message says which.
    #[error("{0}")]
    Failed(String),
}

/// Why a transaction did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// Other transactions won every conflict: try later.
    #[error("other transactions wrote the same rows first, again and again: try later")]
    Conflict,
    /// A snapshot has been open for long, and the log of this compute server, or of the catalog, has no room
    /// for another version that it may need: end that transaction, or make the database with larger logs
    /// (`farpool db up --log-size`).
    #[error(
        "the log is full of versions that an open snapshot may need: end long transactions, or make the \
         database with larger logs (--log-size)"
    )]
    NoRoomForVersions,
    /// The transaction's body gave it up, for this reason. Nothing of it is left.
    #[error("{0}")]
    RolledBack(Box<dyn std::error::Error + Send + Sync>),
    /// The key has a row already.
    #[error("duplicate key in table {0}")]
    Duplicate(String),
    /// Another row has the same key in a unique index.
    #[error("duplicate key in index {index} of table {table}")]
    DuplicateIn {
        /// The table.
        table: String,
        /// The index.
        index: String,
    },
    /// The key has no row.
    #[error("no such key in table {0}")]
    NoSuchKey(String),
    /// The key is longer than the keys that its table was created for.
    #[error("a key of table {table} takes more than {most} bytes: create the table with longer keys")]
    KeyTooLong {
        /// The table.
        table: String,
        /// Bytes that its keys have at most.
        most: usize,
    },
    /// A row has a longer key in an index than the index was created for.
    #[error(
        "a row of table {table} has a key of more than {most} bytes in index {index}: create the index with longer \
         keys"
    )]
    IndexKeyTooLong {
        /// The table.
        table: String,
        /// The index.
        index: String,
        /// Bytes that its keys have at most.
        most: usize,
    },
    /// The table has no room for another row, and cannot grow.
    #[error(
        "table {0} is full and cannot grow: neither the database nor the pool has a free part of memory that is \
         large enough, or the table has as many pieces as a table can have; drop tables, or add a node to the pool"
    )]
    Full(String),
    /// A bucket of the table's index is full, and was split as often as possible. The table has far more rows
    /// than it was created for.
    #[error(
        "table {0} has far too many rows for the number that it was created for: create a table for more rows, \
         and copy the rows there"
    )]
    Crowded(String),
    /// The row is larger than the table's rows may be.
    #[error("a row of {found} bytes is too large for table {table}, whose rows have at most {most} bytes")]
    RowTooLarge {
        /// The table.
        table: String,
        /// Bytes of the row.
        found: usize,
        /// Bytes that rows of the table have at most.
        most: usize,
    },
    /// Create the table with [`TableOptions::ordered`](crate::TableOptions::ordered), and copy its rows.
    #[error(
        "the keys of table {0} are not kept in order: create a table with TableOptions::ordered, and copy the rows"
    )]
    Unordered(String),
    /// Give a value of this type, or open the table in a program that has its type.
    #[error(transparent)]
    BadShape(ShapeError),
    /// A row is not of the type that was asked for.
    #[error("a row of table {0} does not have the type that was asked for")]
    WrongType(String),
    /// The table was dropped.
    #[error("table {0} was dropped")]
    Dropped(String),
    /// The table's keys or rows have another type than the caller expects.
    #[error("table {table} has {what}")]
    OtherShape {
        /// The table.
        table: String,
        /// What it has.
        what: String,
    },
    /// Create the index: [`Client::create_index`](crate::Client::create_index).
    #[error("there is no index {0} of this table: create it (Client::create_index)")]
    NoSuchIndex(String),
    /// A table has an index of this name already.
    #[error("there is an index {0} of this table already")]
    IndexExists(String),
    /// Wait until the client that creates the index has finished. If it has died, create the index again.
    #[error(
        "index {0} is being created: wait until that is finished, or create it again if the program that did so has \
         ended"
    )]
    IndexNotReady(String),
    /// End them, and create the index again.
    #[error(
        "transactions are still open that began before index {0} was created: end them, and create it again, which \
         goes on from what is there"
    )]
    OldTransactions(String),
    /// Declare the index.
    #[error(
        "table {table} has an index {index} that this program does not know: declare it (Table::declare) before \
         writing to the table"
    )]
    Undeclared {
        /// The table.
        table: String,
        /// The index.
        index: String,
    },
    /// No table has this name.
    #[error("there is no table {0}")]
    NoSuchTable(String),
    /// A table has this name already.
    #[error("there is a table {0} already")]
    TableExists(String),
    /// No table can have this name.
    #[error("{0:?} cannot be the name of a table: use 1 to 64 bytes, none of them zero")]
    BadName(String),
    /// Correct the options of the table.
    #[error("{0}")]
    BadOptions(String),
    /// Drop tables, or add a node to the pool.
    #[error("no space: {0}")]
    NoSpace(String),
    /// Begin again: the version that the snapshot needs is not kept any more.
    #[error("the snapshot is too old: a version that it needs is not kept any more")]
    SnapshotTooOld,
    /// Write less at a time.
    #[error(transparent)]
    TooLarge(CommitError),
    /// It is not known yet whether the commit took effect. This process stops being a compute server. Open
    /// the database again, and ask [`Client::outcome`](crate::Client::outcome) once other members have
    /// recovered this one's seat.
    #[error("commit {0} is in doubt: it may have taken effect or not")]
    Unknown(Version),
    /// This process is no longer one of the database's compute servers. Nothing of this transaction is left.
    #[error(transparent)]
    Ended(Ended),
    /// Far memory does not answer. Nothing of this transaction is left.
    #[error(transparent)]
    Memory(MemoryError),
    /// Far memory holds bytes that no compute server writes there.
    #[error("{0}")]
    Damaged(String),
    /// Drop a client first: a change of tables needs a client's place.
    #[error("a compute server has {0} clients at most, and a change of tables counts as one: drop a client")]
    TooManyClients(u16),
    /// Another client has been changing the catalog for too long.
    #[error("another compute server has been changing tables for too long: try again")]
    CatalogBusy,
}

impl TxError {
    /// The error with which a body rolls its transaction back, for this reason.
    pub fn roll_back(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TxError {
        TxError::RolledBack(reason.into())
    }
}

/// Why one try of a transaction has ended.
pub(crate) enum Stop {
    /// Begin again, at once or a little later. After too many tries, the caller gets this error.
    Again(TxError),
    /// Do not begin again.
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
                TxError::Ended(Ended::Failed("no compute server publishes what was committed".to_owned()))
            }
            BeginError::Memory(error) => TxError::Memory(error),
        }
    }
}

/// What an error of a read or write by key means for the transaction.
pub(crate) fn of_key(error: KeyError, table: &str) -> Stop {
    Stop::For(match error {
        KeyError::Duplicate | KeyError::DuplicateBy(_) => TxError::Duplicate(table.to_owned()),
        KeyError::NoSuchKey => TxError::NoSuchKey(table.to_owned()),
        KeyError::Index(IndexError::Full) => TxError::Full(table.to_owned()),
        KeyError::Index(IndexError::Crowded) => TxError::Crowded(table.to_owned()),
        KeyError::Index(IndexError::Memory(error)) => return of_memory(error),
        // The index names only pieces whose growth is published, so a later snapshot has them. If memory was
        // damaged, the tries end with this error.
        KeyError::Index(error @ IndexError::BeyondPieces) => {
            return Stop::Again(TxError::Damaged(format!("table {table}: {error}")));
        }
        KeyError::Index(error) => TxError::Damaged(format!("table {table}: {error}")),
        KeyError::Order(TreeError::Full) => TxError::Full(table.to_owned()),
        KeyError::Order(TreeError::Memory(error)) => return of_memory(error),
        KeyError::Order(error @ TreeError::BeyondPieces) => {
            return Stop::Again(TxError::Damaged(format!("table {table}: {error}")));
        }
        KeyError::Order(TreeError::Busy) => return Stop::Again(TxError::Conflict),
        KeyError::Order(error) => TxError::Damaged(format!("table {table}: {error}")),
        KeyError::Unordered => TxError::Unordered(table.to_owned()),
        KeyError::By(_, TreeError::Full) => TxError::Full(table.to_owned()),
        KeyError::By(_, TreeError::Memory(error)) => return of_memory(error),
        KeyError::By(_, TreeError::Busy) => return Stop::Again(TxError::Conflict),
        KeyError::By(_, ref beyond @ TreeError::BeyondPieces) => {
            return Stop::Again(TxError::Damaged(format!("table {table}: {beyond}")));
        }
        KeyError::By(..) | KeyError::NoSuchIndex(_) => TxError::Damaged(format!("table {table}: {error}")),
        KeyError::BadRow(BadRow::OtherType) => TxError::WrongType(table.to_owned()),
        KeyError::BadRow(BadRow::KeyTooLong { index, most }) => {
            TxError::IndexKeyTooLong { table: table.to_owned(), index, most }
        }
        KeyError::Begin(error) => error.into(),
        KeyError::Record(error) => return of_read(error, table),
    })
}

/// What it means for a transaction that far memory was not accessed.
pub(crate) fn of_memory(error: MemoryError) -> Stop {
    match error {
        // Other transactions of this thread have all buffers, and give them back in a moment.
        MemoryError::Short(_) => Stop::Again(TxError::Memory(error)),
        MemoryError::NotConnected(_) | MemoryError::Failed(_) => Stop::For(TxError::Memory(error)),
    }
}

/// What an error of a read, or of the read before a write, means for the transaction.
pub(crate) fn of_read(error: ReadError, table: &str) -> Stop {
    Stop::For(match error {
        ReadError::Conflict => return Stop::Again(TxError::Conflict),
        // Memory of versions that others have replaced or deleted becomes free in a moment.
        ReadError::NoSpace { .. } => return Stop::Again(TxError::NoSpace(format!("table {table}: {error}"))),
        ReadError::SnapshotTooOld => TxError::SnapshotTooOld,
        ReadError::Memory(error) => return of_memory(error),
        error => TxError::Damaged(format!("table {table}: {error}")),
    })
}
