//! Finding the version of a record that a cut sees.

use farpool_wire::RecordHeader;

use super::{Row, is_absent};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::memory::Memory;
use crate::record::{FoundVersion, OldVersion, Ring};
use crate::rules::Rules;
use crate::table::Place;

/// Looks at a record before it is given up as damaged. Between two looks a commit has gone on that the first one met, and the same
/// does not happen to a later one for ever: either the cut sees what is there, or the ring is asked.
const LOOKS: u32 = 100;

/// What a look at the current version has found.
enum Look<'a> {
    /// The cut sees it, and here it is, with the header before it.
    Seen(RecordHeader, FoundVersion<'a>),
    /// The cut sees an older one; or somebody is replacing the one that was there, and that lies in the ring.
    Older,
    /// Header and data are of different times.
    Torn,
}

/// A record that is to be written.
pub(super) struct ToWrite {
    /// Its header as it was.
    pub(super) seen: RecordHeader,
    /// The present version, as it will lie in the ring.
    pub(super) old: OldVersion,
    /// Its data.
    pub(super) data: Vec<u8>,
}

/// A record as a cut sees it.
pub(super) async fn read<R: Rules>(memory: &Memory, cut: &Cut, place: &Place<'_>) -> Result<Row, ReadError> {
    for _ in 0..LOOKS {
        let bytes = memory.read(place.piece, place.layout.current(place.index)).await?;
        match look::<R>(cut, place, &bytes)? {
            Look::Seen(_, found) => return Ok(row(&found)),
            Look::Torn => {}
            Look::Older => {
                if let Some(row) = read_old::<R>(memory, cut, place).await? {
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
    memory: &Memory,
    cut: &Cut,
    place: &Place<'_>,
) -> Result<ToWrite, ReadError> {
    let (current, ring) = (place.layout.current(place.index), place.layout.ring(place.index));
    let bytes = (current.end - current.start + ring.end - ring.start) as usize;
    for _ in 0..LOOKS {
        let mut plan = memory.plan(place.piece.region.node, bytes)?;
        let current = plan.read(place.piece, current.clone());
        // Behind the header: if that is still the same when it is locked, the counter is, too.
        plan.fence();
        let ring = plan.read(place.piece, ring.clone());
        let ran = plan.run().await;
        ran.check()?;
        match look::<R>(cut, place, ran.bytes(current))? {
            Look::Seen(seen, found) if !R::may_be_locked(seen, found.header) => {
                return Err(ReadError::Conflict);
            }
            Look::Seen(seen, found) => {
                let ring = place.layout.decode_ring(ran.bytes(ring)).ok_or(ReadError::Damaged)?;
                let old = OldVersion { number: ring.next_number(), header: found.header };
                return Ok(ToWrite { seen, old, data: found.data.to_vec() });
            }
            Look::Older => return Err(ReadError::Conflict),
            Look::Torn => memory.endpoint().yield_now().await,
        }
    }
    Err(ReadError::Damaged)
}

fn look<'a, R: Rules>(cut: &Cut, place: &Place<'_>, bytes: &'a [u8]) -> Result<Look<'a>, ReadError> {
    let (header, found) = place.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
    // What a cut sees was installed before the cut was made.
    let is_installed = !header.is_locked() && cut.sees(header.version());
    if !R::takes(found.is_right) {
        return Ok(if is_installed { Look::Torn } else { Look::Older });
    }
    Ok(match cut.sees(found.header.version()) {
        true if is_installed && found.header.version() != header.version() => Look::Torn,
        true => Look::Seen(header, found),
        false => Look::Older,
    })
}

/// The last version in the ring that the cut sees; `None`: what lay there was replaced meanwhile.
async fn read_old<R: Rules>(memory: &Memory, cut: &Cut, place: &Place<'_>) -> Result<Option<Row>, ReadError> {
    let ring = memory.read(place.piece, place.layout.ring(place.index)).await?;
    let ring: Ring = place.layout.decode_ring(&ring).ok_or(ReadError::Damaged)?;
    let Some(old) = ring.last_seen(cut) else {
        return if ring.next_number() == 0 { Ok(None) } else { Err(ReadError::SnapshotTooOld) };
    };
    let bytes = memory.read(place.piece, place.layout.old(place.index, old.number)).await?;
    let found = place.layout.decode_old(place.record, old, &bytes).ok_or(ReadError::Damaged)?;
    Ok(R::takes(found.is_right).then(|| row(&found)))
}

fn row(found: &FoundVersion<'_>) -> Row {
    let data = (!is_absent(found.header)).then(|| found.data.to_vec());
    Row { version: found.header.version(), data }
}
