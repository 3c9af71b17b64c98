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

/// How long who finds all siblings at work waits for one of them: some operations, after which locks are handed to who
/// waits.
const WAIT_FOR_ONE: Duration = Duration::from_millis(10);

/// Sessions of the same process.
pub(crate) trait Siblings: Send + Sync {
    /// Carries out a transfer by a connection of one of them. `None`: nobody who is connected has time.
    fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Result<(), AccessError>>;
}

impl Siblings for Weak<Shared> {
    fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Result<(), AccessError>> {
        let shared = self.upgrade()?;
        let sessions = shared.sessions();
        let first = shared.next_lender.fetch_add(1, Ordering::Relaxed); // any number will do
        let (before, after) = sessions.split_at(first % sessions.len().max(1));
        let in_turn = || after.iter().chain(before);
        let idle = in_turn().filter_map(|session| session.try_lock());
        // Who borrows holds the lock of its own session, and so never meets itself.
        for session in idle.chain(in_turn().take(1).filter_map(|session| session.try_lock_for(WAIT_FOR_ONE)))
        {
            if session.0.is_connected(&extent.region().node)
                && let Some(ended) = session.carry(direction, extent, offset, bytes)
            {
                return Some(ended);
            }
        }
        None
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
