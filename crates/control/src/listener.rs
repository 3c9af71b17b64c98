use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_throttle::{PERIOD, Throttle};
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::{self, FuturesUnordered, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Server;

use crate::dial::is_loopback_ip;
use crate::fault::{CertificateFault, Fault};
use crate::gate::{GREETING_DEADLINE, Gate, MAX_NEWCOMERS, Places};
use crate::greeting::{Begins, await_greeting, begins, part, turn_away};
use crate::peer::{Connection, Identity, Peer, Stream};
use crate::refusals::Refusals;
use crate::version::{CONTROL_VERSION, Versioned};
use crate::{ControlError, Tls};

/// Longest time for any request: more than the longest request that itself waits for other processes.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long requests in progress may take to end when the server stops.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Most requests at a time on one connection: a peer has a handful of kinds, with one request of each.
const MAX_REQUESTS_PER_CONNECTION: usize = 64;

/// Silence after which a connection's peer is sent a keepalive, so that lost peers free their places.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A peer that does not answer a keepalive within this time is gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause after a failed accept (no descriptor is free): trying again at once would fail, too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Capacity of the channel of connections that have greeted; the server takes them from it at once.
const GREETED_AT_ONCE: usize = 16;

/// Logged when the gate closes a connection to make room: the oldest newcomer of the network with most.
const CROWDED: &str = "too many connections have not greeted; the oldest was closed";

/// Called for each refused connection that counts ([`Listener::on_rejected`]).
type OnRejected = Arc<dyn Fn() + Send + Sync>;

/// A bound address of the control plane.
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    acceptor: Option<TlsAcceptor>,
    version: u32,
    on_rejected: OnRejected,
}

impl Listener {
    /// Binds `address`; port 0 takes any free one. Without TLS it must be a loopback address.
    pub async fn bind(address: SocketAddr, tls: Option<Tls>) -> Result<Self, ControlError> {
        if tls.is_none() && !is_loopback_ip(address.ip()) {
            return Err(ControlError::PlaintextOffLoopback { address: address.to_string() });
        }
        let acceptor = tls.as_ref().map(Tls::acceptor).transpose()?;
        let listen = |source| ControlError::Listen { address, source };
        let socket = TcpListener::bind(address).await.map_err(listen)?;
        let address = socket.local_addr().map_err(listen)?;
        Ok(Listener { socket, address, acceptor, version: CONTROL_VERSION, on_rejected: Arc::new(|| {}) })
    }

    /// Calls `count` for each connection that is refused because of what its peer sent, or because no place
    /// is free. Peers that leave before they have greeted, or that greet too late, are not counted.
    pub fn on_rejected(self, count: impl Fn() + Send + Sync + 'static) -> Self {
        Listener { on_rejected: Arc::new(count), ..self }
    }

    /// Makes the listener speak another version of the control plane, as another release would; for tests.
    pub fn speaking(self, version: u32) -> Self {
        Listener { version, ..self }
    }

