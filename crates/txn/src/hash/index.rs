//! Finding keys and giving them record numbers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::join;
use rustix_futex_sync::Mutex;

use super::bucket::{Bucket, Entry, MOST_DEPTH, Position, children, children_word};
use super::key::{KeyHash, decode_key, encode_key};
use super::layout::{IndexLayout, MOST_ENTRIES, Spot};
use super::rules::{Again, IndexRules};
use super::spares::{IndexSpares, Spares, take_spare};
use crate::memory::{Memory, MemoryError, Piece};
use crate::rules::Shipped;

const WORD_BYTES: u64 = size_of::<u64>() as u64;
/// Most splits that a client remembers: about ten megabytes, for a few million keys.
const MOST_SPLITS_KNOWN: usize = 1 << 18;
/// Looks at buckets before an insert is given up. At each level other clients can be first at each entry, and
/// then at splitting.
const MOST_LOOKS: u32 = (MOST_DEPTH + 1) * (MOST_ENTRIES as u32 + 2);

/// Why a key cannot be looked up, or gets no record.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The key has another length than the table's keys.
    #[error("{found} bytes for a key of {wanted}")]
    WrongKeySize {
        /// Bytes of the table's keys.
        wanted: usize,
        /// Bytes of the given key.
        found: usize,
    },
    /// The index has no room for another key: all its numbers or buckets are taken.
    #[error("the table is full")]
    Full,
    /// The key's bucket is full and cannot be split again: its keys agree in all bits by which buckets are
    /// split. More memory does not help.
    #[error("a bucket of the index is full and cannot be split again")]
    Crowded,
    /// The index names a record or a bucket of a piece that this client does not know. The index has grown,
    /// or its memory was damaged.
    #[error("an index names a piece that is unknown here: it has grown, or its memory was damaged")]
    BeyondPieces,
    /// The bytes in far memory are not those of an index: memory was damaged.
    #[error("an index holds bytes that no client writes: its memory was damaged")]
    Damaged,
    /// Far memory does not answer. An insert may have happened; another look-up tells.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The record of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbered {
    /// The key had a record.
    Found(u64),
    /// The key has just got this record. Other clients may know of it already.
    New(u64),
}

impl Numbered {
    /// The record's number.
    pub fn number(self) -> u64 {
        let (Numbered::Found(number) | Numbered::New(number)) = self;
        number
    }
}

/// An index, for use by one thread. The splits that it remembers are never wrong, only incomplete.
pub struct Index<R = Shipped> {
    layout: IndexLayout,
    pieces: Vec<Piece>,
    spares: Arc<IndexSpares>,
    /// Buckets that are split, with the first of their children. They stay split.
    splits: RefCell<BTreeMap<u64, u64>>,
    rules: PhantomData<R>,
}

impl<R: IndexRules> Index<R> {
    /// An index in memory that is zeros, or has been used as this index. `None`: the layout is for another
    /// number of pieces.
    pub fn new(layout: IndexLayout, pieces: Vec<Piece>) -> Option<Self> {
        let spares = Arc::new(IndexSpares::new(&layout));
        Self::sharing(layout, pieces, spares)
    }

    /// The same for one of a process's threads, which share the numbers and buckets that they have taken.
    /// `None`: as above, or the spares belong to another index.
    pub fn sharing(layout: IndexLayout, pieces: Vec<Piece>, spares: Arc<IndexSpares>) -> Option<Self> {
        if pieces.len() as u64 != layout.pieces() || !spares.is_of(&layout) {
            return None;
        }
        spares.grow(&layout);
        Some(Index { layout, pieces, spares, splits: RefCell::default(), rules: PhantomData })
    }

    /// Remembers the splits that the same index remembered when it had fewer pieces.
    pub(crate) fn remember_splits_of(&self, before: &Index<R>) {
        self.splits.replace(before.splits.borrow().clone());
    }

    /// The layout.
    pub fn layout(&self) -> &IndexLayout {
        &self.layout
    }

