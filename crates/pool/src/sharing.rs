//! Admits other clients to regions that this process holds, and fences their grants.
//!
//! [`Holder`](crate::Holder) decides what to ask and what the answers mean; this module talks to the nodes.

use std::sync::Arc;
use std::time::Duration;

use farpool_control::{Tls, dial, explain};
use farpool_lease::Millis;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{AddGrantRequest, AddGrantResponse, FenceGrantRequest};
use farpool_wire::{Epoch, GrantMode, NodeId, RegionId};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::error::GrantError;
use crate::holder::ClientGrant;
use crate::keeper::REQUEST_DEADLINE;
use crate::pool::Shared;
use crate::region::LeasedRegion;

/// How many times a request to fence a grant is sent while the node does not answer.
const FENCE_TRIES: u32 = 10;
/// After this time a fence has been answered or has failed: half a minute.
pub const FENCE_DEADLINE: Duration = REQUEST_DEADLINE.saturating_mul(FENCE_TRIES);

/// Adds a grant, and returns for how long the client may use it (see
/// [`Holder::usable_for`](crate::Holder::usable_for)).
pub(crate) async fn add_grant(
    shared: &Arc<Shared>,
    region: &LeasedRegion,
    mode: GrantMode,
) -> Result<(ClientGrant, Millis), GrantError> {
    let lost = GrantError::LeaseLost { region: region.id };
    let request = shared.stock.with_holder(|holder| holder.add_grant(shared.stock.now(), region.id, mode));
    let request = request.ok_or(lost.clone())?;
    let answer = ask_for_grant(client(shared, region)?, region.id.node, request.clone()).await?;
    let now = shared.stock.now();
    let granted = shared.stock.with_holder(|holder| {
        let grant = holder.grant_added(now, region.id, &request, &answer);
        grant.zip(holder.usable_for(now, region.id))
    });
    granted.ok_or(lost)
}

/// Fences a grant.
pub(crate) async fn fence_grant(
    shared: &Arc<Shared>,
    region: &LeasedRegion,
    grant: Epoch,
) -> Result<(), GrantError> {
    let question = || shared.stock.with_holder(|holder| holder.fence_grant(region.id, grant));
    ask_for_fence(client(shared, region)?, region.id, question).await
}

/// Asks a node for a grant.
pub(crate) async fn ask_for_grant(
    mut client: NodeClient<Channel>,
    node: NodeId,
    request: AddGrantRequest,
) -> Result<AddGrantResponse, GrantError> {
    let asked = tokio::time::timeout(REQUEST_DEADLINE, client.add_grant(request)).await;
    Ok(asked
        .map_err(|_| late(node, REQUEST_DEADLINE))?
        .map_err(|status| refused(node, &status))?
        .into_inner())
}

/// Asks a node to fence a grant, with the request that `question` makes; it makes none once the lease has
/// ended. The request is repeated until the node answers: the node may have to copy a region of many GiB,
/// which takes longer than the deadline of one request.
pub(crate) async fn ask_for_fence(
    mut client: NodeClient<Channel>,
    region: RegionId,
    question: impl Fn() -> Option<FenceGrantRequest>,
) -> Result<(), GrantError> {
    for _ in 0..FENCE_TRIES {
        let request = question().ok_or(GrantError::LeaseLost { region })?;
        if let Ok(answer) = tokio::time::timeout(REQUEST_DEADLINE, client.fence_grant(request)).await {
            return answer.map(drop).map_err(|status| refused(region.node, &status));
        }
    }
    Err(late(region.node, FENCE_DEADLINE))
}

fn client(shared: &Shared, region: &LeasedRegion) -> Result<NodeClient<Channel>, GrantError> {
    dial_node(region.id.node, &region.node.control, shared.config.tls.as_ref())
}

/// A client of a node's control service.
pub(crate) fn dial_node(
    node: NodeId,
    control: &str,
    tls: Option<&Tls>,
) -> Result<NodeClient<Channel>, GrantError> {
    let no_way = |error| GrantError::NoAnswer { node, reason: format!("{error}") };
    dial(control, tls).map(NodeClient::new).map_err(no_way)
}

fn late(node: NodeId, waited: Duration) -> GrantError {
    let reason = format!(
        "no answer within {} s; ask again: until the node answers, the outcome is unknown",
        waited.as_secs()
    );
    GrantError::NoAnswer { node, reason }
}

fn refused(node: NodeId, status: &Status) -> GrantError {
    let reason = explain(status);
    match status.code() {
        Code::FailedPrecondition | Code::InvalidArgument => GrantError::Refused { node, reason },
        _ => GrantError::NoAnswer { node, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_says_no_has_answered_and_one_that_fails_has_not() {
        let node = NodeId(1);
        let answer = |code| refused(node, &Status::new(code, "words"));
        let reason = "words".to_owned();
        for code in [Code::FailedPrecondition, Code::InvalidArgument] {
            assert_eq!(answer(code), GrantError::Refused { node, reason: reason.clone() });
        }
        for code in [Code::Unavailable, Code::DeadlineExceeded, Code::Internal] {
            assert_eq!(answer(code), GrantError::NoAnswer { node, reason: reason.clone() });
        }
    }
}
