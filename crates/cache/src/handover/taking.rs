//! The new daemon's side, on the keeper's thread: it waits until the new server has everything on its disk
//! (H2), and takes pages over from then on (H3).

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{HandedPage, HandoverList, ServerEnd, WatchedFiles};
use crate::at_once;
use crate::client::{CacheClient, OwnCaller};
use crate::door::DoorFile;
use crate::files::KnownFile;
use crate::keeper::Keeper;
use crate::postgres::{
    ControlFile, ServerState, end_of_checkpoint, has_later_timeline, has_record_after, lsn_text,
    position_of_page,
};
use crate::rules::Shipped;
use crate::shared::{Shared, Slots};
use crate::signatures::file_at;
use crate::slot_set::SlotSet;

/// How long the new server may take until it has everything on its disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Once no further file has become known for this long, only pages of known files are taken over.
const FILES_PATIENCE: Duration = Duration::from_secs(1);
/// How long pages are taken over in a round of the keeper. Between rounds it extends the terms of leases.
const ROUND: Duration = Duration::from_millis(20);

/// Progress of taking a cache over.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TakeOverState {
    /// The new server must not be promoted yet.
    Waiting,
    /// The new server may be promoted. Each page is found once it is taken over.
    Going,
    /// It has ended.
    Ended(TakeOverResult),
}

/// What became of a cache that was handed over.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TakeOverResult {
    /// How many pages were taken over.
    pub pages: u64,
    /// How many pages the list has.
    pub listed: u64,
    /// How many of them lay in memory that is gone.
    pub lost: u64,
    /// Why no page was taken over. `None`: only single pages were left out, because they or their files were
    /// written since, their memory is lost, or their positions in the log are too late (H2).
    pub refusal: Option<String>,
}

/// Why pages are not taken over now.
#[derive(PartialEq, Eq, Debug)]
enum NotNow {
    /// It may change.
    Wait(String),
    Never(String),
}

/// Takes pages over, step by step.
pub(crate) struct Taker {
    server: ServerEnd,
    data: PathBuf,
    client: Arc<CacheClient>,
    caller: Option<OwnCaller>,
    files: Vec<KnownFile>,
    /// How many of these files the cache did not know at the last look.
    unknown: usize,
    /// Those that are left, the next one last.
    pages: Vec<HandedPage>,
    /// Slots that have memory, and that only the pages that are left may take.
    withheld: SlotSet,
    slots: u32,
    /// The new server as it was when pages could be taken over.
    seen: Option<WatchedFiles>,
    began: Instant,
    /// When files were first looked for, or one became known last.
    file_found: Option<Instant>,
    taken: TakeOverResult,
}

impl Taker {
    /// Prepares to take over what the list has. `adopted` are the slots that still have their memory.
    pub(crate) fn begin(
        door: &Arc<DoorFile>,
        list: &HandoverList,
        slots: u32,
        adopted: &[Range<u32>],
    ) -> Taker {
        let listed = list.pages();
        let mut files = Vec::new();
        let numbers: Vec<Option<u32>> = list
            .files
            .iter()
            .map(|file| {
                let path = door.data().join(&file.path);
                let (_, id) = file_at(&path).filter(|_| door.is_cacheable_path(&path))?;
                files.push(KnownFile::new(id));
                Some(files.len() as u32 - 1)
            })
            .collect();
        let mut withheld = SlotSet::new(slots);
        adopted.iter().cloned().flatten().for_each(|slot| withheld.insert(slot));
        let mut pages = list.pages_of(|file| numbers[file]);
        let there = pages.len() as u64;
        pages.retain(|page| page.slot < slots && withheld.contains(page.slot));
        let lost = there - pages.len() as u64;
        Taker {
            server: list.server,
            data: door.data().to_owned(),
            client: CacheClient::new(door.clone()),
            caller: None,
            unknown: files.len(),
            files,
            pages,
            withheld,
            slots,
            seen: None,
            began: Instant::now(),
            file_found: None,
            taken: TakeOverResult { listed, lost, ..TakeOverResult::default() },
        }
    }

    /// Whether the new server's state allows it to take pages: nothing has to be waited for any more.
    pub(crate) fn has_begun(&self) -> bool {
        self.seen.is_some()
    }

    /// These slots have lost their memory.
    pub(crate) fn forget(&mut self, slots: &Range<u32>) {
        slots.clone().for_each(|slot| self.withheld.remove(slot));
    }

    /// Takes over some pages, if it may. Returns what became of the cache, once none is left.
    pub(crate) fn step<S: Slots>(
        &mut self,
        keeper: &mut Keeper<Shared<S>, Shipped>,
    ) -> Option<TakeOverResult> {
        let Some(seen) = self.seen.take() else {
            match self.look() {
                Ok(seen) => self.seen = Some(seen),
                Err(NotNow::Wait(_)) if self.began.elapsed() < PATIENCE => {}
                Err(NotNow::Wait(why) | NotNow::Never(why)) => return Some(self.end(keeper, Some(why))),
            }
            return None;
        };
        let began = Instant::now();
        while began.elapsed() < ROUND {
            let Some(page) = self.pages.pop() else { return Some(self.end(keeper, None)) };
            self.take(keeper, &seen, page);
        }
        self.seen = Some(seen);
        None
    }

