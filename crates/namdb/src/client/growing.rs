//! What a client does when a transaction finds a table full.

use farpool_txn::horizon::horizon;
use farpool_txn::{Cut, MemoryError, SessionState};

use super::core::{BusyGuard, ClientCore};
use crate::catalog::{self, Outlook, Turn};
use crate::environment::Environment;
use crate::error::{Ended, Stop, TxError, of_memory};
use crate::member::living::IN_DOUBT;
use crate::transacting::FullTable;

/// What the tries of one transaction have found out about full tables.
#[derive(Default)]
pub(super) struct Growing {
    /// A slab that was full.
    slab: Option<FullSlab>,
    /// The first records of tables that cannot grow: for them, *full* is an error like others.
    vain: Vec<u64>,
    /// The table that has grown last, by its first record, and the pieces that it had before.
    grown: Option<(u64, usize)>,
}

/// A slab that was full, and perhaps gets room by itself.
struct FullSlab {
    /// Older snapshots than this may need its blocks.
    since: Cut,
    /// When it was found full first.
    at_ns: u64,
    /// None of these snapshots is open any more. So many further tries look at all blocks of the member.
    tries_left: Option<u64>,
}

impl Growing {
    /// The first records of tables that cannot grow.
    pub(super) fn vain(&self) -> Vec<u64> {
        self.vain.clone()
    }
}

impl<E: Environment + 'static> ClientCore<E> {
    /// Lets a full table grow, if nothing else helps. Returns whether it has grown since the last try.
    pub(super) async fn make_room<'a>(
        &'a self,
        session: &mut SessionState,
        full: &FullTable,
        growing: &mut Growing,
        busy: &mut Option<BusyGuard<'a, E>>,
    ) -> Result<bool, Stop> {
        if full.is_slab && !self.is_full_for_good(session, full, growing).await? {
            return Ok(false);
        }
        let mut outlook = self.outlook(session, full).await?;
        if outlook == Outlook::MayGrow {
            outlook = self.grow_in_turn(session, full, busy).await?;
        }
        match outlook {
            Outlook::Changed => {
                growing.slab = None;
                let before = Some((full.first_record, full.pieces));
                Ok(std::mem::replace(&mut growing.grown, before) != before)
            }
            Outlook::CannotGrow => {
                growing.vain.push(full.first_record);
                Ok(false)
            }
            Outlook::MayGrow | Outlook::Later => Err(Stop::Again(full.error())),
        }
    }

    /// Whether a slab will not get room by itself: it is still full after all snapshots have ended that were
    /// open when it was found full first, or that was long ago.
    async fn is_full_for_good(
        &self,
        session: &mut SessionState,
        full: &FullTable,
        growing: &mut Growing,
    ) -> Result<bool, Stop> {
        let at_ns = self.endpoint().now_ns();
        let Some(slab) = &mut growing.slab else {
            let since = self.latest_cut(session).await?;
            growing.slab = Some(FullSlab { since, at_ns, tries_left: None });
            return Ok(false);
        };
        if at_ns > slab.at_ns + self.member().patience().as_nanos() as u64 {
            return Ok(true);
        }
        if let Some(left) = &mut slab.tries_left {
            *left = left.saturating_sub(1);
            return Ok(*left == 0);
        }
        let horizon = horizon(self.worker().memory(), &self.member().at().horizon()).await;
        if horizon.map_err(of_memory)?.is_some_and(|horizon| horizon.reaches(&slab.since)) {
            slab.tries_left = Some(full.tries);
        }
        Ok(false)
    }

    async fn latest_cut(&self, session: &mut SessionState) -> Result<Cut, Stop> {
        self.worker().catch_up(session).await.map_err(TxError::from)?;
        Ok(self.worker().begin(session).await.map_err(TxError::from)?.cut().clone())
    }

    /// What can be done for a table that was full, as of now.
    async fn outlook(&self, session: &mut SessionState, full: &FullTable) -> Result<Outlook, Stop> {
        self.worker().catch_up(session).await.map_err(TxError::from)?;
        let transaction = self.worker().begin(session).await.map_err(TxError::from)?;
        catalog::outlook(self.member(), &transaction, self.catalog(), full).await
    }

    /// Lets a table grow, unless other clients of this member, for which it waits, have done so. The client
    /// is idle meanwhile: growing may have to wait for the horizon, which its snapshot would hold back.
    async fn grow_in_turn<'a>(
        &'a self,
        session: &mut SessionState,
        full: &FullTable,
        busy: &mut Option<BusyGuard<'a, E>>,
    ) -> Result<Outlook, Stop> {
        drop(busy.take());
        let turn = Turn::wait_for(self.member(), self.endpoint()).await?;
        *busy = Some(self.mark_busy().await?);
        let outlook = self.outlook(session, full).await?;
        if outlook != Outlook::MayGrow {
            return Ok(outlook);
        }
        drop(busy.take());
        let grown = catalog::grow(turn, self.member(), self.endpoint(), full).await;
        // First: if the member has ended, that is why.
        *busy = Some(self.mark_busy().await?);
        match grown {
            Ok(()) => {
                self.worker().catch_up(session).await.map_err(TxError::from)?;
                Ok(Outlook::Changed)
            }
            Err(TxError::NoSpace(_)) => Ok(Outlook::CannotGrow),
            // Others change the catalog, or have the place or the buffers for that.
            Err(
                error @ (TxError::CatalogBusy
                | TxError::NoRoomForVersions
                | TxError::TooManyClients(_)
                | TxError::Memory(MemoryError::Short(_))),
            ) => Err(Stop::Again(error)),
            // Not the transaction is in doubt, but the growth.
            Err(TxError::Unknown(_)) => Err(TxError::Ended(Ended::Failed(IN_DOUBT.to_owned())).into()),
            Err(error) => Err(error.into()),
        }
    }
}
