//! Recovery of a slot whose client has died: its commits in flight are undone, then the slot goes on (paper
//! 3, section 6.2).
//!
//! V1. Recovery begins only after all grants of the client are fenced: from then on nothing that it sent
//!     takes effect.
//! V2. No transaction has seen a commit that the slot's word does not have, and no client was told that it is
//!     committed: it is undone.
//! V3. If a record says that such a commit has locked it, or replaced its version, the log has what was there
//!     before (L1). The body is put back first, the header last. Meanwhile readers find the version in the
//!     log.
//! V4. Then the slot's word moves over all counts that were in doubt, to the next generation, in which the
//!     slot's next client begins.
//! V5. Each step may be repeated: if a recoverer dies, another one starts again, after it has fenced the
//!     first one.
//! V6. One copy of the log is enough (L1). A copy that a recoverer could not reach lacks its verdicts. So no
//!     recoverer reads it again, and no client that asks for a fate. (Readers of old versions may read it:
//!     they check what they find.) The slot's next client gets [another in its place](replace_copy).

use std::collections::BTreeMap;

use farpool_wire::{RecordHeader, RegionId, Slot, Version};

use crate::log::{Head, Intent, LogAt, LogRoom};
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::Oracle;
use crate::record::{RecordId, body_bytes};
use crate::rules::{Rules, Shipped};

const WORD_BYTES: u64 = 8;
/// Bytes that are copied at once to a new copy of a log.
const COPIED_AT_ONCE: u64 = 64 << 10;

/// The result of a slot's recovery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// The slot's word: its next client begins after this count.
    pub last: u64,
    /// Where the slot's log goes on.
    pub room: LogRoom,
    /// Commits that no transaction will ever see: they were undone, or had not changed any record yet.
    /// Commits that had not even reached the log are not known.
    pub rolled_back: Vec<Version>,
    /// The copy of the log that could not be reached. It must not be in any [`LogAt`] any more, neither for
    /// the slot's next client nor for a client that asks for a [`fate`]: it may make a commit that was rolled
    /// back look committed.
    pub lost_copy: Option<Piece>,
}

/// Why a slot was not recovered.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The oracle has no such slot.
    #[error("the oracle has no slot {0}")]
    NoSuchSlot(usize),
    /// No generation is left for another client.
    #[error("slot {0} is used up: no counts are left for another client")]
    UsedUp(usize),
    /// Attach the region first.
    #[error("a commit has written to region {0}, which is not attached")]
    NotAttached(RegionId),
    /// The log has no version to put back, or the record has another header than it was given: memory was
    /// damaged.
    #[error("memory was damaged: the version of record {} to put back was not found", .0.0)]
    Damaged(RecordId),
    /// Far memory does not answer. Try again with another [`Memory`], after the grants of this one are
    /// fenced: until then, what it has sent may still land.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The outcome of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It took effect.
    Committed,
    /// It never took effect, and never will.
    RolledBack,
    /// It is in flight; or its client has died, and the slot has not been recovered yet.
    NotYetKnown,
    /// It is too long ago: the slot's log does not have it any more.
    Forgotten,
}

/// Undoes the commits that a slot's client left in flight, and lets the slot go on, with both copies of its
/// log. All grants of the client must have been fenced, no other process may be about to do the same, and
/// `memory` must have attached all regions that a transaction may have written to.
///
/// # Errors
/// Then the slot's word stays as it is, so that recovery can start again. A record that cannot be restored
/// does not keep the others from being restored.
pub async fn recover(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    slot: Slot,
) -> Result<Recovered, RecoveryError> {
    let copies = Copies { needed: 2, ..Copies::of(log) };
    recover_with::<Shipped>(memory, oracle, log, copies, slot).await
}

/// As [`recover`], by the rules `R`, and with one copy of the log if the other is lost.
///
/// # Errors
/// As [`recover`].
pub async fn recover_by<R: Rules>(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    slot: Slot,
) -> Result<Recovered, RecoveryError> {
    recover_with::<R>(memory, oracle, log, Copies::of(log), slot).await
}

