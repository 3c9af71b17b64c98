//! Retries of operations whose memory has moved or whose connection broke.
//!
//! A1. An operation is retried only after its region was attached again. From then on the first try takes no
//!     effect any more. Where the connection broke, the fabric promises that for the queue's next
//!     incarnation, once the node has answered it.
//! A2. No region is attached again while a plan with WRITEs is in flight, and no such plan is posted
//!     meanwhile: if the first WRITEs of a plan were refused, its last must not take effect.
//! A3. An operation that its node has not answered by the deadline is not retried. The deadline is as long as
//!     a lease may last; a longer wait would only delay the error.
//! A4. If the node refuses to attach the region again, an operation that was in doubt stays in doubt.

use std::cell::Cell;
use std::io::ErrorKind;
use std::pin::Pin;
use std::time::Duration;

use farpool_fabric::{OpError, Queue, Uncertain};
use farpool_wire::{Refusal, RegionId};

use super::Memory;

/// How long an operation is retried while its memory moves: as long as the copying of a region of many GiB
/// may take.
const MOVE_PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks at whether it has moved.
pub(super) const MOVE_PAUSE: Duration = Duration::from_micros(50);

/// Tries to connect again within an operation's deadline: one every 12 ms in production.
const TRIES_TO_CONNECT: u32 = 1_024;
/// The part of an operation's deadline for which a node's address refuses connections until the node's
/// process is taken to have ended: half a second in production, because a firewall that reloads its rules
/// refuses connections for a moment, too.
const GONE_PART: u32 = 24;

/// When an operation was first retried, by cause.
#[derive(Default)]
pub(super) struct Trying {
    moving_since_ns: Option<u64>,
    lost_since_ns: Option<u64>,
}

/// Why an operation's first try has failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Failed {
    /// Its memory has moved. The try had no effect, or had it where the memory was; attaching again finds
    /// where it is now.
    Moved,
    /// Its connection broke.
    Lost,
    /// For a reason that a retry does not change.
    ForGood,
}

impl Memory {
    /// Waits until a failed operation on a region may be retried. The future is boxed: it is rare, and would
    /// otherwise make every operation's future larger.
    ///
    /// # Errors
    /// The operation's error, if it must not be retried.
    pub(super) fn ready_again<'a>(
        &'a self,
        region: RegionId,
        error: OpError,
        trying: &'a mut Trying,
    ) -> Pin<Box<dyn Future<Output = Result<(), OpError>> + 'a>> {
        Box::pin(self.attach_again(region, error, trying))
    }

    /// Notes why an operation has failed. Says whether it may be retried once its region is attached again.
    pub(super) fn note_retryable(&self, error: &OpError) -> bool {
        self.note_failure(error) != Failed::ForGood
    }

    fn note_failure(&self, error: &OpError) -> Failed {
        match error {
            OpError::Refused(Refusal::NotAttached | Refusal::Busy)
            | OpError::Unknown { cause: Uncertain::EpochMoved, .. } => Failed::Moved,
            OpError::NotSent { .. }
            | OpError::Unknown { cause: Uncertain::ConnectionLost | Uncertain::NotListening, .. }
                if !self.has_given_up.get() =>
            {
                Failed::Lost
            }
            OpError::Unknown { cause: Uncertain::Deadline, .. } => {
                self.has_given_up.set(true);
                Failed::ForGood
            }
            _ => Failed::ForGood,
        }
    }

    async fn attach_again(
        &self,
        region: RegionId,
        error: OpError,
        trying: &mut Trying,
    ) -> Result<(), OpError> {
        let failed = self.note_failure(&error);
        let grant = self.grants.borrow().get(&region).copied();
        let (Some((epoch, key)), Ok(queue)) = (grant, self.queue(region.node)) else {
            return Err(error);
        };
        if failed == Failed::ForGood {
            return Err(error);
        }
        let _following = Following::new(self);
        let mut connecting = Connecting::default();
        loop {
            if self.is_abandoned.get() || trying.note_try(self, failed) {
                return Err(error);
            }
            if self.writing.get() > 0 {
                connecting.refused_since_ns = None; // nothing is tried meanwhile
                self.endpoint.sleep(MOVE_PAUSE).await;
                continue;
            }
            if !queue.is_open() {
                self.connect_again(queue, &mut connecting);
            }
            match queue.attach(region, epoch, key).await {
                Ok(()) => {
                    connecting
                        .superseded
                        .into_iter()
                        .for_each(|last| self.in_flight.settled(region.node, last));
                    return Ok(());
                }
                Err(
                    OpError::Refused(Refusal::Busy) | OpError::Unknown { cause: Uncertain::EpochMoved, .. },
                ) => {
                    connecting.refused_since_ns = None;
                    self.endpoint.sleep(MOVE_PAUSE).await;
                }
                // All places of the node are taken; one may be free in a moment.
                Err(OpError::Refused(Refusal::Exhausted)) => {
                    connecting.refused_since_ns = None;
                    self.pause_before_connecting().await;
                }
                // The grant was fenced (A4).
                Err(OpError::Refused(refusal)) => return Err(evicted(error, refusal)),
                Err(again) if self.note_failure(&again) == Failed::Lost => {
                    trying.lost_since_ns.get_or_insert(self.endpoint.now_ns());
                    let patience = self.endpoint.deadline() / GONE_PART;
                    if connecting.note_loss(&again, self.endpoint.now_ns(), patience) {
                        return Err(error);
                    }
                    self.pause_before_connecting().await;
                }
                Err(_) => return Err(error),
            }
        }
    }

    /// Opens the next incarnation of a queue. Whether the connection works is known only once the node
    /// has answered on it.
    fn connect_again(&self, queue: &Queue, connecting: &mut Connecting) {
        // The incarnations that sent these writes are superseded.
        connecting.superseded = self.in_flight.last_of(queue.node());
        connecting.refused = queue.reconnect().err().map(|error| error.kind());
    }

    async fn pause_before_connecting(&self) {
        self.endpoint.sleep(self.endpoint.deadline() / TRIES_TO_CONNECT).await;
    }
}

