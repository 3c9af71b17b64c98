use std::collections::BTreeSet;
use std::time::Duration;

use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::{AcquireResponse, NodeAddress};
use farpool_wire::{NodeId, OwnerId};
use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::peers::{MAX_ASKED_AT_ONCE, Peers};
use crate::state::Pool;

/// Longest time for one request: two nodes may stall, one after the other, and there is still time for a third.
/// Half of a lease's default time, so that what was granted first is still worth having.
pub const ACQUIRE_DEADLINE: Duration = Duration::from_secs(5);

/// What an owner asks for.
pub struct Wish {
    pub owner: OwnerId,
    pub class: LeaseClass,
    pub count: u32,
    pub avoid: BTreeSet<NodeId>,
}

/// Places a wish and has the nodes grant it. What one node does not give is asked of the others.
///
/// Grants that arrive too late, or whose answers are lost, end by themselves: nobody renews them.
pub async fn acquire(
    pool: &Mutex<Pool>,
    peers: &Peers,
    now: impl Fn() -> Millis,
    wish: Wish,
) -> AcquireResponse {
    let Wish { owner, class, count, avoid: mut passed_over } = wish;
    let deadline = Instant::now() + ACQUIRE_DEADLINE;
    let mut leases = Vec::new();
    while leases.len() < count as usize && Instant::now() < deadline {
        let plan = pool.lock().plan(now(), owner, &passed_over, count - leases.len() as u32);
        if plan.is_empty() {
            break;
        }
        let ask = async |(address, share): (NodeAddress, u32)| {
            (NodeId(address.node), share, peers.grant(&address, owner, class, share).await)
        };
        let mut answers = stream::iter(plan).map(ask).buffer_unordered(MAX_ASKED_AT_ONCE);
        while let Ok(Some((node, share, answer))) = timeout_at(deadline, answers.next()).await {
            match answer {
                Ok(granted) => {
                    pool.lock().granted(node, owner, share, granted.len() as u32);
                    leases.extend(granted);
                }
                Err(error) => {
                    tracing::warn!(%node, %error, "a node could not be asked for regions");
                    pool.lock().failed(now(), node);
                    passed_over.insert(node);
                }
            }
        }
    }
    let short = leases.len() < count as usize;
    let pool = pool.lock();
    AcquireResponse {
        leases,
        region_bytes: pool.region_bytes(now()),
        short_reason: if short { pool.why_short(now()) } else { String::new() },
    }
}
