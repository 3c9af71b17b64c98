//! What a process names in its place: what it may have done to headers and files if it dies.
//!
//! A process stores the name before it changes a header or a file's word, and withdraws the name after its
//! last change to them. The keeper first loads the header (or the file's word), and then the names of the
//! living processes. It may load a name while the process replaces it, and get parts of both. That is
//! harmless: a process that this header counts changed it again before it withdrew the first of the names, so
//! the keeper's compare-and-swap of the header fails. The same holds for a file's word.

use crate::caller::MAX_BLOCKS;
use crate::ground::Ground;
use crate::layout::Layout;

const HOLDER: usize = 0;
pub(crate) const EPOCH: usize = 1;
const WHAT: usize = 2;
const FILE: usize = 3;
const FIRST: usize = 4;
const BLOCKS: usize = 5;
/// Counts since the door was made. Only the holder changes them.
const HITS: usize = 6;
const MISSES: usize = 7;

/// What a call does to more than its own place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Named {
    /// Writes consecutive blocks of a file: the headers of their home buckets.
    Blocks { file: u32, first: u32, blocks: u32 },
    /// Changes a file as a whole: its word.
    File { file: u32 },
}

const NOTHING: u64 = 0;
const WRITES: u64 = 1;
const CHANGES: u64 = 2;

impl Named {
    /// The blocks that are written; none if the file is changed as a whole.
    pub(crate) fn blocks(self) -> std::ops::Range<u32> {
        match self {
            Named::Blocks { first, blocks, .. } => first..first.saturating_add(blocks),
            Named::File { .. } => 0..0,
        }
    }

    /// The home bucket of each of these blocks; one may occur several times.
    pub(crate) fn home_buckets(self, layout: &Layout) -> impl Iterator<Item = u32> {
        let (Named::Blocks { file, .. } | Named::File { file }) = self;
        self.blocks().map(move |block| layout.home(file, block))
    }
}

/// A place in shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a, G> {
    pub(crate) ground: &'a G,
    pub(crate) at: usize,
}

impl<'a, G: Ground> Place<'a, G> {
    pub(crate) fn new(ground: &'a G, number: u32) -> Self {
        Place { ground, at: Layout::place(number) }
    }

    pub(crate) async fn holder(&self) -> u64 {
        self.ground.load(self.at + HOLDER).await
    }

    /// Takes a place that nobody has.
    pub(crate) async fn take(&self, holder: u64) -> bool {
        self.ground.replace(self.at + HOLDER, 0, holder).await
    }

    /// Gives another holder's number to the place of `holder`, if it is that.
    pub(crate) async fn pass_on(&self, holder: u64, to: u64) {
        self.ground.replace(self.at + HOLDER, holder, to).await;
    }

    pub(crate) async fn free(&self) {
        self.ground.store(self.at + HOLDER, 0).await;
    }

    pub(crate) async fn name(&self, named: Named) {
        let (what, file, first, blocks) = match named {
            Named::Blocks { file, first, blocks } => (WRITES, file, first, blocks),
            Named::File { file } => (CHANGES, file, 0, 0),
        };
        self.ground.store(self.at + FILE, file.into()).await;
        self.ground.store(self.at + FIRST, first.into()).await;
        self.ground.store(self.at + BLOCKS, blocks.into()).await;
        self.ground.store(self.at + WHAT, what).await;
    }

    pub(crate) async fn withdraw(&self) {
        self.ground.store(self.at + WHAT, NOTHING).await;
    }

    /// Counts a read that went to the cache first.
    pub(crate) async fn count_read(&self, is_hit: bool) {
        let at = self.at + if is_hit { HITS } else { MISSES };
        self.ground.store(at, self.ground.load(at).await.wrapping_add(1)).await;
    }

    /// How many reads were hits, and how many were not, by all processes that had this place.
    pub(crate) async fn reads(&self) -> (u64, u64) {
        (self.ground.load(self.at + HITS).await, self.ground.load(self.at + MISSES).await)
    }

    /// Withdraws the first of the blocks that a dead process has named. A keeper that dies between the two
    /// stores leaves a block too many.
    pub(crate) async fn withdraw_first(&self) {
        let first = self.ground.load(self.at + FIRST).await;
        let blocks = self.ground.load(self.at + BLOCKS).await;
        self.ground.store(self.at + FIRST, first.wrapping_add(1)).await;
        self.ground.store(self.at + BLOCKS, blocks.saturating_sub(1)).await;
    }

    /// What is named. A name that no process stores counts as none.
    pub(crate) async fn named(&self, layout: &Layout) -> Option<Named> {
        let what = self.ground.load(self.at + WHAT).await;
        let file = self.ground.load(self.at + FILE).await as u32;
        let named = match what {
            WRITES => {
                let first = self.ground.load(self.at + FIRST).await as u32;
                let blocks = self.ground.load(self.at + BLOCKS).await as u32;
                (blocks <= MAX_BLOCKS).then_some(Named::Blocks { file, first, blocks })
            }
            CHANGES => Some(Named::File { file }),
            _ => None,
        };
        named.filter(|_| file < layout.shape().files)
    }
}
