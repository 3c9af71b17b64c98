//! Committing: log the old versions, lock, install the new versions, raise the watermark.

use farpool_fabric::{ARENA_GRANULE_BYTES, MAX_BATCH};
use farpool_wire::{NodeId, RecordHeader, Version};
use futures_util::future::join_all;

use super::by_record::ByRecord;
use super::{Transaction, Write};
use crate::cut::Cut;
use crate::error::CommitError;
use crate::keyed::{Entered, TakenKey};
use crate::log::{Head, Intent, Link, LogAt};
use crate::memory::{Memory, MemoryError, Piece, Plan, run_all};
use crate::record::{DATA_OF_BODY, Label, RecordId, WORD_BYTES, seal_body};
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
    records: Locking<'a>,
    log: Logging<'a>,
    version: Version,
    commit: CommitInFlight<'a, R>,
    /// Blocks with the payloads that it points to.
    blocks: Vec<Fresh>,
    unique: Unique<'a, R>,
    /// What it has entered in secondary indexes.
    entered: Entered,
}

/// Keys of unique indexes that are looked at together.
const KEYS_AT_ONCE: usize = 16;

/// What a commit looks at behind its locks.
struct Unique<'a, R: Rules> {
    worker: &'a Worker<R>,
    cut: Cut,
    /// The records that it writes, in their order, if there are keys.
    own: Vec<RecordId>,
    keys: Vec<TakenKey>,
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
    /// lack of one. (For looks at unique indexes it takes more later. If it gets none, it ends with a
    /// conflict.) Nothing is written yet.
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
        let Transaction { worker, session, cut, writes, blocks, taken_keys, entered, open, .. } = self;
        commit.keep_snapshot(open);
        let (writes, keys) = (writes.into_inner(), taken_keys.into_keys());
        let mut own: Vec<RecordId> = match keys.is_empty() {
            true => Vec::new(),
            false => writes.values().map(|write| write.place.record).collect(),
        };
        own.sort_unstable();
        let version = R::numbered(commit.version());
        let head = Head::new(version, commit.log_place(), intents);
        let log = Logging::new(worker, &head, intents).map_err(CommitError::Nothing)?;
        let records =
            Locking::new(&worker.memory, &writes, version, head.place.start).map_err(CommitError::Nothing)?;
        let (blocks, unique) = (blocks.into_inner(), Unique { worker, cut, own, keys });
        Ok(Committing { session, records, log, version, commit, blocks, unique, entered })
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
        let Committing { session, mut records, mut log, version, mut commit, mut blocks, unique, entered } =
            self;
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
        let are_locked = records.lock::<R>().await.map_err(unknown)?;
        R::passes(Step::Locked);
        if !R::logs_first() {
            done(&mut log.plans).await.map_err(unknown)?;
        }
        // If far memory does not answer, or an index has grown, nothing is installed either.
        if !are_locked || !unique.are_free().await {
            let mut undoing = records.into_unlocking::<R>(version);
            undoing.extend(log.verdicts(version));
            done(&mut undoing).await.map_err(unknown)?;
            commit.vanish();
            blocks.into_iter().for_each(Fresh::give_back);
            return Err(CommitError::Conflict);
        }
        let mut installs = records.into_installs();
        let is_reached = if R::installs_first() {
            done(&mut installs).await.map_err(unknown)?;
            R::passes(Step::Installed);
            commit.finish().await
        } else {
            let is_reached = commit.finish().await;
            done(&mut installs).await.map_err(unknown)?;
            is_reached
        };
        if !is_reached {
            return Err(CommitError::Unknown(version));
        }
        R::passes(Step::Reached);
        for block in blocks {
            block.keep::<R>(commit.memory()).await.map_err(unknown)?;
        }
        entered.forget();
        session.committed(version);
        Ok(version)
    }
}

impl<R: Rules> Unique<'_, R> {
    /// Whether no other row may have one of the keys.
    async fn are_free(&self) -> bool {
        for some in self.keys.chunks(KEYS_AT_ONCE) {
            let looks = some.iter().map(|key| key.is_free(self.worker, &self.cut, &self.own));
            if join_all(looks).await.into_iter().any(|found| !found.is_ok_and(|is_free| is_free)) {
                return false;
            }
        }
        true
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

/// The records of a commit, and what is done with them. They are in groups: a group has records of one node,
/// at most [`RECORDS_AT_ONCE`].
struct Locking<'a> {
    records: Vec<ToLock>,
    /// For each group a plan.
    locks: Vec<Plan<'a>>,
    /// For each group a plan that puts the new versions in their places (X3).
    installs: Vec<Plan<'a>>,
}

/// A record that is to be locked.
struct ToLock {
    /// The index of its group.
    group: usize,
    piece: Piece,
    /// Where its header is in the piece.
    header_at: u64,
    /// Its header as the transaction has seen it.
    seen: RecordHeader,
}

/// The size of a group.
struct GroupSize {
    node: NodeId,
    records: usize,
    bytes: usize,
}

