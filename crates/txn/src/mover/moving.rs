//! The mover's operations.

use farpool_wire::RecordHeader;

use super::chains::{Chains, Moved, Push};
use crate::cut::Cut;
use crate::memory::{Memory, MemoryError, Piece};
use crate::overflow::{Entry, entry_of, link_to};
use crate::record::{NumberedHeader, RecordId, RecordLayout, Ring, WORD_BYTES};
use crate::rules::Rules;
use crate::table::Table;

/// Bytes of rings, or of heads of chains, that are read at once. The horizon may advance between two such
/// READs.
const BYTES_AT_ONCE: usize = 16 << 10;

/// Moves versions of some tables.
#[derive(Default)]
pub(crate) struct Mover {
    pieces: Vec<PieceMover>,
}

/// Moves versions of the records in one piece.
struct PieceMover {
    piece: Piece,
    layout: RecordLayout,
    /// The number of its first record.
    first: RecordId,
    chains: Chains,
    /// The record that is looked at next.
    next: u64,
}

impl Mover {
    /// From now on, moves versions of these tables, if they have overflow regions, and of no others. Finds
    /// the chains in the tables that are new to it (M4). `horizon` is the last published one, if there is
    /// one: the previous mover may have given up entries by it.
    pub(crate) async fn turn_to(
        &mut self,
        memory: &Memory,
        tables: &[Table],
        horizon: Option<&Cut>,
    ) -> Result<(), MemoryError> {
        let mut before = std::mem::take(&mut self.pieces);
        for table in tables.iter().filter(|table| table.layout().overflow() > 0) {
            for (first, piece) in table.pieces() {
                let known = before.iter().position(|mover| mover.first == first && mover.piece == piece);
                self.pieces.push(match known {
                    Some(known) => before.swap_remove(known),
                    None => PieceMover::find(memory, piece, *table.layout(), first, horizon).await?,
                });
            }
        }
        Ok(())
    }

    /// Whether the overflow regions have any version.
    pub(crate) fn has_any(&self) -> bool {
        self.pieces.iter().any(|piece| !piece.chains.is_empty())
    }

    /// Looks at some records of each piece, different ones each time.
    pub(crate) async fn step<R: Rules>(&mut self, memory: &Memory, horizon: &Cut) -> Result<(), MemoryError> {
        for piece in &mut self.pieces {
            piece.step::<R>(memory, horizon).await?;
        }
        Ok(())
    }
}

impl PieceMover {
    /// Finds the chains in a piece's overflow region.
    async fn find(
        memory: &Memory,
        piece: Piece,
        layout: RecordLayout,
        first: RecordId,
        horizon: Option<&Cut>,
    ) -> Result<PieceMover, MemoryError> {
        let mut mover =
            PieceMover { piece, layout, first, chains: Chains::new(layout.overflow(), []), next: 0 };
        mover.chains = Chains::new(layout.overflow(), mover.found(memory, horizon).await?);
        Ok(mover)
    }

    /// Reads all chains.
    async fn found(
        &self,
        memory: &Memory,
        horizon: Option<&Cut>,
    ) -> Result<Vec<(u64, Vec<Moved>)>, MemoryError> {
        let mut found = Vec::new();
        for index in (0..self.layout.records()).step_by(BYTES_AT_ONCE / WORD_BYTES) {
            let end = self.layout.records().min(index + (BYTES_AT_ONCE / WORD_BYTES) as u64);
            let heads = self.layout.chain(index).start..self.layout.chain(end).start;
            let heads = memory.read(&self.piece, heads).await?;
            for (index, head) in (index..).zip(heads.as_chunks::<WORD_BYTES>().0) {
                let head = entry_of(u64::from_le_bytes(*head));
                found.push((index, self.chain_from(memory, index, head, horizon).await?));
            }
            // In shared memory none of this waits, so the thread's other work gets a turn here.
            memory.endpoint().yield_now().await;
        }
        Ok(found)
    }

