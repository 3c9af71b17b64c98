//! A thread has as many lanes as its depth says. Each keeps one doorbell in flight, one after the other.
//!
//! - Nothing is allocated per operation; the clock is read once per group of doorbells.
//! - The operations that are measured are also checked: transfers from time to time, compare-and-swaps and
//!   calls each time.

use std::cell::RefCell;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use farpool_fabric::{ArenaBuf, Batch};
use farpool_wire::CALL_ECHO;

use crate::options::{IoOp, IoOptions};
use crate::places::{FootprintBlock, Places, fill_written, initial_word, is_initial, is_written};
use crate::reach::Reach;
use crate::tally::Tally;

/// Doorbells between two checks of a transfer: checking 8 KiB takes as long as copying them.
const CHECK_EVERY: usize = 1024;

/// What a lane counted.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Operations that ended.
    pub operations: u64,
    /// Transfers whose bytes were checked.
    pub checked: u64,
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts { operations: self.operations + other.operations, checked: self.checked + other.checked }
    }
}

/// One doorbell in flight.
pub struct Lane<'a> {
    reach: &'a Reach,
    op: IoOp,
    block_bytes: usize,
    batch: usize,
    together: usize,
    places: Places,
    /// Where the operations of the last doorbell went.
    picked: Vec<FootprintBlock>,
    local: Local,
    until_check: usize,
}

/// Source and destination of transfers; taken out while the doorbell is in flight.
enum Local {
    Single(Option<ArenaBuf>),
    Batch(Option<Batch>),
}

const IN_FLIGHT: &str = "the buffer came back with the last doorbell";

impl<'a> Lane<'a> {
    /// A lane with places of its own.
    pub fn new(reach: &'a Reach, options: &IoOptions, places: Places) -> Result<Self> {
        let &IoOptions { op, block_bytes, batch, .. } = options;
        let mut buffer = reach.buffer(block_bytes * batch)?;
        buffer.chunks_exact_mut(block_bytes).for_each(fill_written);
        if op == IoOp::Call {
            buffer[..CALL_ECHO.len()].copy_from_slice(CALL_ECHO);
        }
        let local = match batch {
            1 => Local::Single(Some(buffer)),
            _ => Local::Batch(Some(Batch::new(buffer))),
        };
        let together = options.timed_together();
        let picked = Vec::with_capacity(batch);
        Ok(Lane { reach, op, block_bytes, batch, together, places, picked, local, until_check: 0 })
    }

    /// Rings doorbells until `end`.
    pub async fn run(&mut self, end: Instant, tally: &RefCell<Tally>) -> Result<Counts> {
        let mut counts = Counts::default();
        let mut started = Instant::now();
        loop {
            for _ in 0..self.together {
                match self.batch {
                    1 => self.single().await?,
                    _ => self.batched().await?,
                }
            }
            counts.operations += (self.together * self.batch) as u64;
            let now = Instant::now();
            tally.borrow_mut().record(now - started, self.together);
            if now >= end {
                return Ok(counts);
            }
            started = now;
            if self.until_check <= self.together {
                counts.checked += self.check().await?;
                self.until_check = CHECK_EVERY;
                started = Instant::now(); // the time of the check does not count
            }
            self.until_check -= self.together.min(self.until_check);
        }
    }

