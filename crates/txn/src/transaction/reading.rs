//! Finding the version of a record that a cut sees.

use farpool_wire::{RecordHeader, Version};

use super::{Row, is_absent};
use crate::cut::Cut;
use crate::error::ReadError;
use crate::memory::Memory;
use crate::record::{OldVersion, Ring};
use crate::rules::Rules;
use crate::table::Place;

/// Looks at a record before it is given up as damaged. Between two looks a commit has gone on that the first one met, and the same
/// does not happen to a later one for ever: either the cut sees what is there, or the ring is asked.
const LOOKS: u32 = 100;

/// What a look at the current version has found.
enum Look {
    /// The cut sees it, and here it is.
    Seen(RecordHeader, Vec<u8>),
    /// The cut sees an older one; or this one is about to be replaced, and lies in the ring as well.
    Older,
    /// It changed while it was read.
    Torn,
}

/// A record as a cut sees it.
pub(super) async fn read<R: Rules>(memory: &Memory, cut: &Cut, place: &Place<'_>) -> Result<Row, ReadError> {
    for _ in 0..LOOKS {
        let bytes = memory.read(place.piece, place.layout.current(place.index)).await?;
        match look::<R>(cut, place, &bytes)? {
            Look::Seen(header, data) => return Ok(row(header, data)),
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

/// A record that is to be written: its header, its data, and the number that they get in the ring.
pub(super) async fn read_to_write<R: Rules>(
    memory: &Memory,
    cut: &Cut,
    place: &Place<'_>,
) -> Result<(RecordHeader, Vec<u8>, u64), ReadError> {
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
            Look::Seen(header, _) if header.is_locked() => return Err(ReadError::Conflict),
            Look::Seen(header, data) => {
                let ring = place.layout.decode_ring(ran.bytes(ring)).ok_or(ReadError::Damaged)?;
                return Ok((header, data, ring.next_number()));
            }
            Look::Older => return Err(ReadError::Conflict),
            Look::Torn => memory.endpoint().yield_now().await,
        }
    }
    Err(ReadError::Damaged)
}

fn look<R: Rules>(cut: &Cut, place: &Place<'_>, bytes: &[u8]) -> Result<Look, ReadError> {
    let found = place.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
    let (header, verified) = found;
    if !cut.sees(header.version()) {
        return Ok(Look::Older);
    }
    let as_found = &bytes[bytes.len() - place.layout.data_bytes()..];
    Ok(match R::data_of(verified, as_found) {
        Some(data) => Look::Seen(header, data.to_vec()),
        // Nobody has written there yet, though somebody may be about to: zeros, without a checksum.
        None if header.version() == Version::INITIAL && is_zeros(&bytes[size_of::<u64>()..]) => {
            Look::Seen(header, as_found.to_vec())
        }
        None if header.is_locked() => Look::Older,
        None => Look::Torn,
    })
}

/// The last version in the ring that the cut sees; `None`: what lay there was replaced meanwhile.
async fn read_old<R: Rules>(memory: &Memory, cut: &Cut, place: &Place<'_>) -> Result<Option<Row>, ReadError> {
    let ring = memory.read(place.piece, place.layout.ring(place.index)).await?;
    let ring: Ring = place.layout.decode_ring(&ring).ok_or(ReadError::Damaged)?;
    let Some(old) = ring.last_seen(cut) else {
        return if ring.next_number() == 0 { Ok(None) } else { Err(ReadError::SnapshotTooOld) };
    };
    let OldVersion { number, header } = old;
    let bytes = memory.read(place.piece, place.layout.old(place.index, number)).await?;
    let as_found = &bytes[bytes.len() - place.layout.data_bytes()..];
    let data = R::data_of(place.layout.decode_old(place.record, old, &bytes), as_found);
    Ok(data.map(|data| row(header, data.to_vec())))
}

fn is_zeros(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

fn row(header: RecordHeader, data: Vec<u8>) -> Row {
    Row { version: header.version(), data: (!is_absent(header)).then_some(data) }
}
