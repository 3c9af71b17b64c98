//! What a client leaves behind that dies: its commits under way are undone, then its slot goes on (paper 3, section 6.2).
//!
//! V1. Only behind the fence of all its grants: from then on nothing of it takes effect.
//! V2. A commit that its slot's word does not have was shown to nobody, and nobody was told that it is committed: it is undone.
//! V3. A record says that such a commit has locked it, or replaced its version: then the log tells what was there before (L1), and the
//!     ring has its data, if they are not in their place any more (X3). They are put back first, the header last. Who reads
//!     meanwhile takes the ring's.
//! V4. Then the slot's word jumps over all that was in doubt, to the next generation: the next client of the slot begins behind it.
//! V5. Each step may be done again: where a recoverer dies, another begins anew, behind the fence of that one.

use std::collections::BTreeMap;

use farpool_wire::{RecordHeader, RegionId, Slot, Version, next_generation};

use crate::log::{Head, Intent, LogAt};
use crate::memory::{Memory, MemoryError, Piece};
use crate::oracle::Oracle;
use crate::record::{RecordId, RecordLayout};
use crate::slot::MAX_COMMITS_UNDER_WAY;

const WORD_BYTES: u64 = 8;

/// What was found of a slot's last client, and done about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// The slot's word: behind it, its next client begins.
    pub last: u64,
    /// Commits that will never be seen: they were undone, or had not come so far that anything had to be. Of those that had not even come
    /// into the log nothing is known.
    pub rolled_back: Vec<Version>,
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
    /// Far memory does not answer. Try again with another [`Memory`], behind the fence of this one's grants: what it has sent may still
    /// land, until then.
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

/// Undoes what a slot's client left under way, and lets the slot go on. All its grants must have been fenced, nobody else may be about
/// to do the same, and `memory` must have all regions attached that a transaction may have written to.
///
/// # Errors
/// Then the slot's word stays, and with it what could not be undone. Everything else was undone.
pub async fn recover(
    memory: &Memory,
    oracle: &Oracle,
    log: &LogAt,
    slot: Slot,
) -> Result<Recovered, RecoveryError> {
    let (piece, word) = oracle.word(slot).ok_or(RecoveryError::NoSuchSlot(slot.index()))?;
    let shown = memory.read_word(&piece, word).await?;
    let (mut rolled_back, mut trouble) = (Vec::new(), None);
    for (version, (head, intents)) in in_doubt(memory, log, slot, shown).await? {
        for intent in head.intents(&intents).unwrap_or_default() {
            // One record that cannot be helped does not keep the others locked.
            trouble = undo(memory, &intent, version).await.err().or(trouble);
        }
        rolled_back.push((version, head));
    }
    if let Some(trouble) = trouble {
        return Err(trouble);
    }
    for (version, head) in &rolled_back {
        // With the head: a copy may never have had it, and what it has there instead must not lose its own verdict.
        let place = [&head.encode()[..], &Head::verdict_on(*version).to_le_bytes()].concat();
        for copy in &log.copies {
            memory.write(copy, log.layout.head(*version).start, &place).await?;
        }
    }
    let last = next_generation(shown.saturating_add(MAX_COMMITS_UNDER_WAY as u64))
        .ok_or(RecoveryError::UsedUp(slot.index()))?;
    memory.write_word(&piece, word, last).await?;
    Ok(Recovered { last, rolled_back: rolled_back.into_iter().map(|(version, _)| version).collect() })
}

/// All commits that are not shown. Where the intents are whole in neither copy, nothing was locked.
async fn in_doubt(
    memory: &Memory,
    log: &LogAt,
    slot: Slot,
    shown: u64,
) -> Result<BTreeMap<Version, (Head, Vec<u8>)>, MemoryError> {
    let mut in_doubt = BTreeMap::new();
    for copy in &log.copies {
        let places = memory.read(copy, log.layout.heads()).await?;
        let heads = places.chunks_exact(Head::PLACE_BYTES).filter_map(Head::decode).map(|(head, _)| head);
        for head in heads.filter(|head| head.version.slot() == slot && head.version.count() > shown) {
            let Some(place) = log.layout.intents(&head) else { continue };
            let intents = memory.read(copy, place).await?;
            let known = in_doubt.entry(head.version).or_insert((head, Vec::new()));
            if head.intents(&intents).is_some() {
                *known = (head, intents.to_vec());
            }
        }
    }
    Ok(in_doubt)
}

/// Puts back what a record held before a commit, if that has locked it (V3).
async fn undo(memory: &Memory, intent: &Intent<'_>, version: Version) -> Result<(), RecoveryError> {
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
    if !(found.is_right && found.header == before.header) {
        let old = read_at(memory, &region, intent.old, layout.old(0, 0)).await?.ok_or_else(damaged)?;
        let kept = layout.decode_old(intent.record, before, &old).filter(|kept| kept.is_right);
        let body = layout.encode_body(intent.record, before.header, kept.ok_or_else(damaged)?.data);
        memory.write(&region, intent.current + WORD_BYTES, &body).await?;
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

/// What became of a commit, of which its client was told nothing, or which has died.
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
    let mut is_torn = false;
    for copy in &log.copies {
        let place = memory.read(copy, start..start + Head::PLACE_BYTES as u64).await?;
        match Head::decode(&place) {
            Some((head, true)) if head.version == version => return Ok(Fate::RolledBack),
            Some((head, false)) if head.version == version => return Ok(Fate::Committed),
            Some((head, _)) if head.version.count() > version.count() => return Ok(Fate::Forgotten),
            Some(_) => {} // of an earlier one
            None => is_torn |= place.iter().any(|&byte| byte != 0),
        }
    }
    // A later commit's head is being written there; or its intents never were.
    Ok(if is_torn { Fate::Forgotten } else { Fate::RolledBack })
}
