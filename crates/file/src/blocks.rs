//! The words of all blocks, in memory that other processes of this host can share.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use farpool_fabric::{Endpoint, Mapping, SharedMemory};
use farpool_pool::{EXTENT_BYTES, Extent};
use farpool_wire::{BLOCK_BYTES, BlockWord};

use crate::guest::table;

mod slots;
mod witness;

pub(crate) use slots::KeptSize;
use slots::SLOT_BYTES;
use witness::WITNESS_BYTES;

/// Blocks of an extent.
pub(crate) const BLOCKS_PER_EXTENT: u64 = EXTENT_BYTES / BLOCK_BYTES as u64;
/// Far memory that one store can describe: 4 TiB. The table is sparse: a word takes memory once it is
/// touched.
const MAX_EXTENTS: u64 = (4 << 40) / EXTENT_BYTES;
const WORD_BYTES: u64 = 8;
/// The words of blocks, and after them one for each extent.
const TABLE_BYTES: u64 = MAX_EXTENTS * (BLOCKS_PER_EXTENT + 1) * WORD_BYTES;
/// Kept files whose sizes and times have a place after that: as many as a mount has inodes.
pub(crate) const KEPT_FILES: u64 = 1 << 20;
/// Where the sizes and times of kept files begin.
pub(crate) const SLOTS: u64 = TABLE_BYTES;
/// Where the second copies of these sizes begin.
pub(crate) const ECHOES: u64 = SLOTS + KEPT_FILES * SLOT_BYTES;
/// Where the witnesses begin, against which the words of blocks are checked.
pub(crate) const WITNESSES: u64 = ECHOES + KEPT_FILES * WORD_BYTES;
/// Bytes of the table if it outlives the process that made it.
pub const KEPT_WORDS_BYTES: u64 = WITNESSES + MAX_EXTENTS * WITNESS_BYTES;
const EXTENT_WORDS: u64 = MAX_EXTENTS * BLOCKS_PER_EXTENT * WORD_BYTES;
/// In an extent's word: a late write may still land on the extent.
const DOUBTED: u64 = 1;
/// The owner's number as a holder of locks; other numbers are direct clients (called *guests* in the code).
pub(crate) const OWNER: u16 = 0;
/// How long an operation waits for a locked block before it gives up. A writer finishes within its node's
/// deadline, or a little later if it first has to reconnect. The locks of a dead writer are taken over at
/// once.
const LOCK_PATIENCE: Duration = Duration::from_secs(12);
/// As [`LOCK_PATIENCE`], for a direct client. It is short, since the client can ask the owner instead, and
/// the owner may be waiting for the client's operation.
const GUEST_PATIENCE: Duration = Duration::from_millis(50);
/// How many times a locked word is read before the waiter sleeps between reads: most writers finish within
/// microseconds.
const EAGER_LOOKS: u32 = 100;
const LOOK_INTERVAL: Duration = Duration::from_micros(100);

/// The table of words, indexed by extent number and block, as one process of the host sees it.
#[derive(Debug)]
pub(crate) struct BlockWords {
    table: Arc<Mapping>,
    holder: u16,
    /// The memory of words that outlive the process, if they do; space in it is reserved as needed.
    memory: Option<Arc<SharedMemory>>,
    /// This process no longer changes the table.
    abandoned: AtomicBool,
}

/// One block's place in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockPlace(u64);

/// The block stayed locked for longer than any writer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StillLocked;

impl BlockWords {
    /// The owner's view, and the memory for its direct clients.
    pub(crate) fn create() -> io::Result<(Self, SharedMemory)> {
        let memory = SharedMemory::create("farpool-blocks", TABLE_BYTES)?;
        Ok((Self::of(memory.mapping().clone(), OWNER), memory))
    }

    /// The owner's view of words in memory that outlives it.
    pub(crate) fn kept(memory: &Arc<SharedMemory>) -> Self {
        let words = Self::of(memory.mapping().clone(), OWNER);
        BlockWords { memory: Some(memory.clone()), ..words }
    }

    /// A direct client's view.
    pub(crate) fn open(fd: &OwnedFd, holder: u16) -> io::Result<Self> {
        Ok(Self::of(Arc::new(table::map(fd, TABLE_BYTES)?), holder))
    }

    fn of(table: Arc<Mapping>, holder: u16) -> Self {
        BlockWords { table, holder, memory: None, abandoned: AtomicBool::new(false) }
    }

