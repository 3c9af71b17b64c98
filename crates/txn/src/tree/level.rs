//! One level of an ordered index: entering records under keys, removing entries, and reading them in order.
//! The level above has a hint for most leaves of this one: where a search for a leaf's ranks may begin.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use farpool_fabric::ArenaBuf;

use super::entry::{Children, EntryKind, EntryWord};
use super::known::{FIRST_LEAF, Known};
use super::layout::{LevelLayout, Spot};
use super::leaf::{Leaf, LiveEntry, Rank, Unusable};
use super::rules::TreeRules;
use super::spares::LevelSpares;
use crate::hash::{is_unknown_to_others, take_spare};
use crate::memory::{Memory, MemoryError, Piece};
use crate::record::WORD_BYTES;
use crate::rules::Shipped;

/// Compare-and-swaps that are posted together.
const AT_ONCE: usize = 32;
/// Looks at one leaf before an operation gives up: at each of its places other clients may be first, and
/// then at replacing it.
const MOST_LOOKS: u32 = 10_000;
/// Most steps of a search from leaf to leaf. With hints it needs a few; the highest level has none. More
/// steps than this lead round in a circle.
const MOST_STEPS: u32 = 1 << 20;
/// Steps of a search from leaf to leaf before it asks for a hint.
const STEPS_BEFORE_HINT: u32 = 3;

/// Why an ordered index cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The key has another length than the index's keys.
    #[error("{found} bytes for a key of {wanted}")]
    WrongKeySize {
        /// Bytes of the index's keys.
        wanted: usize,
        /// Bytes of the given key.
        found: usize,
    },
    /// All leaves were handed out.
    #[error("the index is full")]
    Full,
    /// Other clients were first each time.
    #[error("other clients change this part of an index all the time")]
    Busy,
    /// The index names a leaf in a piece that this client does not know: it has grown, or its memory was
    /// damaged.
    #[error("an index names a piece that is unknown here: it has grown, or its memory was damaged")]
    BeyondPieces,
    /// No client writes what was read: memory was damaged.
    #[error("an index holds bytes that no client writes: its memory was damaged")]
    Damaged,
    /// Far memory does not answer. A change may have happened all the same.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The entries of one leaf that lie in a range, in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// The entries, each with its word when it was read.
    pub entries: Vec<(Rank, EntryWord)>,
    /// Where the next leaf begins, in the direction of the search. `None`: there is none.
    pub next: Option<Rank>,
}

impl Run {
    /// The ranks of the entries.
    pub fn ranks(&self) -> Vec<Rank> {
        self.entries.iter().map(|(rank, _)| rank.clone()).collect()
    }
}

/// The live entries of one leaf from a rank on, as they were seen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Looked {
    /// The entries, in their order. A rank may have two.
    pub entries: Vec<SeenEntry>,
    /// Where the next leaf begins. `None`: there is none.
    pub next: Option<Rank>,
}

/// A live entry, as it was seen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeenEntry {
    /// Its rank.
    pub rank: Rank,
    word: EntryWord,
    leaf: u64,
    place: usize,
}

/// The place of an entry that was removed, which is not used again yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemovedEntry {
    leaf: u64,
    place: usize,
    word: EntryWord,
}

/// Which leaf is wanted.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// That for a rank.
    At(&'a Rank),
    /// That for the highest ranks below this one; `None`: for the highest of all.
    Below(Option<&'a Rank>),
}

impl Wanted<'_> {
    fn is_covered_by(self, leaf: &Leaf<'_>) -> bool {
        match self {
            Wanted::At(rank) => leaf.covers(&rank.key, rank.number),
            Wanted::Below(end) => leaf.covers_below(end),
        }
    }

    /// Whether the wanted leaf is on the right of this one.
    fn is_right_of(self, leaf: &Leaf<'_>) -> bool {
        match self {
            Wanted::At(rank) => leaf.is_below(&rank.key, rank.number),
            Wanted::Below(Some(end)) => leaf.high().is_some_and(|high| high < *end),
            Wanted::Below(None) => leaf.high().is_some(),
        }
    }

    fn first_in(self, known: &Known) -> u64 {
        match self {
            Wanted::At(rank) => known.at(rank),
            Wanted::Below(end) => known.below(end),
        }
    }

    /// Hints below this rank are for leaves that are not on the right of the wanted one. `None`: all are.
    fn hints_below(self) -> Option<Rank> {
        match self {
            Wanted::At(rank) => Some(hint_of(rank, u64::MAX)),
            Wanted::Below(end) => end.map(|end| hint_of(end, 0)),
        }
    }
}

