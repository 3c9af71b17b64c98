//! Threads that share connections: what a session does for a sibling that its node has no place for.
//!
//! B1. A session that is locked is never waited for without a limit: who borrows holds its own lock, and two that waited
//!     for each other would wait for ever.
//! B2. Who lends does not borrow in turn.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use farpool_fabric::block_on;

use crate::error::AccessError;
use crate::pool::Shared;
use crate::session::{Confined, Direction, Way};
use crate::space::Extent;

/// How long who finds siblings at work waits for one of them: a few operations of a busy machine, after which the lock is
/// handed to who waits.
const WAIT_FOR_ONE: Duration = Duration::from_millis(50);

/// What came of asking siblings.
pub(crate) enum Borrowed {
    /// One has carried it out, or tried to.
    Done(Result<(), AccessError>),
    /// Some are at work, and may be connected.
    AllBusy,
    /// None of them is connected.
    NobodyConnected,
}

/// Sessions of the same process.
pub(crate) trait Siblings: Send + Sync {
    /// Carries out a transfer by a connection of one of them.
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed;
}

impl Siblings for Weak<Shared> {
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed {
        let Some(shared) = self.upgrade() else { return Borrowed::NobodyConnected };
        let sessions = shared.sessions();
        let first = shared.next_lender.fetch_add(1, Ordering::Relaxed); // any number will do
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
        // Who borrows holds the lock of its own session: it is among the busy ones, and is no reason to wait.
        let others = busy.len().saturating_sub(1);
        let Some(next) = busy.get(first % busy.len().max(1)).filter(|_| others > 0) else {
            return Borrowed::NobodyConnected;
        };
        match next.try_lock_for(WAIT_FOR_ONE).and_then(|session| carry(&session)) {
            Some(ended) => Borrowed::Done(ended),
            None => Borrowed::AllBusy,
        }
    }
}

impl Confined {
    /// Carries out a transfer for a sibling. `None`: there is no room for its bytes.
    fn carry(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Result<(), AccessError>> {
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
