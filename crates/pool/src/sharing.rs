//! Letting other clients into regions of ours, and shutting them out.
//!
//! What is asked and what the answers mean is [`Holder`](crate::Holder)'s to say; the way to the node is here.

use std::sync::Arc;

use farpool_control::dial;
use farpool_lease::Millis;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::{Epoch, GrantMode};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::error::GrantError;
use crate::holder::ClientGrant;
use crate::keeper::REQUEST_DEADLINE;
use crate::pool::Shared;
use crate::region::LeasedRegion;

/// How often a node is asked to fence a grant while it gives no answer: half a minute in all.
const FENCE_TRIES: u32 = 10;

/// Adds a grant, and says for how long the client may use it (see [`Holder::usable_for`](crate::Holder::usable_for)).
pub(crate) async fn add_grant(
    shared: &Arc<Shared>,
    region: &LeasedRegion,
    mode: GrantMode,
) -> Result<(ClientGrant, Millis), GrantError> {
    let lost = GrantError::LeaseLost { region: region.id };
    let request = shared.stock.with_holder(|holder| holder.add_grant(shared.stock.now(), region.id, mode));
    let request = request.ok_or(lost.clone())?;
    let mut node = client(shared, region)?;
    let asked = tokio::time::timeout(REQUEST_DEADLINE, node.add_grant(request.clone())).await;
    let answer = asked.map_err(|_| late(region))?.map_err(|status| refused(region, &status))?.into_inner();
    let now = shared.stock.now();
    let granted = shared.stock.with_holder(|holder| {
        let grant = holder.grant_added(now, region.id, &request, &answer);
        grant.zip(holder.usable_for(now, region.id))
    });
    granted.ok_or(lost)
}

/// Fences a grant. Asked again while the node has not answered: copying a region of many GiB lasts longer than an answer
/// may, and who asks again learns when it is done.
pub(crate) async fn fence_grant(
    shared: &Arc<Shared>,
    region: &LeasedRegion,
    grant: Epoch,
) -> Result<(), GrantError> {
    let mut node = client(shared, region)?;
    for _ in 0..FENCE_TRIES {
        let request =
            shared.stock.with_holder(|holder| holder.fence_grant(shared.stock.now(), region.id, grant));
        let request = request.ok_or(GrantError::LeaseLost { region: region.id })?;
        if let Ok(answer) = tokio::time::timeout(REQUEST_DEADLINE, node.fence_grant(request)).await {
            return answer.map(drop).map_err(|status| refused(region, &status));
        }
    }
    Err(late(region))
}

fn client(shared: &Shared, region: &LeasedRegion) -> Result<NodeClient<Channel>, GrantError> {
    let channel = dial(&region.node.control, shared.config.tls.as_ref());
    let no_way = |error| GrantError::NoAnswer { node: region.id.node, reason: format!("{error}") };
    channel.map(NodeClient::new).map_err(no_way)
}

fn late(region: &LeasedRegion) -> GrantError {
    let reason = format!(
        "no answer within {} s; ask again: until it answers, nothing is certain",
        REQUEST_DEADLINE.as_secs()
    );
    GrantError::NoAnswer { node: region.id.node, reason }
}

fn refused(region: &LeasedRegion, status: &Status) -> GrantError {
    let (node, reason) = (region.id.node, status.message().to_owned());
    match status.code() {
        Code::FailedPrecondition | Code::InvalidArgument => GrantError::Refused { node, reason },
        _ => GrantError::NoAnswer { node, reason },
    }
}
