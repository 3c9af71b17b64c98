//! Judges what a file promises, from the history of requests and answers.
//!
//! J1. Each cell is an atomic register. A read finds the data that were acknowledged last, or data of a write
//!     that was in flight or in doubt. It never finds what was overwritten before the read began, nor bytes
//!     of another cell or file. It finds zeros where nothing was written or the file was truncated.
//! J2. A block changes as a whole: no read finds part of a write without the rest, unless a later change has
//!     replaced the rest.
//! J3. Data that cannot be read lay in a region that was lost, or a write to them ended in doubt and no later
//!     write has covered them. (`failure_is_explained` has the exact list of excuses.)
//! J4. A file reaches as far as acknowledged writes do, and not beyond the point where it was truncated.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use farpool_file::{FileError, Redundancy};
use farpool_pool::EXTENT_BYTES;

use super::client::CELLS;
use super::history::{Asked, CELLS_PER_BLOCK, Ended, Record, named, word};
use crate::register::{Touch, check};

const BLOCKS_PER_EXTENT: u64 = EXTENT_BYTES / farpool_wire::BLOCK_BYTES as u64;
/// The most violations that are reported: the first ones are the useful ones.
const TOLD: usize = 8;

impl Record {
    fn is_done(&self) -> bool {
        self.ended == Ended::Done
    }

    /// The cells that it writes; none if it is not a write.
    fn written(&self) -> Range<u64> {
        if let Asked::Write(cells) = &self.asked { cells.clone() } else { 0..0 }
    }

    /// How far the file reaches once this operation is done; 0 if the operation does not set or extend the
    /// size.
    fn reaches(&self) -> u64 {
        match &self.asked {
            Asked::Write(cells) => cells.end,
            Asked::SetSize(size) => *size,
            _ => 0,
        }
    }

    /// It ended before the other began.
    fn precedes(&self, other: &Record) -> bool {
        self.end < other.start
    }
}

/// Finds everything that is wrong with a history.
pub(super) fn judge(
    records: &[Record],
    world: Excuses,
    redundancies: &BTreeMap<u64, Redundancy>,
) -> Vec<String> {
    let mut by_file: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (place, record) in records.iter().enumerate() {
        by_file.entry(record.file).or_default().push(place);
    }
    let mut violations = Vec::new();
    for (file, places) in by_file {
        let of_file: Vec<&Record> = places.iter().map(|&place| &records[place]).collect();
        let redundancy = redundancies.get(&file).copied().unwrap_or_default();
        let row = (redundancy.nodes() > 1).then(|| redundancy.nodes() - 1);
        let is_not_done = |record: &&&Record| !record.is_done() && !record.written().is_empty();
        let within =
            of_file.iter().filter(is_not_done).map(|write| (write.number, certain_end(&of_file, write)));
        let within = within.collect();
        let judge = Judge { file, all: records, records: of_file, within, world, row };
        judge.all_of(&mut violations);
    }
    violations.truncate(TOLD);
    violations
}

/// How far the file certainly reached during the whole of a write.
fn certain_end(records: &[&Record], write: &Record) -> u64 {
    let holds = |grown: &&&Record| {
        let cuts = |other: &&Record| matches!(other.asked, Asked::SetSize(size) if size < grown.reaches());
        let since = |other: &&Record| !other.precedes(grown) && other.start < write.end;
        grown.is_done() && grown.precedes(write) && !records.iter().any(|other| cuts(other) && since(other))
    };
    records.iter().filter(holds).map(|grown| grown.reaches()).max().unwrap_or(0)
}

/// What a world excuses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Excuses {
    /// No fault was drawn that can cost a lease or a node.
    pub(super) calm: bool,
    /// Processes run short of file descriptors. If a part of a block could not be truncated, the whole block
    /// is lost, because the truncated part must not show again.
    pub(super) short: bool,
    /// At most one node was hurt at a time. Rows survive that, so redundant files have no excuse.
    pub(super) survivable: bool,
    /// Bits were flipped in far memory.
    pub(super) flips: bool,
    /// All processes that work on files are killed at once. Their successors may find some sectors of a write
    /// that was in flight, and not others.
    pub(super) owner_dies: bool,
    /// No store fails, and no write arrives late.
    pub(super) stores_succeed: bool,
    /// There is an overflow directory with room for everything.
    pub(super) never_full: bool,
}

