//! Committing: log the old versions, lock, install the new versions, raise the watermark.

use farpool_fabric::{ARENA_GRANULE_BYTES, MAX_BATCH};
use farpool_wire::{NodeId, RecordHeader, Slot, Version};

use super::{Transaction, Write};
use crate::error::CommitError;
use crate::log::{Head, Intent, Link, LogAt};
use crate::memory::{Memory, MemoryError, Plan, run_all};
use crate::record::{DATA_OF_BODY, Label, WORD_BYTES, seal_body};
use crate::rules::{Rules, Step};
use crate::slab::Fresh;
use crate::worker::{CommitInFlight, SessionState, Worker};

/// Operations that install one record.
const OPERATIONS_EACH: usize = 2;
/// Records of one node that are locked, or installed, with one doorbell.
const RECORDS_AT_ONCE: usize = MAX_BATCH / OPERATIONS_EACH;

/// The plans of one commit may take so many of so many parts of a thread's buffers.
const USED_BUFFER_PARTS: usize = 3;
const BUFFER_PARTS: usize = 4;

/// A transaction that is about to commit. Dropping it aborts it, as long as [`commit`](Self::commit) has not
/// begun.
pub struct Committing<'a, R: Rules> {
    session: &'a mut SessionState,
    groups: Vec<Group>,
    prepared: Vec<GroupPlans<'a>>,
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
        if self.writes.borrow().is_empty() {
            return Ok(None);
        }
        let intents = self.intents();
        self.check_buffers(&intents)?;
        let bytes = intents.len() as u64;
        let begun = match self.worker.begin_commit(bytes) {
            Err(CommitError::LogFull) => {
                self.worker.refresh_horizon().await.map_err(CommitError::Nothing)?;
                self.worker.begin_commit(bytes)?
            }
            begun => begun?,
        };
        self.with_plans(begun, &intents)?.commit().await.map(Some)
    }

    /// The first half of [`commit`](Self::commit): determines which version it would be, by which any client
    /// can ask for its outcome later. Takes all the buffers that it needs, so that it does not fail later for
    /// lack of one. Nothing is written yet.
    ///
    /// # Errors
    /// When there is no room for it now, or ever. Nothing of it is left. It may be [`CommitError::LogFull`]
    /// even if a newer horizon would make room: [`commit`](Self::commit) reads the horizon again first.
    pub fn prepare(self) -> Result<Option<Committing<'a, R>>, CommitError> {
        if self.writes.borrow().is_empty() {
            return Ok(None);
        }
        let intents = self.intents();
        self.check_buffers(&intents)?;
        let begun = self.worker.begin_commit(intents.len() as u64)?;
        self.with_plans(begun, &intents).map(Some)
    }

    /// What it writes to its log.
    fn intents(&self) -> Vec<u8> {
        let writes = self.writes.borrow();
        let mut intents = Vec::with_capacity(writes.values().map(|write| intent_of(write).bytes()).sum());
        writes.values().for_each(|write| intent_of(write).encode(&mut intents));
        intents
    }

    /// Checks that its plans fit the thread's buffers when most of these are free.
    fn check_buffers(&self, intents: &[u8]) -> Result<(), CommitError> {
        let (memory, copies) = (&self.worker.memory, self.worker.log().copies.len());
        let writes = self.writes.borrow();
        let groups = writes.values().count() / RECORDS_AT_ONCE + memory.nodes();
        let records: usize = writes.values().map(|write| write.place.layout.current_bytes()).sum();
        // A plan has one granule that is not full. A group has two plans.
        let rounding = (copies + 2 * groups) * ARENA_GRANULE_BYTES;
        let bytes = records + copies * (intents.len() + Head::BYTES) + rounding;
        let most = memory.endpoint().arena().bytes() / BUFFER_PARTS * USED_BUFFER_PARTS;
        let of = "a thread's buffers";
        let too_large = || CommitError::TooLarge { of, bytes: bytes as u64, most: most as u64 };
        (bytes <= most).then_some(()).ok_or_else(too_large)
    }

    fn with_plans(
        self,
        mut commit: CommitInFlight<'a, R>,
        intents: &[u8],
    ) -> Result<Committing<'a, R>, CommitError> {
        let Transaction { worker, session, writes, blocks, open, .. } = self;
        commit.keep_snapshot(open);
        let version = R::numbered(commit.version());
        let head = Head::new(version, commit.log_place(), intents);
        let log = Logging::new(worker, &head, intents).map_err(CommitError::Nothing)?;
        let groups = by_node(linked(writes.into_inner().into_values(), version.slot(), head.place.start));
        let prepared: Result<Vec<_>, _> = groups
            .iter()
            .map(|(node, writes)| GroupPlans::new(&worker.memory, *node, writes, version))
            .collect();
        let prepared = prepared.map_err(CommitError::Nothing)?;
        let blocks = blocks.into_inner();
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
        let place = layout.intents(head).expect("room for them was taken in the log");
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
        header_at: piece.start + layout.current(index).start,
        data_bytes: layout.data_bytes(),
        replaced: (write.before.label != Label::INITIAL).then_some(write.before.body.as_slice()),
    }
}

