//! Judges whether a history of transactions is snapshot isolation, from what clients asked and were answered,
//! with the cuts and versions that they saw. It looks at nothing in the engine's memory.
//!
//! J1. Cuts are totally ordered.
//! J2. A cut that sees a transaction, and from which something of it is read, sees all that this transaction
//!     began from. (With J1, it is enough to look where something was read: a wrong snapshot from which
//!     nothing was read has harmed no client.)
//! J3. The versions of a record follow each other one by one: no two replace the same version, and each
//!     replaces the last one that its transaction saw.
//! J4. A transaction reads, of each record, the last version that its cut sees, and the value that this
//!     version's transaction wrote last.
//! J5. A session sees its own commits, and its cuts do not go back.
//!
//! A transaction whose outcome its client does not know counts as committed if any transaction saw something
//! of it; then all of it has to be there.

mod history;
#[cfg(test)]
mod tests;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};

use farpool_wire::Version;

use crate::cut::Cut;
pub use history::{Outcome, Read, Record, Transaction, Value, Write};
pub use verdict::Violation;

/// Looks for violations of snapshot isolation.
///
/// # Errors
/// The first violation that is found, with the transactions in it (their places in `history`).
pub fn judge(history: &[Transaction]) -> Result<(), Violation> {
    cuts_are_ordered(history)?;
    let committed = Committed::of(history)?;
    let chains = committed.chains()?;
    for (place, transaction) in history.iter().enumerate() {
        for read in &transaction.reads {
            committed.check_read(&chains, place, transaction, read)?;
        }
    }
    sessions_go_forward(history)
}

/// J1. Cuts are compared by what they see, whatever their numbers are.
fn cuts_are_ordered(history: &[Transaction]) -> Result<(), Violation> {
    let cuts = history.iter().enumerate().map(|(place, transaction)| (place, &transaction.begun_from));
    let mut cuts: Vec<(usize, &Cut)> = cuts.collect();
    // A cut that reaches another has a larger sum, or is the same.
    cuts.sort_by_key(|(_, cut)| cut.counts().iter().map(|&count| u128::from(count)).sum::<u128>());
    for pair in cuts.windows(2) {
        let [(one, earlier), (other, later)] = pair else { continue };
        if !later.reaches(earlier) {
            return Err(Violation::CrossingCuts { one: *one, other: *other });
        }
    }
    Ok(())
}

/// J5. `history` has each session's transactions in their order.
fn sessions_go_forward(history: &[Transaction]) -> Result<(), Violation> {
    let mut last: BTreeMap<u32, (usize, &Transaction)> = BTreeMap::new();
    for (place, transaction) in history.iter().enumerate() {
        if let Some((before, earlier)) = last.insert(transaction.session, (place, transaction)) {
            let forgets =
                matches!(earlier.outcome, Outcome::Committed(own) if !transaction.begun_from.sees(own));
            if forgets || !transaction.begun_from.reaches(&earlier.begun_from) {
                return Err(Violation::SessionWentBack { before, after: place });
            }
        }
    }
    Ok(())
}

/// All transactions of which anything took effect, by version.
struct Committed<'a> {
    history: &'a [Transaction],
    by_version: BTreeMap<Version, usize>,
}

/// For each record, its versions in their order. The first is the one before the first transaction.
type Chains = BTreeMap<Record, Vec<Version>>;

impl<'a> Committed<'a> {
    fn of(history: &'a [Transaction]) -> Result<Self, Violation> {
        let seen: BTreeSet<Version> = history.iter().flat_map(Transaction::versions_met).collect();
        let mut by_version = BTreeMap::new();
        for (place, transaction) in history.iter().enumerate() {
            let version = match transaction.outcome {
                Outcome::Committed(version) => version,
                Outcome::Unknown(version) if seen.contains(&version) => version,
                Outcome::Unknown(_) | Outcome::Aborted => continue,
            };
            if let Some(one) = by_version.insert(version, place) {
                return Err(Violation::SameVersion { one, other: place });
            }
        }
        Ok(Committed { history, by_version })
    }

    fn write_of(&self, version: Version, record: Record) -> Option<&'a Write> {
        self.history[*self.by_version.get(&version)?].writes.iter().find(|write| write.record == record)
    }

    /// J3.
    fn chains(&self) -> Result<Chains, Violation> {
        let mut next: BTreeMap<(Record, Version), (usize, Version)> = BTreeMap::new();
        let mut writes: BTreeMap<Record, usize> = BTreeMap::new();
        for (&version, &place) in &self.by_version {
            let transaction = &self.history[place];
            for write in &transaction.writes {
                *writes.entry(write.record).or_default() += 1;
                if !transaction.begun_from.sees(write.replaced) {
                    return Err(Violation::ReplacedUnseen { by: place, record: write.record });
                }
                if let Some((one, _)) = next.insert((write.record, write.replaced), (place, version)) {
                    return Err(Violation::LostUpdate { one, other: place, record: write.record });
                }
            }
        }
        let mut chains = Chains::new();
        for (record, count) in writes {
            let mut chain = vec![Version::INITIAL];
            let mut last = Version::INITIAL;
            while let Some(&(_, version)) = next.get(&(record, last)) {
                chain.push(version);
                last = version;
                if chain.len() > count + 1 {
                    break; // a circle
                }
            }
            if chain.len() != count + 1 {
                return Err(Violation::BrokenChain { record });
            }
            chains.insert(record, chain);
        }
        Ok(chains)
    }

    /// J2 and J4.
    fn check_read(
        &self,
        chains: &Chains,
        place: usize,
        reader: &Transaction,
        read: &Read,
    ) -> Result<(), Violation> {
        let cut = &reader.begun_from;
        let by = place;
        let record = read.record;
        if !cut.sees(read.version) {
            return Err(Violation::ReadFromTheFuture { by, record });
        }
        if read.version != Version::INITIAL {
            let Some(write) = self.write_of(read.version, record) else {
                return Err(Violation::DirtyRead { by, record });
            };
            if write.value != read.value {
                return Err(Violation::WrongValue { by, record });
            }
            let writer = self.by_version[&read.version];
            if !cut.reaches(&self.history[writer].begun_from) {
                return Err(Violation::CutWithoutCause { by, of: writer });
            }
        }
        let chain = chains.get(&record).map_or(&[][..], Vec::as_slice);
        let last_seen = chain.iter().rev().find(|&&version| cut.sees(version));
        if last_seen.is_some_and(|&last| last != read.version) {
            return Err(Violation::StaleRead { by, record });
        }
        Ok(())
    }
}
