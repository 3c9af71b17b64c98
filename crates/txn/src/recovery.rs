//! What a client leaves behind that dies: its commits under way are undone, then its slot goes on (paper 3,
//! section 6.2).
//!
//! V1. Only behind the fence of all its grants: from then on nothing of it takes effect.
//! V2. A commit that its slot's word does not have was shown to nobody, and nobody was told that it is
//!     committed: it is undone.
//! V3. A record says that such a commit has locked it, or replaced its version: then the log tells what was
//!     there before (L1), and the ring has its data, if they are not in their place any more (X3). They are
//!     put back first, the header last. Who reads meanwhile takes the ring's.
//! V4. Then the slot's word jumps over all that was in doubt, to the next generation: the next client of the
//!     slot begins behind it.
//! V5. Each step may be done again: where a recoverer dies, another begins anew, behind the fence of that
//!     one.
//! V6. One copy of the log is enough (L1). One that a recoverer could not reach lacks his verdicts: it is
//!     never read again, and the slot's next client gets [another in its place](replace_copy).

use std::collections::BTreeMap;

use farpool_wire::{RecordHeader, RegionId, Slot, Version};

use crate::log::{Head, Intent, LogAt};
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::Oracle;
use crate::record::{RecordId, RecordLayout};
use crate::rules::{Rules, Shipped};

const WORD_BYTES: u64 = 8;

/// What was found of a slot's last client, and done about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// The slot's word: behind it, its next client begins.
    pub last: u64,
    /// Commits that will never be seen: they were undone, or had not come so far that anything had to be. Of
    /// those that had not even come into the log nothing is known.
    pub rolled_back: Vec<Version>,
    /// The copy of the log that could not be reached. It must not be in a [`LogAt`] any more, neither of the
    /// slot's next client nor of who asks for a [`fate`]: it may take commits for good that were rolled back.
    pub lost_copy: Option<Piece>,
}

/// Why a slot cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The oracle has no such slot.
    #[error("the oracle has no slot {0}")]
    NoSuchSlot(usize),
    /// It has had all the clients that it can have.
    #[error("slot {0} is used up: its clients have taken all its numbers")]
    UsedUp(usize),
    /// Attach it first.
    #[error("a commit has written to region {0}, which is not attached")]
    NotAttached(RegionId),
    /// What a record held before is neither in its place nor in its ring.
    #[error("what record {} held before a commit that has to be undone is not to be found", .0.0)]
    Damaged(RecordId),
    /// Far memory does not answer. Try again with another [`Memory`], behind the fence of this one's grants:
    /// what it has sent may still land, until then.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// What became of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It took effect.
    Committed,
    /// It never took effect, nor will it.
    RolledBack,
    /// It is under way; or its client has died, and the slot was not looked after yet.
    NotYetKnown,
    /// It is too long ago: the slot's log does not have it any more.
    Forgotten,
}

/// Undoes what a slot's client left under way, and lets the slot go on, with both copies of its log. All its
/// grants must have been fenced, nobody else may be about to do the same, and `memory` must have all regions
/// attached that a transaction may have written to.
///
/// # Errors
/// Then the slot's word stays, and with it what could not be undone. Everything else was undone.
pub async fn recover(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    slot: Slot,
) -> Result<Recovered, RecoveryError> {
    let copies = Copies { needed: 2, ..Copies::of(log) };
    recover_with::<Shipped>(memory, oracle, log, copies, slot).await
}

/// [`recover`] by rules that may be wrong, and with one copy of the log if the other is lost.
///
/// # Errors
/// As there.
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
    let shown = memory.read_word(&piece, word).await?;
    let (mut rolled_back, mut trouble) = (Vec::new(), None);
    for (version, (head, intents)) in in_doubt(memory, log, &mut copies, slot, shown).await? {
        for intent in head.intents(&intents).unwrap_or_default() {
            // One record that cannot be helped does not keep the others locked.
            trouble = undo::<R>(memory, &intent, version).await.err().or(trouble);
        }
        rolled_back.push((version, head));
    }
    if let Some(trouble) = trouble {
        return Err(trouble);
    }
    for (version, head) in &rolled_back {
        // With the head: a copy may never have had it, and what it has there instead must not lose its own
        // verdict.
        let place = [&head.encode()[..], &Head::verdict_on(*version).to_le_bytes()].concat();
        let kept = if R::verdicts_have_heads() { 0..place.len() } else { Head::BYTES..place.len() };
        for copy in copies.left.clone() {
            let start = log.layout.head(*version).start + kept.start as u64;
            let written = memory.write(&copy, start, &place[kept.clone()]).await;
            copies.unless_lost(copy, written)?;
        }
    }
    let last = R::behind_what_is_in_doubt(shown).ok_or(RecoveryError::UsedUp(slot.index()))?;
    memory.write_word(&piece, word, last).await?;
    let rolled_back = rolled_back.into_iter().map(|(version, _)| version).collect();
    Ok(Recovered { last, rolled_back, lost_copy: copies.lost })
}

/// The copies of a log, of which one may be lost (V6).
struct Copies {
    left: Vec<Piece>,
    lost: Option<Piece>,
    /// As many must be left.
    needed: usize,
}

impl Copies {
    fn of(log: &LogAt) -> Copies {
        Copies { left: log.copies.to_vec(), lost: None, needed: 1 }
    }

