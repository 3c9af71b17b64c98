use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Server;

use crate::dial::is_loopback_ip;
use crate::guarded::{Greeting, Guarded, OnRejected};
use crate::{ControlError, Tls};

/// Most connections at a time: the largest pool's nodes and as many clients, well below the usual 4,096 descriptors.
/// Later ones wait in the kernel's queue.
pub const MAX_CONNECTIONS: usize = 2_048;

/// Longest time for any request: above the longest of those that wait for others.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long requests under way may take to end when the server stops.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Most requests at a time on one connection: a peer has a handful of kinds, and one of each under way.
const MAX_REQUESTS_PER_CONNECTION: usize = 64;

/// A connection that is silent for so long is asked whether it lives, so that lost peers free their slots.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A peer that does not answer this question in time is gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause after a failed accept (descriptors used up): the cause does not pass by trying at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound address of the control plane.
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    tls: Option<Tls>,
    on_rejected: OnRejected,
}

impl Listener {
    /// Binds `address`; port 0 takes any free one. Without TLS it must be a loopback address.
    pub async fn bind(address: SocketAddr, tls: Option<Tls>) -> Result<Self, ControlError> {
        if tls.is_none() && !is_loopback_ip(address.ip()) {
            return Err(ControlError::PlaintextOffLoopback { address: address.to_string() });
        }
        let failed = |source| ControlError::Listen { address, source };
        let socket = TcpListener::bind(address).await.map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Listener { socket, address, tls, on_rejected: Arc::new(|| ()) })
    }

    /// Has `count` called for each connection that is closed since its peer speaks neither HTTP/2 nor, where it must,
    /// TLS; for a counter.
    pub fn on_rejected(self, count: impl Fn() + Send + Sync + 'static) -> Self {
        Listener { on_rejected: Arc::new(count), ..self }
    }

    /// Where it listens, with the real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves one gRPC service until `shutdown`; then ends within [`SHUTDOWN_GRACE`].
    pub async fn serve<S>(self, service: S, shutdown: impl Future<Output = ()>) -> Result<(), ControlError>
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        let server = match &self.tls {
            Some(tls) => Server::builder().tls_config(tls.server()).map_err(|source| tls.unusable(source))?,
            None => Server::builder(),
        };
        let server = server
            .timeout(REQUEST_TIMEOUT)
            .concurrency_limit_per_connection(MAX_REQUESTS_PER_CONNECTION)
            .max_concurrent_streams(MAX_REQUESTS_PER_CONNECTION as u32)
            .load_shed(true)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { stopped.await.unwrap_or_default() };
        let greeting = if self.tls.is_some() { Greeting::Tls } else { Greeting::Http2 };
        let incoming = incoming(self.socket, greeting, self.on_rejected);
        let mut serving = pin!(server.serve_with_incoming_shutdown(service, incoming, stopped));
        let ended = tokio::select! {
            ended = &mut serving => ended,
            () = shutdown => {
                let _ = stop.send(()); // the receiver lives in `serving`
                tokio::time::timeout(SHUTDOWN_GRACE, serving).await.unwrap_or(Ok(()))
            }
        };
        ended.map_err(ControlError::Serve)
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("address", &self.address)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// Accepted connections, at most [`MAX_CONNECTIONS`] at a time.
fn incoming(
    socket: TcpListener,
    greeting: Greeting,
    on_rejected: OnRejected,
) -> impl Stream<Item = io::Result<Guarded>> {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    stream::unfold((socket, slots, on_rejected), move |(socket, slots, on_rejected)| async move {
        let slot = slots.clone().acquire_owned().await.ok()?;
        loop {
            match socket.accept().await {
                Ok((stream, _)) => {
                    let _ = stream.set_nodelay(true); // fails only when the peer is gone already
                    let guarded = Guarded::new(stream, greeting, on_rejected.clone(), slot);
                    return Some((Ok(guarded), (socket, slots, on_rejected)));
                }
                Err(error) => {
                    tracing::debug!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}
