use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint};

use crate::fault::Fault;
use crate::greeting::greet;
use crate::quiet::Quiet;
use crate::tls::server_name;
use crate::version::agent;
use crate::{ControlError, REQUEST_TIMEOUT, Tls};

/// The longest wait for a connection, and again for its greeting: several round trips to the far side of the
/// world.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Silence after which the peer of a connection with open requests is sent a keepalive.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// A peer that does not answer a keepalive within this time is gone.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// A channel to `host:port`. It connects at the first request, and again whenever the connection is lost. So
/// the only errors here are a wrong address and unusable certificates. [`explain`](crate::explain) says why a
/// request failed.
pub fn dial(address: &str, tls: Option<&Tls>) -> Result<Channel, ControlError> {
    let malformed = || ControlError::Address { address: address.to_owned() };
    let host = host_of(address).ok_or_else(malformed)?;
    if tls.is_none() && !is_loopback_host(host) {
        return Err(ControlError::PlaintextOffLoopback { address: address.to_owned() });
    }
    // The connector does TLS; with `https` the endpoint would do it a second time.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|_| malformed())?;
    let endpoint = endpoint
        .user_agent(agent())
        .map_err(|_| malformed())?
        .timeout(REQUEST_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT);
    let tls = tls.map(Tls::connector).transpose()?;
    Ok(endpoint.connect_with_connector_lazy(Connector { address: address.to_owned(), tls }))
}

/// Makes connections; its error is a [`Fault`].
#[derive(Clone)]
struct Connector {
    address: String,
    tls: Option<TlsConnector>,
}

/// A connection with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Connector {
    async fn connect(self) -> Result<TokioIo<Box<dyn Stream>>, Fault> {
        let connecting = timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.address)).await;
        let stream =
            connecting.map_err(|_| Fault::Late)?.map_err(|error| Fault::Unreachable(error.to_string()))?;
        let _ = stream.set_nodelay(true); // fails only when the peer is gone already
        let stream = Quiet(stream);
        let greeting = async {
            let stream: Box<dyn Stream> = match self.tls {
                Some(tls) => {
                    let stream = tls.connect(server_name(), stream).await;
                    Box::new(greet(stream.map_err(|error| Fault::of_dialled(&error))?).await?)
                }
                None => Box::new(greet(stream).await?),
            };
            Ok(TokioIo::new(stream))
        };
        timeout(CONNECT_TIMEOUT, greeting).await.unwrap_or(Err(Fault::Late))
    }
}

impl Service<http::Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = Fault;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Fault>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Uri) -> Self::Future {
        Box::pin(self.clone().connect())
    }
}

/// Whether an address is a loopback address, which no other machine reaches.
pub(crate) fn is_loopback_ip(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Checks that [`dial`] accepts `address` as HOST:PORT.
pub fn check_address(address: &str) -> Result<(), ControlError> {
    host_of(address).map(drop).ok_or_else(|| ControlError::Address { address: address.to_owned() })
}

/// Whether `host:port` is certainly on this machine.
pub fn is_loopback(address: &str) -> bool {
    host_of(address).is_some_and(is_loopback_host)
}

/// The host of `host:port`; `None` if the address has another form.
fn host_of(address: &str) -> Option<&str> {
    if let Ok(socket) = address.parse::<SocketAddr>() {
        return (socket.port() != 0).then(|| address.rsplit_once(':').map(|(host, _)| host))?;
    }
    let (host, port) = address.rsplit_once(':')?;
    let named = !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    let reachable =
        port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0);
    (named && reachable).then_some(host)
}

/// Whether a host is this machine. A name other than `localhost` may resolve to anything, so it does not
/// count.
fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(is_loopback_ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plain_text_is_dialled_on_loopback_only() {
        for near in
            ["127.0.0.1:7700", "127.9.9.9:1", "[::1]:7700", "localhost:7700", "[::ffff:127.0.0.1]:7700"]
        {
            assert!(dial(near, None).is_ok(), "{near}");
        }
        for far in
            ["10.0.0.1:7700", "0.0.0.0:7700", "[::]:7700", "db1.example:7700", "localhost.example:7700"]
        {
            let error = dial(far, None).unwrap_err();
            assert!(matches!(error, ControlError::PlaintextOffLoopback { .. }), "{far}");
            assert!(error.to_string().contains("--tls-dir"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_address_that_is_not_host_and_port_is_refused() {
        for bad in ["", "localhost", "localhost:", "localhost:0", "127.0.0.1:0", ":7700", "localhost:99999"] {
            assert!(matches!(dial(bad, None), Err(ControlError::Address { .. })), "{bad}");
            assert!(check_address(bad).is_err(), "{bad}");
        }
        for bad in
            ["http://localhost:7700", "localhost:7700/x", "a@localhost:7700", "local host:7700", "[::1:7700"]
        {
            assert!(matches!(dial(bad, None), Err(ControlError::Address { .. })), "{bad}");
        }
    }
}
