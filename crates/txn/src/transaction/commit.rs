//! Committing: write down what is meant, lock, keep the old versions, install the new ones, show.

use std::collections::BTreeMap;

use farpool_fabric::MAX_BATCH;
use farpool_wire::{NodeId, RecordHeader, Version};
use futures_util::future::join_all;

use super::{Transaction, Write};
use crate::error::CommitError;
use crate::log::{Head, Intent};
use crate::memory::{Memory, MemoryError, Plan};
use crate::rules::Rules;
use crate::worker::{Session, UnderWay, Worker};

/// Operations that install one record.
const OPERATIONS_EACH: usize = 5;
/// Records of one node that are locked, or installed, with one doorbell.
const RECORDS_AT_ONCE: usize = MAX_BATCH / OPERATIONS_EACH;
const WORD_BYTES: usize = size_of::<u64>();

/// A transaction that is about to commit. Dropping it aborts it, as long as [`commit`](Self::commit) has not begun.
pub struct Committing<'a, R: Rules> {
    session: &'a mut Session,
    groups: Vec<Group<'a>>,
    prepared: Vec<Prepared<'a>>,
    log: Logging<'a>,
    under_way: UnderWay<'a, R>,
}

impl<'a, R: Rules> Transaction<'a, R> {
    /// Commits. `None`: it has written nothing, so there was nothing to do.
    ///
    /// # Errors
    /// Tells whether nothing of it is left, or nobody knows.
    pub async fn commit(self) -> Result<Option<Version>, CommitError> {
        match self.prepare()? {
            Some(committing) => committing.commit().await.map(Some),
            None => Ok(None),
        }
    }

    /// The first half of [`commit`](Self::commit): says which version it would be, by which anybody can ask for its outcome later. Takes
    /// all the memory that it needs: behind this it does not fail for want of that. Nothing is written yet.
    ///
    /// # Errors
    /// When there is no room for it now, or ever. Nothing of it is left.
    pub fn prepare(self) -> Result<Option<Committing<'a, R>>, CommitError> {
        if self.writes.is_empty() {
            return Ok(None);
        }
        let Transaction { worker, session, writes, cut } = self;
        let mut intents = Vec::new();
        writes.values().for_each(|write| intent_of(write).encode(&mut intents));
        let under_way = worker.begin_commit(intents.len() as u64)?;
        let head = Head::new(under_way.version(), cut.sequence(), under_way.log_start(), &intents);
        let log = Logging::new(worker, &head, &intents).map_err(CommitError::Nothing)?;
        let groups = by_node(writes.into_values());
        let prepared: Result<Vec<_>, _> = groups
            .iter()
            .map(|(node, writes)| Prepared::new(&worker.memory, *node, writes, under_way.version()))
            .collect();
        let prepared = prepared.map_err(CommitError::Nothing)?;
        Ok(Some(Committing { session, groups, prepared, log, under_way }))
    }
}

impl<R: Rules> Committing<'_, R> {
    /// Which version it will be.
    pub fn version(&self) -> Version {
        self.under_way.version()
    }

    /// Commits. Dropped before it is done, nobody knows what of it took effect.
    ///
    /// # Errors
    /// Tells whether nothing of it is left, or nobody knows.
    pub async fn commit(self) -> Result<Version, CommitError> {
        let Committing { session, groups, prepared, mut log, mut under_way } = self;
        let version = under_way.version();
        let unknown = |_: MemoryError| CommitError::Unknown(version);
        under_way.touches();
        // What may still be written must not come upon another commit's intents: so this one is not over where that is not known.
        if R::logs_first() {
            run_all(std::mem::take(&mut log.intents)).await.map_err(CommitError::Nothing)?;
        }
        let locked = lock::<R>(&groups, prepared, version).await.map_err(unknown)?;
        run_all(log.intents).await.map_err(unknown)?;
        let installation = match locked {
            Ok(installation) => installation,
            Err(mut undoing) => {
                undoing.extend(log.verdicts);
                run_all(undoing).await.map_err(unknown)?;
                under_way.vanished();
                return Err(CommitError::Conflict);
            }
        };
        let is_shown = if R::installs_first() {
            run_all(installation).await.map_err(unknown)?;
            under_way.is_shown().await
        } else {
            let is_shown = under_way.is_shown().await;
            run_all(installation).await.map_err(unknown)?;
            is_shown
        };
        if !is_shown {
            return Err(CommitError::Unknown(version));
        }
        session.committed(version);
        Ok(version)
    }
}

