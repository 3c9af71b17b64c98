//! What is known of a transaction by who ran it.

use farpool_wire::Version;

use crate::cut::Cut;

/// Which record: tables and keys are one number here.
pub type Record = u64;
/// What a record holds; `None`: there is no such record. Each write has a value of its own, so that values
/// tell writes apart.
pub type Value = Option<u64>;

/// How a transaction ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It was said to be committed, as this version. One that wrote nothing has no version, and counts as
    /// [`Aborted`](Self::Aborted).
    Committed(Version),
    /// Nothing of it may ever be seen.
    Aborted,
    /// Its client died, or was told that nobody knows; it would be this version.
    Unknown(Version),
}

/// A record as a transaction found it in its snapshot: not what it wrote itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Read {
    /// Which.
    pub record: Record,
    /// The version that was there; [`Version::INITIAL`] where nobody has written yet.
    pub version: Version,
    /// What it held.
    pub value: Value,
}

/// What a transaction put in a record's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    /// Which.
    pub record: Record,
    /// The version that it replaced, as validated when it was locked.
    pub replaced: Version,
    /// What it holds from then on.
    pub value: Value,
}

/// A transaction, from its client's point of view.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transaction {
    /// Whose: one transaction after the other.
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
    /// Versions of others that it came across.
    pub(super) fn versions_met(&self) -> impl Iterator<Item = Version> + '_ {
        self.reads.iter().map(|read| read.version).chain(self.writes.iter().map(|write| write.replaced))
    }
}
