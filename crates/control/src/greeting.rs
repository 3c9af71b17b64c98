//! The greeting of a connection, on either side: TLS if it is used, then HTTP/2's preface and its answer.
//! This module checks the first bytes itself, because an HTTP/2 library reports anything unexpected only as
//! `http2 error`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

use crate::fault::Fault;

/// HTTP/2's connection preface (RFC 9113, section 3.4).
pub(crate) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A frame's header (RFC 9113, section 4.1): length, type, flags, stream. The first frame of either side is
/// of type SETTINGS.
const FRAME_HEADER_BYTES: usize = 9;
const TYPE_AT: usize = 3;
const SETTINGS: u8 = 4;

/// The first bytes of a TLS record with a client's greeting: type 22, version 3.x (RFC 8446, section 5.1).
const TLS_GREETING: &[u8; 2] = &[22, 3];
/// The first byte of an alert.
const TLS_ALERT: u8 = 21;

/// The answer to a client that speaks plain text to an endpoint with TLS: a fatal alert,
/// `unexpected_message`.
const ANSWER_TO_PLAIN_TEXT: &[u8; 7] = &[TLS_ALERT, 3, 3, 0, 2, 2, 10];
/// The answer to a client that speaks TLS to an endpoint without it: the frame GOAWAY with
/// INADEQUATE_SECURITY (RFC 9113, section 6.8). Since it is not a TLS record, the client detects the fault.
const ANSWER_TO_TLS: &[u8; 17] = &[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xC];

/// A stream whose greeting has been read, or written, already.
#[derive(Debug)]
pub(crate) struct Greeted<S> {
    stream: S,
    /// Bytes that have been read already; they are returned first.
    read: Vec<u8>,
    /// How many of the next bytes to write have been written already.
    written: usize,
}

/// Greets as the client, and checks the answer.
pub(crate) async fn greet<S>(mut stream: S) -> Result<Greeted<S>, Fault>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let failed = |error: io::Error| Fault::of_dialled(&error);
    stream.write_all(PREFACE).await.map_err(failed)?;
    stream.flush().await.map_err(failed)?;
    let mut header = [0; FRAME_HEADER_BYTES];
    let mut heard = 0;
    while heard < header.len() {
        match stream.read(&mut header[heard..]).await.map_err(failed)? {
            0 if heard == 0 => return Err(Fault::Closed),
            0 => break,
            more => heard += more,
        }
        if header[0] == TLS_ALERT {
            // As the length of a frame, this byte would mean 1.3 MiB: too long for a first frame.
            return Err(Fault::WantsTls);
        }
    }
    if heard < header.len() || header[TYPE_AT] != SETTINGS {
        return Err(Fault::NotFarpool);
    }
    Ok(Greeted { stream, read: header.to_vec(), written: PREFACE.len() })
}

/// The kind of a connection, by the first bytes of the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begins {
    Tls,
    Http2,
    /// Neither of the two.
    Otherwise,
    /// The connection ended without a byte.
    Not,
}

/// Peeks at the first bytes without consuming them.
pub(crate) async fn begins(stream: &TcpStream) -> io::Result<Begins> {
    let mut first = [0; TLS_GREETING.len()];
    let heard = stream.peek(&mut first).await?;
    Ok(Begins::of(&first[..heard]))
}

impl Begins {
    fn of(first: &[u8]) -> Begins {
        match first {
            [] => Begins::Not,
            _ if TLS_GREETING.starts_with(first) => Begins::Tls,
            _ if PREFACE.starts_with(first) => Begins::Http2,
            _ => Begins::Otherwise,
        }
    }
}

