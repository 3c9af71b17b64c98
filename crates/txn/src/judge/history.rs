//! A transaction, as the client that ran it knows it.

use farpool_wire::Version;

use crate::cut::Cut;

/// A record. Table and key are one number here.
pub type Record = u64;
/// The value of a record. `None`: there is no such record. Each write has a unique value, so that values
/// identify writes.
pub type Value = Option<u64>;

/// How a transaction ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Its client was told that it is committed, as this version. A transaction that wrote nothing has no
    /// version, and counts as [`Aborted`](Self::Aborted).
    Committed(Version),
    /// It was not committed: no transaction may ever see anything of it.
    Aborted,
    /// It is in doubt, because its client died or was told so. If it took effect, it is this version.
    Unknown(Version),
}

/// A record as a transaction found it in its snapshot, without its own writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Read {
    /// The record.
    pub record: Record,
    /// The version that it found; [`Version::INITIAL`] if the record was never written.
    pub version: Version,
    /// The value of that version.
    pub value: Value,
}

/// A transaction's write to a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// The record.
    pub record: Record,
    /// The version that it replaced, as validated when the record was locked.
    pub replaced: Version,
    /// The new value.
    pub value: Value,
}

/// A transaction, from its client's point of view.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transaction {
    /// Its session, which runs one transaction after the other.
    pub session: u32,
    /// Its snapshot.
    pub begun_from: Cut,
    /// What it found.
    pub reads: Vec<Read>,
    /// What it wrote, each record once.
    pub writes: Vec<Write>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Transaction {
    /// The versions of other transactions that it read or replaced.
    pub(super) fn versions_met(&self) -> impl Iterator<Item = Version> + '_ {
        self.reads.iter().map(|read| read.version).chain(self.writes.iter().map(|write| write.replaced))
    }
}
