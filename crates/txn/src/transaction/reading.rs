//! Finding the version of a record that a cut sees.

use std::ops::Range;

use farpool_wire::{RecordHeader, Version};

use super::Row;
use crate::cut::Cut;
use crate::error::ReadError;
use crate::log::{Head, Intent};
use crate::memory::{Memory, Plan};
use crate::record::{DATA_OF_BODY, FoundVersion, Label, RecordLayout, WORD_BYTES};
use crate::rules::Rules;
use crate::table::Place;
use crate::worker::Worker;

/// How often a record is read before it is given up as damaged. Between two looks, the commit that the first
/// look met has gone on. That cannot repeat for ever: a record is replaced once for each published cut at
/// most.
const LOOKS: u32 = 100;
/// Links that are followed between two turns of the thread's other tasks: in shared memory none of them
/// waits.
const LINKS_PER_TURN: u32 = 64;

/// What a look at a record's place has found.
enum Look<'a> {
    /// The cut sees the current version. Here it is, with the header before it.
    Seen(RecordHeader, FoundVersion<'a>),
    /// The cut sees an older version than this one.
    Older(Label),
    /// Words of different versions. The commit that the header names, if the cut does not see it: its version
    /// is being installed, rolled back, or replaced.
    Torn(Option<Version>),
}

/// A record that is to be written.
pub(super) struct ToWrite {
    /// Its header as it was.
    pub(super) seen: RecordHeader,
    /// Which version it has.
    pub(super) label: Label,
    /// Its body, with that version.
    pub(super) body: Vec<u8>,
}

impl ToWrite {
    /// As it was for the transaction.
    pub(super) fn row(&self) -> Row {
        row(&self.label, &self.body[DATA_OF_BODY..])
    }
}

/// Where a plan's READ of a record that is to be written puts its place.
pub(super) struct Asked(Range<usize>);

impl Asked {
    /// Bytes that the READ of one record takes.
    pub(super) fn bytes(layout: &RecordLayout) -> usize {
        layout.current_bytes()
    }

    /// Adds the READs of some records.
    pub(super) fn add(plan: &mut Plan<'_>, places: &[Place]) -> Vec<Asked> {
        let read = |place: &Place| plan.read(&place.piece, place.layout.current(place.index));
        places.iter().map(read).map(Asked).collect()
    }

    /// What was found of one record; `None`: words of different times.
    pub(super) fn found<R: Rules>(
        &self,
        plan: &Plan<'_>,
        cut: &Cut,
        place: &Place,
    ) -> Result<Option<ToWrite>, ReadError> {
        let bytes = plan.bytes(self.0.clone());
        match look::<R>(cut, place, bytes)? {
            Look::Seen(seen, found) if R::may_be_locked(seen, found.label.header) => {
                Ok(Some(ToWrite { seen, label: found.label, body: bytes[WORD_BYTES..].to_vec() }))
            }
            // Another commit is writing it, and this cut does not see that commit.
            Look::Seen(..) | Look::Older(_) | Look::Torn(Some(_)) => Err(ReadError::Conflict),
            Look::Torn(None) => Ok(None),
        }
    }
}

/// A record as a cut sees it.
pub(super) async fn read<R: Rules>(worker: &Worker<R>, cut: &Cut, place: &Place) -> Result<Row, ReadError> {
    let memory = &worker.memory;
    let mut missed = None;
    for _ in 0..LOOKS {
        let bytes = memory.read(&place.piece, place.layout.current(place.index)).await?;
        match look::<R>(cut, place, &bytes)? {
            Look::Seen(_, found) => return Ok(row(&found.label, found.data)),
            Look::Older(label) => {
                if let Some(row) = read_older(worker, cut, place, label).await? {
                    return Ok(row);
                }
                // Links of a version stay as they are, so what was not there is not there.
                if missed.replace(label) == Some(label) {
                    return Err(lost(worker));
                }
            }
            Look::Torn(Some(by)) => {
                if let Some(row) = read_replaced_by(worker, cut, place, by).await? {
                    return Ok(row);
                }
            }
            Look::Torn(None) => {}
        }
        memory.endpoint().yield_now().await;
    }
    Err(ReadError::Damaged)
}

/// The error of a version that is not where its link leads. No intent that a snapshot needs is overwritten
/// while its worker announces it.
fn lost<R>(worker: &Worker<R>) -> ReadError {
    if worker.announcer.is_some() { ReadError::Damaged } else { ReadError::SnapshotTooOld }
}

/// Reads a record that is to be written.
pub(super) async fn read_to_write<R: Rules>(
    memory: &Memory,
    cut: &Cut,
    place: &Place,
) -> Result<ToWrite, ReadError> {
    for _ in 0..LOOKS {
        let mut plan = memory.plan(place.piece.region.node, Asked::bytes(&place.layout))?;
        let asked = Asked::add(&mut plan, std::slice::from_ref(place));
        let plan = plan.run().await;
        plan.check()?;
        match asked[0].found::<R>(&plan, cut, place)? {
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
        Look::Older(_) | Look::Torn(_) => None,
    })
}