/// What is written to the slot's log.
struct Logging<'a> {
    /// Before anything is locked.
    intents: Vec<Plan<'a>>,
    /// That nothing has come of it: whoever asks for its fate must not take it for committed.
    verdicts: Vec<Plan<'a>>,
}

impl<'a> Logging<'a> {
    fn new<R: Rules>(worker: &'a Worker<R>, head: &Head, intents: &[u8]) -> Result<Self, MemoryError> {
        let layout = worker.log.layout;
        let place = layout.intents(head).expect("room for them was taken in the ring");
        let mut log = Logging { intents: Vec::new(), verdicts: Vec::new() };
        for copy in &worker.log.copies {
            let mut plan = worker.memory.plan(copy.region.node, intents.len() + Head::BYTES)?;
            plan.write(copy, place.start, intents);
            plan.write(copy, layout.head(head.version).start, &head.encode());
            log.intents.push(plan);
            let mut plan = worker.memory.plan(copy.region.node, WORD_BYTES)?;
            let verdict = Head::verdict_on(head.version).to_le_bytes();
            plan.write(copy, layout.verdict(head.version).start, &verdict);
            log.verdicts.push(plan);
        }
        Ok(log)
    }
}

fn intent_of<'a>(write: &'a Write<'_>) -> Intent<'a> {
    let (layout, piece, index) = (write.place.layout, write.place.piece, write.place.index);
    Intent {
        record: write.place.record,
        region: piece.region,
        current: piece.start + layout.current(index).start,
        seen: write.before.seen,
        old: piece.start + layout.old(index, write.before.old.number).start,
        number: write.before.old.number,
        data_bytes: layout.data_bytes(),
        new: write.new.as_deref(),
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
            lock.compare_and_swap(write.place.piece, header_at(write), write.before.seen.0, locked(version));
        }
        // Two versions with their checksums, two headers, the counter, and which version it is.
        let bytes =
            writes.iter().map(|write| 2 * (WORD_BYTES + write.before.data.len()) + 4 * WORD_BYTES).sum();
        let mut install = memory.plan(node, bytes)?;
        writes.iter().for_each(|write| prepare_one(&mut install, write, version));
        Ok(Prepared { lock, unlock: memory.plan(node, 0)?, install })
    }
}

/// A header that says who has locked its record.
fn locked(version: Version) -> u64 {
    RecordHeader::of(version).locked().0
}

/// Locks all records that are still what the transaction has seen (X2), and says how they are installed; else somebody was first, and
/// it says how those are unlocked that were locked.
async fn lock<'a, R: Rules>(
    groups: &[Group<'_>],
    prepared: Vec<Prepared<'a>>,
    version: Version,
) -> Result<Result<Vec<Plan<'a>>, Vec<Plan<'a>>>, MemoryError> {
    let (mut locks, mut unlocking, mut installation) = (Vec::new(), Vec::new(), Vec::new());
    for Prepared { lock, unlock, install } in prepared {
        locks.push(lock.run());
        unlocking.push(unlock);
        installation.push(install);
    }
    let mut is_first = true;
    for (((_, writes), unlock), ran) in groups.iter().zip(&mut unlocking).zip(join_all(locks).await) {
        for (write, found) in writes.iter().zip(ran.words()?) {
            let seen = write.before.seen;
            if R::has_locked(seen, RecordHeader(found)) {
                unlock.compare_and_swap(write.place.piece, header_at(write), locked(version), seen.0);
            } else {
                is_first = false;
            }
        }
    }
    Ok(if is_first { Ok(installation) } else { Err(unlocking) })
}

fn header_at(write: &Write<'_>) -> u64 {
    write.place.layout.current(write.place.index).start
}

fn prepare_one(plan: &mut Plan<'_>, write: &Write<'_>, version: Version) {
    let (layout, piece, index) = (write.place.layout, write.place.piece, write.place.index);
    let (record, old, data) = (write.place.record, write.before.old, &write.before.data);
    plan.write(piece, layout.old(index, old.number).start, &layout.encode_old(record, old, data));
    plan.write(piece, layout.old_header(index, old.number).start, &old.header.0.to_le_bytes());
    plan.write(piece, layout.ring(index).start, &(old.number + 1).to_le_bytes());
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let body = layout.encode_body(record, header, write.new.as_deref().unwrap_or(data));
    plan.write(piece, header_at(write) + WORD_BYTES as u64, &body);
    plan.write(piece, header_at(write), &header.0.to_le_bytes());
}

async fn run_all(plans: Vec<Plan<'_>>) -> Result<(), MemoryError> {
    let ran = join_all(plans.into_iter().map(Plan::run)).await;
    ran.iter().try_for_each(|ran| ran.check())
}