    /// The address on which it listens, with the real port.
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
        let server = Server::builder()
            .timeout(REQUEST_TIMEOUT)
            .concurrency_limit_per_connection(MAX_REQUESTS_PER_CONNECTION)
            .max_concurrent_streams(MAX_REQUESTS_PER_CONNECTION as u32)
            .load_shed(true)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
        let (greeted, incoming) = mpsc::channel(GREETED_AT_ONCE);
        let incoming = stream::unfold(incoming, async |mut incoming: mpsc::Receiver<Connection>| {
            let connection = incoming.recv().await?;
            Some((Ok::<_, Infallible>(connection), incoming))
        });
        let doorway = Doorway {
            acceptor: self.acceptor,
            places: Places::default(),
            greeted,
            on_rejected: self.on_rejected,
            refusals: Refusals::default(),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { stopped.await.unwrap_or_default() };
        let service = Versioned::new(service, self.version);
        let mut serving = pin!(server.serve_with_incoming_shutdown(service, incoming, stopped));
        let ended = tokio::select! {
            ended = &mut serving => ended,
            never = let_in(&self.socket, &doorway) => match never {},
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
            .field("is_tls", &self.acceptor.is_some())
            .finish_non_exhaustive()
    }
}

/// Accepts connections, and admits those whose peers greet correctly.
async fn let_in(socket: &TcpListener, doorway: &Doorway) -> Infallible {
    let mut gate = Gate::default();
    let mut greetings = FuturesUnordered::new();
    let crowded = Throttle::new();
    let mut periods = tokio::time::interval(PERIOD);
    loop {
        tokio::select! {
            accepted = socket.accept() => match accepted {
                Ok((stream, address)) => {
                    let _ = stream.set_nodelay(true); // fails only when the peer is gone already
                    let (handle, registration) = AbortHandle::new_pair();
                    let (number, made_room) = gate.arrives(address.ip(), handle);
                    if let Some(network) = made_room
                        && let Some(left_out) = crowded.occurs(Instant::now())
                    {
                        tracing::warn!(limit = MAX_NEWCOMERS, %network, left_out, "{CROWDED}");
                    }
                    greetings.push(async move {
                        let _ = Abortable::new(doorway.receive(stream, address), registration).await;
                        number
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(number) = greetings.next() => drop(gate.leaves(number)),
            _ = periods.tick() => doorway.tell_overdue(),
        }
    }
}

/// What a connection passes through before the server gets it.
struct Doorway {
    acceptor: Option<TlsAcceptor>,
    places: Places,
    greeted: mpsc::Sender<Connection>,
    on_rejected: OnRejected,
    refusals: Refusals,
}

impl Doorway {
    async fn receive(&self, stream: TcpStream, address: SocketAddr) {
        match timeout(GREETING_DEADLINE, self.greet(stream, address)).await {
            Ok(Ok(connection)) => {
                let _ = self.greeted.send(connection).await; // fails only when the server stops
            }
            Ok(Err(fault)) => self.refuse(address, &fault),
            Err(_) => self.refuse(address, &Fault::Late),
        }
    }

    async fn greet(&self, stream: TcpStream, address: SocketAddr) -> Result<Connection, Fault> {
        let plain = Peer { address, identity: Identity::Address(address.ip().to_canonical()) };
        let begins = begins(&stream).await.map_err(|error| Fault::of_stream(&error))?;
        let (stream, peer) = match (begins, &self.acceptor) {
            (Begins::Tls, Some(acceptor)) => {
                let stream = match acceptor.accept(stream).into_fallible().await {
                    Ok(stream) => stream,
                    Err((error, stream)) => {
                        part(stream).await; // TLS has sent the reason
                        return Err(Fault::of_accepted(&error));
                    }
                };
                let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
                let certificate = certificate.ok_or(Fault::ItsCertificate(CertificateFault::Missing))?;
                let identity = Identity::Certificate(certificate.as_ref().into());
                (Stream::Tls(Box::new(await_greeting(stream).await?)), Peer { address, identity })
            }
            (Begins::Http2, None) => (Stream::Plain(await_greeting(stream).await?), plain),
            (Begins::Http2, Some(_)) => return turn_away(stream, Fault::SpokePlainText).await,
            (Begins::Tls, None) => return turn_away(stream, Fault::SpokeTls).await,
            (Begins::Otherwise, _) => return Err(Fault::NotFarpool),
            (Begins::Not, _) => return Err(Fault::Closed),
        };
        Ok(Connection { stream, peer, _place: self.places.take(address.ip())? })
    }

    /// Logs why a peer was not admitted. A peer that only checked whether the port is open does not concern
    /// an operator, and is logged at debug level.
    fn refuse(&self, address: SocketAddr, fault: &Fault) {
        match fault {
            Fault::Closed | Fault::Late | Fault::Unreachable(_) => {
                tracing::debug!(%address, %fault, "a peer left without a greeting");
            }
            Fault::NotFarpool => {
                tracing::debug!(%address, %fault, "a peer was refused");
                (self.on_rejected)();
            }
            _ => {
                match self.refusals.occurs(fault, Instant::now()) {
                    Some(left_out) => tracing::warn!(%address, %fault, left_out, "a peer was refused"),
                    None => tracing::debug!(%address, %fault, "a peer was refused"),
                }
                (self.on_rejected)();
            }
        }
    }

    /// Logs how many refusals were left out of the log and are not counted in a line yet.
    fn tell_overdue(&self) {
        let left_out = self.refusals.overdue(Instant::now());
        if left_out > 0 {
            tracing::warn!(left_out, "more peers were refused for the same reasons");
        }
    }
}