async fn recover_with<R: Rules>(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    mut copies: Copies,
    slot: Slot,
) -> Result<Recovered, RecoveryError> {
    let (piece, word) = oracle.word(slot).ok_or(RecoveryError::NoSuchSlot(slot.index()))?;
    let watermark = memory.read_word(&piece, word).await?;
    let (mut rolled_back, mut failure) = (Vec::new(), None);
    let found = read_log(memory, log, &mut copies, slot, watermark).await?;
    for (version, (head, intents)) in found.in_doubt {
        for intent in head.intents(&intents).unwrap_or_default() {
            // One record that cannot be restored does not keep the others locked.
            failure = undo::<R>(memory, &intent, version).await.err().or(failure);
        }
        rolled_back.push((version, head));
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    for (version, head) in &rolled_back {
        // With the head: a copy may never have had it. Then the place still has the head of another commit,
        // which must not be left there without its own verdict.
        let place = [&head.encode()[..], &Head::verdict_on(*version).to_le_bytes()].concat();
        let kept = if R::verdicts_have_heads() { 0..place.len() } else { Head::BYTES..place.len() };
        for copy in copies.left.clone() {
            let start = log.layout.head(*version).start + kept.start as u64;
            let written = memory.write(&copy, start, &place[kept.clone()]).await;
            copies.unless_lost(copy, written)?;
        }
    }
    let last = R::start_after_recovery(watermark).ok_or(RecoveryError::UsedUp(slot.index()))?;
    memory.write_word(&piece, word, last).await?;
    let rolled_back = rolled_back.into_iter().map(|(version, _)| version).collect();
    let bytes = log.layout.area_bytes();
    let room = match found.last {
        _ if !R::keeps_log_of_predecessor() => LogRoom::new(bytes),
        LastHead::None => LogRoom::new(bytes),
        LastHead::Known(head) => LogRoom::after_head(bytes, &head, last),
        LastHead::Overwritten => LogRoom::taken_until(bytes, last),
    };
    Ok(Recovered { last, room, rolled_back, lost_copy: copies.lost })
}

/// The copies of a log, one of which may be lost (V6).
struct Copies {
    left: Vec<Piece>,
    lost: Option<Piece>,
    /// How many must be left.
    needed: usize,
}

impl Copies {
    fn of(log: &LogAt) -> Copies {
        Copies { left: log.copies.to_vec(), lost: None, needed: 1 }
    }

    /// The result of an operation on a copy. `None`: that copy is lost, and there is another.
    fn unless_lost<T>(
        &mut self,
        copy: Piece,
        done: Result<T, MemoryError>,
    ) -> Result<Option<T>, MemoryError> {
        match done {
            Ok(done) => Ok(Some(done)),
            // A lack of buffers says nothing about the copy.
            Err(short @ MemoryError::Short(_)) => Err(short),
            Err(error) if self.left.iter().filter(|left| **left != copy).count() < self.needed => Err(error),
            Err(_) => {
                self.left.retain(|left| *left != copy);
                self.lost = Some(copy);
                Ok(None)
            }
        }
    }
}

/// What a log has of its slot's last commits.
struct Found {
    /// All commits that the watermark has not reached. If neither copy has a commit's intents whole, that
    /// commit has locked nothing.
    in_doubt: BTreeMap<Version, (Head, Vec<u8>)>,
    last: LastHead,
}

/// The head of the last commit in a log.
enum LastHead {
    /// Nothing was ever written there.
    None,
    Known(Head),
    /// A place has neither zeros nor a whole head: the client died while it wrote a head there, perhaps over
    /// the last one.
    Overwritten,
}

impl LastHead {
    fn add(&mut self, slot: Slot, place: &[u8]) {
        *self = match (&self, Head::decode(place)) {
            (LastHead::Overwritten, _) => LastHead::Overwritten,
            (LastHead::Known(last), Some((head, _))) if head.version < last.version => return,
            (_, Some((head, _))) if head.version.slot() == slot => LastHead::Known(head),
            (_, None) if place.iter().all(|&byte| byte == 0) => return,
            _ => LastHead::Overwritten,
        };
    }
}

async fn read_log(
    memory: &Memory,
    log: &LogAt,
    copies: &mut Copies,
    slot: Slot,
    watermark: u64,
) -> Result<Found, MemoryError> {
    let (mut in_doubt, mut last) = (BTreeMap::new(), LastHead::None);
    for copy in log.copies {
        let places = memory.read(&copy, log.layout.heads()).await;
        let Some(places) = copies.unless_lost(copy, places)? else { continue };
        places.chunks_exact(Head::PLACE_BYTES).for_each(|place| last.add(slot, place));
        let heads = places.chunks_exact(Head::PLACE_BYTES).filter_map(Head::decode).map(|(head, _)| head);
        for head in heads.filter(|head| head.version.slot() == slot && head.version.count() > watermark) {
            let Some(place) = log.layout.intents(&head) else { continue };
            let intents = memory.read(&copy, place).await;
            let Some(intents) = copies.unless_lost(copy, intents)? else { break };
            let known = in_doubt.entry(head.version).or_insert((head, Vec::new()));
            if head.intents(&intents).is_some() {
                *known = (head, intents.to_vec());
            }
        }
    }
    Ok(Found { in_doubt, last })
}

/// Puts back what a record held before a commit, if the commit has locked it (V3).
async fn undo<R: Rules>(memory: &Memory, intent: &Intent<'_>, version: Version) -> Result<(), RecoveryError> {
    let damaged = || RecoveryError::Damaged(intent.record);
    let region = memory.whole(intent.region).ok_or(RecoveryError::NotAttached(intent.region))?;
    let start = intent.header_at.checked_add(WORD_BYTES).ok_or_else(damaged)?;
    let header = RecordHeader(memory.read_word(&region, intent.header_at).await?);
    if header.version() != version {
        return Ok(()); // another commit locked it first, or this one was undone before
    }
    let label = intent.label_before().ok_or_else(damaged)?;
    let never_written = vec![0; body_bytes(intent.data_bytes)];
    let body = intent.replaced.unwrap_or(&never_written);
    if !R::data_first() {
        memory.compare_and_swap(&region, intent.header_at, header.0, label.header.0).await?;
    }
    memory.write(&region, start, body).await?;
    if !R::data_first() {
        return Ok(());
    }
    // Another commit's header is there if this swap was tried twice, because the memory moved, and that
    // commit has locked the record after the first try.
    let found = memory.compare_and_swap(&region, intent.header_at, header.0, label.header.0).await?;
    let is_free = found == header.0 || RecordHeader(found).version() != version;
    if is_free { Ok(()) } else { Err(damaged()) }
}

/// The outcome of a commit whose client was not told, or has died. One copy of the log tells it, unless a
/// recovery has lost that copy.
///
/// # Errors
/// When far memory does not answer.
pub async fn fate(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    version: Version,
) -> Result<Fate, RecoveryError> {
    let slot = version.slot();
    let (piece, word) = oracle.word(slot).ok_or(RecoveryError::NoSuchSlot(slot.index()))?;
    if memory.read_word(&piece, word).await? < version.count() {
        return Ok(Fate::NotYetKnown);
    }
    let mut copies = Copies::of(log);
    let mut found = Verdicts::default();
    for copy in log.copies {
        let place = memory.read(&copy, log.layout.place_of_head(version)).await;
        if let Some(place) = copies.unless_lost(copy, place)? {
            found.look(version, &place);
        }
    }
    Ok(found.fate())
}

/// Puts another copy in the place of one that is lost, with all that the remaining copy has.
///
/// # Errors
/// When far memory does not answer: begin again.
pub async fn replace_copy(
    memory: &Memory,
    log: &LogAt,
    lost: Piece,
    by: Piece,
) -> Result<LogAt, MemoryError> {
    let copies = log.copies.map(|copy| if copy == lost { by } else { copy });
    for left in copies.iter().filter(|copy| **copy != by) {
        for start in (0..log.layout.bytes()).step_by(COPIED_AT_ONCE as usize) {
            let end = log.layout.bytes().min(start + COPIED_AT_ONCE);
            let bytes = memory.read(left, start..end).await?;
            memory.write_from(bytes, &by, start).await?;
        }
    }
    Ok(LogAt { copies, layout: log.layout })
}

/// What the copies of a log have in the place of a commit's head.
#[derive(Default)]
struct Verdicts {
    verdict: bool,
    /// Zeros, or the head of an earlier commit.
    nothing: bool,
    /// The head of a later commit, or bytes that are being replaced.
    other: bool,
}

impl Verdicts {
    fn look(&mut self, version: Version, place: &[u8]) {
        match Head::decode(place) {
            Some((head, is_rolled_back)) if head.version == version => self.verdict |= is_rolled_back,
            Some((head, _)) if head.version.count() < version.count() => self.nothing = true,
            None if place.iter().all(|&byte| byte == 0) => self.nothing = true,
            _ => self.other = true,
        }
    }

    /// The fate of a commit that the slot's word has.
    fn fate(&self) -> Fate {
        match self {
            Verdicts { verdict: true, .. } => Fate::RolledBack,
            // Its intents are not in both copies, so it has never locked anything.
            Verdicts { nothing: true, .. } => Fate::RolledBack,
            Verdicts { other: true, .. } => Fate::Forgotten,
            _ => Fate::Committed,
        }
    }
}
