//! Finding the version of a record that a cut sees.

use std::ops::Range;

use farpool_wire::{RecordHeader, Version};

use super::{Row, is_absent};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::horizon::Announcer;
use crate::memory::{Memory, Plan};
use crate::overflow::{Entry, entry_of, link_to};
use crate::record::{FoundVersion, NumberedHeader, RecordLayout, Ring};
use crate::rules::Rules;
use crate::table::Place;
use crate::worker::Worker;

/// How often a record is read before it is given up as damaged. Between two looks, the commit that the first
/// look met has gone on. That cannot repeat for ever: either the cut sees what is there, or the ring is read.
const LOOKS: u32 = 100;

/// What a look at the current version has found.
enum Look<'a> {
    /// The cut sees it. Here it is, with the header before it.
    Seen(RecordHeader, FoundVersion<'a>),
    /// The cut sees an older version, or a commit is replacing the version that was there, which then lies in
    /// the ring. In the second case this is that version, unless the word that names it is already the new
    /// commit's.
    Older(Option<Version>),
    /// Header and data are of different times.
    Torn,
}

/// A record that is to be written.
pub(super) struct ToWrite {
    /// Its header as it was.
    pub(super) seen: RecordHeader,
    /// The current version, as it will lie in the ring.
    pub(super) old: NumberedHeader,
    /// Its data.
    pub(super) data: Vec<u8>,
}

impl ToWrite {
    /// As it was for the transaction.
    pub(super) fn row(&self) -> Row {
        row(self.old.header, &self.data)
    }
}

/// Where a plan's READs of a record that is to be written put its current version and, where workers announce
/// themselves, its ring.
pub(super) struct Asked {
    current: Range<usize>,
    ring: Option<Range<usize>>,
}

impl Asked {
    /// Bytes that the READs of one record take.
    pub(super) fn bytes(layout: &RecordLayout) -> usize {
        layout.current_bytes() + layout.ring_bytes()
    }

    /// Adds the READs of some records.
    pub(super) fn add<R: Rules>(plan: &mut Plan<'_>, worker: &Worker<R>, places: &[Place]) -> Vec<Asked> {
        let currents: Vec<Range<usize>> =
            places.iter().map(|place| plan.read(&place.piece, place.layout.current(place.index))).collect();
        let looks_at_rings = worker.announcer.is_some();
        if looks_at_rings {
            // After the versions: the rings then have all versions before these.
            plan.fence();
        }
        let mut ring = |place: &Place| plan.read(&place.piece, place.layout.ring(place.index));
        let rings = places.iter().map(|place| looks_at_rings.then(|| ring(place)));
        currents.into_iter().zip(rings).map(|(current, ring)| Asked { current, ring }).collect()
    }

    /// What was found of one record; `None`: words of different times.
    pub(super) async fn found<R: Rules>(
        &self,
        plan: &Plan<'_>,
        worker: &Worker<R>,
        cut: &Cut,
        place: &Place,
    ) -> Result<Option<ToWrite>, ReadError> {
        let (seen, found) = match look::<R>(cut, place, plan.bytes(self.current.clone()))? {
            Look::Seen(seen, found) if R::may_be_locked(seen, found.header) => (seen, found),
            Look::Seen(..) | Look::Older(_) => return Err(ReadError::Conflict),
            Look::Torn => return Ok(None),
        };
        let old = NumberedHeader { number: found.number, header: found.header };
        if let (Some(announcer), Some(ring)) = (&worker.announcer, &self.ring) {
            let ring = place.layout.decode_ring(plan.bytes(ring.clone())).ok_or(ReadError::Damaged)?;
            find_room::<R>(&worker.memory, announcer, &ring, old).await?;
        }
        Ok(Some(ToWrite { seen, old, data: found.data.to_vec() }))
    }
}

/// A record as a cut sees it.
pub(super) async fn read<R: Rules>(memory: &Memory, cut: &Cut, place: &Place) -> Result<Row, ReadError> {
    for _ in 0..LOOKS {
        let bytes = memory.read(&place.piece, place.layout.current(place.index)).await?;
        match look::<R>(cut, place, &bytes)? {
            Look::Seen(_, found) => return Ok(row(found.header, found.data)),
            Look::Torn => {}
            Look::Older(replaced) => {
                let row = read_old::<R>(memory, cut, place).await?;
                // If it is another version, no commit is replacing this one, and memory was damaged.
                if let Some(row) = row.filter(|row| replaced.is_none_or(|replaced| row.version == replaced)) {
                    return Ok(row);
                }
            }
        }
        memory.endpoint().yield_now().await;
    }
    Err(ReadError::Damaged)
}