impl Trying {
    /// Notes one more try. Says whether the operation has been tried for as long as it may be.
    fn note_try(&mut self, memory: &Memory, failed: Failed) -> bool {
        let now_ns = memory.endpoint.now_ns();
        let since_ns = match failed {
            Failed::Lost => &mut self.lost_since_ns,
            Failed::Moved | Failed::ForGood => &mut self.moving_since_ns,
        };
        since_ns.get_or_insert(now_ns);
        let is_past = |since_ns: Option<u64>, patience: Duration| {
            since_ns.is_some_and(|since_ns| now_ns.saturating_sub(since_ns) >= patience.as_nanos() as u64)
        };
        is_past(self.moving_since_ns, MOVE_PATIENCE)
            || is_past(self.lost_since_ns, memory.endpoint.deadline())
    }
}

/// Connecting again to a node.
#[derive(Default)]
struct Connecting {
    /// The last in-flight write that can no longer land once the queue's next incarnation is answered.
    superseded: Option<u64>,
    /// Why the last try could not even begin to connect.
    refused: Option<ErrorKind>,
    /// Since when every try was refused, and the node answered none.
    refused_since_ns: Option<u64>,
}

impl Connecting {
    /// Notes that the last try ended with `error`. Says whether the node's address has refused connections
    /// for as long as `patience`.
    fn note_loss(&mut self, error: &OpError, now_ns: u64, patience: Duration) -> bool {
        let refused = matches!(self.refused, Some(ErrorKind::ConnectionRefused | ErrorKind::NotFound));
        let ended = matches!(error, OpError::Unknown { cause: Uncertain::NotListening, .. });
        if !refused && !ended {
            self.refused_since_ns = None;
            return false;
        }
        let since_ns = *self.refused_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since_ns) >= patience.as_nanos() as u64
    }
}

/// How an operation ends if the node refuses to attach its region for this thread again: what was in doubt
/// stays in doubt.
fn evicted(error: OpError, refusal: Refusal) -> OpError {
    match error {
        OpError::NotSent { .. } => OpError::Refused(refusal),
        OpError::Unknown { node, .. } => OpError::Unknown { node, cause: Uncertain::EpochMoved },
        OpError::Refused(_) => error,
    }
}

/// A future waits to attach a region again: no plan with WRITEs is posted meanwhile.
struct Following<'a>(&'a Cell<u32>);

impl<'a> Following<'a> {
    fn new(memory: &'a Memory) -> Self {
        memory.following.set(memory.following.get() + 1);
        Following(&memory.following)
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Plans with WRITEs are in flight. If this is dropped before they have ended, no region is attached again.
pub(super) struct Posted<'a> {
    memory: &'a Memory,
    plans: u32,
}

impl<'a> Posted<'a> {
    pub(super) fn new(memory: &'a Memory, plans: u32) -> Self {
        memory.writing.set(memory.writing.get() + plans);
        Posted { memory, plans }
    }

    pub(super) fn end(self) {
        self.memory.writing.set(self.memory.writing.get() - self.plans);
        std::mem::forget(self);
    }
}

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        if self.plans > 0 {
            self.memory.is_abandoned.set(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use farpool_wire::NodeId;

    use super::*;

    const PATIENCE: Duration = Duration::from_nanos(100);

    #[test]
    fn an_address_is_given_up_only_after_refusals_without_a_break() {
        let of = |cause| OpError::Unknown { node: NodeId(1), cause };
        let (refused, lost) = (of(Uncertain::NotListening), of(Uncertain::ConnectionLost));
        let mut connecting = Connecting::default();
        assert!(!connecting.note_loss(&refused, 1_000, PATIENCE));
        assert!(!connecting.note_loss(&refused, 1_099, PATIENCE));
        assert!(connecting.note_loss(&refused, 1_100, PATIENCE));
        // A connection came about, and broke.
        assert!(!connecting.note_loss(&lost, 1_150, PATIENCE));
        assert!(!connecting.note_loss(&refused, 1_200, PATIENCE));
        assert!(connecting.note_loss(&refused, 1_300, PATIENCE));
        // The node answered.
        connecting.refused_since_ns = None;
        assert!(!connecting.note_loss(&refused, 1_400, PATIENCE));
    }
}