    /// The number of a key's record, if it has one.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn find(&self, memory: &Memory, key: &[u8]) -> Result<Option<u64>, IndexError> {
        let found = self.find_with(memory, key, async |_| ()).await?;
        Ok(found.map(|(number, ())| number))
    }

    /// The number of a key's record, if it has one, with the result of `beside`. That begins with a likely
    /// number, together with the READ of the key.
    pub(crate) async fn find_with<T>(
        &self,
        memory: &Memory,
        key: &[u8],
        beside: impl AsyncFn(u64) -> T,
    ) -> Result<Option<(u64, T)>, IndexError> {
        let hash = self.hash(key)?;
        let mut at = Position::home(self.layout.home(hash));
        let bucket = self.bucket(memory, &mut at, hash).await?;
        self.look(memory, &bucket, hash, key, beside).await
    }

    /// The key of a record that was committed. `None`: the memory was damaged.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn key_of(&self, memory: &Memory, number: u64) -> Result<Option<Vec<u8>>, IndexError> {
        let Some(spot) = self.layout.key(number) else { return Ok(None) };
        let bytes = memory.read(&self.pieces[spot.piece], spot.range).await?;
        Ok(decode_key(number, self.layout.shape().key_bytes, &bytes).map(<[u8]>::to_vec))
    }

    /// The number of a key's record. A key that has none gets one.
    ///
    /// # Errors
    /// [`IndexError::Full`], [`IndexError::Crowded`], or [`IndexError::BeyondPieces`]; or when far memory
    /// does not answer: then another call tells whether the key has a number.
    pub async fn find_or_insert(&self, memory: &Memory, key: &[u8]) -> Result<Numbered, IndexError> {
        let hash = self.hash(key)?;
        let mut at = Position::home(self.layout.home(hash));
        let mut looks = true;
        for _ in 0..MOST_LOOKS {
            let bucket = self.bucket(memory, &mut at, hash).await?;
            if looks && let Some((number, ())) = self.look(memory, &bucket, hash, key, async |_| ()).await? {
                return Ok(Numbered::Found(number));
            }
            if let Some(place) = R::place(&bucket, hash) {
                if let Some(entry) = self.put(memory, at, place, hash, key).await? {
                    if R::splits_ahead(bucket.empty_places().count() - 1) {
                        self.split(memory, at, &bucket.with(place, entry)).await?;
                    }
                    return Ok(Numbered::New(entry.number()));
                }
                looks = R::looks_again(Again::LostEntry);
            } else {
                self.split(memory, at, &bucket).await?;
                looks = R::looks_again(Again::Split);
            }
        }
        Err(IndexError::Damaged)
    }

    fn hash(&self, key: &[u8]) -> Result<KeyHash, IndexError> {
        let shape = self.layout.shape();
        if key.len() != shape.key_bytes {
            return Err(IndexError::WrongKeySize { wanted: shape.key_bytes, found: key.len() });
        }
        Ok(KeyHash::of(shape.seed, key))
    }

    /// Goes down to a bucket that was not split when it was read, and returns that.
    async fn bucket(&self, memory: &Memory, at: &mut Position, hash: KeyHash) -> Result<Bucket, IndexError> {
        loop {
            while let Some(children) = self.known_children(at.bucket) {
                *at = at.child(children, hash).ok_or(IndexError::Damaged)?;
            }
            let spot = self.layout.buckets_from(at.bucket, 1).ok_or(IndexError::Damaged)?;
            let bytes = memory.read(&self.pieces[spot.piece], spot.range).await?;
            let bucket = Bucket::decode(&bytes).ok_or(IndexError::Damaged)?;
            let Some(children) = bucket.children() else { return Ok(bucket) };
            self.remember_split(at.bucket, children)?;
            *at = at.child(children, hash).ok_or(IndexError::Damaged)?;
        }
    }

    fn known_children(&self, bucket: u64) -> Option<u64> {
        self.splits.borrow().get(&bucket).copied()
    }

    fn remember_split(&self, bucket: u64, children: u64) -> Result<(), IndexError> {
        if !self.layout.is_pair(children) {
            let is_known = self.layout.buckets_from(children, 1).is_some();
            return Err(if is_known { IndexError::Damaged } else { IndexError::BeyondPieces });
        }
        let mut splits = self.splits.borrow_mut();
        if splits.len() < MOST_SPLITS_KNOWN {
            splits.insert(bucket, children);
        }
        Ok(())
    }

    /// The record in a bucket that has this key, with the result of `beside`.
    async fn look<T>(
        &self,
        memory: &Memory,
        bucket: &Bucket,
        hash: KeyHash,
        key: &[u8],
        beside: impl AsyncFn(u64) -> T,
    ) -> Result<Option<(u64, T)>, IndexError> {
        for entry in bucket.entries().filter(|entry| entry.fits(hash)) {
            let number = entry.number();
            let Some(spot) = self.layout.key(number) else {
                if R::stops_at_unknown_pieces() {
                    return Err(IndexError::BeyondPieces);
                }
                continue;
            };
            let is_its_key = async {
                let bytes = memory.read(&self.pieces[spot.piece], spot.range).await?;
                let found = decode_key(number, key.len(), &bytes).ok_or(IndexError::Damaged)?;
                Ok::<_, IndexError>(R::is_key(found, key))
            };
            let (is_its_key, beside) = join(is_its_key, beside(number)).await;
            if is_its_key? {
                return Ok(Some((number, beside)));
            }
        }
        Ok(None)
    }

    /// Puts a key into an entry that was empty (H2). `None`: another client was first.
    async fn put(
        &self,
        memory: &Memory,
        at: Position,
        place: usize,
        hash: KeyHash,
        key: &[u8],
    ) -> Result<Option<Entry>, IndexError> {
        let bucket = self.layout.buckets_from(at.bucket, 1).ok_or(IndexError::Damaged)?;
        let (piece, within) = self.take(memory, &self.spares.numbers, bucket.piece).await?;
        let number = self.layout.number(piece, within);
        let entry = Entry::new(hash, number);
        let entry_at = bucket.range.start + (1 + place as u64) * WORD_BYTES;
        let found = self.publish(memory, (bucket.piece, entry_at), entry, key).await;
        if is_unknown_to_others(&found) || found.is_err() && R::reuses_numbers_in_doubt() {
            self.spares.numbers.lock().give_back(piece, within);
        }
        Ok((found? == 0).then_some(entry))
    }

    /// Writes a key, and then its entry (H3) if that is empty. Returns the word that the entry had.
    async fn publish(
        &self,
        memory: &Memory,
        (piece, entry_at): (usize, u64),
        entry: Entry,
        key: &[u8],
    ) -> Result<u64, MemoryError> {
        let area = self.layout.key(entry.number()).expect("numbers are handed out within the layout");
        let bytes = encode_key(entry.number(), key);
        let (of_key, of_entry) = (&self.pieces[area.piece], &self.pieces[piece]);
        if !R::writes_keys_first() {
            let found = memory.compare_and_swap(of_entry, entry_at, 0, entry.word()).await?;
            memory.write(of_key, area.range.start, &bytes).await?;
            return Ok(found);
        }
        if area.piece == piece {
            // On one queue they take effect in this order. They are under one grant, so if the first is
            // refused, the second is, too.
            let mut plan = memory.plan_soon(of_key.region.node, bytes.len()).await?;
            plan.write(of_key, area.range.start, &bytes);
            plan.compare_and_swap(of_entry, entry_at, 0, entry.word());
            return plan.run().await.last_word();
        }
        memory.write(of_key, area.range.start, &bytes).await?;
        memory.compare_and_swap(of_entry, entry_at, 0, entry.word()).await
    }

    /// Splits a full bucket (H4), unless another client does so first. Either way the split is remembered.
    async fn split(&self, memory: &Memory, at: Position, bucket: &Bucket) -> Result<(), IndexError> {
        if at.depth == MOST_DEPTH {
            return Err(IndexError::Crowded);
        }
        let spot = self.layout.buckets_from(at.bucket, 1).ok_or(IndexError::Damaged)?;
        let (piece, within) = self.take(memory, &self.spares.pairs, spot.piece).await?;
        let pair = self.layout.pair(piece, within);
        let Spot { range, .. } =
            self.layout.buckets_from(pair, 2).expect("pairs are handed out within the layout");
        let found = async {
            memory.write(&self.pieces[piece], range.start, &bucket.halves(at.depth)).await?;
            memory.compare_and_swap(&self.pieces[spot.piece], spot.range.start, 0, children_word(pair)).await
        };
        let found = found.await;
        if is_unknown_to_others(&found) || found.is_err() && R::reuses_numbers_in_doubt() {
            self.spares.pairs.lock().give_back(piece, within);
        }
        let first = children(found?).ok_or(IndexError::Damaged)?;
        self.remember_split(at.bucket, first.unwrap_or(pair))
    }

    /// Takes a spare of the first piece that has one, in [the order](IndexLayout::search_order) for
    /// `preferred`. Returns the piece, and the spare's place in it.
    async fn take(
        &self,
        memory: &Memory,
        spares: &Mutex<Spares>,
        preferred: usize,
    ) -> Result<(usize, u64), IndexError> {
        let order = self.layout.search_order(preferred);
        take_spare(memory, &self.pieces, order, spares).await?.ok_or(IndexError::Full)
    }
}

/// Whether no other client can learn of the number or pair that was to be named (H5): another one was named
/// instead, or nothing was sent.
pub(crate) fn is_unknown_to_others(found: &Result<u64, MemoryError>) -> bool {
    match found {
        Ok(found) => *found != 0,
        Err(MemoryError::Short(_) | MemoryError::NotConnected(_)) => true,
        Err(MemoryError::Failed(_)) => false,
    }
}