struct Judge<'a> {
    file: u64,
    all: &'a [Record],
    records: Vec<&'a Record>,
    /// For each write that did not succeed, by number: how far the file certainly reached during the write.
    within: BTreeMap<u64, u64>,
    world: Excuses,
    /// The number of data extents of a row, if the file has rows.
    row: Option<u64>,
}

/// What a read found.
struct Look<'a> {
    record: &'a Record,
    first: u64,
    words: &'a [u64],
}

impl Look<'_> {
    fn cells(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        (self.first..).zip(self.words.iter().copied())
    }
}

impl<'a> Judge<'a> {
    fn all_of(&self, violations: &mut Vec<String>) {
        let looks: Vec<Look<'_>> = self
            .records
            .iter()
            .filter_map(|record| match (&record.asked, &record.ended) {
                (Asked::Read(cells), Ended::Found(words)) => Some(Look { record, first: cells.start, words }),
                _ => None,
            })
            .collect();
        let mut say = |what: Result<(), String>| {
            if let Err(what) = what {
                violations.push(format!("file {}: {what}", self.file));
            }
        };
        for look in &looks {
            say(self.names_are_right(look));
        }
        let cells: BTreeSet<u64> = looks.iter().flat_map(|look| look.cells().map(|(cell, _)| cell)).collect();
        for cell in cells {
            say(self.cell_is_a_register(cell, &looks));
        }
        for look in &looks {
            say(self.blocks_are_whole(look));
            say(self.size_fits(look));
        }
        for record in &self.records {
            if let Ended::Failed(error) = &record.ended {
                say(self.failure_is_explained(record, *error));
            }
        }
    }

    /// The cells that an operation sets to zero, or may set to zero.
    fn zeroed(&self, record: &Record) -> Range<u64> {
        match &record.asked {
            Asked::Zero(cells) => cells.clone(),
            Asked::SetSize(size) => *size..CELLS.max(*size),
            // A failed write is cleared again past the end of the file, and nowhere else.
            Asked::Write(cells) => match self.within.get(&record.number) {
                Some(within) => cells.start.max(*within)..cells.end.max(*within),
                None => 0..0,
            },
            _ => 0..0,
        }
    }

    /// The cells that an operation changes, if any.
    fn changed(&self, record: &Record) -> Range<u64> {
        if let Asked::Write(cells) = &record.asked { cells.clone() } else { self.zeroed(record) }
    }