    /// What an operation on one of them came to; `None`: that copy is lost, and there is another.
    fn unless_lost<T>(
        &mut self,
        copy: Piece,
        done: Result<T, MemoryError>,
    ) -> Result<Option<T>, MemoryError> {
        match done {
            Ok(done) => Ok(Some(done)),
            // That says nothing of the copy.
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

/// All commits that are not shown. Where the intents are whole in neither copy, nothing was locked.
async fn in_doubt(
    memory: &Memory,
    log: &LogAt,
    copies: &mut Copies,
    slot: Slot,
    shown: u64,
) -> Result<BTreeMap<Version, (Head, Vec<u8>)>, MemoryError> {
    let mut in_doubt = BTreeMap::new();
    for copy in log.copies {
        let places = memory.read(&copy, log.layout.heads()).await;
        let Some(places) = copies.unless_lost(copy, places)? else { continue };
        let heads = places.chunks_exact(Head::PLACE_BYTES).filter_map(Head::decode).map(|(head, _)| head);
        for head in heads.filter(|head| head.version.slot() == slot && head.version.count() > shown) {
            let Some(place) = log.layout.intents(&head) else { continue };
            let intents = memory.read(&copy, place).await;
            let Some(intents) = copies.unless_lost(copy, intents)? else { break };
            let known = in_doubt.entry(head.version).or_insert((head, Vec::new()));
            if head.intents(&intents).is_some() {
                *known = (head, intents.to_vec());
            }
        }
    }
    Ok(in_doubt)
}

/// Puts back what a record held before a commit, if that has locked it (V3).
async fn undo<R: Rules>(memory: &Memory, intent: &Intent<'_>, version: Version) -> Result<(), RecoveryError> {
    let damaged = || RecoveryError::Damaged(intent.record);
    let region = memory.whole(intent.region).ok_or(RecoveryError::NotAttached(intent.region))?;
    // As if the record were alone.
    let layout = RecordLayout::new(1, intent.data_bytes, 1).ok_or_else(damaged)?;
    let current = read_at(memory, &region, intent.current, layout.current(0)).await?.ok_or_else(damaged)?;
    let (header, found) = layout.decode_current(intent.record, &current).ok_or_else(damaged)?;
    if header.version() != version {
        return Ok(()); // somebody else was first to lock it, or this was done before
    }
    let before = intent.old_version();
    if !R::data_first() {
        memory.compare_and_swap(&region, intent.current, header.0, intent.seen.0).await?;
    }
    if !(found.is_right && found.header == before.header && found.number == before.number) {
        let old = read_at(memory, &region, intent.old, layout.old(0, 0)).await?.ok_or_else(damaged)?;
        let kept = layout.decode_old(intent.record, before, &old).filter(|kept| kept.is_right);
        let body = layout.encode_body(intent.record, before, kept.ok_or_else(damaged)?.data);
        memory.write(&region, intent.current + WORD_BYTES, &body).await?;
    }
    if !R::data_first() {
        return Ok(());
    }
    // Done before, where another has locked the record since: the memory has moved, and it was tried twice.
    let found = memory.compare_and_swap(&region, intent.current, header.0, intent.seen.0).await?;
    let is_free = found == header.0 || RecordHeader(found).version() != version;
    if is_free { Ok(()) } else { Err(damaged()) }
}

/// Bytes at `start`, as many as in `like`; `None`: no memory has so many bytes.
async fn read_at(
    memory: &Memory,
    region: &Piece,
    start: u64,
    like: std::ops::Range<u64>,
) -> Result<Option<Vec<u8>>, MemoryError> {
    let Some(end) = start.checked_add(like.end - like.start) else { return Ok(None) };
    Ok(Some(memory.read(region, start..end).await?.to_vec()))
}

/// What became of a commit, of which its client was told nothing, or which has died. One copy of the log
/// tells it, if it is none that a recovery has lost.
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
    let start = log.layout.head(version).start;
    let mut copies = Copies::of(log);
    let mut found = Found::default();
    for copy in log.copies {
        let place = memory.read(&copy, start..start + Head::PLACE_BYTES as u64).await;
        if let Some(place) = copies.unless_lost(copy, place)? {
            found.look(version, &place);
        }
    }
    Ok(found.fate())
}

/// Puts another copy in the place of one that is lost, with all that the one left says of commits that are
/// over.
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
        let heads = memory.read(left, log.layout.heads()).await?;
        memory.write(&by, log.layout.heads().start, &heads).await?;
    }
    Ok(LogAt { copies, layout: log.layout })
}

/// What the copies of a log have in the place of a commit's head.
#[derive(Default)]
struct Found {
    verdict: bool,
    /// Zeros, or the head of an earlier one.
    nothing: bool,
    /// A later one's head is there, or bytes that are being replaced.
    other: bool,
}

impl Found {
    fn look(&mut self, version: Version, place: &[u8]) {
        match Head::decode(place) {
            Some((head, is_rolled_back)) if head.version == version => self.verdict |= is_rolled_back,
            Some((head, _)) if head.version.count() < version.count() => self.nothing = true,
            None if place.iter().all(|&byte| byte == 0) => self.nothing = true,
            _ => self.other = true,
        }
    }

    /// Of a commit that its slot's word has.
    fn fate(&self) -> Fate {
        match self {
            Found { verdict: true, .. } => Fate::RolledBack,
            // Where its intents are not in both copies, it has never locked anything.
            Found { nothing: true, .. } => Fate::RolledBack,
            Found { other: true, .. } => Fate::Forgotten,
            _ => Fate::Committed,
        }
    }
}
