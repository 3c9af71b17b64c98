//! What a process names in its place: what it may have done to headers and files if it dies.
//!
//! A place is named before anything is done, and the name is withdrawn after all of it is undone. The keeper
//! reads names while they change. It then reads parts of two names, and that is harmless: whoever has
//! withdrawn a name since has changed the word that the keeper is about to replace.

use crate::ground::Ground;
use crate::layout::Layout;

const HOLDER: usize = 0;
pub(crate) const ERA: usize = 1;
const WHAT: usize = 2;
const FILE: usize = 3;
const FIRST: usize = 4;
const BLOCKS: usize = 5;

/// What a call does to more than its own place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Named {
    /// Writes consecutive blocks of a file: their buckets' headers.
    Blocks { file: u32, first: u32, blocks: u32 },
    /// Changes a file as a whole: its word.
    File { file: u32 },
}

const NOTHING: u64 = 0;
const WRITES: u64 = 1;
const CHANGES: u64 = 2;

impl Named {
    /// Whether a call of this name may have changed the header of a bucket.
    pub(crate) fn covers(self, layout: &Layout, bucket: u32) -> bool {
        self.buckets(layout).any(|named| named == bucket)
    }

    /// The buckets of all blocks.
    pub(crate) fn buckets(self, layout: &Layout) -> impl Iterator<Item = u32> {
        let (file, blocks) = match self {
            Named::Blocks { file, first, blocks } => (file, first..first.saturating_add(blocks)),
            Named::File { file } => (file, 0..0),
        };
        blocks.map(move |block| layout.bucket(file, block))
    }
}

/// A place in shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a, G> {
    pub(crate) ground: &'a G,
    pub(crate) at: usize,
}

impl<G: Ground> Place<'_, G> {
    pub(crate) async fn holder(&self) -> u64 {
        self.ground.load(self.at + HOLDER).await
    }

    /// Takes a place that nobody has.
    pub(crate) async fn take(&self, holder: u64) -> bool {
        self.ground.replace(self.at + HOLDER, 0, holder).await
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

    pub(crate) async fn named(&self) -> Option<Named> {
        let what = self.ground.load(self.at + WHAT).await;
        let file = self.ground.load(self.at + FILE).await as u32;
        match what {
            WRITES => {
                let first = self.ground.load(self.at + FIRST).await as u32;
                let blocks = self.ground.load(self.at + BLOCKS).await as u32;
                Some(Named::Blocks { file, first, blocks })
            }
            CHANGES => Some(Named::File { file }),
            _ => None,
        }
    }
}