    /// From now on this view changes no word: it is the copy of a forked process, or simulates one that died.
    pub(crate) fn abandon(&self) {
        // Relaxed, pairs with nothing: a forked process has one thread, and a simulated one runs on one.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// The unlocked word with its lock taken by this process.
    fn locked(&self, word: BlockWord) -> BlockWord {
        if self.holder == OWNER { word.locked() } else { word.locked_by(self.holder) }
    }

    fn patience(&self) -> Duration {
        if self.holder == OWNER { LOCK_PATIENCE } else { GUEST_PATIENCE }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Whether an extent's number is within the table.
    pub(crate) fn covers(&self, extent: &Extent) -> bool {
        extent.number() < MAX_EXTENTS
    }

    /// Where the word of an extent's `block`-th block lies.
    pub(crate) fn place(&self, extent: &Extent, block: u64) -> BlockPlace {
        debug_assert!(block < BLOCKS_PER_EXTENT && self.covers(extent));
        BlockPlace((extent.number() * BLOCKS_PER_EXTENT + block) * WORD_BYTES)
    }

    /// Forgets all of an extent's blocks: the extent was just taken, and no other task knows it.
    pub(crate) fn clear(&self, extent: &Extent) {
        for block in 0..BLOCKS_PER_EXTENT {
            self.put(self.place(extent, block), BlockWord::EMPTY);
        }
        self.begin_witness(extent);
        self.set_extent_word(extent, 0);
    }

    /// Notes that a write in doubt may still land on an extent.
    pub(crate) fn doubt(&self, extent: &Extent) {
        self.set_extent_word(extent, DOUBTED);
        self.witness_doubt(extent);
    }

    /// Whether a write in doubt may still land on an extent.
    pub(crate) fn is_doubted(&self, extent: &Extent) -> bool {
        let word = self.table.load(EXTENT_WORDS + extent.number() * WORD_BYTES);
        word.expect("an extent of the table has a word") & DOUBTED != 0
    }

    fn set_extent_word(&self, extent: &Extent, word: u64) {
        if !self.is_abandoned() {
            let stored = self.table.store(EXTENT_WORDS + extent.number() * WORD_BYTES, word);
            stored.expect("an extent of the table has a word");
        }
    }

    /// Reserves memory for the words of these extents, so that touching them cannot fail.
    pub(crate) fn reserve(&self, extents: std::ops::Range<u64>) -> std::io::Result<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let (first, count) = (extents.start, extents.end - extents.start);
        let bytes = BLOCKS_PER_EXTENT * WORD_BYTES;
        memory.reserve(first * bytes, count * bytes)?;
        memory.reserve(EXTENT_WORDS + first * WORD_BYTES, count * WORD_BYTES)?;
        memory.reserve(WITNESSES + first * WITNESS_BYTES, count * WITNESS_BYTES)
    }

    /// Whether a process that died may have been writing there: it has left a lock or a mark.
    pub(crate) fn may_be_written(&self, number: u64) -> bool {
        let mark = self.table.load(EXTENT_WORDS + number * WORD_BYTES).unwrap_or(0);
        let is_marked = mark & DOUBTED != 0 || self.is_witness_in_doubt(number);
        number < MAX_EXTENTS && (is_marked || self.has_locks_at(number))
    }

    /// Whether some block of an extent is locked.
    pub(crate) fn has_locks(&self, extent: &Extent) -> bool {
        self.has_locks_at(extent.number())
    }

    fn has_locks_at(&self, number: u64) -> bool {
        let first = number * BLOCKS_PER_EXTENT;
        (first..first + BLOCKS_PER_EXTENT)
            .any(|block| BlockWord(self.table.load(block * WORD_BYTES).unwrap_or(0)).is_locked())
    }

    /// Marks all of an extent's blocks as lost: the extent was just taken, and replaces one whose contents
    /// are gone.
    pub(crate) fn lose(&self, extent: &Extent) {
        for block in 0..BLOCKS_PER_EXTENT {
            self.store(self.place(extent, block), BlockWord::EMPTY.lost());
        }
    }

    /// Whether all of an extent's blocks are empty: none has contents, is lost or is being written.
    pub(crate) fn are_empty(&self, extent: &Extent) -> bool {
        (0..BLOCKS_PER_EXTENT).all(|block| self.load(self.place(extent, block)) == BlockWord::EMPTY)
    }

    /// The word as it is now. Acquires the stores that were made before the word was stored.
    pub(crate) fn load(&self, place: BlockPlace) -> BlockWord {
        BlockWord(self.table.load(place.0).expect("a place lies within the table"))
    }

    /// Stores a word and so releases its lock. The store is ordered after all earlier accesses.
    pub(crate) fn store(&self, place: BlockPlace, word: BlockWord) {
        if !self.is_abandoned() {
            self.update_witness(place, word);
        }
        self.put(place, word);
    }

    /// Stores a word without its witness, which the caller updates.
    fn put(&self, place: BlockPlace, word: BlockWord) {
        if !self.is_abandoned() {
            self.table.store(place.0, word.0).expect("a place lies within the table");
        }
    }

    /// Takes over the lock of a dead holder. Returns the word as the holder left it; `None`: that holder does
    /// not have the lock.
    pub(crate) fn take_over(&self, place: BlockPlace, dead: u16) -> Option<BlockWord> {
        let word = self.load(place);
        if word.guest() != Some(dead) {
            return None;
        }
        let taken = self.locked(word.unlocked());
        let found =
            self.table.compare_and_swap(place.0, word.0, taken.0).expect("a place lies within the table");
        (found == word.0).then_some(word)
    }

    /// Takes the lock, and returns the word as it was. One time limit holds for the whole wait, whether one
    /// writer keeps the lock or other writers take it first again and again.
    pub(crate) async fn lock(
        &self,
        endpoint: &Endpoint,
        place: BlockPlace,
    ) -> Result<BlockWord, StillLocked> {
        let mut wait = Wait::new(endpoint, self.patience());
        loop {
            let word = self.unlocked_within(place, &mut wait).await?;
            if self.is_abandoned() {
                return Err(StillLocked);
            }
            let before = self.table.compare_and_swap(place.0, word.0, self.locked(word).0);
            if before.expect("a place lies within the table") == word.0 {
                // Orders the stores to far memory after the lock; pairs with the readers' acquiring loads.
                fence(Ordering::SeqCst);
                return Ok(word);
            }
            wait.a_moment().await?;
        }
    }

    /// The word once its lock is free.
    pub(crate) async fn unlocked(
        &self,
        endpoint: &Endpoint,
        place: BlockPlace,
    ) -> Result<BlockWord, StillLocked> {
        self.unlocked_within(place, &mut Wait::new(endpoint, self.patience())).await
    }

    async fn unlocked_within(
        &self,
        place: BlockPlace,
        wait: &mut Wait<'_>,
    ) -> Result<BlockWord, StillLocked> {
        loop {
            let word = self.load(place);
            if !word.is_locked() {
                return Ok(word);
            }
            wait.a_moment().await?;
        }
    }
}

/// Waiting for a lock: one time limit for all of it, from the first wait.
struct Wait<'a> {
    endpoint: &'a Endpoint,
    patience: Duration,
    give_up_at: Option<u64>,
    looks: u32,
}

