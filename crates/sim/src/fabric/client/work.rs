//! What clients do to regions, and what they can check at once: order within a queue, and whole records.

use std::ops::Range;

use farpool_fabric::{ArenaBuf, Batch, OpError};
use farpool_wire::{GrantMode, RegionId, RemoteAddr};
use futures_util::future::join;

use super::Client;
use crate::fabric::TORN_COPY;
use crate::fabric::director::Offer;
use crate::fabric::history::{End, What};
use crate::fabric::layout::{
    ADDED, PLAIN, RECORD_WORDS, REGION_BYTES, SWAPPED, USED_WORDS, checksum, record, record_of, stream_of,
};

const WORD: u64 = 8;

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
}

impl Client {
    /// Performs one random operation.
    pub(super) async fn work(&mut self, offer: &Offer) {
        match self.random.below(100) {
            0..18 => self.write_some(offer).await,
            18..34 => self.read_some(offer).await,
            34..44 => self.swap(offer).await,
            44..52 => self.add(offer).await,
            52..62 if self.owns_stream => self.go_on_with_stream(offer).await,
            52..68 => self.look_at_stream(offer).await,
            68..76 if self.owns_stream => self.write_record(offer).await,
            68..88 => self.read_record(offer).await,
            88..95 => self.write_and_read_at_once(offer).await,
            _ => self.step_out_of_bounds(offer).await,
        }
    }

    pub(super) async fn read_all(&mut self, offer: &Offer) {
        self.read_words(offer, 0..USED_WORDS).await;
    }

    fn at(&self, offer: &Offer, word: u64) -> RemoteAddr {
        let region = RegionId { node: self.run.nodes[offer.node].id, index: offer.region };
        RemoteAddr { region, offset: word * WORD }
    }

    fn buffer(&self, words: usize) -> Option<ArenaBuf> {
        self.endpoint.arena().take(words * WORD as usize).ok()
    }

    fn filled(&self, values: &[u64]) -> Option<ArenaBuf> {
        let mut buffer = self.buffer(values.len())?;
        for (place, value) in buffer.chunks_exact_mut(WORD as usize).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        Some(buffer)
    }

    fn some_plain_words(&mut self) -> Range<u64> {
        let length = 1 + self.random.below(8);
        let start = PLAIN.start + self.random.below(PLAIN.end - PLAIN.start - length + 1);
        start..start + length
    }

    fn begin(&self, offer: &Offer, touches: impl IntoIterator<Item = (u64, What)>) -> Vec<usize> {
        self.run.history.borrow_mut().begin(self.actor(offer), touches)
    }

    /// Records how an operation ended.
    fn end<T>(
        &mut self,
        offer: &Offer,
        records: &[usize],
        result: &Result<T, OpError>,
        found: &[u64],
    ) -> End {
        let end = self.note_end(offer, result);
        let mut history = self.run.history.borrow_mut();
        history.end(records, end, found);
        let writes = records.iter().any(|&record| history.accesses[record].what != What::Read);
        if end == End::Done && writes && offer.mode == GrantMode::ReadOnly {
            history.complain(format!("read-only grant {} changed something", offer.grant));
        }
        end
    }

    async fn write_words(&mut self, offer: &Offer, first: u64, values: &[u64]) {
        let Some(buffer) = self.filled(values) else { return };
        let records = self.begin(offer, (first..).zip(values.iter().map(|&value| What::Write(value))));
        let (_, result) =
            self.timed(self.queue(offer).write(self.at(offer, first), offer.grant, buffer)).await;
        self.end(offer, &records, &result, &[]);
    }

    async fn read_words(&mut self, offer: &Offer, words: Range<u64>) -> Option<Vec<u64>> {
        let buffer = self.buffer((words.end - words.start) as usize)?;
        let records = self.begin(offer, words.clone().map(|word| (word, What::Read)));
        let at = self.at(offer, words.start);
        let (buffer, result) = self.timed(self.queue(offer).read(at, offer.grant, buffer)).await;
        let found = words_of(&buffer);
        let end = self.end(offer, &records, &result, &found);
        (end == End::Done).then_some(found)
    }

    fn fresh(&self, count: u64) -> Vec<u64> {
        let mut history = self.run.history.borrow_mut();
        (0..count).map(|_| history.fresh_value()).collect()
    }

    async fn write_some(&mut self, offer: &Offer) {
        let words = self.some_plain_words();
        let values = self.fresh(words.end - words.start);
        self.write_words(offer, words.start, &values).await;
    }

    async fn read_some(&mut self, offer: &Offer) {
        let words = self.some_plain_words();
        self.read_words(offer, words).await;
    }

    /// A write and a read of the same words, both in flight. The read comes later on the queue, so it must
    /// return what this write has written, or what other clients have written since.
    async fn write_and_read_at_once(&mut self, offer: &Offer) {
        let words = self.some_plain_words();
        let values = self.fresh(words.end - words.start);
        let (Some(data), Some(room)) = (self.filled(&values), self.buffer(values.len())) else { return };
        let written = self.begin(offer, words.clone().zip(values.iter().map(|&value| What::Write(value))));
        let read = self.begin(offer, words.clone().map(|word| (word, What::Read)));
        let (queue, at) = (self.queue(offer), self.at(offer, words.start));
        let both = join(queue.write(at, offer.grant, data), queue.read(at, offer.grant, room));
        let ((_, write_result), (room, read_result)) = self.timed(both).await;
        self.end(offer, &written, &write_result, &[]);
        self.end(offer, &read, &read_result, &words_of(&room));
    }

