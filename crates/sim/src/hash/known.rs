//! What a process knows of an index that has grown.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use farpool_fabric::sim::Random;
use farpool_txn::hash::{Index, IndexError, IndexRules, IndexSpares};

use super::Run;

/// The pieces that a process knows: at first perhaps fewer than there are, as if it had opened the index
/// before that grew.
pub(super) struct Known<R> {
    run: Rc<Run>,
    spares: Arc<IndexSpares>,
    index: RefCell<Rc<Index<R>>>,
}

impl<R: IndexRules> Known<R> {
    /// A process that knows any number of layers.
    pub(super) fn some(run: &Rc<Run>, random: &mut Random) -> Rc<Self> {
        let layers = run.pieces.len() / run.growth.layer;
        Self::new(run, (1 + random.index(layers)) * run.growth.layer)
    }

    /// A process that knows the whole index.
    pub(super) fn all(run: &Rc<Run>) -> Rc<Self> {
        Self::new(run, run.pieces.len())
    }

    fn new(run: &Rc<Run>, pieces: usize) -> Rc<Self> {
        let spares = Arc::new(IndexSpares::new(&run.growth.layout(pieces)));
        let index = RefCell::new(Rc::new(run.index_knowing(pieces, &spares)));
        Rc::new(Known { run: run.clone(), spares, index })
    }

    /// Asks the index. If it has no room in the pieces that are known, or names another piece, the process
    /// learns of all pieces, and asks again.
    pub(super) async fn ask<T>(
        &self,
        question: impl AsyncFn(&Index<R>) -> Result<T, IndexError>,
    ) -> Result<T, IndexError> {
        let index = self.index.borrow().clone();
        match question(&index).await {
            Err(IndexError::BeyondPieces | IndexError::Full) if self.run.has_pieces_beyond(&index) => {}
            answer => return answer,
        }
        // Another task of the process may have learned of them meanwhile.
        if self.run.has_pieces_beyond(&self.index.borrow()) {
            let all = self.run.index_knowing(self.run.pieces.len(), &self.spares);
            self.index.replace(Rc::new(all));
        }
        let index = self.index.borrow().clone();
        question(&index).await
    }
}