/// The rank in the level above of a hint that a leaf with this number begins at this rank.
fn hint_of(low: &Rank, leaf: u64) -> Rank {
    Rank::new(&[&low.key[..], &low.number.to_be_bytes()].concat(), leaf)
}

/// A level's work that may go on in the level above. Boxed: futures of a level would contain themselves.
type Above<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a search is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Its client reads the leaf.
    Read,
    /// Its client changes the leaf.
    Change,
}

/// How a search has come to a leaf.
enum Arrived {
    /// The client remembers the leaf, or does now.
    Remembered,
    /// From the leaf that this one has replaced.
    Down,
    /// By a hint. There may be a newer leaf for its ranks.
    ByHint,
}

/// A leaf that was read.
struct Found {
    number: u64,
    bytes: ArenaBuf,
}

/// A level of an ordered index, for use by one thread.
pub(super) struct Level<R = Shipped> {
    layout: LevelLayout,
    pieces: Vec<Piece>,
    spares: Arc<LevelSpares>,
    known: RefCell<Known>,
    rules: PhantomData<R>,
}

impl<R: TreeRules> Level<R> {
    pub(super) fn new(layout: LevelLayout, pieces: Vec<Piece>, spares: Arc<LevelSpares>) -> Self {
        spares.grow(&layout);
        Level { layout, pieces, spares, known: RefCell::default(), rules: PhantomData }
    }

    /// Remembers what the same level with fewer pieces remembered.
    pub(super) fn remember_leaves_of(&self, before: &Level<R>) {
        self.known.replace(before.known.borrow().clone());
    }

    /// Enters a rank, unless it is entered.
    pub(super) async fn enter(
        &self,
        memory: &Memory,
        rank: &Rank,
        above: &[Level<R>],
    ) -> Result<(), TreeError> {
        for look in 0..MOST_LOOKS {
            let found = self.leaf(memory, Wanted::At(rank), Purpose::Change, above).await?;
            let (leaf, spot) = self.decode(&found)?;
            let piece = self.pieces[spot.piece];
            let at = |place| spot.range.start + self.layout.leaf().word_of(place);
            let Some(entry) = find(&leaf, rank).or_read_again(memory).await? else { continue };
            match (entry, leaf.free_place(R::is_free, rank.number.wrapping_add(look.into()))) {
                // What is relied upon in a frozen leaf might be lost: it is copied before.
                (Some((_, word)), _) if word.is_frozen() => {
                    self.replace(memory, found.number, rank, above).await?
                }
                (Some((place, word)), _) => {
                    if !R::counts_reliance() || rely_on(memory, &piece, at(place), word).await? {
                        return Ok(());
                    }
                }
                (None, Some(place)) => {
                    if self.fill(memory, &spot, (place, leaf.word(place)), rank).await? {
                        return Ok(());
                    }
                }
                (None, None) => self.replace(memory, found.number, rank, above).await?,
            }
        }
        Err(TreeError::Busy)
    }

    /// Writes a new entry to an empty place (T2). `false`: another client was first, or the leaf was frozen.
    async fn fill(
        &self,
        memory: &Memory,
        spot: &Spot,
        (place, free): (usize, EntryWord),
        rank: &Rank,
    ) -> Result<bool, TreeError> {
        let (piece, layout) = (self.pieces[spot.piece], self.layout.leaf());
        let word_at = spot.range.start + layout.word_of(place);
        let body_at = spot.range.start + layout.body_of(place).start;
        let (body, live) = (layout.encode_body(&rank.key, rank.number), free.live(rank.number));
        let reserved = if R::reserves() { EntryWord::reserved(self.spares.token()) } else { free };
        if R::reserves() && !swap(memory, &piece, word_at, free, reserved).await? {
            return Ok(false);
        }
        if !R::writes_keys_first() {
            let is_live = swap(memory, &piece, word_at, reserved, live).await?;
            memory.write(&piece, body_at, &body).await?;
            return Ok(is_live);
        }
        // On one queue they take effect in this order.
        let mut plan = memory.plan_soon(piece.region.node, body.len()).await?;
        plan.write(&piece, body_at, &body);
        plan.compare_and_swap(&piece, word_at, reserved.0, live.0);
        Ok(plan.run().await.last_word()? == reserved.0)
    }

