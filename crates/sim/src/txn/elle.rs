//! A run's history in the form that third-party checkers read (Elle's JSON, the workload *list-append*), for
//! a second opinion.
//!
//! A record counts as the list of all commits that have written it: each commit comes after the one whose
//! version it replaced. So a read of a version is a read of such a list. The reads of a transaction that did
//! not commit form a transaction of their own, since they come from one snapshot.

use std::collections::BTreeMap;

use farpool_txn::judge::{Outcome, Record, Transaction};
use farpool_wire::Version;

/// Returns one operation a line. The invocation of each transaction comes right before its completion.
pub(super) fn lines(history: &[Transaction]) -> Vec<String> {
    let replaced = Replaced::of(history);
    let mut lines = Vec::new();
    for transaction in history {
        let reads: Vec<String> = transaction
            .reads
            .iter()
            .map(|read| format!("[\"r\",{},[{}]]", read.record, replaced.list(read.record, read.version)))
            .collect();
        let appends = |version| -> Vec<String> {
            let append = |record| format!("[\"append\",{record},{}]", name(version));
            transaction.writes.iter().map(|write| append(write.record)).collect()
        };
        let process = u64::from(transaction.session);
        match transaction.outcome {
            Outcome::Committed(version) => {
                push(&mut lines, process, "ok", &[reads, appends(version)].concat())
            }
            Outcome::Aborted => push(&mut lines, process, "ok", &reads),
            Outcome::Unknown(version) => {
                push(&mut lines, process, "ok", &reads);
                // By convention a process does not continue under its name after an operation with an
                // unknown outcome, so the writes get a process of their own.
                let doubter = DOUBTERS + lines.len() as u64;
                push(&mut lines, doubter, "info", &appends(version));
            }
        }
    }
    lines
}

/// The lowest name of processes that run a single transaction and never learn its outcome. Names of sessions
/// are lower.
const DOUBTERS: u64 = 1 << 40;

fn push(lines: &mut Vec<String>, process: u64, ends_as: &str, operations: &[String]) {
    if operations.is_empty() {
        return;
    }
    let value = operations.join(",");
    for kind in ["invoke", ends_as] {
        lines.push(format!("{{\"type\":\"{kind}\",\"process\":{process},\"value\":[{value}]}}"));
    }
}

/// A unique number for each version: its slot and its count.
fn name(version: Version) -> u64 {
    (version.slot().index() as u64) << COUNT_BITS | version.count()
}

/// Bits of a version's count. With the slot's bits they fit the 63 bits that other checkers use for a number.
const COUNT_BITS: u32 = 49;

/// The version that each version of a record has replaced.
struct Replaced(BTreeMap<(Record, Version), Version>);

impl Replaced {
    fn of(history: &[Transaction]) -> Replaced {
        let mut replaced = BTreeMap::new();
        for transaction in history {
            let (Outcome::Committed(version) | Outcome::Unknown(version)) = transaction.outcome else {
                continue;
            };
            replaced.extend(transaction.writes.iter().map(|write| ((write.record, version), write.replaced)));
        }
        Replaced(replaced)
    }

    fn list(&self, record: Record, version: Version) -> String {
        let mut versions = Vec::new();
        let mut last = version;
        // No list has more entries than there are versions. This limit ends the loop even in a cycle.
        while last != Version::INITIAL && versions.len() <= self.0.len() {
            versions.push(name(last).to_string());
            last = self.0.get(&(record, last)).copied().unwrap_or(Version::INITIAL);
        }
        versions.reverse();
        versions.join(",")
    }
}
