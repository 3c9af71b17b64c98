use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A peer must have begun to speak within this time: the wait for a lost packet to be sent again, and some.
pub const PREFACE_DEADLINE: Duration = Duration::from_secs(5);

/// Length of HTTP/2's connection preface; a TLS greeting is longer.
const PREFACE_BYTES: usize = 24;

/// An accepted connection. It holds one of the listener's slots, and closes if its peer stays silent at the start.
pub(crate) struct Guarded {
    stream: TcpStream,
    silence: Option<Pin<Box<Sleep>>>,
    heard_bytes: usize,
    _slot: OwnedSemaphorePermit,
}

impl Guarded {
    pub(crate) fn new(stream: TcpStream, slot: OwnedSemaphorePermit) -> Self {
        let silence = Some(Box::pin(tokio::time::sleep(PREFACE_DEADLINE)));
        Guarded { stream, silence, heard_bytes: 0, _slot: slot }
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
        self.heard_bytes = self.heard_bytes.saturating_add(buffer.filled().len() - before);
        if self.heard_bytes >= PREFACE_BYTES {
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
