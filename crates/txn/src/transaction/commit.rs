//! Committing: lock, keep the old versions, install the new ones, show.

use std::collections::BTreeMap;

use farpool_fabric::MAX_BATCH;
use farpool_wire::{NodeId, RecordHeader, Version};

use super::{Transaction, Write};
use crate::error::CommitError;
use crate::memory::{Memory, MemoryError, Plan};
use crate::record::OldVersion;
use crate::rules::Rules;

/// Operations that install one record.
const OPERATIONS_EACH: usize = 5;
/// Records of one node that are locked, or installed, with one doorbell.
const RECORDS_AT_ONCE: usize = MAX_BATCH / OPERATIONS_EACH;
const WORD_BYTES: usize = size_of::<u64>();

impl<R: Rules> Transaction<'_, R> {
    /// Commits. `None`: it has written nothing, so there was nothing to do.
    ///
    /// # Errors
    /// Tells whether nothing of it is left, or nobody knows.
    pub async fn commit(self) -> Result<Option<Version>, CommitError> {
        if self.writes.is_empty() {
            return Ok(None);
        }
        let Transaction { worker, session, writes, .. } = self;
        let groups = by_node(writes.into_values());
        let mut under_way = worker.begin_commit()?;
        let version = under_way.version();
        // Before anything is locked: then it must not fail for want of memory.
        let prepared: Result<Vec<_>, _> = groups
            .iter()
            .map(|(node, writes)| Prepared::new(&worker.memory, *node, writes, version))
            .collect();
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let _ = under_way.ended().await; // where that fails, the worker is stuck; it is an abort all the same
                return Err(CommitError::Nothing(error));
            }
        };
        let done = async {
            let Some(installation) = lock::<R>(&groups, prepared).await? else { return Ok(false) };
            if R::installs_first() {
                install(installation).await?;
                under_way.ended().await?;
            } else {
                under_way.ended().await?;
                install(installation).await?;
            }
            Ok::<_, MemoryError>(true)
        };
        match done.await {
            Ok(true) if worker.is_shown(version).await => {
                session.committed(version);
                Ok(Some(version))
            }
            Ok(false) => {
                let _ = under_way.ended().await; // as above
                Err(CommitError::Conflict)
            }
            Ok(true) | Err(_) => Err(CommitError::Unknown(version)),
        }
    }
}

/// Some records of one node.
type Group<'a> = (NodeId, Vec<Write<'a>>);

fn by_node<'a>(writes: impl Iterator<Item = Write<'a>>) -> Vec<Group<'a>> {
    let mut nodes: BTreeMap<NodeId, Vec<Write<'a>>> = BTreeMap::new();
    for write in writes {
        nodes.entry(write.place.piece.region.node).or_default().push(write);
    }
    let mut groups = Vec::new();
    for (node, mut writes) in nodes {
        while !writes.is_empty() {
            let rest = writes.split_off(writes.len().min(RECORDS_AT_ONCE));
            groups.push((node, std::mem::replace(&mut writes, rest)));
        }
    }
    groups
}

/// All that is done with a group of records.
struct Prepared<'a> {
    lock: Plan<'a>,
    /// Filled once it is known what was locked.
    unlock: Plan<'a>,
    /// Keeps the old versions and puts the new ones in their places (X3).
    install: Plan<'a>,
}

impl<'a> Prepared<'a> {
    fn new(
        memory: &'a Memory,
        node: NodeId,
        writes: &[Write<'_>],
        version: Version,
    ) -> Result<Self, MemoryError> {
        let mut lock = memory.plan(node, 0)?;
        for write in writes {
            lock.compare_and_swap(write.place.piece, header_at(write), write.seen.0, write.seen.locked().0);
        }
        // Two versions with their checksums, two headers and a counter.
        let bytes = writes.iter().map(|write| 2 * (WORD_BYTES + write.old.len()) + 3 * WORD_BYTES).sum();
        let mut install = memory.plan(node, bytes)?;
        writes.iter().for_each(|write| prepare_one(&mut install, write, version));
        Ok(Prepared { lock, unlock: memory.plan(node, 0)?, install })
    }
}

/// Locks all records that are still what the transaction has seen (X2), and says what is to be done with them; `None`: somebody was
/// first, and none is locked.
async fn lock<'a, R: Rules>(
    groups: &[Group<'_>],
    prepared: Vec<Prepared<'a>>,
) -> Result<Option<Vec<Plan<'a>>>, MemoryError> {
    let (mut locked, mut installation) = (Vec::new(), Vec::new());
    let mut is_first = true;
    for ((_, writes), Prepared { lock, mut unlock, install }) in groups.iter().zip(prepared) {
        let found = lock.run().await.words()?;
        for (write, found) in writes.iter().zip(found) {
            if R::has_locked(write.seen, RecordHeader(found)) {
                unlock.compare_and_swap(
                    write.place.piece,
                    header_at(write),
                    write.seen.locked().0,
                    write.seen.0,
                );
            } else {
                is_first = false;
            }
        }
        locked.push(unlock);
        installation.push(install);
        if !is_first {
            break;
        }
    }
    if is_first {
        return Ok(Some(installation));
    }
    for unlock in locked {
        unlock.run().await.check()?;
    }
    Ok(None)
}

fn header_at(write: &Write<'_>) -> u64 {
    write.place.layout.current(write.place.index).start
}

fn prepare_one(plan: &mut Plan<'_>, write: &Write<'_>, version: Version) {
    let (layout, piece, index) = (write.place.layout, write.place.piece, write.place.index);
    let old = OldVersion { number: write.number, header: write.seen };
    plan.write(
        piece,
        layout.old(index, old.number).start,
        &layout.encode_old(write.place.record, old, &write.old),
    );
    plan.write(piece, layout.old_header(index, old.number).start, &old.header.0.to_le_bytes());
    plan.write(piece, layout.ring(index).start, &(old.number + 1).to_le_bytes());
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let data = write.new.as_deref().unwrap_or(&write.old);
    let sealed = layout.encode_current(write.place.record, header, data);
    plan.write(piece, header_at(write) + WORD_BYTES as u64, &sealed);
    plan.write(piece, header_at(write), &header.0.to_le_bytes());
}

async fn install(plans: Vec<Plan<'_>>) -> Result<(), MemoryError> {
    for plan in plans {
        plan.run().await.check()?;
    }
    Ok(())
}
