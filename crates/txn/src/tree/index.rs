//! An ordered index: its levels, and what users do with them.

use std::sync::Arc;

use super::layout::{LEVELS, TreeLayout};
use super::leaf::Rank;
use super::level::{Level, Looked, RemovedEntry, Run, SeenEntry, TreeError};
use super::rules::TreeRules;
use super::spares::TreeSpares;
use crate::memory::{Memory, Piece};
use crate::rules::Shipped;

/// An ordered index, for use by one thread.
pub struct Tree<R = Shipped> {
    layout: TreeLayout,
    /// The lowest one, then those with hints for the one before.
    levels: Vec<Level<R>>,
    /// While a thread has the index open, its process keeps what it has taken of it.
    _spares: Arc<TreeSpares>,
}

impl<R: TreeRules> Tree<R> {
    /// An index in memory that is zeros, or has been used as this index, for one of a process's threads,
    /// which share the spares. `None`: the layout is for another number of pieces, or the spares belong to
    /// another index.
    pub fn sharing(layout: TreeLayout, pieces: Vec<Piece>, spares: Arc<TreeSpares>) -> Option<Self> {
        if pieces.len() as u64 != layout.pieces() || !spares.is_of(&layout) {
            return None;
        }
        let level = |level: usize| {
            let at = |(number, piece): (usize, &Piece)| Piece {
                start: piece.start + layout.level_at(level, number),
                ..*piece
            };
            let pieces = pieces.iter().enumerate().map(at).collect();
            Level::new(*layout.level(level), pieces, spares.levels[level].clone())
        };
        Some(Tree { layout, levels: (0..LEVELS).map(level).collect(), _spares: spares })
    }

    /// Remembers what the same index with fewer pieces remembered.
    pub(crate) fn remember_leaves_of(&self, before: &Tree<R>) {
        self.levels.iter().zip(&before.levels).for_each(|(level, before)| level.remember_leaves_of(before));
    }

    /// The layout.
    pub fn layout(&self) -> &TreeLayout {
        &self.layout
    }

    /// Enters a record under a key, unless it is entered there. Either way, nobody removes the entry who has
    /// decided before this that it is not needed.
    ///
    /// # Errors
    /// [`TreeError::Full`] or [`TreeError::BeyondPieces`]; or when far memory does not answer: then the
    /// record may be entered.
    pub async fn enter(&self, memory: &Memory, key: &[u8], number: u64) -> Result<(), TreeError> {
        let (wanted, found) = (self.layout.leaf().key_bytes(), key.len());
        if found != wanted {
            return Err(TreeError::WrongKeySize { wanted, found });
        }
        let (lowest, above) = self.levels();
        lowest.enter(memory, &Rank::new(key, number), above).await
    }

    /// The entries from a rank on, in the leaf for that rank, as they may be removed.
    ///
    /// # Errors
    /// [`TreeError::Full`]; or when far memory does not answer.
    pub async fn look(&self, memory: &Memory, first: &Rank) -> Result<Looked, TreeError> {
        let (lowest, above) = self.levels();
        lowest.look(memory, first, above).await
    }

    /// Removes an entry that was seen, if nobody has relied on it since (T4). `None`: it stays, or was
    /// removed, or its leaf was replaced.
    ///
    /// # Errors
    /// When far memory does not answer: then the entry may be removed, and its place is not used again.
    pub async fn remove(&self, memory: &Memory, seen: &SeenEntry) -> Result<Option<RemovedEntry>, TreeError> {
        self.levels().0.remove(memory, seen).await
    }

    /// Lets the place of an entry that was removed be used again. All operations that had begun when
    /// [`remove`](Self::remove) returned must have ended.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn empty(&self, memory: &Memory, removed: &RemovedEntry) -> Result<(), TreeError> {
        self.levels().0.empty(memory, removed).await
    }

    /// The entries from a rank on, in the leaf for that rank.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn run_from(&self, memory: &Memory, first: &Rank) -> Result<Run, TreeError> {
        let (lowest, above) = self.levels();
        lowest.run_from(memory, first, above).await
    }

    /// The entries below a rank, in the leaf for the highest ranks below it; `None`: in the last leaf. Their
    /// order is ascending here, too.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn run_below(&self, memory: &Memory, end: Option<&Rank>) -> Result<Run, TreeError> {
        let (lowest, above) = self.levels();
        lowest.run_below(memory, end, above).await
    }

    fn levels(&self) -> (&Level<R>, &[Level<R>]) {
        self.levels.split_first().expect("an index has levels")
    }
}