/// Waits for the greeting, as the server.
pub(crate) async fn await_greeting<S>(mut stream: S) -> Result<Greeted<S>, Fault>
where
    S: AsyncRead + Unpin,
{
    let mut read = Vec::with_capacity(PREFACE.len());
    while read.len() < PREFACE.len() {
        let room = PREFACE.len() - read.len();
        let heard = (&mut stream).take(room as u64).read_buf(&mut read).await;
        if heard.map_err(|error| Fault::of_accepted(&error))? == 0 {
            return Err(if read.is_empty() { Fault::Closed } else { Fault::NotFarpool });
        }
        if !PREFACE.starts_with(&read) {
            return Err(Fault::NotFarpool);
        }
    }
    Ok(Greeted { stream, read, written: 0 })
}

/// The most bytes that a client may have sent before it gets the answer: a greeting with room to spare.
const MOST_READ_AFTER_ANSWER: u64 = 64 << 10;

/// Tells a client that this endpoint does not speak its protocol.
pub(crate) async fn turn_away<T>(mut stream: TcpStream, fault: Fault) -> Result<T, Fault> {
    let answer: &[u8] = match fault {
        Fault::SpokePlainText => ANSWER_TO_PLAIN_TEXT,
        Fault::SpokeTls => ANSWER_TO_TLS,
        _ => &[],
    };
    let _ = stream.write_all(answer).await; // the client may be gone
    part(stream).await;
    Err(fault)
}

/// Ends a connection so that the client gets the last answer: ends the sending side, and reads what the
/// client sends before the socket is closed. If the kernel closed it with unread bytes, it would reset the
/// connection, and the answer could be lost.
pub(crate) async fn part(mut stream: TcpStream) {
    let parted = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut (&mut stream).take(MOST_READ_AFTER_ANSWER), &mut tokio::io::sink()).await
    };
    // If the client is gone or stays silent, the connection is closed anyway.
    let _ = tokio::time::timeout(TOLD_WITHIN, parted).await;
}

/// How long a client may take to receive the answer: more than a round trip to the far side of the world.
const TOLD_WITHIN: Duration = Duration::from_millis(500);

impl<S: AsyncRead + Unpin> AsyncRead for Greeted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.read.is_empty() {
            let now = self.read.len().min(buffer.remaining());
            buffer.put_slice(&self.read[..now]);
            self.read.drain(..now);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Greeted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let skipped = self.written.min(bytes.len());
        if skipped == 0 {
            return Pin::new(&mut self.stream).poll_write(cx, bytes);
        }
        self.written -= skipped;
        if skipped == bytes.len() {
            return Poll::Ready(Ok(skipped));
        }
        // Never `Pending` here: some of the bytes count as written, and the caller writes the rest again.
        match Pin::new(&mut self.stream).poll_write(cx, &bytes[skipped..]) {
            Poll::Ready(Ok(more)) => Poll::Ready(Ok(skipped + more)),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Ready(Ok(skipped)),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_connection_is_detected_from_its_first_byte() {
        assert_eq!(Begins::of(b""), Begins::Not);
        assert_eq!((Begins::of(b"P"), Begins::of(b"PR")), (Begins::Http2, Begins::Http2));
        assert_eq!((Begins::of(&[22]), Begins::of(&[22, 3])), (Begins::Tls, Begins::Tls));
        for other in [&b"GE"[..], &[22, 4], &[0xFF]] {
            assert_eq!(Begins::of(other), Begins::Otherwise);
        }
    }

    #[tokio::test]
    async fn both_sides_greet_without_losing_a_byte() {
        let (near, far) = tokio::io::duplex(64);
        let settings = [0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
        let listening = tokio::spawn(async move {
            let mut greeted = await_greeting(far).await.unwrap();
            greeted.write_all(&settings).await.unwrap();
            let mut heard = [0; PREFACE.len() + 4];
            greeted.read_exact(&mut heard).await.unwrap();
            heard
        });
        let mut greeted = greet(near).await.unwrap();
        for byte in PREFACE.iter().chain(b"more") {
            greeted.write_all(&[*byte]).await.unwrap();
        }
        let mut answer = [0; FRAME_HEADER_BYTES];
        greeted.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, settings);
        assert_eq!(listening.await.unwrap(), *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore");
    }
}