    fn write_of(&self, word: u64) -> &'a Record {
        &self.all[named(word).0 as usize - 1]
    }

    /// Checks that each word names a write of this file and cell.
    fn names_are_right(&self, look: &Look<'_>) -> Result<(), String> {
        for (cell, word) in look.cells().filter(|(_, word)| *word != 0) {
            let (write, file, of_cell) = named(word);
            let known = write.checked_sub(1).and_then(|place| self.all.get(place as usize));
            let is_right = known.is_some_and(|write| write.file == file && write.written().contains(&cell));
            if !is_right || file != self.file || of_cell != cell {
                return Err(format!(
                    "cell {cell} holds {word:#x}: write {write}, file {file}, cell {of_cell}"
                ));
            }
        }
        Ok(())
    }

    /// Checks J1 for one cell.
    fn cell_is_a_register(&self, cell: u64, looks: &[Look<'_>]) -> Result<(), String> {
        let seen: Vec<(&Record, u64)> = looks
            .iter()
            .filter_map(|look| {
                let place = cell.checked_sub(look.first)? as usize;
                look.words.get(place).map(|&word| (look.record, word))
            })
            .collect();
        let covers = |record: &&&Record| self.changed(record).contains(&cell);
        let changes: Vec<&Record> = self.records.iter().filter(covers).copied().collect();
        let mut touches = Vec::new();
        for write in changes.iter().filter(|change| change.written().contains(&cell)) {
            let value = word(write.number, self.file, cell);
            touches.push(Touch {
                value,
                writes: true,
                start: write.start,
                end: write.end,
                certain: write.is_done(),
            });
        }
        for (read, word) in seen.iter().filter(|(_, word)| *word != 0) {
            if self.names_right(*word, cell) {
                touches.push(Touch {
                    value: *word,
                    writes: false,
                    start: read.start,
                    end: read.end,
                    certain: true,
                });
            }
        }
        check(0, &touches).map_err(|what| format!("cell {cell}: {what}"))?;
        for (read, word) in &seen {
            if *word != 0 && !self.names_right(*word, cell) {
                continue; // already reported
            }
            self.nothing_newer(cell, read, *word, &changes, &seen)?;
        }
        Ok(())
    }

    fn names_right(&self, word: u64, cell: u64) -> bool {
        let (write, file, of_cell) = named(word);
        file == self.file && of_cell == cell && write >= 1 && write <= self.all.len() as u64
    }

    /// Checks that what a read found had not certainly been replaced before the read began.
    fn nothing_newer(
        &self,
        cell: u64,
        read: &Record,
        word: u64,
        changes: &[&Record],
        seen: &[(&Record, u64)],
    ) -> Result<(), String> {
        // Whether the change certainly took effect before this read began.
        let is_in_force = |change: &Record| {
            let was_seen = || {
                seen.iter().any(|(earlier, word)| {
                    *word != 0
                        && self.names_right(*word, cell)
                        && std::ptr::eq(self.write_of(*word), change)
                        && earlier.precedes(read)
                })
            };
            change.is_done() && change.precedes(read) || was_seen()
        };
        let sources: Vec<(u64, u64)> = if word == 0 {
            let zeros = changes
                .iter()
                .filter(|change| self.zeroed(change).contains(&cell) && change.start < read.end);
            zeros.map(|zero| (zero.start, zero.end)).chain([(0, 0)]).collect()
        } else {
            let write = self.write_of(word);
            vec![(write.start, write.end)]
        };
        let replaced = |&(_, end): &(u64, u64)| {
            changes.iter().find(|change| {
                let other = word == 0 && change.written().contains(&cell)
                    || word != 0 && self.zeroed(change).contains(&cell) && change.is_done();
                other && change.start > end && is_in_force(change)
            })
        };
        let newer = sources.iter().map(replaced);
        let mut last = None;
        for newer in newer {
            match newer {
                None => return Ok(()),
                Some(change) => last = Some(*change),
            }
        }
        let newer = last.map(|change| format!("{:?}", change.asked)).unwrap_or_default();
        Err(format!("cell {cell} holds {word:#x} at {}, which {newer} had replaced", read.start))
    }

    /// Checks J2 for one read.
    fn blocks_are_whole(&self, look: &Look<'_>) -> Result<(), String> {
        let cells: Vec<(u64, u64)> =
            look.cells().filter(|(cell, word)| *word == 0 || self.names_right(*word, *cell)).collect();
        for block in cells.chunk_by(|one, other| one.0 / CELLS_PER_BLOCK == other.0 / CELLS_PER_BLOCK) {
            for &(cell, word) in block.iter().filter(|(_, word)| *word != 0) {
                let write = self.write_of(word);
                if self.world.owner_dies && write.ended == Ended::Dropped {
                    continue;
                }
                let beside = block.iter().filter(|(other, word_there)| {
                    *word_there != word
                        && write.written().contains(other)
                        && named(*word_there).0 != named(word).0
                });
                for &(other, word_there) in beside {
                    if self.is_older(word_there, (other, cell), write, look.record) {
                        return Err(format!(
                            "cells {cell} and {other} of one block: {word:#x} and the older {word_there:#x}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether what `cell` holds was certainly there before `write`, which wrote `cell` and `beside` at once.
    fn is_older(&self, word: u64, (cell, beside): (u64, u64), write: &Record, read: &Record) -> bool {
        if word != 0 {
            let there = self.write_of(word);
            // If both writes cover both cells, the later one must be found in both.
            return there.precedes(write) || there.written().contains(&beside);
        }
        let came_after = |zero: &&&Record| {
            self.zeroed(zero).contains(&cell) && !zero.precedes(write) && zero.start < read.end
        };
        !self.records.iter().any(|zero| came_after(&zero))
    }

    /// Checks J4 for one read.
    fn size_fits(&self, look: &Look<'_>) -> Result<(), String> {
        let Asked::Read(asked) = &look.record.asked else { return Ok(()) };
        let (read, end) = (look.record, look.first + look.words.len() as u64);
        if end < asked.end {
            // The read returned less than it asked for: the file ended there, or before the start of the
            // read.
            let write = self.records.iter().find(|write| {
                write.is_done() && write.written().end > end && write.precedes(read) && {
                    let cut = |other: &&&Record| matches!(other.asked, Asked::SetSize(size) if size < write.written().end);
                    let since = |other: &&&Record| !other.precedes(write) && other.start < read.end;
                    !self.records.iter().any(|other| cut(&other) && since(&other))
                }
            });
            if let Some(write) = write {
                return Err(format!("it ends at cell {end}, but was written up to {}", write.written().end));
            }
        }
        let cut = self.records.iter().find_map(|cut| match cut.asked {
            Asked::SetSize(size)
                if cut.is_done() && !look.words.is_empty() && size < end && cut.precedes(read) =>
            {
                let longer = |other: &&&Record| match &other.asked {
                    Asked::Write(cells) => cells.end > size,
                    Asked::SetSize(other) => *other > size,
                    _ => false,
                };
                let since = |other: &&&Record| !other.precedes(cut) && other.start < read.end;
                (!self.records.iter().any(|other| longer(&other) && since(&other))).then_some(size)
            }
            _ => None,
        });
        match cut {
            Some(size) => Err(format!("it reaches to cell {end}, but was truncated at {size}")),
            None => Ok(()),
        }
    }

    /// Checks J3 for one failure.
    fn failure_is_explained(&self, failed: &Record, error: FileError) -> Result<(), String> {
        let cells = match &failed.asked {
            Asked::SetSize(size) => *size..*size + 1,
            Asked::Read(cells) | Asked::Write(cells) | Asked::Zero(cells) | Asked::Reserve(cells) => {
                cells.clone()
            }
        };
        let is_redundant = self.world.survivable && self.row.is_some();
        // A disk that hangs has the same consequences as a node that was lost during the operation.
        let error = match error {
            FileError::Storage { offset } => FileError::Lost { offset },
            error => error,
        };
        let is_explained = match error {
            // A write may have been abandoned half-way. Nothing else explains the loss.
            FileError::Lost { .. } if is_redundant => self.is_in_doubt(failed, &cells),
            FileError::Short | FileError::Unavailable { .. } | FileError::GuestAtWork if is_redundant => {
                false
            }
            FileError::Damaged { .. } if is_redundant => self.world.flips && self.is_in_doubt(failed, &cells),
            FileError::Damaged { .. } => self.world.flips || self.could_not_be_moved(failed, &cells),
            FileError::TooFewNodes { .. } | FileError::NoSpace if self.world.never_full => false,
            FileError::TooFewNodes { .. } => !matches!(failed.asked, Asked::Read(_)),
            // Data that cannot be read cannot be truncated either. They are then lost, because they must not
            // show again. Also, rows do not distinguish damage from loss.
            FileError::Lost { .. } if self.world.flips => true,
            // If members of a row are lost together, their blocks stay lost, also after the members are
            // replaced elsewhere.
            FileError::Lost { .. } if self.row.is_some() && !self.world.calm => true,
            // The write itself may have ended in doubt: its connection broke, and there was no file
            // descriptor for another one.
            FileError::Lost { .. } if matches!(failed.asked, Asked::Write(_)) && !self.world.calm => true,
            FileError::Lost { .. } => failed.was_lost || self.is_in_doubt(failed, &cells),
            FileError::NoSpace => !matches!(failed.asked, Asked::Read(_)),
            FileError::Short | FileError::Unavailable { .. } | FileError::GuestAtWork => !self.world.calm,
            _ => false,
        };
        if is_explained {
            return Ok(());
        }
        Err(format!(
            "{:?} from {} to {} fails for no reason: {error}",
            failed.asked, failed.start, failed.end
        ))
    }

    /// Whether the owner died during a change of these cells while the pool had no room. The successor then
    /// could not move the blocks, and stores of that change may still land on them.
    fn could_not_be_moved(&self, failed: &Record, cells: &Range<u64>) -> bool {
        let blocks_of =
            |cells: &Range<u64>| cells.start / CELLS_PER_BLOCK..cells.end.div_ceil(CELLS_PER_BLOCK);
        let may_still_land = |change: &&&Record| {
            let changed = blocks_of(&self.changed(change));
            let asked = blocks_of(cells);
            change.ended == Ended::Dropped
                && change.start < failed.end
                && changed.start < asked.end
                && asked.start < changed.end
        };
        let is_full =
            |record: &Record| record.ended == Ended::Failed(FileError::NoSpace) && record.start < failed.end;
        self.world.owner_dies
            && self.records.iter().any(|record| may_still_land(&record))
            && self.all.iter().any(is_full)
    }

    /// The blocks of a block's column, including the block itself. One block in doubt makes the parity
    /// useless for all of them.
    fn column_of(&self, block: u64) -> impl Iterator<Item = u64> + use<> {
        let (stripe, within) = (block / BLOCKS_PER_EXTENT, block % BLOCKS_PER_EXTENT);
        let stripes = match self.row {
            Some(data) => stripe / data * data..(stripe / data + 1) * data,
            None => stripe..stripe + 1,
        };
        stripes.map(move |stripe| stripe * BLOCKS_PER_EXTENT + within)
    }

    /// Whether a change to the column of one of the cells' blocks ended in doubt, and no acknowledged change
    /// has covered that block since.
    fn is_in_doubt(&self, failed: &Record, cells: &Range<u64>) -> bool {
        let (first, end) = (cells.start / CELLS_PER_BLOCK, cells.end.div_ceil(CELLS_PER_BLOCK));
        (first..end).flat_map(|block| self.column_of(block).map(move |mate| (block, mate))).any(
            |(block, mate)| {
                let of_block = block * CELLS_PER_BLOCK..(block + 1) * CELLS_PER_BLOCK;
                let of_mate = mate * CELLS_PER_BLOCK..(mate + 1) * CELLS_PER_BLOCK;
                let touches = |record: &Record| {
                    let changed = self.changed(record);
                    changed.start < of_mate.end && of_mate.start < changed.end
                };
                let covers = |record: &Record| {
                    let changed = self.changed(record);
                    changed.start <= of_block.start && of_block.end <= changed.end
                };
                self.records.iter().any(|doubt| {
                    let is_cut = self.world.short && doubt.written().is_empty() && !covers(doubt);
                    // A change in flight may be in doubt until it is retried by another route.
                    let in_flight = !self.world.calm && self.row.is_none() && doubt.end >= failed.start;
                    let not_done = !doubt.is_done() || is_cut || in_flight;
                    let in_doubt = not_done && touches(doubt) && doubt.start < failed.end;
                    let repaired = |other: &&&Record| {
                        other.is_done() && covers(other) && doubt.precedes(other) && other.precedes(failed)
                    };
                    in_doubt
                        && !std::ptr::eq(*doubt, failed)
                        && !self.records.iter().any(|other| repaired(&other))
                })
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORLD: Excuses = Excuses {
        calm: false,
        short: false,
        survivable: false,
        flips: false,
        owner_dies: false,
        stores_succeed: false,
        never_full: false,
    };

    /// Sequential operations on one file.
    fn one_after_the_other(operations: Vec<(Asked, Ended)>) -> Vec<Record> {
        let records = (1..).zip(operations).map(|(number, (asked, ended))| Record {
            number,
            file: 1,
            asked,
            ended,
            start: 2 * number,
            end: 2 * number + 1,
            was_lost: false,
        });
        records.collect()
    }

    fn failed() -> Ended {
        Ended::Failed(FileError::NoSpace)
    }

    #[test]
    fn a_failed_write_may_leave_zeros_only_past_the_end_of_the_file() {
        let written = (Asked::Write(0..8), Ended::Done);
        let found = |words: Vec<u64>| (Asked::Read(0..words.len() as u64), Ended::Found(words));
        let held: Vec<u64> = (0..8).map(|cell| word(1, 1, cell)).collect();

        let cleared = vec![written.clone(), (Asked::Write(0..16), failed()), found(vec![0; 8])];
        assert!(!judge(&one_after_the_other(cleared), WORLD, &BTreeMap::new()).is_empty());

        let kept = vec![written, (Asked::Write(0..16), failed()), found(held)];
        assert_eq!(judge(&one_after_the_other(kept), WORLD, &BTreeMap::new()), Vec::<String>::new());
    }
}
