//! Clients. Each is a process on the owner's machine with its own session. All work on the same files.

use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{ProcessId, Random};
use farpool_file::{FileCore, FileError, StoreCore};
use farpool_pool::{EXTENT_BYTES, LeasedRegion, SessionCore};
use futures_util::future::{Either, select};

use super::broken::Chosen;
use super::guest::AsGuest;
use super::history::{Asked, CELL, CELLS_PER_BLOCK, Ended, Entry, filled, found};
use super::{FILES, GROWING_PERMILLE, Numbered, Phase, Run};

/// Cells of an extent. `CELLS` are the cells of a file that clients use: three extents.
pub(super) const CELLS_PER_EXTENT: u64 = EXTENT_BYTES / CELL;
pub(super) const CELLS: u64 = 3 * CELLS_PER_EXTENT;
/// How often a client polls its connections when nothing arrives, so that it notices when they break during
/// an operation.
const TICK: Duration = Duration::from_millis(20);
/// Operations of a client on each file after the last node was lost.
const OPERATIONS_AT_THE_END: u32 = 6;
/// The share of operations that are abandoned half-way, in thousandths.
const GIVEN_UP_PERMILLE: u32 = 110;

/// Counts a client as unfinished until this is dropped. The run waits for all clients.
struct AtWork(Rc<Run>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.at_work.set(self.0.at_work.get() - 1);
    }
}

pub(super) struct Client {
    run: Rc<Run>,
    core: SessionCore,
    random: Random,
    /// Set if the client works on files directly.
    guest: Option<AsGuest>,
}

/// Starts a client in its own process.
pub(super) fn start(run: &Rc<Run>) {
    let process = run.world.add_process(run.host);
    run.at_work.set(run.at_work.get() + 1);
    let at_work = AtWork(run.clone());
    let mut client = Client::new(run, process);
    if run.has_guests && client.random.chance(700) {
        client.guest = AsGuest::new(run, process);
    }
    let guest = client.guest.as_ref().map(|guest| guest.guest.clone());
    run.clients.borrow_mut().push((process, guest));
    let (ticking, endpoint) = (run.clone(), client.core.endpoint().clone());
    run.tasks.spawn(process, async move {
        while ticking.phase.get() == Phase::Busy {
            endpoint.sleep(TICK).await;
        }
    });
    run.tasks.spawn(process, async move {
        let _at_work = at_work;
        while client.run.phase.get() == Phase::Busy {
            client.pause(2, if client.run.moves { 60 } else { 250 }).await;
            client.do_something().await;
            client.core.let_go().await;
            if let Some(guest) = &client.guest {
                guest.let_go().await;
            }
        }
    });
}

impl Client {
    pub(super) fn new(run: &Rc<Run>, process: ProcessId) -> Self {
        let random = run.random(run.next_name());
        Client { run: run.clone(), core: run.session(process), random, guest: None }
    }

    async fn pause(&mut self, least_ms: u64, most_ms: u64) {
        let ms = least_ms + self.random.below(most_ms - least_ms + 1);
        self.run.world.sleep_by(self.run.host, Duration::from_millis(ms)).await;
    }

    fn some_file(&mut self) -> Numbered {
        self.run.files.borrow()[self.random.index(FILES)].clone()
    }

    async fn do_something(&mut self) {
        let (number, file) = self.some_file();
        if self.random.chance(15) {
            let fresh = self.run.fresh_file();
            let place = self.random.index(FILES);
            self.run.files.borrow_mut()[place] = fresh;
            return;
        }
        if self.run.has_guests && self.random.chance(20) {
            return self.close_for_a_while(number, &file).await;
        }
        let asked = self.something();
        if !self.random.chance(GIVEN_UP_PERMILLE) {
            return self.carry_out(number, &file, asked).await;
        }
        let a_while = Duration::from_micros(self.random.below(30_000));
        let late = self.run.world.sleep_by(self.run.host, a_while);
        if let Either::Right(_) = select(pin!(self.carry_out(number, &file, asked)), pin!(late)).await {
            self.run.world.note("an operation on file {} is given up", &[number]);
        }
    }