impl<'a> Locking<'a> {
    /// Plans what is done with the records. The first intent starts at byte `start` of the log's intents.
    fn new(
        memory: &'a Memory,
        writes: &ByRecord<Write>,
        version: Version,
        start: u64,
    ) -> Result<Self, MemoryError> {
        let (mut sizes, mut records) = (Vec::new(), Vec::with_capacity(writes.values().count()));
        for Write { place, before, .. } in writes.values() {
            let group = add_to_group(&mut sizes, place.piece.region.node, place.layout.current_bytes());
            let header_at = place.layout.current(place.index).start;
            records.push(ToLock { group, piece: place.piece, header_at, seen: before.seen });
        }
        let (mut locks, mut installs) = (Vec::with_capacity(sizes.len()), Vec::with_capacity(sizes.len()));
        for GroupSize { node, bytes, .. } in sizes {
            locks.push(memory.plan(node, 0)?);
            installs.push(memory.plan(node, bytes)?);
        }
        let mut next = start;
        for (write, record) in writes.values().zip(&records) {
            // Links each version to the intent with the version before.
            let intent = intent_of(write);
            let link = match intent.replaced {
                Some(_) => Link::to(version.slot(), next).expect("a link can name every place of a log"),
                None => Link::NONE,
            };
            next += intent.bytes() as u64;
            let ToLock { group, piece, header_at, seen } = record;
            locks[*group].compare_and_swap(piece, *header_at, seen.0, locked(version));
            install(&mut installs[*group], write, *header_at, link, version);
        }
        Ok(Locking { records, locks, installs })
    }

    /// Locks all records that are still what the transaction has seen (X2). False: another transaction was
    /// first to write one of them.
    async fn lock<R: Rules>(&mut self) -> Result<bool, MemoryError> {
        done(&mut self.locks).await?;
        Ok(self.found().all(|(record, found)| R::has_locked(record.seen, found)))
    }

    /// The records, and the header that was found at each when it was to be locked.
    fn found(&self) -> impl Iterator<Item = (&ToLock, RecordHeader)> {
        let mut words: Vec<_> = self.locks.iter().map(Plan::words).collect();
        self.records.iter().map(move |record| {
            let word = words[record.group].next().expect("a compare-and-swap for each record");
            (record, RecordHeader(word))
        })
    }

    /// Unlocks the records that were locked.
    fn into_unlocking<R: Rules>(self, version: Version) -> Vec<Plan<'a>> {
        let are_locked: Vec<bool> =
            self.found().map(|(record, found)| R::has_locked(record.seen, found)).collect();
        let Locking { records, locks: mut plans, .. } = self;
        plans.iter_mut().for_each(Plan::clear);
        for (ToLock { group, piece, header_at, seen }, _) in
            records.iter().zip(are_locked).filter(|(_, is)| *is)
        {
            plans[*group].compare_and_swap(piece, *header_at, locked(version), seen.0);
        }
        plans
    }

    /// Puts the new versions in their places. The buffers of the other plans are free for others.
    fn into_installs(self) -> Vec<Plan<'a>> {
        self.installs
    }
}

/// Adds a record to a group, the newest one of its node if that has room, and returns the group's index.
fn add_to_group(sizes: &mut Vec<GroupSize>, node: NodeId, bytes: usize) -> usize {
    let has_room = |size: &GroupSize| size.node == node && size.records < RECORDS_AT_ONCE;
    let group = sizes.iter().rposition(has_room).unwrap_or_else(|| {
        sizes.push(GroupSize { node, records: 0, bytes: 0 });
        sizes.len() - 1
    });
    sizes[group].records += 1;
    sizes[group].bytes += bytes;
    group
}

/// A locked header, which names the commit that has locked the record.
fn locked(version: Version) -> u64 {
    RecordHeader::of(version).locked().0
}

fn install(plan: &mut Plan<'_>, write: &Write, header_at: u64, link: Link, version: Version) {
    let piece = &write.place.piece;
    let header = RecordHeader::of(version);
    let header = if write.new.is_some() { header } else { header.deleted() };
    let label = Label { header, number: write.before.label.number + 1, link };
    let before = &write.before.body;
    plan.write_with(piece, header_at + WORD_BYTES as u64, before.len(), |body| {
        // A version that deletes the record has whatever data there were.
        body[DATA_OF_BODY..].copy_from_slice(write.new.as_deref().unwrap_or(&before[DATA_OF_BODY..]));
        seal_body(write.place.record, label, body);
    });
    plan.write(piece, header_at, &header.0.to_le_bytes());
}

async fn done(plans: &mut [Plan<'_>]) -> Result<(), MemoryError> {
    run_all(plans).await;
    plans.iter().try_for_each(Plan::check)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_group_has_records_of_one_node_as_many_as_a_doorbell_takes_and_the_bytes_of_all(
            records in prop::collection::vec((1..4_u64, 1..100_usize), 0..300),
        ) {
            let mut sizes = Vec::new();
            let groups: Vec<usize> = records
                .iter()
                .map(|&(node, bytes)| add_to_group(&mut sizes, NodeId(node), bytes))
                .collect();
            for (group, size) in sizes.iter().enumerate() {
                let of_it = || records.iter().zip(&groups).filter(|(_, of)| **of == group).map(|(record, _)| record);
                prop_assert!(of_it().all(|(node, _)| NodeId(*node) == size.node));
                prop_assert_eq!(of_it().map(|(_, bytes)| bytes).sum::<usize>(), size.bytes);
                prop_assert_eq!(of_it().count(), size.records);
                prop_assert!((1..=MAX_BATCH / OPERATIONS_EACH).contains(&size.records));
            }
            for node in (1..4).map(NodeId) {
                let all = records.iter().filter(|(of, _)| NodeId(*of) == node).count();
                let of_it = sizes.iter().filter(|size| size.node == node).count();
                prop_assert_eq!(of_it, all.div_ceil(RECORDS_AT_ONCE), "doorbells of {:?}", node);
            }
        }
    }
}
