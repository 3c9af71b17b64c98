use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use farpool_control::{ControlError, Listener, Tls};
use farpool_wire::control::broker_server::BrokerServer;

use crate::service::BrokerService;
use crate::store::{Store, StoreError};

/// How often the broker looks for nodes that have long been silent: rarely, since minutes do not matter here.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(30);

/// How a broker runs.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    /// Where it listens; port 0 takes any free one.
    pub listen: SocketAddr,
    /// The file in which it stores the nodes that it knows.
    pub store: PathBuf,
    /// Certificates; without them it serves loopback only.
    pub tls: Option<Tls>,
}

/// Why a broker does not run. Each text names the fix.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The address or the certificates are at fault.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The store is at fault.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Runs a broker until `shutdown`, then ends within [`farpool_control::SHUTDOWN_GRACE`]. Before it answers
/// the first request, it asks the nodes of an earlier run for their tables. Then it calls `on_ready` with the
/// real address.
pub async fn run(
    config: BrokerConfig,
    on_ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), BrokerError> {
    let listener = Listener::bind(config.listen, config.tls.clone()).await?;
    let service = Arc::new(BrokerService::new(Store::open(&config.store)?, config.tls)?);
    service.refresh().await;
    let counting = service.clone();
    let listener = listener.on_rejected(move || counting.connection_rejected());
    on_ready(listener.address());
    tokio::select! {
        ended = listener.serve(BrokerServer::from_arc(service.clone()), shutdown) => Ok(ended?),
        never = forget_silent_nodes(&service) => match never {},
    }
}

async fn forget_silent_nodes(service: &BrokerService) -> Infallible {
    loop {
        tokio::time::sleep(HOUSEKEEPING_INTERVAL).await;
        service.forget_silent().await;
    }
}
