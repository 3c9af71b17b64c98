//! What a direct client (called *guest* in the code) and the owner send each other: packets over a Unix
//! socket, with descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use farpool_wire::control::GuestAnswer;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Longest message: an answer about a region, with a socket's path of the greatest length.
pub const MAX_MESSAGE_BYTES: usize = 512;
/// Most descriptors beside a message.
const MAX_DESCRIPTORS: usize = 2;

/// Sends a packet. Never waits: a peer that does not read is not served.
///
/// # Errors
/// Any error of the socket.
pub fn send(socket: BorrowedFd<'_>, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut beside, flags)?;
    Ok(())
}

/// Receives a packet: its bytes, and the descriptors that came beside it. No bytes: the other side has closed
/// the connection.
///
/// # Errors
/// Any error of the socket; also for packets that are too long.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags)?;
    let mut descriptors = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    bytes.truncate(received.bytes);
    Ok((bytes, descriptors))
}

/// Whether the other side is known to have closed the connection. Does not wait.
pub(crate) fn is_cut(socket: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut look = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let looked = poll(&mut look, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }));
    looked.is_err() || look[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
}

/// An answer that refuses a request and says why.
pub fn refusal(errno: rustix::io::Errno) -> GuestAnswer {
    GuestAnswer { errno: errno.raw_os_error() as u32, ..GuestAnswer::default() }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn sending_to_a_peer_that_does_not_read_fails_at_once() {
        /// How long a call that waits would take.
        const PATIENCE: Duration = Duration::from_secs(10);
        let (ours, _peers) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        set_socket_timeout(&ours, Timeout::Send, Some(PATIENCE)).unwrap();
        let begun = Instant::now();
        let mut sent = std::iter::repeat_with(|| send(ours.as_fd(), &[1; MAX_MESSAGE_BYTES], &[]));
        let error = sent.find_map(Result::err).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(begun.elapsed() < PATIENCE);
    }
}