/// A write, and the link from its version to the one before.
type Linked = (Write, Link);

/// Links each version to the intent with the version before. The first intent starts at byte `start` of the
/// log's intents.
fn linked(writes: impl Iterator<Item = Write>, slot: Slot, start: u64) -> impl Iterator<Item = Linked> {
    let mut next = start;
    writes.map(move |write| {
        let intent = intent_of(&write);
        let link = match intent.replaced {
            Some(_) => Link::to(slot, next).expect("a link can name every place of a log"),
            None => Link::NONE,
        };
        next += intent.bytes() as u64;
        (write, link)
    })
}

/// Some records of one node: at most [`RECORDS_AT_ONCE`].
type Group = (NodeId, Vec<Linked>);

fn by_node(writes: impl Iterator<Item = Linked>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for linked in writes {
        let node = linked.0.place.piece.region.node;
        let has_room = |(of, writes): &&mut Group| *of == node && writes.len() < RECORDS_AT_ONCE;
        match groups.iter_mut().rev().find(has_room) {
            Some((_, writes)) => writes.push(linked),
            None => groups.push((node, vec![linked])),
        }
    }
    groups
}

/// The plans for a group of records.
struct GroupPlans<'a> {
    lock: Plan<'a>,
    /// Puts the new versions in their places (X3).
    install: Plan<'a>,
}

impl<'a> GroupPlans<'a> {
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
        Ok(GroupPlans { lock, install: plan })
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
    prepared: Vec<GroupPlans<'a>>,
    version: Version,
) -> Result<Result<Vec<Plan<'a>>, Vec<Plan<'a>>>, MemoryError> {
    let (mut locks, installation): (Vec<_>, Vec<_>) =
        prepared.into_iter().map(|GroupPlans { lock, install }| (lock, install)).unzip();
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

fn install(plan: &mut Plan<'_>, write: &Write, link: Link, version: Version) {
    let piece = &write.place.piece;
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let label = Label { header, number: write.before.label.number + 1, link };
    let before = &write.before.body;
    plan.write_with(piece, header_at(write) + WORD_BYTES as u64, before.len(), |body| {
        // A version that deletes the record has whatever data there were.
        body[DATA_OF_BODY..].copy_from_slice(write.new.as_deref().unwrap_or(&before[DATA_OF_BODY..]));
        seal_body(write.place.record, label, body);
    });
    plan.write(piece, header_at(write), &header.0.to_le_bytes());
}

async fn done(plans: &mut [Plan<'_>]) -> Result<(), MemoryError> {
    run_all(plans).await;
    plans.iter().try_for_each(Plan::check)
}
