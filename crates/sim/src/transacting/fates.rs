//! Reads the outcomes of commits from their slots' logs, and compares them with what is known.

use farpool_txn::judge::Outcome;
use farpool_txn::log::LogAt;
use farpool_txn::recovery::{Fate, RecoveryError, fate};
use farpool_txn::{Memory, Oracle};
use farpool_wire::Version;

use super::Ledger;

/// A process that asks.
pub(crate) struct Asking<'a, L> {
    pub(crate) ledger: &'a Ledger,
    pub(crate) memory: &'a Memory,
    pub(crate) oracle: &'a Oracle,
    /// Returns the log of a slot, with the grants of this process.
    pub(crate) log_of: L,
}

/// Which copies of the log to ask for the outcome of a commit.
#[derive(Clone, Copy)]
pub(crate) enum Asked {
    /// Both copies together, like a process that cannot know whether one of them was just lost.
    Both,
    /// Both copies together, and each by itself.
    Each,
}

impl<L: Fn(u16) -> LogAt> Asking<'_, L> {
    /// Asks for the outcomes of commits in doubt, in slots that have been recovered. Complains about every
    /// commit that is still in doubt.
    pub(crate) async fn learn_fates(&self, is_wanted: impl Fn(u16) -> bool) -> Result<(), RecoveryError> {
        for version in self.learn(is_wanted).await? {
            let what = format!("commit {version} is still in doubt after its slot's recovery");
            self.ledger.notes.complain(what);
        }
        Ok(())
    }

    /// Asks for the outcomes of all commits in doubt. Some may stay in doubt.
    pub(crate) async fn learn_known_fates(&self) -> Result<(), RecoveryError> {
        self.learn(|_| true).await.map(drop)
    }

    /// Returns the commits that are still in doubt.
    async fn learn(&self, is_wanted: impl Fn(u16) -> bool) -> Result<Vec<Version>, RecoveryError> {
        let unknown: Vec<_> = {
            let history = self.ledger.history.borrow();
            let outcomes =
                history.iter().enumerate().map(|(place, transaction)| (place, transaction.outcome));
            let unknown = outcomes.filter_map(|(place, outcome)| match outcome {
                Outcome::Unknown(version) => Some((place, version)),
                _ => None,
            });
            unknown.filter(|(_, version)| is_wanted(slot_of(*version))).collect()
        };
        let mut not_yet = Vec::new();
        for (place, version) in unknown {
            let log = (self.log_of)(slot_of(version));
            let outcome = match fate(self.memory, self.oracle, &log, version).await? {
                Fate::Committed => Outcome::Committed(version),
                Fate::RolledBack => Outcome::Aborted,
                Fate::Forgotten => continue,
                Fate::NotYetKnown => {
                    not_yet.push(version);
                    continue;
                }
            };
            self.ledger.knows(version, outcome);
            self.ledger.history.borrow_mut()[place].outcome = outcome;
        }
        Ok(not_yet)
    }

    /// Checks that the logs agree with the known outcomes of commits, as far as they still have the commits.
    pub(crate) async fn ask_again(
        &self,
        asked: Asked,
        mut is_wanted: impl FnMut(u16) -> bool,
    ) -> Result<(), RecoveryError> {
        let known = self.ledger.known.borrow().clone();
        for (version, is_committed) in known.into_iter().filter(|(version, _)| is_wanted(slot_of(*version))) {
            let log = (self.log_of)(slot_of(version));
            let alone = log.copies.map(|copy| [copy; 2]);
            let alone = alone.into_iter().filter(|_| matches!(asked, Asked::Each));
            for copies in alone.chain([log.copies]) {
                let told = fate(self.memory, self.oracle, &LogAt { copies, ..log }, version).await?;
                let fits = match told {
                    Fate::Committed => is_committed,
                    // The client may have rolled the commit back, and the slot's watermark has not reached it
                    // yet, because the slot has made no later commit.
                    Fate::RolledBack | Fate::NotYetKnown => !is_committed,
                    Fate::Forgotten => true,
                };
                if !fits {
                    let what = format!("commit {version}: committed = {is_committed} before, {told:?} now");
                    self.ledger.notes.complain(what);
                }
            }
        }
        Ok(())
    }
}

fn slot_of(version: Version) -> u16 {
    version.slot().index() as u16
}