fn look<'a, R: Rules>(cut: &Cut, place: &Place, bytes: &'a [u8]) -> Result<Look<'a>, ReadError> {
    let (header, found) = place.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
    if !R::takes(found.is_right) {
        let by = Some(header.version()).filter(|by| !cut.sees(*by));
        return Ok(Look::Torn(by));
    }
    let version = found.label.version();
    if !cut.sees(version) {
        return Ok(Look::Older(found.label));
    }
    // What a cut sees was installed before the cut was made.
    let is_installed = !header.is_locked() && cut.sees(header.version());
    Ok(match is_installed && version != header.version() {
        true => Look::Torn(None),
        false => Look::Seen(header, found),
    })
}

/// The last version before that of `label` that the cut sees. `None`: a link led to something else.
async fn read_older<R>(
    worker: &Worker<R>,
    cut: &Cut,
    place: &Place,
    label: Label,
) -> Result<Option<Row>, ReadError> {
    let mut older = Older::than(label);
    while let Some(found) = older.next(worker, place).await? {
        match found {
            Before::Nothing => return Ok(Some(Row::absent())),
            Before::Lost => return Ok(None),
            Before::Version(label, data) if cut.sees(label.version()) => return Ok(Some(row(&label, &data))),
            Before::Version(..) => {}
        }
    }
    Ok(None)
}

/// Follows the links from a version of a record to earlier ones (R1).
pub(crate) struct Older {
    label: Label,
    followed: u32,
}

/// What a link has led to.
pub(crate) enum Before {
    /// A version, and its data.
    Version(Label, Vec<u8>),
    /// The record was absent before.
    Nothing,
    /// Not the version that should lie there.
    Lost,
}

impl Older {
    /// Begins at the version of this label.
    pub(crate) fn than(label: Label) -> Older {
        Older { label, followed: 0 }
    }

    /// The version before the one that was found last. `None`: there can be none.
    pub(crate) async fn next<R>(
        &mut self,
        worker: &Worker<R>,
        place: &Place,
    ) -> Result<Option<Before>, ReadError> {
        let Some((slot, start)) = self.label.before.target() else { return Ok(Some(Before::Nothing)) };
        let Some(number) = self.label.number.checked_sub(1) else { return Ok(None) };
        self.followed += 1;
        if self.followed.is_multiple_of(LINKS_PER_TURN) {
            worker.memory.endpoint().yield_now().await;
        }
        let length = Intent::bytes_for(place.layout.data_bytes()) as u64;
        let log = worker.logs.of(slot);
        let there = log.and_then(|log| log.layout.ring(start, length).map(|range| (log, range)));
        let Some((log, range)) = there else { return Ok(Some(Before::Lost)) };
        let record = place.record;
        let found = log.find(&worker.memory, range, |bytes| {
            let (intent, _) = Intent::decode(bytes).filter(|(intent, _)| intent.record == record)?;
            let found = intent.version_before()?;
            let is_it = found.is_right && found.label.number == number;
            is_it.then(|| (found.label, found.data.to_vec()))
        });
        Ok(Some(match found.await? {
            Some((label, data)) => {
                self.label = label;
                Before::Version(label, data)
            }
            None => Before::Lost,
        }))
    }
}

/// The last version that a cut sees of a record whose header names a commit that the cut does not see: that
/// commit's log has the version that it replaces. `None`: the log has later commits in its place.
async fn read_replaced_by<R>(
    worker: &Worker<R>,
    cut: &Cut,
    place: &Place,
    by: Version,
) -> Result<Option<Row>, ReadError> {
    let (memory, Some(log)) = (&worker.memory, worker.logs.of(by.slot())) else { return Ok(None) };
    let of_commit =
        |bytes: &[u8]| Head::decode(bytes).map(|(head, _)| head).filter(|head| head.version == by);
    let Some(head) = log.find(memory, log.layout.place_of_head(by), of_commit).await? else {
        return Ok(None);
    };
    let Some(range) = log.layout.intents(&head) else { return Ok(None) };
    let found = log.find(memory, range, |bytes| {
        let intents = head.intents(bytes)?;
        let intent = intents.iter().find(|intent| intent.record == place.record)?;
        let data = intent.version_before().map_or(Vec::new(), |found| found.data.to_vec());
        Some((intent.label_before()?, data))
    });
    match found.await? {
        Some((label, data)) if cut.sees(label.version()) => Ok(Some(row(&label, &data))),
        Some((label, _)) => {
            read_older(worker, cut, place, label).await?.map(Some).ok_or_else(|| lost(worker))
        }
        None => Ok(None),
    }
}

pub(super) fn row(label: &Label, data: &[u8]) -> Row {
    Row { version: label.version(), data: (!label.is_absent()).then(|| data.to_vec()) }
}