    #[inline]
    async fn single(&mut self) -> Result<()> {
        let place = self.places.pick();
        self.picked.clear();
        self.picked.push(place);
        let (queue, at, epoch) = self.reach.find(place);
        let Local::Single(buffer) = &mut self.local else {
            unreachable!("a batch of one has a plain buffer")
        };
        match self.op {
            IoOp::Read => {
                let (returned, result) = queue.read(at, epoch, buffer.take().expect(IN_FLIGHT)).await;
                *buffer = Some(returned);
                result?;
            }
            IoOp::Write => {
                let (returned, result) = queue.write(at, epoch, buffer.take().expect(IN_FLIGHT)).await;
                *buffer = Some(returned);
                result?;
            }
            IoOp::Cas => {
                let word = initial_word(place.region, place.offset);
                check_word(queue.compare_and_swap(at, epoch, word, word).await?, word)?;
            }
            IoOp::Faa => {
                queue.fetch_and_add(at, epoch, 1).await?;
            }
            IoOp::Call => {
                let answer = queue.call(buffer.take().expect(IN_FLIGHT), self.block_bytes).await?;
                ensure!(answer.bytes == self.block_bytes, "the echo has another length than the call");
                *buffer = Some(answer.buffer);
            }
        }
        Ok(())
    }

    #[inline]
    async fn batched(&mut self) -> Result<()> {
        let Local::Batch(kept) = &mut self.local else { unreachable!("several operations make a batch") };
        let mut batch = kept.take().expect(IN_FLIGHT);
        batch.clear();
        self.picked.clear();
        for number in 0..self.batch {
            let place = self.places.pick();
            let place = self.picked.first().map_or(place, |&first| self.reach.beside(first, place));
            self.picked.push(place);
            let (_, at, epoch) = self.reach.find(place);
            let range = number * self.block_bytes..(number + 1) * self.block_bytes;
            match self.op {
                IoOp::Read => batch.read(at, epoch, range),
                IoOp::Write => batch.write(at, epoch, range),
                IoOp::Cas => {
                    let word = initial_word(place.region, place.offset);
                    batch.compare_and_swap(at, epoch, word, word);
                }
                IoOp::Faa => batch.fetch_and_add(at, epoch, 1),
                IoOp::Call => unreachable!("refused when the options were checked"),
            }
        }
        let (queue, ..) = self.reach.find(self.picked[0]);
        let batch = kept.insert(queue.run(batch).await);
        for (result, place) in batch.results().iter().zip(&self.picked) {
            let before = (*result)?;
            if self.op == IoOp::Cas {
                check_word(before, initial_word(place.region, place.offset))?;
            }
        }
        Ok(())
    }

    /// Checks that the last doorbell did what it should. Returns how many transfers it checked.
    async fn check(&mut self) -> Result<u64> {
        match self.op {
            IoOp::Read => self.check_read(),
            IoOp::Write => self.check_written().await,
            IoOp::Call => {
                let Local::Single(Some(buffer)) = &self.local else { unreachable!("calls are not batched") };
                ensure!(buffer.starts_with(CALL_ECHO), "the echo differs from the call");
                Ok(1)
            }
            // Compare-and-swaps are checked one by one, and fetch-and-adds by their sum in the end.
            IoOp::Cas | IoOp::Faa => Ok(0),
        }
    }

    fn check_read(&self) -> Result<u64> {
        let bytes: &[u8] = match &self.local {
            Local::Single(buffer) => buffer.as_ref().expect(IN_FLIGHT),
            Local::Batch(batch) => batch.as_ref().expect(IN_FLIGHT).buffer(),
        };
        for (block, &place) in bytes.chunks_exact(self.block_bytes).zip(&self.picked) {
            ensure!(is_initial(block, place), "wrong bytes were read from {:?}", self.reach.find(place).1);
        }
        Ok(self.picked.len() as u64)
    }

    async fn check_written(&mut self) -> Result<u64> {
        let &place = self.picked.first().context("nothing was written")?;
        let (queue, at, epoch) = self.reach.find(place);
        let (buffer, result) = queue.read(at, epoch, self.reach.buffer(self.block_bytes)?).await;
        result.map_err(|error| anyhow!("cannot read back {at}: {error}"))?;
        ensure!(is_written(&buffer), "the bytes read back from {at} differ from those written");
        Ok(1)
    }
}

#[inline]
fn check_word(before: u64, expected: u64) -> Result<()> {
    ensure!(before == expected, "a word holds {before:#x} instead of {expected:#x}");
    Ok(())
}
