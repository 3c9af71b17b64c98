//! Committing: log the old versions, lock, install the new versions, raise the watermark.

use std::collections::BTreeMap;

use farpool_fabric::MAX_BATCH;
use farpool_wire::{NodeId, RecordHeader, Slot, Version};

use super::{Transaction, Write};
use crate::error::CommitError;
use crate::log::{Head, Intent, Link, LogAt};
use crate::memory::{Memory, MemoryError, Plan, run_all};
use crate::record::{DATA_OF_BODY, Label, seal_body};
use crate::rules::{Rules, Step};
use crate::slab::Fresh;
use crate::worker::{CommitInFlight, SessionState, Worker};

/// Operations that install one record.
const OPERATIONS_EACH: usize = 2;
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
        if self.writes.is_empty() {
            return Ok(None);
        }
        let intents = self.intents();
        let bytes = intents.len() as u64;
        let begun = match self.worker.begin_commit(bytes) {
            Err(CommitError::LogFull) => {
                self.worker.look_for_log_room().await.map_err(CommitError::Nothing)?;
                self.worker.begin_commit(bytes)?
            }
            begun => begun?,
        };
        self.prepared(begun, &intents)?.commit().await.map(Some)
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
        let intents = self.intents();
        let begun = self.worker.begin_commit(intents.len() as u64)?;
        self.prepared(begun, &intents).map(Some)
    }

    /// What it writes to its log.
    fn intents(&self) -> Vec<u8> {
        let mut intents =
            Vec::with_capacity(self.writes.values().map(|write| intent_of(write).bytes()).sum());
        self.writes.values().for_each(|write| intent_of(write).encode(&mut intents));
        intents
    }

    fn prepared(
        self,
        mut commit: CommitInFlight<'a, R>,
        intents: &[u8],
    ) -> Result<Committing<'a, R>, CommitError> {
        let Transaction { worker, session, writes, blocks, open, .. } = self;
        commit.keep_snapshot(open);
        let version = R::numbered(commit.version());
        let head = Head::new(version, commit.log_place(), intents);
        let log = Logging::new(worker, &head, intents).map_err(CommitError::Nothing)?;
        let groups = by_node(linked(writes.into_values(), version.slot(), head.place.start));
        let prepared: Result<Vec<_>, _> = groups
            .iter()
            .map(|(node, writes)| Prepared::new(&worker.memory, *node, writes, version))
            .collect();
        let prepared = prepared.map_err(CommitError::Nothing)?;
        Ok(Committing { session, groups, prepared, log, version, commit, blocks })
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
        let log = worker.log();
        let layout = log.layout;
        let place = layout.intents(head).expect("room for them was taken in the ring");
        let mut plans = Vec::with_capacity(log.copies.len());
        for copy in log.copies.iter().take(R::copies_logged()) {
            let mut plan = worker.memory.plan(copy.region.node, intents.len() + Head::BYTES)?;
            plan.write(copy, place.start, intents);
            plan.write(copy, layout.head(head.version).start, &head.encode());
            plans.push(plan);
        }
        Ok(Logging { log, plans })
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
        data_bytes: layout.data_bytes(),
        before: (write.before.label != Label::INITIAL).then_some(write.before.body.as_slice()),
    }
}

/// A write, and the link from its version to the one before.
type Linked = (Write, Link);

/// Links each version to the intent with the version before. The intents start at `start` in the log's ring.
fn linked(writes: impl Iterator<Item = Write>, slot: Slot, start: u64) -> impl Iterator<Item = Linked> {
    let mut next = start;
    writes.map(move |write| {
        let intent = intent_of(&write);
        let link = match intent.before {
            Some(_) => Link::to(slot, next).expect("a link can name every place of a log"),
            None => Link::NONE,
        };
        next += intent.bytes() as u64;
        (write, link)
    })
}

/// Some records of one node.
type Group = (NodeId, Vec<Linked>);

fn by_node(writes: impl Iterator<Item = Linked>) -> Vec<Group> {
    let mut nodes: BTreeMap<NodeId, Vec<Linked>> = BTreeMap::new();
    for linked in writes {
        nodes.entry(linked.0.place.piece.region.node).or_default().push(linked);
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
    /// Puts the new versions in their places (X3).
    install: Plan<'a>,
}

impl<'a> Prepared<'a> {
    fn new(
        memory: &'a Memory,
        node: NodeId,
        writes: &[Linked],
        version: Version,
    ) -> Result<Self, MemoryError> {
        let mut lock = memory.plan(node, 0)?;
        for (write, _) in writes {
            lock.compare_and_swap(&write.place.piece, header_at(write), write.before.seen.0, locked(version));
        }
        // For each record its place: the body, and the header behind it.
        let bytes = writes.iter().map(|(write, _)| write.place.layout.current_bytes()).sum();
        let mut plan = memory.plan(node, bytes)?;
        for (write, link) in writes {
            install(&mut plan, write, *link, version);
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
        group.1.iter().zip(lock.words()).all(|((write, _), found)| has_locked(write, found))
    };
    if groups.iter().zip(&locks).all(has_locked_all) {
        return Ok(Ok(installation));
    }
    for ((_, writes), lock) in groups.iter().zip(&mut locks) {
        let found: Vec<u64> = lock.words().collect();
        lock.clear();
        for ((write, _), found) in writes.iter().zip(found) {
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

fn install(plan: &mut Plan<'_>, write: &Write, before: Link, version: Version) {
    let piece = &write.place.piece;
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let label = Label { header, number: write.before.label.number + 1, before };
    // A version that deletes the record has whatever data there were.
    let mut body = write.before.body.clone();
    if let Some(new) = &write.new {
        body[DATA_OF_BODY..].copy_from_slice(new);
    }
    seal_body(write.place.record, label, &mut body);
    plan.write(piece, header_at(write) + WORD_BYTES as u64, &body);
    plan.write(piece, header_at(write), &header.0.to_le_bytes());
}

async fn done(plans: &mut [Plan<'_>]) -> Result<(), MemoryError> {
    run_all(plans).await;
    plans.iter().try_for_each(Plan::check)
}
