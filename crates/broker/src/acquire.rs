//! Requests that need nodes: [`placing`](crate::placing) makes the plans, this module sends the requests.

use std::time::Duration;

use farpool_lease::Millis;
use farpool_wire::NodeId;
use farpool_wire::control::{AcquireResponse, NodeAddress, RevokeRequest, RevokeResponse};
use futures_util::stream::{self, StreamExt};
use rustix_futex_sync::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::peers::{InVain, MAX_ASKED_AT_ONCE, Peers};
use crate::placing::{Placing, TakingBack, Wish};
use crate::state::Pool;

/// Longest time for one request: two nodes may stall, one after the other, and there is still time for a
/// third. Half of a lease's default duration, so that the leases granted first are still worth having.
pub const ACQUIRE_DEADLINE: Duration = Duration::from_secs(5);

/// Places a request and has the nodes grant it.
///
/// Grants that arrive too late, or whose answers are lost, end by themselves, because no owner renews them.
pub async fn acquire(
    pool: &Mutex<Pool>,
    peers: &Peers,
    now: impl Fn() -> Millis,
    wish: Wish,
) -> AcquireResponse {
    let (owner, class) = (wish.owner, wish.class);
    let deadline = Instant::now() + ACQUIRE_DEADLINE;
    let mut placing = Placing::new(wish);
    while Instant::now() < deadline {
        let plan = placing.next(&mut pool.lock(), now());
        if plan.is_empty() {
            break;
        }
        let ask = async |(address, share): (NodeAddress, u32)| {
            (NodeId(address.node), share, peers.grant(&address, owner, class, share).await)
        };
        let mut answers = stream::iter(plan).map(ask).buffer_unordered(MAX_ASKED_AT_ONCE);
        while let Ok(Some((node, share, answer))) = timeout_at(deadline, answers.next()).await {
            match answer {
                Ok(granted) => placing.granted(&mut pool.lock(), node, share, granted),
                Err(error) => {
                    peers.warn(InVain::Regions, node, &error);
                    placing.failed(&mut pool.lock(), now(), node);
                }
            }
        }
    }
    placing.answer(&pool.lock(), now())
}

/// Asks nodes, one after another, to take leases of an owner back.
pub async fn take_back(
    pool: &Mutex<Pool>,
    peers: &Peers,
    now: impl Fn() -> Millis,
    request: RevokeRequest,
) -> RevokeResponse {
    let deadline = Instant::now() + ACQUIRE_DEADLINE;
    let mut back = TakingBack::new(farpool_wire::OwnerId(request.owner), request.count);
    while Instant::now() < deadline {
        let Some((address, share)) = back.next(&mut pool.lock(), now()) else { break };
        let (node, asked) = (NodeId(address.node), RevokeRequest { count: share, ..request });
        match timeout_at(deadline, peers.revoke(&address, asked)).await {
            Ok(Ok(said)) => back.revoked(&mut pool.lock(), now(), node, share, &said),
            Ok(Err(error)) => {
                peers.warn(InVain::TakingBack, node, &error);
                back.failed(&mut pool.lock(), now(), node, share);
            }
            Err(_) => back.failed(&mut pool.lock(), now(), node, share),
        }
    }
    back.answer(&pool.lock(), now())
}
