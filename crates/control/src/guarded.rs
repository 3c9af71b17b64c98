use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A peer must have begun to speak within this time: the wait for a lost packet to be sent again, and some.
pub const PREFACE_DEADLINE: Duration = Duration::from_secs(5);

/// HTTP/2's connection preface (RFC 9113, section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How a TLS record with a client's greeting starts: type 22, version 3.x (RFC 8446, section 5.1).
const TLS_GREETING: &[u8; 2] = &[22, 3];

/// Told of each connection that was closed since its peer did not begin as it must.
pub(crate) type OnRejected = Arc<dyn Fn() + Send + Sync>;

/// How a peer must begin.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Greeting {
    Http2,
    Tls,
}

/// An accepted connection. It holds one of the listener's slots, and closes if its peer begins with silence or with
/// anything else than its greeting.
pub(crate) struct Guarded {
    stream: TcpStream,
    silence: Option<Pin<Box<Sleep>>>,
    greeting: Greeting,
    heard: [u8; PREFACE.len()],
    heard_bytes: usize,
    on_rejected: OnRejected,
    _slot: OwnedSemaphorePermit,
}

impl Guarded {
    pub(crate) fn new(
        stream: TcpStream,
        greeting: Greeting,
        on_rejected: OnRejected,
        slot: OwnedSemaphorePermit,
    ) -> Self {
        let silence = Some(Box::pin(tokio::time::sleep(PREFACE_DEADLINE)));
        let heard = [0; PREFACE.len()];
        Guarded { stream, silence, greeting, heard, heard_bytes: 0, on_rejected, _slot: slot }
    }

    /// Looks at the first bytes of a connection; false when they are no greeting.
    fn hear(&mut self, bytes: &[u8]) -> bool {
        let room = &mut self.heard[self.heard_bytes..];
        let kept = bytes.len().min(room.len());
        room[..kept].copy_from_slice(&bytes[..kept]);
        self.heard_bytes += kept;
        if self.greeting.allows(&self.heard[..self.heard_bytes]) {
            return true;
        }
        self.heard_bytes = 0; // from now on this peer has not greeted
        self.reject();
        false
    }

    fn has_greeted(&self) -> bool {
        self.heard_bytes == PREFACE.len()
    }

    fn reject(&self) {
        tracing::debug!(greeting = ?self.greeting, "a peer did not begin as it must");
        (self.on_rejected)();
    }
}

impl Greeting {
    /// Whether a connection may start like this.
    fn allows(self, heard: &[u8]) -> bool {
        let expected: &[u8] = match self {
            Greeting::Http2 => PREFACE,
            Greeting::Tls => TLS_GREETING,
        };
        heard.iter().zip(expected).all(|(heard, expected)| heard == expected)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Who says nothing at all may only have looked whether somebody listens.
        if self.heard_bytes > 0 && !self.has_greeted() {
            self.reject();
        }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(silence) = &mut self.silence
            && silence.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if self.silence.is_some() && !self.hear(&buffer.filled()[before..]) {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        if self.has_greeted() {
            self.silence = None;
        }
        polled
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Connected for Guarded {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_are_known_from_their_first_byte_on() {
        assert!(Greeting::Http2.allows(b"") && Greeting::Http2.allows(b"PRI"));
        assert!(Greeting::Http2.allows(PREFACE));
        assert!(!Greeting::Http2.allows(b"GET") && !Greeting::Http2.allows(&[22, 3, 1]));
        assert!(Greeting::Tls.allows(&[22]) && Greeting::Tls.allows(&[22, 3, 1, 2, 0]));
        assert!(!Greeting::Tls.allows(b"PRI * HTTP") && !Greeting::Tls.allows(&[22, 4]));
    }
}
