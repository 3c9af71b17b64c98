//! Finding the version of a record that a cut sees.

use farpool_wire::{RecordHeader, Version};

use super::Row;
use super::long::whole;
use crate::cut::Cut;
use crate::error::ReadError;
use crate::log::{Head, Intent};
use crate::memory::Memory;
use crate::record::{DATA_OF_BODY, FoundVersion, Label, WORD_BYTES};
use crate::rules::Rules;
use crate::table::{Place, Table};
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
    /// The current version, which the cut does not see: an earlier one is wanted.
    TooNew(Label),
    /// Words of different times. The commit that the header names, if the cut does not see it: its version
    /// is being installed, rolled back, or replaced.
    Mixed(Option<Version>),
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

    /// Its data. `None`: there was no such record.
    pub(super) fn data(&self) -> Option<&[u8]> {
        (!self.label.is_absent()).then(|| &self.body[DATA_OF_BODY..])
    }
}

/// A record that is to be written, as it was found; `None`: words of different times.
pub(super) fn to_write<R: Rules>(
    cut: &Cut,
    place: &Place,
    bytes: &[u8],
) -> Result<Option<ToWrite>, ReadError> {
    match look::<R>(cut, place, bytes)? {
        Look::Seen(seen, found) if R::may_be_locked(seen, found.label.header) => {
            Ok(Some(ToWrite { seen, label: found.label, body: bytes[WORD_BYTES..].to_vec() }))
        }
        // Another commit is writing it, and this cut does not see that commit.
        Look::Seen(..) | Look::TooNew(_) | Look::Mixed(Some(_)) => Err(ReadError::Conflict),
        Look::Mixed(None) => Ok(None),
    }
}

/// A record as a cut sees it.
pub(super) async fn read<R: Rules>(worker: &Worker<R>, cut: &Cut, place: &Place) -> Result<Row, ReadError> {
    let memory = &worker.memory;
    let range = place.range();
    let seen = memory.read_now(&place.piece, range.clone(), |bytes| seen_row::<R>(cut, place, bytes));
    if let Some(row) = seen.transpose()?.flatten() {
        return Ok(row);
    }
    let mut missed = None;
    for _ in 0..LOOKS {
        let bytes = memory.read(&place.piece, range.clone()).await?;
        match look::<R>(cut, place, &bytes)? {
            Look::Seen(_, found) => return Ok(row(&found.label, found.data)),
            Look::TooNew(label) => {
                if let Some(row) = read_earlier(worker, cut, place, label).await? {
                    return Ok(row);
                }
                // The version may have been one whose commit was being rolled back; then another is found
                // now. The link of a version never changes, so that of the same one leads nowhere this time,
                // too.
                if missed.replace(label) == Some(label) {
                    return Err(missing_version_error(worker));
                }
            }
            Look::Mixed(Some(by)) => {
                if let Some(row) = read_replaced_by(worker, cut, place, by).await? {
                    return Ok(row);
                }
            }
            Look::Mixed(None) => {}
        }
        memory.endpoint().yield_now().await;
    }
    Err(ReadError::Damaged)
}

/// The error of a version that is not where its link leads. No intent that a snapshot needs is overwritten
/// while its worker announces it.
fn missing_version_error<R>(worker: &Worker<R>) -> ReadError {
    if worker.announcer.is_some() { ReadError::Damaged } else { ReadError::SnapshotTooOld }
}

/// Reads the current version of a record, which the cut sees.
///
/// # Errors
/// [`ReadError::Conflict`] if the cut does not see it, or another commit has locked the record.
pub(crate) async fn read_current<R: Rules>(
    worker: &Worker<R>,
    cut: &Cut,
    table: &Table,
    number: u64,
) -> Result<Row, ReadError> {
    let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
    let row = read_to_write::<R>(&worker.memory, cut, &place).await?.row();
    whole(worker, table, number, row).await
}

/// Reads the current version of a record, whether the cut sees it or not, and those before it up to the first
/// one that the cut sees; the current one is the first. `None`: there are more than `most`, or one is not
/// there any more.
///
/// # Errors
/// [`ReadError::Conflict`] if a commit has locked the record.
pub(crate) async fn read_since<R: Rules>(
    worker: &Worker<R>,
    cut: &Cut,
    (table, number): (&Table, u64),
    most: usize,
) -> Result<Option<Vec<Row>>, ReadError> {
    let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
    let all = Cut::new(u64::MAX, vec![u64::MAX; cut.counts().len()].into());
    let current = read_to_write::<R>(&worker.memory, &all, &place).await?;
    let mut earlier = EarlierVersions::of(current.label);
    let mut rows = vec![whole(worker, table, number, current.row()).await?];
    while rows.last().is_some_and(|row| !cut.sees(row.version)) {
        let before = match earlier.next(worker, &place).await? {
            Followed::Version(label, data) => row(&label, &data),
            Followed::NeverWritten => Row::never_written(), // each cut sees that
            Followed::Lost => return Ok(None),
        };
        if rows.len() == most {
            return Ok(None);
        }
        rows.push(whole(worker, table, number, before).await?);
    }
    Ok(Some(rows))
}