    fn take<S: Slots>(
        &mut self,
        keeper: &mut Keeper<Shared<S>, Shipped>,
        seen: &WatchedFiles,
        page: HandedPage,
    ) {
        if !self.withheld.contains(page.slot) {
            self.taken.lost += 1;
            return;
        }
        self.withheld.remove(page.slot);
        keeper.restore_slots(page.slot..page.slot + 1);
        let Some(caller) = &mut self.caller else { return };
        // A page without a position was changed in ways that are not in the log.
        let lsn_of = |head| Some(position_of_page(head)).filter(|at| *at > 0).unwrap_or(u64::MAX);
        let restartpoint = self.server.checkpoint.position;
        let is_taken = at_once(caller.take_over(seen, &page, restartpoint, lsn_of));
        self.taken.pages += u64::from(is_taken);
    }

    /// Releases the slots that are still withheld, and leaves the place.
    pub(crate) fn end<S: Slots>(
        &mut self,
        keeper: &mut Keeper<Shared<S>, Shipped>,
        refusal: Option<String>,
    ) -> TakeOverResult {
        for slot in 0..self.slots {
            if self.withheld.contains(slot) {
                self.withheld.remove(slot);
                keeper.restore_slots(slot..slot + 1);
            }
        }
        if let Some(caller) = self.caller.take() {
            at_once(caller.leave());
        }
        TakeOverResult { refusal, ..self.taken.clone() }
    }

    /// Looks at the new server's files, and *then* whether it has everything on its disk (H3).
    fn look(&mut self) -> Result<WatchedFiles, NotNow> {
        let wait = |why: &str| NotNow::Wait(why.to_owned());
        if self.caller.is_none() {
            self.caller = self.client.take_place();
        }
        let caller = self.caller.as_mut().ok_or_else(|| {
            wait("all places of the cache are taken: stop some of the programs that use it, and try again")
        })?;
        let seen = at_once(caller.watch(&mut self.files))
            .ok_or_else(|| wait("the cache does not open: see `farpool cache status`"))?;
        let is_progress = seen.unknown() < std::mem::replace(&mut self.unknown, seen.unknown());
        if self.file_found.is_none() || is_progress {
            self.file_found = Some(Instant::now());
        }
        if seen.unknown() > 0 && self.file_found.is_some_and(|found| found.elapsed() < FILES_PATIENCE) {
            return Err(wait("files are not known yet"));
        }
        check_server(&self.data, self.server).map(|()| seen)
    }
}

/// Whether the server has everything on its disk that the old one has written, and nothing else.
fn check_server(data: &Path, old: ServerEnd) -> Result<(), NotNow> {
    let never = |why: &str| Err(NotNow::Never(why.to_owned()));
    let promoted = "the server is no standby any more: hand the cache over before it is promoted";
    let server = ControlFile::read(data).map_err(|error| {
        NotNow::Never(format!("cannot read global/pg_control: {error}: name the standby's data directory"))
    })?;
    let timeline = old.checkpoint.timeline;
    let has_later = has_later_timeline(data, timeline)
        .map_err(|error| NotNow::Wait(format!("cannot read pg_wal of the server: {error}")))?;
    if server.system != old.system {
        return never("the server is not a standby of the one whose cache was handed over");
    }
    if server.checksums != old.checksums {
        return never("one of the servers has data checksums, and the other has not");
    }
    match server.state {
        _ if has_later || server.checkpoint.timeline > timeline => return never(promoted),
        ServerState::ShutDown | ServerState::Primary => return never(promoted),
        ServerState::Starting => return Err(NotNow::Wait("the standby does not run: start it".to_owned())),
        ServerState::Standby => {}
    }
    let (last, end) = (server.checkpoint, end_of_checkpoint(old.checkpoint.position, server.segment_bytes));
    let has_more = has_record_after(data, old.checkpoint, server.segment_bytes)
        .map_err(|error| NotNow::Wait(format!("cannot read pg_wal of the server: {error}")))?;
    if has_more || last.position > old.checkpoint.position || server.min_recovery > end {
        return never("the old server was started again after it had handed its cache over");
    }
    if last.position < old.checkpoint.position || last.timeline < timeline {
        return Err(NotNow::Wait(format!(
            "the last restartpoint of the standby is at {}, but the old server has shut down at {}: run CHECKPOINT \
             on the standby once it has replayed all of the log",
            lsn_text(last.position),
            lsn_text(old.checkpoint.position)
        )));
    }
    if last.time != old.checkpoint.time {
        return never("the standby has followed another server than the one whose cache was handed over");
    }
    Ok(())
}