    /// The live entries from a rank on, in the leaf for that rank, which is not frozen.
    pub(super) async fn look(
        &self,
        memory: &Memory,
        first: &Rank,
        above: &[Level<R>],
    ) -> Result<Looked, TreeError> {
        for _ in 0..MOST_LOOKS {
            let found = self.leaf(memory, Wanted::At(first), Purpose::Change, above).await?;
            let (leaf, _) = self.decode(&found)?;
            // A frozen leaf keeps its entries: they are copied before.
            if leaf.words().any(EntryWord::is_frozen) {
                self.replace(memory, found.number, first, above).await?;
                continue;
            }
            let Some(live) = leaf.all_live().or_read_again(memory).await? else { continue };
            let seen = |live: &LiveEntry<'_>| SeenEntry {
                rank: Rank::new(live.key, live.number),
                word: live.word,
                leaf: found.number,
                place: live.place,
            };
            let mut entries: Vec<_> = live.iter().map(seen).filter(|entry| entry.rank >= *first).collect();
            entries.sort_by(|one, other| one.rank.cmp(&other.rank));
            return Ok(Looked { entries, next: leaf.high() });
        }
        Err(TreeError::Busy)
    }

    /// Removes an entry that was seen, if it is as it was (T4). `None`: it is not.
    pub(super) async fn remove(
        &self,
        memory: &Memory,
        seen: &SeenEntry,
    ) -> Result<Option<RemovedEntry>, TreeError> {
        let (leaf, place, word) = (seen.leaf, seen.place, seen.word.removed());
        let (piece, at) = self.word_at(leaf, place)?;
        if !swap(memory, &piece, at, seen.word, word).await? {
            return Ok(None);
        }
        // The checksum: no client that finds another entry here takes this one's key for that one's.
        memory.write(&piece, at + WORD_BYTES as u64, &[0; WORD_BYTES]).await?;
        Ok(Some(RemovedEntry { leaf, place, word }))
    }

    /// Lets the place of an entry that was removed be used again (T4).
    pub(super) async fn empty(&self, memory: &Memory, removed: &RemovedEntry) -> Result<(), TreeError> {
        let (piece, at) = self.word_at(removed.leaf, removed.place)?;
        // If the leaf is frozen, nothing is to be done.
        swap(memory, &piece, at, removed.word, removed.word.emptied()).await?;
        Ok(())
    }

    /// Where the word of a place of a leaf lies.
    fn word_at(&self, leaf: u64, place: usize) -> Result<(Piece, u64), TreeError> {
        let spot = self.spot(leaf)?;
        Ok((self.pieces[spot.piece], spot.range.start + self.layout.leaf().word_of(place)))
    }

    /// The entries from a rank on, in the leaf for that rank.
    pub(super) async fn run_from(
        &self,
        memory: &Memory,
        first: &Rank,
        above: &[Level<R>],
    ) -> Result<Run, TreeError> {
        let (mut entries, (_, next)) = self.run(memory, Wanted::At(first), above).await?;
        entries.retain(|(rank, _)| rank >= first);
        Ok(Run { entries, next })
    }

    /// The entries below a rank, in the leaf for the highest ranks below it; `None`: in the last leaf.
    pub(super) async fn run_below(
        &self,
        memory: &Memory,
        end: Option<&Rank>,
        above: &[Level<R>],
    ) -> Result<Run, TreeError> {
        let (mut entries, (next, _)) = self.run(memory, Wanted::Below(end), above).await?;
        entries.retain(|(rank, _)| end.is_none_or(|end| rank < end));
        Ok(Run { entries, next })
    }

    /// All entries of a leaf in their order, and its fences.
    async fn run(
        &self,
        memory: &Memory,
        wanted: Wanted<'_>,
        above: &[Level<R>],
    ) -> Result<(Vec<(Rank, EntryWord)>, (Option<Rank>, Option<Rank>)), TreeError> {
        for _ in 0..MOST_LOOKS {
            let found = self.leaf(memory, wanted, Purpose::Read, above).await?;
            let (leaf, _) = self.decode(&found)?;
            let Some(live) = leaf.all_live().or_read_again(memory).await? else { continue };
            let mut entries: Vec<_> =
                live.iter().map(|live| (Rank::new(live.key, live.number), live.word.thawed())).collect();
            entries.sort_by(|one, other| one.0.cmp(&other.0));
            entries.dedup_by(|one, other| one.0 == other.0);
            return Ok((entries, (leaf.low(), leaf.high())));
        }
        Err(TreeError::Damaged)
    }

    /// The leaf of the level below that the last hint below a rank is for.
    fn last_hint<'a>(
        &'a self,
        memory: &'a Memory,
        end: Option<Rank>,
        above: &'a [Level<R>],
    ) -> Above<'a, Result<Option<u64>, TreeError>> {
        Box::pin(async move {
            let run = self.run_below(memory, end.as_ref(), above).await?;
            Ok(run.entries.last().map(|(rank, _)| rank.number))
        })
    }

    /// Gives a hint that a leaf of the level below begins at this rank. Searches find the leaf without it,
    /// too.
    fn give_hint<'a>(
        &'a self,
        memory: &'a Memory,
        low: &Rank,
        leaf: u64,
        above: &'a [Level<R>],
    ) -> Above<'a, Result<(), TreeError>> {
        let hint = hint_of(low, leaf);
        Box::pin(async move {
            match self.enter(memory, &hint, above).await {
                Err(TreeError::Full | TreeError::BeyondPieces) => Ok(()),
                given => given,
            }
        })
    }

    fn spot(&self, number: u64) -> Result<Spot, TreeError> {
        self.layout.leaves_from(number, 1).ok_or(TreeError::BeyondPieces)
    }

    fn decode<'a>(&self, found: &'a Found) -> Result<(Leaf<'a>, Spot), TreeError> {
        Ok((self.leaf_in(&found.bytes)?, self.spot(found.number)?))
    }

    /// The leaf in bytes that [`read`](Self::read) has found whole, or that this client has made.
    fn leaf_in<'a>(&self, bytes: &'a [u8]) -> Result<Leaf<'a>, TreeError> {
        Leaf::decode(self.layout.leaf(), bytes).map_err(|_| TreeError::Damaged)
    }

    /// Goes to the wanted leaf: one that had not been replaced when it was read.
    async fn leaf(
        &self,
        memory: &Memory,
        wanted: Wanted<'_>,
        purpose: Purpose,
        above: &[Level<R>],
    ) -> Result<Found, TreeError> {
        let mut number = wanted.first_in(&self.known.borrow());
        let mut arrived = Arrived::Remembered;
        for step in 0..MOST_STEPS {
            if step == STEPS_BEFORE_HINT
                && let Some((hints, above)) = above.split_first()
                && let Some(hint) = hints.last_hint(memory, wanted.hints_below(), above).await?
            {
                (number, arrived) = (hint, Arrived::ByHint);
            }
            let bytes = self.read(memory, number).await?;
            let leaf = self.leaf_in(&bytes)?;
            match arrived {
                Arrived::Remembered => {}
                Arrived::Down => self.known.borrow_mut().note(leaf.low(), number),
                Arrived::ByHint => self.known.borrow_mut().note_unless_known(leaf.low(), number),
            }
            if R::checks_fences() && !wanted.is_covered_by(&leaf) {
                arrived = Arrived::Remembered;
                number = match leaf.next().filter(|_| wanted.is_right_of(&leaf)) {
                    Some(next) => {
                        self.known.borrow_mut().note_unless_known(leaf.high(), next);
                        next
                    }
                    None => FIRST_LEAF, // no search comes here by what it remembers
                };
                continue;
            }
            match leaf.children().map_err(|_| TreeError::Damaged)? {
                Some(children) if R::goes_to_children(purpose) => {
                    (number, arrived) = (children.first, Arrived::Down);
                }
                _ => return Ok(Found { number, bytes }),
            }
        }
        Err(TreeError::Damaged)
    }

    /// Reads a leaf until its fences are whole.
    async fn read(&self, memory: &Memory, number: u64) -> Result<ArenaBuf, TreeError> {
        let spot = self.spot(number)?;
        for _ in 0..MOST_LOOKS {
            let bytes = memory.read(&self.pieces[spot.piece], spot.range.clone()).await?;
            match Leaf::decode(self.layout.leaf(), &bytes) {
                Ok(_) => return Ok(bytes),
                Err(Unusable::Torn) => memory.endpoint().yield_now().await,
                Err(Unusable::Damaged) => break,
            }
        }
        Err(TreeError::Damaged)
    }

    /// Replaces a leaf that has no empty place (T3), unless another client does so first.
    async fn replace(
        &self,
        memory: &Memory,
        number: u64,
        wanted: &Rank,
        above: &[Level<R>],
    ) -> Result<(), TreeError> {
        let spot = self.spot(number)?;
        let Some(frozen) = self.freeze(memory, number).await? else { return Ok(()) };
        let leaf = self.leaf_in(&frozen)?;
        let order = self.layout.search_order(spot.piece + 1);
        let taken = take_spare(memory, &self.pieces, order, &self.spares.pairs).await?;
        let (home, pair) = taken.ok_or(TreeError::Full)?;
        let first = self.layout.pair(home, pair);
        let next = if R::links_leaves() { Some(first + 1) } else { leaf.next() };
        let images = leaf.replacement(wanted, next).map_err(|_| TreeError::Damaged)?;
        let children = Children { first, are_two: images.len() == 2 };
        let both = self.layout.leaves_from(first, 2).expect("pairs are handed out within the layout");
        let named = async {
            memory.write(&self.pieces[home], both.range.start, &images.concat()).await?;
            memory.compare_and_swap(&self.pieces[spot.piece], spot.range.start, 0, children.word()).await
        };
        let named = named.await;
        if is_unknown_to_others(&named) {
            self.spares.pairs.lock().give_back(home, pair);
        }
        if named? != 0 || !children.are_two {
            return Ok(());
        }
        let (Some((hints, above)), Some(second)) = (above.split_first(), images.get(1)) else {
            return Ok(());
        };
        let second = self.leaf_in(second)?;
        match second.low() {
            Some(low) => hints.give_hint(memory, &low, first + 1, above).await,
            None => Ok(()),
        }
    }

    /// Freezes all entries of a leaf. Returns its bytes then; `None`: it was replaced.
    async fn freeze(&self, memory: &Memory, number: u64) -> Result<Option<ArenaBuf>, TreeError> {
        let spot = self.spot(number)?;
        let piece = self.pieces[spot.piece];
        for _ in 0..MOST_LOOKS {
            let bytes = self.read(memory, number).await?;
            let leaf = self.leaf_in(&bytes)?;
            if leaf.children().map_err(|_| TreeError::Damaged)?.is_some() {
                return Ok(None);
            }
            let open = |(_, word): &(usize, EntryWord)| R::freezes(*word) && !word.is_frozen();
            let open: Vec<_> = leaf.words().enumerate().filter(open).collect();
            if open.is_empty() {
                match leaf.all_live().or_read_again(memory).await? {
                    Some(_) => return Ok(Some(bytes)),
                    None => continue,
                }
            }
            for some in open.chunks(AT_ONCE) {
                let mut plan = memory.plan_soon(piece.region.node, 0).await?;
                for &(place, word) in some {
                    let at = spot.range.start + self.layout.leaf().word_of(place);
                    plan.compare_and_swap(&piece, at, word.0, word.frozen().0);
                }
                plan.run().await.check()?;
            }
        }
        Err(TreeError::Damaged)
    }
}

