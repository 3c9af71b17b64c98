//! Committing: log the intents, lock, keep the old versions, install the new ones, raise the watermark.

use std::collections::BTreeMap;

use farpool_fabric::MAX_BATCH;
use farpool_wire::{NodeId, RecordHeader, Version};

use super::{Transaction, Write};
use crate::error::CommitError;
use crate::log::{Head, Intent, LogAt};
use crate::memory::{Memory, MemoryError, Plan, run_all};
use crate::record::NumberedHeader;
use crate::rules::{Rules, Step};
use crate::slab::Fresh;
use crate::worker::{CommitInFlight, SessionState, Worker};

/// Operations that install one record.
const OPERATIONS_EACH: usize = 5;
/// Records of one node that are locked, or installed, with one doorbell.
const RECORDS_AT_ONCE: usize = MAX_BATCH / OPERATIONS_EACH;
const WORD_BYTES: usize = size_of::<u64>();

/// A transaction that is about to commit. Dropping it aborts it, as long as [`commit`](Self::commit) has not
/// begun.
pub struct Committing<'a, R: Rules> {
    session: &'a mut SessionState,
    groups: Vec<Group>,
    prepared: Vec<Prepared<'a>>,
    log: Logging<'a>,
    version: Version,
    commit: CommitInFlight<'a, R>,
    /// Blocks with the payloads that it points to.
    blocks: Vec<Fresh>,
}

impl<'a, R: Rules> Transaction<'a, R> {
    /// Commits. `None`: it has written nothing, so there was nothing to do.
    ///
    /// # Errors
    /// Says whether nothing of it is left, or its outcome is unknown.
    pub async fn commit(self) -> Result<Option<Version>, CommitError> {
        match self.prepare()? {
            Some(committing) => committing.commit().await.map(Some),
            None => Ok(None),
        }
    }

    /// The first half of [`commit`](Self::commit): determines which version it would be, by which any client
    /// can ask for its outcome later. Takes all the buffers that it needs, so that it does not fail later for
    /// lack of one. Nothing is written yet.
    ///
    /// # Errors
    /// When there is no room for it now, or ever. Nothing of it is left.
    pub fn prepare(self) -> Result<Option<Committing<'a, R>>, CommitError> {
        if self.writes.is_empty() {
            return Ok(None);
        }
        let Transaction { worker, session, writes, cut, blocks, open, .. } = self;
        let mut intents = Vec::new();
        writes.values().for_each(|write| intent_of(write).encode(&mut intents));
        let mut commit = worker.begin_commit(intents.len() as u64)?;
        commit.keep_snapshot(open);
        let version = R::numbered(commit.version());
        let head = Head::new(version, cut.sequence(), commit.log_start(), &intents);
        let log = Logging::new(worker, &head, &intents).map_err(CommitError::Nothing)?;
        let groups = by_node(writes.into_values());
        let prepared: Result<Vec<_>, _> = groups
            .iter()
            .map(|(node, writes)| Prepared::new::<R>(&worker.memory, *node, writes, version))
            .collect();
        let prepared = prepared.map_err(CommitError::Nothing)?;
        Ok(Some(Committing { session, groups, prepared, log, version, commit, blocks }))
    }
}

impl<R: Rules> Committing<'_, R> {
    /// Which version it will be.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Commits. If the future is dropped before it is done, the outcome is unknown.
    ///
    /// # Errors
    /// Says whether nothing of it is left, or its outcome is unknown.
    pub async fn commit(self) -> Result<Version, CommitError> {
        let Committing { session, groups, prepared, mut log, version, mut commit, mut blocks } = self;
        let unknown = |_: MemoryError| CommitError::Unknown(version);
        commit.mark_touched();
        blocks.iter_mut().for_each(Fresh::mark_in_doubt);
        R::passes(Step::Prepared);
        // If it is unknown whether the intents were written, they may still land, and must not overwrite
        // another commit's. So this commit does not count as finished then.
        if R::logs_first() {
            done(&mut log.plans).await.map_err(CommitError::Nothing)?;
            R::passes(Step::Logged);
        }
        let locked = lock::<R>(&groups, prepared, version).await.map_err(unknown)?;
        R::passes(Step::Locked);
        if !R::logs_first() {
            done(&mut log.plans).await.map_err(unknown)?;
        }
        let mut installation = match locked {
            Ok(installation) => installation,
            Err(mut undoing) => {
                undoing.extend(log.verdicts(version));
                done(&mut undoing).await.map_err(unknown)?;
                commit.vanish();
                blocks.into_iter().for_each(Fresh::give_back);
                return Err(CommitError::Conflict);
            }
        };
        let is_reached = if R::installs_first() {
            done(&mut installation).await.map_err(unknown)?;
            R::passes(Step::Installed);
            commit.finish().await
        } else {
            let is_reached = commit.finish().await;
            done(&mut installation).await.map_err(unknown)?;
            is_reached
        };
        if !is_reached {
            return Err(CommitError::Unknown(version));
        }
        R::passes(Step::Reached);
        for block in blocks {
            block.keep::<R>(commit.memory()).await.map_err(unknown)?;
        }
        session.committed(version);
        Ok(version)
    }
}

/// What is written to the slot's log.
struct Logging<'a> {
    log: &'a LogAt,
    /// One for each copy. The intents are written before anything is locked.
    plans: Vec<Plan<'a>>,
}

