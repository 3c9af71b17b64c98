//! Answers of one connection that wait to be sent, and the descriptors that go with them.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::buffers::SpareBuffers;
use super::connection::SEND_AT_BYTES;

/// Most descriptors that go with one byte.
const MAX_DESCRIPTORS: usize = 2;

/// While this many descriptors wait, no further request is served: they stay open in this process until they
/// are sent. Enough for those of a few attachments.
const MAX_WAITING_DESCRIPTORS: usize = 8;

/// What waits to be sent.
#[derive(Default)]
pub(super) struct Answers {
    /// Answers are appended here; `bytes[..sent]` has been sent.
    pub(super) bytes: Vec<u8>,
    sent: usize,
    /// Descriptors to send with the byte at this place of `bytes`.
    descriptors: VecDeque<(usize, Vec<OwnedFd>)>,
}

impl Answers {
    /// How many bytes wait.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Sends descriptors along with the byte appended last.
    pub(super) fn attach_descriptors(&mut self, descriptors: Vec<OwnedFd>) {
        debug_assert!(descriptors.len() <= MAX_DESCRIPTORS);
        self.descriptors.push_back((self.bytes.len() - 1, descriptors));
    }

    /// Whether another request may be carried out before something is sent.
    #[inline]
    pub(super) fn have_room(&self) -> bool {
        self.waiting_bytes() < SEND_AT_BYTES
            && (self.descriptors.is_empty() || self.waiting_descriptors() < MAX_WAITING_DESCRIPTORS)
    }

    /// How many descriptors wait.
    pub(super) fn waiting_descriptors(&self) -> usize {
        self.descriptors.iter().map(|(_, descriptors)| descriptors.len()).sum()
    }

    /// Sends as much as the socket takes; false when the peer is gone.
    pub(super) fn send(&mut self, stream: impl AsFd) -> bool {
        while self.waiting_bytes() > 0 {
            let stop = self.descriptors.front().map_or(self.bytes.len(), |&(place, _)| place);
            let result = if self.sent < stop {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                rustix::net::send(&stream, &self.bytes[self.sent..stop], flags)
            } else {
                self.send_with_descriptors(&stream)
            };
            match result {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        self.bytes.clear();
        self.sent = 0;
        true
    }

    /// Sends the byte that carries the next descriptors.
    fn send_with_descriptors(&mut self, stream: impl AsFd) -> Result<usize, Errno> {
        let (place, descriptors) = self.descriptors.front().expect("the caller looked");
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let byte = [IoSlice::new(&self.bytes[*place..place + 1])];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::net::sendmsg(stream, &byte, &mut ancillary, flags)?;
        self.descriptors.pop_front();
        Ok(sent)
    }

    /// Moves the answers to a large buffer for a turn, in which there must always be room.
    pub(super) fn widen(&mut self, spare: &mut SpareBuffers) {
        spare.widen(&mut self.bytes);
    }

    /// After a turn, moves unsent answers to a buffer of just their size, unless they are large.
    pub(super) fn narrow(&mut self, spare: &mut SpareBuffers) {
        let sent = spare.narrow(&mut self.bytes, self.sent);
        for (place, _) in &mut self.descriptors {
            *place -= self.sent - sent;
        }
        self.sent = sent;
    }
}