/// The live entry of a rank: its place and word.
fn find(leaf: &Leaf<'_>, rank: &Rank) -> Result<Option<(usize, EntryWord)>, Unusable> {
    for place in 0..leaf.places() {
        let word = leaf.word(place);
        if word.kind() != EntryKind::Live || word.number() != Some(rank.number) {
            continue;
        }
        if leaf.live(place)?.is_some_and(|live| live.key == &*rank.key) {
            return Ok(Some((place, word)));
        }
    }
    Ok(None)
}

/// Relies on a live entry, if its word is still this one (T4). `false`: it may not be.
async fn rely_on(memory: &Memory, piece: &Piece, at: u64, word: EntryWord) -> Result<bool, MemoryError> {
    let mut plan = memory.plan_soon(piece.region.node, 0).await?;
    plan.compare_and_swap(piece, at, word.0, word.relied_on().0);
    let plan = plan.run().await;
    // Another client may have put the same word there, which a remover has seen since.
    Ok(plan.last_word()? == word.0 && !plan.was_tried_again())
}

/// Replaces a word of an entry, if it is this one.
async fn swap(
    memory: &Memory,
    piece: &Piece,
    at: u64,
    from: EntryWord,
    to: EntryWord,
) -> Result<bool, MemoryError> {
    Ok(memory.compare_and_swap(piece, at, from.0, to.0).await? == from.0)
}

/// What to do about bytes of different times: the caller reads them again.
trait OrReadAgain<T> {
    /// `None`, after a pause: they were of different times.
    async fn or_read_again(self, memory: &Memory) -> Result<Option<T>, TreeError>;
}

impl<T> OrReadAgain<T> for Result<T, Unusable> {
    async fn or_read_again(self, memory: &Memory) -> Result<Option<T>, TreeError> {
        match self {
            Ok(found) => Ok(Some(found)),
            Err(Unusable::Torn) => {
                memory.endpoint().yield_now().await;
                Ok(None)
            }
            Err(Unusable::Damaged) => Err(TreeError::Damaged),
        }
    }
}