impl<'a> Logging<'a> {
    fn new<R: Rules>(worker: &'a Worker<R>, head: &Head, intents: &[u8]) -> Result<Self, MemoryError> {
        let layout = worker.log.layout;
        let place = layout.intents(head).expect("room for them was taken in the ring");
        let mut plans = Vec::with_capacity(worker.log.copies.len());
        for copy in worker.log.copies.iter().take(R::copies_logged()) {
            let mut plan = worker.memory.plan(copy.region.node, intents.len() + Head::BYTES)?;
            plan.write(copy, place.start, intents);
            plan.write(copy, layout.head(head.version).start, &head.encode());
            plans.push(plan);
        }
        Ok(Logging { log: &worker.log, plans })
    }

    /// Writes that nothing of the commit is left: a client that asks for its fate must not take it for
    /// committed. Uses the plans that have written the intents, so that it does not fail for lack of buffers.
    fn verdicts(self, version: Version) -> Vec<Plan<'a>> {
        let Logging { log, mut plans } = self;
        for (plan, copy) in plans.iter_mut().zip(&log.copies) {
            plan.clear();
            plan.write(copy, log.layout.verdict(version).start, &Head::verdict_on(version).to_le_bytes());
        }
        plans
    }
}

fn intent_of(write: &Write) -> Intent<'_> {
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
type Group = (NodeId, Vec<Write>);

fn by_node(writes: impl Iterator<Item = Write>) -> Vec<Group> {
    let mut nodes: BTreeMap<NodeId, Vec<Write>> = BTreeMap::new();
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

/// The plans for a group of records.
struct Prepared<'a> {
    lock: Plan<'a>,
    /// Keeps the old versions and puts the new ones in their places (X3).
    install: Plan<'a>,
}

impl<'a> Prepared<'a> {
    fn new<R: Rules>(
        memory: &'a Memory,
        node: NodeId,
        writes: &[Write],
        version: Version,
    ) -> Result<Self, MemoryError> {
        let mut lock = memory.plan(node, 0)?;
        for write in writes {
            lock.compare_and_swap(&write.place.piece, header_at(write), write.before.seen.0, locked(version));
        }
        // For each record: two versions with their checksums, two headers, the counter, and the new version
        // with its number.
        let bytes =
            writes.iter().map(|write| 2 * (WORD_BYTES + write.before.data.len()) + 5 * WORD_BYTES).sum();
        let mut plan = memory.plan(node, bytes)?;
        for write in writes {
            if R::keeps_first() {
                keep(&mut plan, write);
            }
            install(&mut plan, write, version);
            if !R::keeps_first() {
                keep(&mut plan, write);
            }
        }
        Ok(Prepared { lock, install: plan })
    }
}

/// A locked header, which names the commit that has locked the record.
fn locked(version: Version) -> u64 {
    RecordHeader::of(version).locked().0
}

/// Locks all records that are still what the transaction has seen (X2), and returns how they are installed.
/// If another transaction was first, returns how those that were locked are unlocked.
async fn lock<'a, R: Rules>(
    groups: &[Group],
    prepared: Vec<Prepared<'a>>,
    version: Version,
) -> Result<Result<Vec<Plan<'a>>, Vec<Plan<'a>>>, MemoryError> {
    let (mut locks, installation): (Vec<_>, Vec<_>) =
        prepared.into_iter().map(|Prepared { lock, install }| (lock, install)).unzip();
    run_all(&mut locks).await;
    locks.iter().try_for_each(Plan::check)?;
    let has_locked = |write: &Write, found: u64| R::has_locked(write.before.seen, RecordHeader(found));
    let has_locked_all = |(group, lock): (&Group, &Plan<'_>)| {
        group.1.iter().zip(lock.words()).all(|(write, found)| has_locked(write, found))
    };
    if groups.iter().zip(&locks).all(has_locked_all) {
        return Ok(Ok(installation));
    }
    for ((_, writes), lock) in groups.iter().zip(&mut locks) {
        let found: Vec<u64> = lock.words().collect();
        lock.clear();
        for (write, found) in writes.iter().zip(found) {
            if has_locked(write, found) {
                let seen = write.before.seen.0;
                lock.compare_and_swap(&write.place.piece, header_at(write), locked(version), seen);
            }
        }
    }
    Ok(Err(locks))
}

fn header_at(write: &Write) -> u64 {
    write.place.layout.current(write.place.index).start
}

fn keep(plan: &mut Plan<'_>, write: &Write) {
    let (layout, piece, index) = (write.place.layout, &write.place.piece, write.place.index);
    let (record, old, data) = (write.place.record, write.before.old, &write.before.data);
    plan.write(piece, layout.old(index, old.number).start, &layout.encode_old(record, old, data));
    plan.write(piece, layout.old_header(index, old.number).start, &old.header.0.to_le_bytes());
    plan.write(piece, layout.ring(index).start, &(old.number + 1).to_le_bytes());
}

fn install(plan: &mut Plan<'_>, write: &Write, version: Version) {
    let (layout, piece, before) = (write.place.layout, &write.place.piece, &write.before);
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let named = NumberedHeader { number: before.old.number + 1, header };
    let data = write.new.as_deref().unwrap_or(&before.data);
    let body = layout.encode_body(write.place.record, named, data);
    plan.write(piece, header_at(write) + WORD_BYTES as u64, &body);
    plan.write(piece, header_at(write), &header.0.to_le_bytes());
}

async fn done(plans: &mut [Plan<'_>]) -> Result<(), MemoryError> {
    run_all(plans).await;
    plans.iter().try_for_each(Plan::check)
}