impl<'a> Wait<'a> {
    fn new(endpoint: &'a Endpoint, patience: Duration) -> Self {
        Wait { endpoint, patience, give_up_at: None, looks: 0 }
    }

    /// Waits before the word is read again.
    async fn a_moment(&mut self) -> Result<(), StillLocked> {
        let now = self.endpoint.now_ns();
        let give_up_at = *self.give_up_at.get_or_insert(now + self.patience.as_nanos() as u64);
        if now > give_up_at {
            return Err(StillLocked);
        }
        self.looks += 1;
        if self.looks < EAGER_LOOKS {
            self.endpoint.yield_now().await;
        } else {
            self.endpoint.sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use farpool_fabric::{Peer, block_on};
    use farpool_pool::{LeasedRegion, NodeState};
    use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};

    use super::*;
    use crate::tests::{Hasty, endpoint, taken_blocks};

    #[test]
    fn a_block_that_stays_locked_is_given_up() {
        let (words, _memory) = BlockWords::create().unwrap();
        let place = BlockPlace(0);
        let endpoint = endpoint(Hasty::default());
        assert_eq!(block_on(&endpoint, words.lock(&endpoint, place)), Ok(BlockWord::EMPTY));
        assert_eq!(block_on(&endpoint, words.lock(&endpoint, place)), Err(StillLocked));
    }

    #[test]
    fn the_lock_of_a_direct_client_names_it_until_the_owner_takes_it_over() {
        let (words, memory) = BlockWords::create().unwrap();
        let (place, endpoint) = (BlockPlace(0), endpoint(Hasty::default()));
        words.store(place, BlockWord::EMPTY.written(5));
        let client = BlockWords::open(&memory.fd().try_clone_to_owned().unwrap(), 7).unwrap();
        block_on(&endpoint, client.lock(&endpoint, place)).unwrap();
        assert_eq!((words.load(place).guest(), words.take_over(place, 8)), (Some(7), None));
        assert!(words.take_over(place, 7).is_some());
        assert_eq!((words.load(place).is_locked(), words.load(place).guest()), (true, None));
    }

    #[test]
    fn waiting_for_a_lock_ends_whether_it_is_kept_or_others_are_faster() {
        let endpoint = endpoint(Hasty::default());
        let mut wait = Wait::new(&endpoint, LOCK_PATIENCE);
        let looks = block_on(&endpoint, async {
            let mut looks = 0;
            while wait.a_moment().await.is_ok() {
                looks += 1;
            }
            looks
        });
        assert!((1..=LOCK_PATIENCE.as_secs() + 1).contains(&looks), "{looks}");
    }

    /// An extent with a number, of a region that nobody uses.
    pub(super) fn extent(number: u64) -> Extent {
        let peer = Peer { node: NodeId(1), tcp: None, verbs: None, shm_socket: None };
        let id = RegionId { node: NodeId(1), index: 0 };
        let node = Arc::new(NodeState::new(peer, String::new()));
        let key = AccessKey::from_bytes([0; 16]);
        let region = Arc::new(LeasedRegion::new(id, Epoch(1), key, node, u64::MAX));
        Extent::of_guest(region, 0, number)
    }

    /// Words that outlive their process, and their memory.
    pub(super) fn kept() -> (BlockWords, Arc<SharedMemory>) {
        let memory = Arc::new(SharedMemory::create("kept", KEPT_WORDS_BYTES).unwrap());
        (BlockWords::kept(&memory), memory)
    }

    #[test]
    fn the_table_has_words_for_extents_up_to_its_end() {
        let (words, _memory) = BlockWords::create().unwrap();
        assert!(words.covers(&extent(MAX_EXTENTS - 1)) && !words.covers(&extent(MAX_EXTENTS)));
        words.clear(&extent(MAX_EXTENTS - 1));
    }

    #[test]
    fn an_extent_is_in_doubt_until_it_is_taken_anew() {
        let (words, _memory) = BlockWords::create().unwrap();
        let (one, other) = (extent(4), extent(5));
        words.doubt(&one);
        assert_eq!((words.is_doubted(&one), words.is_doubted(&other)), (true, false));
        words.clear(&one);
        assert!(!words.is_doubted(&one));
    }

    #[test]
    fn an_extent_has_locks_while_one_of_its_blocks_is_locked() {
        let (words, _memory) = BlockWords::create().unwrap();
        let (one, other) = (extent(4), extent(5));
        assert!(!words.has_locks(&one));
        let place = words.place(&one, BLOCKS_PER_EXTENT - 1);
        words.store(place, BlockWord::EMPTY.written(3).locked());
        assert_eq!((words.has_locks(&one), words.has_locks(&other)), (true, false));
        words.store(place, BlockWord::EMPTY.written(3));
        assert!(!words.has_locks(&one));
    }

    #[test]
    fn a_lock_a_mark_or_a_witness_tells_a_successor_that_a_write_may_still_land() {
        let forget = |memory: &Mapping, at: u64, bytes: u64| {
            (at..at + bytes).step_by(WORD_BYTES as usize).for_each(|at| memory.store(at, 0).unwrap());
        };
        for left in ["a lock", "a mark", "a witness"] {
            let (words, memory) = kept();
            for number in 0..24 {
                words.clear(&extent(number));
                assert!(!words.may_be_written(number));
            }
            let (number, extent) = (17, extent(17));
            match left {
                "a lock" => {
                    words.store(words.place(&extent, 9), BlockWord::EMPTY.written(3).locked());
                }
                "a mark" => {
                    words.doubt(&extent);
                    forget(memory.mapping(), WITNESSES + number * WITNESS_BYTES, WITNESS_BYTES);
                }
                _ => {
                    words.doubt(&extent);
                    forget(memory.mapping(), EXTENT_WORDS + number * WORD_BYTES, WORD_BYTES);
                }
            }
            let found: Vec<u64> = (0..24).filter(|number| words.may_be_written(*number)).collect();
            assert_eq!(found, [number], "{left}");
            memory.mapping().store(SLOTS, DOUBTED).unwrap(); // here the table of extents has ended
            assert!(!words.may_be_written(MAX_EXTENTS), "there is no such extent");
        }
    }

    #[test]
    fn touching_words_for_which_memory_is_reserved_takes_no_more_memory() {
        let (words, memory) = kept();
        words.reserve(1_000..1_016).unwrap();
        let before = taken_blocks(memory.fd());
        for number in 1_000..1_016 {
            let extent = extent(number);
            words.clear(&extent);
            words.doubt(&extent);
            words.store(words.place(&extent, 3), BlockWord::EMPTY.written(5));
        }
        assert_eq!(taken_blocks(memory.fd()), before);
    }
}