    /// Closes a file to direct clients (called *guests* in the code) for a while, as if a process that is not
    /// a direct client had opened it.
    async fn close_for_a_while(&mut self, number: u64, file: &Arc<FileCore<Chosen>>) {
        if !self.run.closed.borrow_mut().insert(number) {
            return;
        }
        self.run.world.note("file {} is being closed to guests", &[number]);
        self.run.size_by_kernel(number, file, u64::MAX);
        if file.close_to_guests(&self.core).await.is_ok() {
            self.run.shut.borrow_mut().insert(number);
            self.pause(1, 200).await;
            self.run.shut.borrow_mut().remove(&number);
        }
        self.run.world.note("file {} is open to guests", &[number]);
        self.run.closed.borrow_mut().remove(&number);
        if file.open_to_guests().is_err() {
            self.run.complain("no memory to share a file with direct clients".to_owned());
        }
        if self.random.chance(GROWING_PERMILLE) {
            self.run.let_guests_grow(number, file);
        }
    }

    fn something(&mut self) -> Asked {
        match self.random.below(100) {
            0..45 => Asked::Read(self.range()),
            45..84 => Asked::Write(self.range()),
            84..90 => Asked::Zero(self.range()),
            90..96 => Asked::SetSize(self.place()),
            _ => Asked::Reserve(self.range()),
        }
    }

    /// Draws a cell, mostly near borders of blocks and extents, where other clients work as well.
    fn place(&mut self) -> u64 {
        let borders = [0, CELLS_PER_BLOCK, CELLS_PER_EXTENT, 2 * CELLS_PER_EXTENT];
        let near = self.random.below(2 * CELLS_PER_BLOCK);
        let border = borders[self.random.index(borders.len())];
        match self.random.below(8) {
            0 => self.random.below(CELLS),
            1..4 => border,
            _ => (border + near).saturating_sub(CELLS_PER_BLOCK),
        }
    }

    fn range(&mut self) -> Range<u64> {
        let start = self.place();
        let cells = match self.random.below(24) {
            0 => CELLS_PER_EXTENT,
            1 => 1 + self.random.below(CELLS),
            2..7 => CELLS_PER_BLOCK,
            _ => 1 + self.random.below(3 * CELLS_PER_BLOCK),
        };
        start..(start + cells).min(CELLS)
    }

    /// Carries out an operation, and records its result.
    pub(super) async fn carry_out(&self, number: u64, file: &Arc<FileCore<Chosen>>, asked: Asked) {
        if matches!(&asked, Asked::Write(cells) | Asked::Zero(cells) | Asked::Read(cells) if cells.is_empty())
        {
            return;
        }
        let before = regions_of(file, &asked);
        let entry = self.run.history.begins(number, asked.clone());
        let (what, cells) = described(&asked);
        self.run.world.note(what.0, &[number, cells.start, cells.end, entry.number()]);
        let ended = self.ask(number, file, &asked, &entry).await;
        let lies_there = before.into_iter().chain(regions_of(file, &asked));
        let now_ms = self.run.stock().now().0;
        let was_lost = lies_there.into_iter().any(|region| region.check(now_ms).is_err());
        let failed = u64::from(matches!(ended, Ended::Failed(_)));
        self.run.world.note(what.1, &[entry.number(), failed]);
        entry.ends(ended, was_lost);
    }

    async fn ask(&self, number: u64, file: &FileCore<Chosen>, asked: &Asked, entry: &Entry) -> Ended {
        if let Some(guest) = &self.guest
            && let Some(ended) = guest.ask(number, file, asked, entry).await
        {
            return ended;
        }
        let core = &self.core;
        let bytes = |cells: &Range<u64>| (cells.start * CELL, (cells.end - cells.start) * CELL);
        let done = match asked {
            Asked::Read(cells) => return self.read(number, file, cells).await,
            Asked::Write(cells) => {
                let data = filled(entry.number(), number, cells.clone());
                let _by_kernel = self.run.writes_by_kernel(number, file, cells.end * CELL);
                file.write(core, cells.start * CELL, &data).await
            }
            Asked::Zero(cells) => {
                let (offset, length) = bytes(cells);
                file.punch(core, offset, length).await
            }
            Asked::SetSize(cells) => {
                let _by_kernel = self.run.cuts_by_kernel(number, file);
                file.set_size(core, cells * CELL).await
            }
            Asked::Reserve(cells) => {
                let (offset, length) = bytes(cells);
                file.reserve(offset, length).await
            }
        };
        done.map_or_else(Ended::Failed, |()| Ended::Done)
    }