    /// Swaps the value that it has just read, so that the swap succeeds unless another client was faster.
    async fn swap(&mut self, offer: &Offer) {
        let word = SWAPPED.start + self.random.below(SWAPPED.end - SWAPPED.start);
        let Some(seen) = self.read_words(offer, word..word + 1).await else { return };
        let (expected, new) = (seen[0], self.fresh(1)[0]);
        let records = self.begin(offer, [(word, What::Swap { expected, new })]);
        let at = self.at(offer, word);
        let result = self.timed(self.queue(offer).compare_and_swap(at, offer.grant, expected, new)).await;
        self.end(offer, &records, &result, &[result.unwrap_or(0)]);
    }

    async fn add(&mut self, offer: &Offer) {
        let word = ADDED.start + self.random.below(ADDED.end - ADDED.start);
        let records = self.begin(offer, [(word, What::Add)]);
        let result = self.timed(self.queue(offer).fetch_and_add(self.at(offer, word), offer.grant, 1)).await;
        self.end(offer, &records, &result, &[result.unwrap_or(0)]);
    }

    /// In one batch, reads the first word of the client's stream, raises both words behind a fence, and reads
    /// the first again.
    async fn go_on_with_stream(&mut self, offer: &Offer) {
        let [first, second] = stream_of(self.place.index);
        let next = self.fresh(1)[0];
        let Some(buffer) = self.filled(&[0, next, 0]) else { return };
        let writes = self.begin(offer, [(first, What::Write(next)), (second, What::Write(next))]);
        let reads = self.begin(offer, [(first, What::Read)]);
        let mut batch = Batch::new(buffer);
        batch.read(self.at(offer, first), offer.grant, 0..8);
        batch.fence();
        batch.write(self.at(offer, first), offer.grant, 8..16);
        batch.write(self.at(offer, second), offer.grant, 8..16);
        batch.read(self.at(offer, first), offer.grant, 16..24);
        let batch = self.timed(self.queue(offer).run(batch)).await;
        let results = batch.results().to_vec();
        let found = words_of(batch.buffer());
        self.end(offer, &writes[..1], &results[1], &[]);
        self.end(offer, &writes[1..], &results[2], &[]);
        self.end(offer, &reads, &results[3], &found[2..]);
        self.note_end(offer, &results[0]);
        if results[0].is_ok() && found[0] >= next {
            self.run.complain("a fenced write passed a read posted before it".into());
        }
        if results[1].is_ok() && results[3].is_ok() && found[2] != next {
            self.run.complain("a read passed a write posted before it".into());
        }
    }

    /// The second word of a stream is raised after the first, so a client that sees a value in the second
    /// must find at least that value in the first.
    async fn look_at_stream(&mut self, offer: &Offer) {
        let whose = self.random.below(self.run.board.borrow().offers.len() as u64) as usize;
        let [first, second] = stream_of(whose);
        let Some(buffer) = self.buffer(2) else { return };
        let records = self.begin(offer, [(second, What::Read), (first, What::Read)]);
        let mut batch = Batch::new(buffer);
        batch.read(self.at(offer, second), offer.grant, 0..8);
        batch.fence();
        batch.read(self.at(offer, first), offer.grant, 8..16);
        let batch = self.timed(self.queue(offer).run(batch)).await;
        let results = batch.results().to_vec();
        let found = words_of(batch.buffer());
        self.end(offer, &records[..1], &results[0], &found[..1]);
        self.end(offer, &records[1..], &results[1], &found[1..]);
        if results.iter().all(Result::is_ok) && found[0] > found[1] {
            self.run.complain(format!("writes of one queue were seen out of order: {found:x?}"));
        }
    }

    async fn write_record(&mut self, offer: &Offer) {
        let version = self.fresh(1)[0];
        self.write_words(offer, record_of(self.place.index), &record(version)).await;
    }

    /// A reader accepts a record only if its checksum is right.
    async fn read_record(&mut self, offer: &Offer) {
        let whose = self.random.below(self.run.board.borrow().offers.len() as u64) as usize;
        let first = record_of(whose);
        let Some(found) = self.read_words(offer, first..first + RECORD_WORDS).await else { return };
        let is_blank = found.iter().all(|&word| word == 0);
        let is_whole = is_blank || found.last() == Some(&checksum(&found));
        let is_taken = is_whole || self.run.is_broken(TORN_COPY);
        if is_taken && !is_blank && found != record(found[0]) {
            self.run.complain(format!("a record was accepted that was never written: {found:x?}"));
        }
    }

    async fn step_out_of_bounds(&mut self, offer: &Offer) {
        let Some(buffer) = self.filled(&[u64::MAX; 2]) else { return };
        let past = RemoteAddr { offset: REGION_BYTES - WORD, ..self.at(offer, 0) };
        let (_, result) = self.timed(self.queue(offer).write(past, offer.grant, buffer)).await;
        self.judge_impossible(offer, result);
        let odd = RemoteAddr { offset: 3, ..self.at(offer, 0) };
        let result = self.timed(self.queue(offer).fetch_and_add(odd, offer.grant, 1)).await;
        self.judge_impossible(offer, result.map(drop));
    }

    fn judge_impossible(&mut self, offer: &Offer, result: Result<(), OpError>) {
        use farpool_wire::Refusal::{Misaligned, OutOfBounds};
        match result {
            Ok(()) => self.run.complain("an impossible operation was acknowledged".into()),
            Err(OpError::Refused(OutOfBounds | Misaligned)) => {}
            Err(_) => {
                self.note_end(offer, &result);
            }
        }
    }
}
