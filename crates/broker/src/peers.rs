//! The broker's requests to nodes. Each has a connection of its own: few requests reach the broker, and a new
//! connection cannot be stale.

use std::error::Error;
use std::time::{Duration, Instant};

use farpool_control::{ControlError, Tls, dial, explain};
use farpool_lease::LeaseClass;
use farpool_throttle::Throttles;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::{
    GrantRequest, Lease, NodeAddress, RegionsRequest, RegisterRequest, RevokeRequest, RevokeResponse,
};
use farpool_wire::{NodeId, OwnerId};
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::placing::are_sound;

/// Longest wait for a grant or a revocation. A node answers from memory, so only a lost or stalled one needs
/// longer.
pub const GRANT_DEADLINE: Duration = Duration::from_secs(2);

/// Longest wait for a node's table.
pub const REGIONS_DEADLINE: Duration = Duration::from_secs(1);

/// Most nodes asked at the same time for one request: each takes a file descriptor meanwhile.
pub const MAX_ASKED_AT_ONCE: usize = 32;

/// Why a node gave no usable answer. The broker passes it over.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Its address cannot be dialled.
    #[error(transparent)]
    Dial(#[from] ControlError),
    /// It did not answer in time.
    #[error("no answer in time")]
    Late,
    /// It cannot be reached, or refuses.
    #[error("{}", explain(.0))]
    Failed(#[from] tonic::Status),
    /// Its answer does not fit the request.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
}

/// The kind of a request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum InVain {
    /// To lend regions.
    Regions,
    /// To take leases back.
    TakingBack,
    /// To show its table.
    Table,
}

/// How nodes are asked.
pub struct Peers {
    tls: Option<Tls>,
    /// Limits the warnings: clients ask as often as they like, and the same node may fail each time.
    failures: Throttles<(InVain, NodeId)>,
}

impl Peers {
    pub fn new(tls: Option<Tls>) -> Self {
        Peers { tls, failures: Throttles::default() }
    }

    /// Warns of a node that gave no usable answer.
    pub fn warn(&self, in_vain: InVain, node: NodeId, error: &dyn Error) {
        let Some(left_out) = self.failures.occurs((in_vain, node), Instant::now()) else { return };
        match in_vain {
            InVain::Regions => {
                tracing::warn!(%node, %error, left_out, "a node could not be asked for regions");
            }
            InVain::TakingBack => {
                tracing::warn!(%node, %error, left_out, "a node could not be asked to take leases back");
            }
            InVain::Table => tracing::warn!(%node, %error, left_out, "a node's table was not accepted"),
        }
    }

    /// Asks a node to lend `count` regions. Returns that many leases, or fewer.
    pub async fn grant(
        &self,
        address: &NodeAddress,
        owner: OwnerId,
        class: LeaseClass,
        count: u32,
    ) -> Result<Vec<Lease>, PeerError> {
        let mut node = self.client(address)?;
        let request = GrantRequest { owner: owner.0, count, class: class.to_wire() };
        let answer = timeout(GRANT_DEADLINE, node.grant(request)).await.map_err(|_| PeerError::Late)?;
        let leases = answer?.into_inner().leases;
        if !are_sound(&leases, NodeId(address.node), class, count) {
            return Err(PeerError::Malformed("leases that were not asked for"));
        }
        Ok(leases)
    }

    /// Asks a node to take leases of an owner back.
    pub async fn revoke(
        &self,
        address: &NodeAddress,
        request: RevokeRequest,
    ) -> Result<RevokeResponse, PeerError> {
        let mut node = self.client(address)?;
        let answer = timeout(GRANT_DEADLINE, node.revoke(request)).await.map_err(|_| PeerError::Late)?;
        Ok(answer?.into_inner())
    }

    /// Asks a node for its table. Returns it in the form of a report.
    pub async fn regions(&self, address: &NodeAddress) -> Result<RegisterRequest, PeerError> {
        let mut node = self.client(address)?;
        let answer = timeout(REGIONS_DEADLINE, node.regions(RegionsRequest {})).await;
        let table = answer.map_err(|_| PeerError::Late)??.into_inner();
        if table.address.as_ref().is_none_or(|found| found.node != address.node) {
            return Err(PeerError::Malformed("another node answers at its address"));
        }
        Ok(RegisterRequest {
            address: table.address,
            region_bytes: table.region_bytes,
            regions_total: table.regions_total,
            lent: table.lent,
        })
    }

    fn client(&self, address: &NodeAddress) -> Result<NodeClient<Channel>, ControlError> {
        Ok(NodeClient::new(dial(&address.control, self.tls.as_ref())?))
    }
}
