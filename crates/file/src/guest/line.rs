//! The connection between a direct client (called *guest* in the code) and the owner: packets over a Unix
//! socket, with descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use farpool_fabric::Peer;
use farpool_pool::{OVERFLOW_NODE, OverflowRegion, SharedFile};
use farpool_wire::control::{self, GuestAnswer};
use farpool_wire::{AccessKey, Epoch, NodeId, RegionId};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::store::GuestRegion;

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

impl GuestRegion {
    /// The region as a message. The caller sends the [file](Self::file) of a region of the overflow directory
    /// with it.
    pub fn to_wire(&self) -> control::GuestRegion {
        control::GuestRegion {
            node: self.peer.node.0,
            index: self.id.index,
            epoch: self.epoch.0,
            key: self.key.as_bytes().to_vec(),
            tcp: self.peer.tcp.map(|address| address.to_string()).unwrap_or_default(),
            shm_socket: self
                .peer
                .shm_socket
                .as_ref()
                .map(|path| path.display().to_string())
                .unwrap_or_default(),
        }
    }

    /// The file of a region of the overflow directory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.storage.as_ref()?.file()
    }

    /// The region in a message, with the file that came with it; `None`: the message is invalid.
    pub fn from_wire(wire: &control::GuestRegion, file: Option<OwnedFd>) -> Option<Self> {
        let node = NodeId(wire.node);
        let storage: Option<Arc<dyn OverflowRegion>> = match (node == OVERFLOW_NODE, file) {
            (true, Some(file)) => Some(Arc::new(SharedFile::new(file))),
            (false, None) => None,
            _ => return None,
        };
        let peer = Peer {
            node,
            tcp: wire.tcp.parse().ok(),
            verbs: None,
            shm_socket: (!wire.shm_socket.is_empty()).then(|| PathBuf::from(&wire.shm_socket)),
        };
        let id = RegionId { node, index: wire.index };
        let key = AccessKey::from_slice(&wire.key)?;
        Some(GuestRegion { id, epoch: Epoch(wire.epoch), key, peer, storage })
    }
}

/// An answer that refuses a request and says why.
pub fn refusal(errno: rustix::io::Errno) -> GuestAnswer {
    GuestAnswer { errno: errno.raw_os_error() as u32, ..GuestAnswer::default() }
}