    /// A record's chain from an entry on, as far as its numbers have no gap, and up to the first version that
    /// the horizon sees. Entries after that may have been given up, and may have been reused for another
    /// version.
    async fn chain_from(
        &self,
        memory: &Memory,
        index: u64,
        mut next: Option<u64>,
        horizon: Option<&Cut>,
    ) -> Result<Vec<Moved>, MemoryError> {
        let mut chain: Vec<Moved> = Vec::new();
        while let Some(entry) = next
            && let Some(place) = self.layout.entry(entry)
        {
            let bytes = memory.read(&self.piece, place).await?;
            let Some((found, true)) = Entry::decode(&self.layout, &bytes) else { break };
            let follows = chain
                .last()
                .is_none_or(|later| later.named.number.checked_sub(1) == Some(found.named.number));
            if found.record != self.record(index) || !follows {
                break;
            }
            chain.push(Moved { entry, named: found.named });
            let is_last = horizon.is_some_and(|horizon| horizon.sees(found.named.header.version()));
            next = found.before.filter(|_| !is_last);
        }
        Ok(chain)
    }

    fn record(&self, index: u64) -> RecordId {
        RecordId(self.first.0 + index)
    }

    async fn step<R: Rules>(&mut self, memory: &Memory, horizon: &Cut) -> Result<(), MemoryError> {
        let ring = self.layout.ring(0);
        let ring_bytes = (ring.end - ring.start) as usize;
        let start = self.next;
        let end = self.layout.records().min(start + (BYTES_AT_ONCE / ring_bytes).max(1) as u64);
        let rings = self.layout.ring(start).start..self.layout.ring(end - 1).end;
        let rings = memory.read(&self.piece, rings).await?;
        for (index, ring) in (start..).zip(rings.chunks_exact(ring_bytes)) {
            // If the counter is not valid, transactions report the error.
            if let Some(ring) = self.layout.decode_ring(ring) {
                self.tend::<R>(memory, horizon, index, &ring).await?;
            }
        }
        self.next = if end == self.layout.records() { 0 } else { end };
        Ok(())
    }

    /// Makes room in a record's ring for its next writers.
    async fn tend<R: Rules>(
        &mut self,
        memory: &Memory,
        horizon: &Cut,
        index: u64,
        ring: &Ring,
    ) -> Result<(), MemoryError> {
        let is_needed = |header: Option<RecordHeader>| !header.is_some_and(|it| horizon.sees(it.version()));
        let to_move =
            |(old, successor): &(NumberedHeader, _)| !old.header.is_moved() && is_needed(*successor);
        let mut oldest = ring.oldest().filter(to_move).peekable();
        if oldest.peek().is_none() && !self.chains.has_any(index) {
            return Ok(());
        }
        let header = memory.read_word(&self.piece, self.layout.current(index).start).await?;
        let current = Some(RecordHeader(header)).filter(|header| !header.is_locked());
        self.chains.collect(index, current, horizon);
        for (old, successor) in oldest {
            let is_done =
                !is_needed(successor.or(current)) || self.move_one::<R>(memory, horizon, index, old).await?;
            if !is_done {
                break;
            }
        }
        Ok(())
    }

    /// Moves a version. False: it cannot be moved now, so no later one can be.
    async fn move_one<R: Rules>(
        &mut self,
        memory: &Memory,
        horizon: &Cut,
        index: u64,
        old: NumberedHeader,
    ) -> Result<bool, MemoryError> {
        let record = self.record(index);
        let place = self.layout.old(index, old.number);
        let bytes = memory.read(&self.piece, place).await?;
        let Some(found) = self.layout.decode_old(record, old, &bytes).filter(|found| found.is_right) else {
            return Ok(false); // header and data are of different times
        };
        // No client writes the header meanwhile: its place may be written again only once this has taken
        // effect.
        let at = self.layout.old_header(index, old.number).start;
        let (unmarked, marked) = (old.header.0, old.header.moved().0);
        if !R::copies_first() {
            memory.compare_and_swap(&self.piece, at, unmarked, marked).await?;
        }
        let mut plan = memory.plan(self.piece.region.node, WORD_BYTES + self.layout.entry_bytes())?;
        if !self.chains.has(index, old) {
            let Push::At { entry, before } = self.chains.push(index, old, horizon) else { return Ok(false) };
            let bytes = Entry { record, named: old, before, data: found.data }.encode();
            let place = self.layout.entry(entry).expect("an entry that was free");
            plan.write(&self.piece, place.start, &bytes);
            plan.write(&self.piece, self.layout.chain(index).start, &link_to(Some(entry)).to_le_bytes());
        }
        plan.compare_and_swap(&self.piece, at, unmarked, marked);
        plan.run().await.check()?;
        Ok(true)
    }
}
