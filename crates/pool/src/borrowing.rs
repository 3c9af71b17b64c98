//! Borrowing: sessions of a process share connections. A session does transfers for a sibling that has no
//! place at the node.
//!
//! B1. A borrower waits for a locked session only for a bounded time. It holds its own lock meanwhile, so two
//!     borrowers could otherwise wait for each other for ever.
//! B2. A lender does not borrow in turn.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use farpool_fabric::block_on;
use parking_lot::Mutex;

use crate::pool::Shared;
use crate::session::{Confined, Direction, Failure, Way};
use crate::space::Extent;

/// How long a borrower waits for one busy sibling: as long as a few operations take on a busy machine. By
/// then the lock's fairness has given a waiting thread its turn.
const WAIT_FOR_ONE: Duration = Duration::from_millis(50);

/// The outcome of asking siblings.
pub(crate) enum Borrowed {
    /// A sibling has done the transfer, or has tried to.
    Done(Result<(), Failure>),
    /// All siblings that may be connected are busy.
    AllBusy,
    /// No sibling is connected to the node.
    NoneConnected,
}

/// The other sessions of the process.
pub(crate) trait Siblings: Send + Sync {
    /// Does a transfer through the connection of one session.
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed;
}

/// All sessions of a pool but one.
pub(crate) struct OtherSessions {
    pub(crate) shared: Weak<Shared>,
    /// The borrower's own session, which the borrower has locked.
    pub(crate) own: Weak<Mutex<Confined>>,
}

impl Siblings for OtherSessions {
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed {
        let Some(shared) = self.shared.upgrade() else { return Borrowed::NoneConnected };
        let mut sessions = shared.sessions();
        sessions.retain(|session| !std::ptr::eq(Arc::as_ptr(session), self.own.as_ptr()));
        let first = shared.next_lender.fetch_add(1, Ordering::Relaxed); // spreads load; pairs with nothing
        let (before, after) = sessions.split_at(first % sessions.len().max(1));
        let mut carry = |session: &Confined| {
            let connected = session.0.is_connected(&extent.region().node);
            connected.then(|| session.carry(direction, extent, offset, bytes)).flatten()
        };
        let mut busy = Vec::new();
        for session in after.iter().chain(before) {
            match session.try_lock() {
                Some(session) => {
                    if let Some(ended) = carry(&session) {
                        return Borrowed::Done(ended);
                    }
                }
                None => busy.push(session),
            }
        }
        let Some(next) = busy.get(first % busy.len().max(1)) else { return Borrowed::NoneConnected };
        match next.try_lock_for(WAIT_FOR_ONE).and_then(|session| carry(&session)) {
            Some(ended) => Borrowed::Done(ended),
            None => Borrowed::AllBusy,
        }
    }
}

impl Confined {
    /// Does a transfer for a sibling. `None`: the arena of this session has no room for its bytes.
    fn carry(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Result<(), Failure>> {
        let core = &self.0;
        let mut buffer = core.buffer(bytes.len()).ok()?;
        if direction == Direction::Write {
            buffer.copy_from_slice(bytes);
        }
        let carried = core.transfer(direction, extent, offset, buffer, Way::Own);
        let (buffer, result) = block_on(core.endpoint(), carried);
        if direction == Direction::Read {
            bytes.copy_from_slice(&buffer);
        }
        Some(result)
    }
}