    /// Reads through the kernel, which reads no further than the size that it knows.
    async fn read(&self, number: u64, file: &FileCore<Chosen>, cells: &Range<u64>) -> Ended {
        let (offset, length) = (cells.start * CELL, (cells.end - cells.start) * CELL);
        let there = self.run.size_by_kernel(number, file, offset + length).saturating_sub(offset).min(length);
        match file.read(&self.core, offset, there as usize).await {
            Err(error) => Ended::Failed(error),
            Ok((buffer, within)) => {
                looked_at(&self.run, cells, buffer.as_deref().map_or(&[][..], |bytes| &bytes[within]))
            }
        }
    }

    /// Performs a few operations on one file.
    pub(super) async fn work_on(&mut self, (number, file): &Numbered) {
        for _ in 0..OPERATIONS_AT_THE_END {
            let asked = self.something();
            self.carry_out(*number, file, asked).await;
        }
    }

    /// Scrubs everything, which repairs what is wrong. Returns whether all could be looked at.
    pub(super) async fn scrub(&self, store: &StoreCore<Chosen>) -> bool {
        store.scrub(&self.core, || false).await.is_ok()
    }

    /// Tries to write an extent until this succeeds or the tries run out. Returns the last error.
    pub(super) async fn write_anew(
        &mut self,
        (number, file): &Numbered,
        extent: u64,
        tries: u32,
    ) -> Result<(), FileError> {
        let cells = extent * CELLS_PER_EXTENT..(extent + 1) * CELLS_PER_EXTENT;
        let mut result = Ok(());
        for _ in 0..tries {
            let entry = self.run.history.begins(*number, Asked::Write(cells.clone()));
            let data = filled(entry.number(), *number, cells.clone());
            let written = {
                let _by_kernel = self.run.writes_by_kernel(*number, file, cells.end * CELL);
                file.write(&self.core, cells.start * CELL, &data).await
            };
            match written {
                Ok(()) => {
                    entry.ends(Ended::Done, false);
                    return Ok(());
                }
                Err(error) => {
                    entry.ends(Ended::Failed(error), true);
                    result = Err(error);
                }
            }
            self.pause(100, 300).await;
        }
        result
    }
}

/// The outcome of a read that found these bytes.
pub(super) fn looked_at(run: &Run, cells: &Range<u64>, bytes: &[u8]) -> Ended {
    match found(bytes) {
        Ok(words) => Ended::Found(words),
        Err(_) if run.excuses.owner_dies => Ended::Dropped,
        Err(place) => {
            let cell = cells.start + place as u64;
            run.complain(format!("cell {cell} is torn: it holds words of several writes"));
            Ended::Dropped
        }
    }
}

/// The regions that hold the cells of an operation now.
fn regions_of(file: &FileCore<Chosen>, asked: &Asked) -> Vec<Arc<LeasedRegion>> {
    let cells = described(asked).1;
    let extents = cells.start / CELLS_PER_EXTENT..cells.end.div_ceil(CELLS_PER_EXTENT);
    let found = extents.filter_map(|extent| file.extent_at(extent * EXTENT_BYTES));
    found.map(|extent| extent.region().clone()).collect()
}

/// The lines for the trace at the beginning and the end of an operation, and its cells.
fn described(asked: &Asked) -> ((&'static str, &'static str), Range<u64>) {
    match asked {
        Asked::Read(cells) => {
            (("file {}, cells {} to {}: read {}", "read {} ends, error: {}"), cells.clone())
        }
        Asked::Write(cells) => {
            (("file {}, cells {} to {}: write {}", "write {} ends, error: {}"), cells.clone())
        }
        Asked::Zero(cells) => {
            (("file {}, cells {} to {}: punch {}", "punch {} ends, error: {}"), cells.clone())
        }
        Asked::SetSize(size) => {
            (("file {}, cells {} to {}: cut {}", "cut {} ends, error: {}"), *size..CELLS.max(*size))
        }
        Asked::Reserve(cells) => {
            (("file {}, cells {} to {}: reserve {}", "reserve {} ends, error: {}"), cells.clone())
        }
    }
}