/// Reads a record that is to be written.
pub(super) async fn read_to_write<R: Rules>(
    memory: &Memory,
    cut: &Cut,
    place: &Place,
) -> Result<ToWrite, ReadError> {
    let range = place.range();
    for _ in 0..LOOKS {
        let found =
            match memory.read_now(&place.piece, range.clone(), |bytes| to_write::<R>(cut, place, bytes)) {
                Some(found) => found?,
                None => to_write::<R>(cut, place, &memory.read(&place.piece, range.clone()).await?)?,
            };
        match found {
            Some(found) => return Ok(found),
            None => memory.endpoint().yield_now().await,
        }
    }
    Err(ReadError::Damaged)
}

/// The current version, if what was read of it is what the cut sees. Otherwise more has to be read.
pub(super) fn seen_version<'a, R: Rules>(
    cut: &Cut,
    place: &Place,
    bytes: &'a [u8],
) -> Result<Option<FoundVersion<'a>>, ReadError> {
    Ok(match look::<R>(cut, place, bytes)? {
        Look::Seen(_, found) => Some(found),
        Look::TooNew(_) | Look::Mixed(_) => None,
    })
}

/// The record, if what was read of its place is what the cut sees.
pub(super) fn seen_row<R: Rules>(cut: &Cut, place: &Place, bytes: &[u8]) -> Result<Option<Row>, ReadError> {
    Ok(seen_version::<R>(cut, place, bytes)?.map(|found| row(&found.label, found.data)))
}

fn look<'a, R: Rules>(cut: &Cut, place: &Place, bytes: &'a [u8]) -> Result<Look<'a>, ReadError> {
    let (header, found) = place.layout.decode_current(place.record, bytes).ok_or(ReadError::Damaged)?;
    if !R::takes(found.is_right) {
        let by = Some(header.version()).filter(|by| !cut.sees(*by));
        return Ok(Look::Mixed(by));
    }
    let version = found.label.version();
    if !cut.sees(version) {
        return Ok(Look::TooNew(found.label));
    }
    // What a cut sees was installed before the cut was made.
    let is_installed = !header.is_locked() && cut.sees(header.version());
    Ok(match is_installed && version != header.version() {
        true => Look::Mixed(None),
        false => Look::Seen(header, found),
    })
}

/// The last version before that of `label` that the cut sees. `None`: a link led to something else.
async fn read_earlier<R>(
    worker: &Worker<R>,
    cut: &Cut,
    place: &Place,
    label: Label,
) -> Result<Option<Row>, ReadError> {
    let mut earlier = EarlierVersions::of(label);
    loop {
        match earlier.next(worker, place).await? {
            Followed::NeverWritten => return Ok(Some(Row::never_written())),
            Followed::Lost => return Ok(None),
            Followed::Version(label, data) if cut.sees(label.version()) => {
                return Ok(Some(row(&label, &data)));
            }
            Followed::Version(..) => {}
        }
    }
}

/// Follows the links from a version of a record to earlier ones (R1).
pub(crate) struct EarlierVersions {
    label: Label,
    followed: u32,
}

/// What a link has led to.
pub(crate) enum Followed {
    /// A version, and its data.
    Version(Label, Vec<u8>),
    /// There is none: the record was never written before.
    NeverWritten,
    /// Not the version that should lie there.
    Lost,
}

impl EarlierVersions {
    /// Begins at the version of this label.
    pub(crate) fn of(label: Label) -> EarlierVersions {
        EarlierVersions { label, followed: 0 }
    }

    /// The version before the one that was found last.
    pub(crate) async fn next<R>(&mut self, worker: &Worker<R>, place: &Place) -> Result<Followed, ReadError> {
        let Some((slot, start)) = self.label.link.target() else { return Ok(Followed::NeverWritten) };
        let Some(number) = self.label.number.checked_sub(1) else { return Ok(Followed::Lost) };
        self.followed += 1;
        if self.followed.is_multiple_of(LINKS_PER_TURN) {
            worker.memory.endpoint().yield_now().await;
        }
        let length = Intent::bytes_for(place.layout.data_bytes()) as u64;
        let log = worker.logs.of(slot);
        let there = log.and_then(|log| log.layout.intent_range(start, length).map(|range| (log, range)));
        let Some((log, range)) = there else { return Ok(Followed::Lost) };
        let record = place.record;
        let found = log.find(&worker.memory, range, |bytes| {
            let (intent, _) = Intent::decode(bytes).filter(|(intent, _)| intent.record == record)?;
            let found = intent.version_before()?;
            let is_it = found.is_right && found.label.number == number;
            is_it.then(|| (found.label, found.data.to_vec()))
        });
        Ok(match found.await? {
            Some((label, data)) => {
                self.label = label;
                Followed::Version(label, data)
            }
            None => Followed::Lost,
        })
    }
}

/// The last version that a cut sees of a record whose header names a commit that the cut does not see: that
/// commit's log has the version that it replaces. `None`: the log has a later commit in its place.
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
        Some((label, _)) => read_earlier(worker, cut, place, label)
            .await?
            .map(Some)
            .ok_or_else(|| missing_version_error(worker)),
        None => Ok(None),
    }
}

pub(super) fn row(label: &Label, data: &[u8]) -> Row {
    Row { version: label.version(), data: (!label.is_absent()).then(|| data.to_vec()) }
}