/// Reads a record that is to be written.
pub(super) async fn read_to_write<R: Rules>(
    worker: &Worker<R>,
    cut: &Cut,
    place: &Place,
) -> Result<ToWrite, ReadError> {
    let memory = &worker.memory;
    for _ in 0..LOOKS {
        let mut plan = memory.plan(place.piece.region.node, Asked::bytes(&place.layout))?;
        let asked = Asked::add(&mut plan, worker, std::slice::from_ref(place));
        let plan = plan.run().await;
        plan.check()?;
        match asked[0].found(&plan, worker, cut, place).await? {
            Some(found) => return Ok(found),
            None => memory.endpoint().yield_now().await,
        }
    }
    Err(ReadError::Damaged)
}

/// The current version, if what was read of it is what the cut sees. Otherwise more has to be read.
pub(super) fn settled<'a, R: Rules>(
    cut: &Cut,
    place: &Place,
    bytes: &'a [u8],
) -> Result<Option<FoundVersion<'a>>, ReadError> {
    Ok(match look::<R>(cut, place, bytes)? {
        Look::Seen(_, found) => Some(found),
        Look::Older(_) | Look::Torn => None,
    })
}

/// Makes sure that the ring has room for a version.
async fn find_room<R: Rules>(
    memory: &Memory,
    announcer: &Announcer,
    ring: &Ring,
    kept: NumberedHeader,
) -> Result<(), ReadError> {
    if R::reuses_place(ring.has_room_for(kept, &announcer.horizon()))
        || R::reuses_place(ring.has_room_for(kept, &announcer.refresh(memory).await?))
    {
        return Ok(());
    }
    // It may be this worker's own announcement that holds the horizon back.
    announcer.announce::<R>(memory).await?;
    Err(ReadError::RingFull)
}

fn look<'a, R: Rules>(cut: &Cut, place: &Place, bytes: &'a [u8]) -> Result<Look<'a>, ReadError> {
    let (header, found) = place.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
    // What a cut sees was installed before the cut was made.
    let is_installed = !header.is_locked() && cut.sees(header.version());
    let version = found.header.version();
    if !R::takes(found.is_right) {
        let replaced = Some(version).filter(|version| cut.sees(*version));
        return Ok(if is_installed { Look::Torn } else { Look::Older(replaced) });
    }
    Ok(match cut.sees(version) {
        true if is_installed && version != header.version() => Look::Torn,
        true => Look::Seen(header, found),
        false => Look::Older(None),
    })
}

/// The last version in the ring that the cut sees; `None`: what lay there was replaced meanwhile.
async fn read_old<R: Rules>(memory: &Memory, cut: &Cut, place: &Place) -> Result<Option<Row>, ReadError> {
    let ring = memory.read(&place.piece, place.layout.ring(place.index)).await?;
    let ring: Ring = place.layout.decode_ring(&ring).ok_or(ReadError::Damaged)?;
    let Some(old) = ring.last_seen(cut) else {
        return match ring.next_number() {
            0 => Ok(None),
            _ => read_overflow::<R>(memory, cut, place, 0).await,
        };
    };
    let bytes = memory.read(&place.piece, place.layout.old(place.index, old.number)).await?;
    let found = place.layout.decode_old(place.record, old, &bytes).ok_or(ReadError::Damaged)?;
    match R::takes(found.is_right) {
        true => Ok(Some(row(found.header, found.data))),
        // The client that was writing there again may have died before it wrote the header.
        false if old.header.is_moved() => read_overflow::<R>(memory, cut, place, old.number).await,
        false => Ok(None),
    }
}

/// The last version in the overflow region that the cut sees, if its number is at least `least`, which the
/// ring has named. `None`: the words of the ring were of different times, and the version is there.
///
/// The head of the chain is read after the ring: by then the chain has what the ring no longer had.
async fn read_overflow<R: Rules>(
    memory: &Memory,
    cut: &Cut,
    place: &Place,
    least: u64,
) -> Result<Option<Row>, ReadError> {
    let (layout, most) = (&place.layout, place.layout.overflow());
    if most == 0 {
        return Err(ReadError::SnapshotTooOld);
    }
    let mut next = memory.read_word(&place.piece, layout.chain(place.index).start).await?;
    for _ in 0..most {
        let Some(entry) = entry_of(next) else { break };
        let bytes = memory.read(&place.piece, layout.entry(entry).ok_or(ReadError::Damaged)?).await?;
        let (found, is_right) = Entry::decode(layout, &bytes).ok_or(ReadError::Damaged)?;
        if !R::takes(is_right) || found.record != place.record {
            return Ok(None);
        }
        if cut.sees(found.named.header.version()) {
            return Ok((found.named.number >= least).then(|| row(found.named.header, found.data)));
        }
        next = link_to(found.before);
    }
    Err(ReadError::SnapshotTooOld)
}

pub(super) fn row(header: RecordHeader, data: &[u8]) -> Row {
    Row { version: header.version(), data: (!is_absent(header)).then(|| data.to_vec()) }
}
