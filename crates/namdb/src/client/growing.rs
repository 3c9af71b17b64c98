//! What a client does when a transaction finds a table full.

use farpool_txn::horizon::horizon;
use farpool_txn::{Cut, MemoryError, SessionState};

use super::core::{BusyGuard, ClientCore};
use crate::catalog::{self, Outlook};
use crate::environment::Environment;
use crate::error::{Stop, TxError, of_memory};
use crate::transacting::FullTable;

/// What the tries of one transaction have found out about full tables.
#[derive(Default)]
pub(super) struct Growing {
    /// When a slab was found full first, and the snapshot then.
    slab_full: Option<(Cut, u64)>,
    /// There is no memory for more pieces.
    is_vain: bool,
}

impl Growing {
    /// Whether a full table may still grow; if not, *full* is an error like others.
    pub(super) fn is_possible(&self) -> bool {
        !self.is_vain
    }
}

impl<E: Environment + 'static> ClientCore<E> {
    /// Lets a full table grow, if nothing else helps. Returns whether it has grown.
    pub(super) async fn make_room<'a>(
        &'a self,
        session: &mut SessionState,
        full: &FullTable,
        growing: &mut Growing,
        busy: &mut Option<BusyGuard<'a, E>>,
    ) -> Result<bool, Stop> {
        if full.is_slab && !self.is_full_for_good(full, growing).await? {
            return Ok(false);
        }
        match self.outlook(session, full).await? {
            Outlook::Changed => {}
            Outlook::CannotGrow => growing.is_vain = true,
            Outlook::MayGrow => {
                // Idle meanwhile: growing may have to wait for the horizon, which a snapshot of this client
                // would hold back.
                drop(busy.take());
                let grown = self.grow(session, full).await;
                *busy = Some(self.mark_busy().await?);
                match grown {
                    Err(Stop::For(TxError::NoSpace(_))) => growing.is_vain = true,
                    grown => grown?,
                }
            }
        }
        growing.slab_full = None;
        Ok(growing.is_possible())
    }

    /// Whether a slab will not get room by itself: all snapshots have ended that were open when it was found
    /// full first, or that was long ago.
    async fn is_full_for_good(&self, full: &FullTable, growing: &mut Growing) -> Result<bool, Stop> {
        let now = self.endpoint().now_ns();
        let Some((cut, first)) = &growing.slab_full else {
            growing.slab_full = Some((full.cut.clone(), now));
            return Ok(false);
        };
        if now > first + self.member().patience().as_nanos() as u64 {
            return Ok(true);
        }
        let horizon = horizon(self.worker().memory(), &self.member().at().horizon()).await;
        Ok(horizon.map_err(of_memory)?.is_some_and(|horizon| horizon.reaches(cut)))
    }

    /// What can be done for a table that was full, as of now.
    async fn outlook(&self, session: &mut SessionState, full: &FullTable) -> Result<Outlook, Stop> {
        self.worker().catch_up(session).await.map_err(TxError::from)?;
        let transaction = self.worker().begin(session).await.map_err(TxError::from)?;
        catalog::outlook(self.member().at(), &transaction, self.catalog(), full).await
    }

    /// Lets a table grow, unless another client has done so. The session's next transaction has the new
    /// pieces.
    async fn grow(&self, session: &mut SessionState, full: &FullTable) -> Result<(), Stop> {
        catalog::grow(self.member(), self.endpoint(), full).await.map_err(|error| match error {
            // Others change the catalog, or have the place or the buffers for that.
            TxError::CatalogBusy
            | TxError::NoRoomForVersions
            | TxError::TooManyClients(_)
            | TxError::Memory(MemoryError::Short(_)) => Stop::Again(error),
            error => Stop::For(error),
        })?;
        self.worker().catch_up(session).await.map_err(TxError::from)?;
        Ok(())
    }
}
