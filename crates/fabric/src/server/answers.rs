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

/// Requests are not looked at while so many descriptors wait. Room for those of a few attachments: they are
/// open in this process until they are sent.
const MAX_WAITING_DESCRIPTORS: usize = 8;

/// What waits to be sent.
#[derive(Default)]
pub(super) struct Answers {
    /// Answers are appended here; `bytes[..sent]` has gone.
    pub(super) bytes: Vec<u8>,
    sent: usize,
    /// Descriptors to go out with the byte at this place of `bytes`.
    descriptors: VecDeque<(usize, Vec<OwnedFd>)>,
}

impl Answers {
    /// How much waits.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Descriptors go out with the last byte appended.
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

    /// Descriptors that wait.
    pub(super) fn waiting_descriptors(&self) -> usize {
        self.descriptors.iter().map(|(_, descriptors)| descriptors.len()).sum()
    }

    /// Sends what can be sent; false when the peer is gone.
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

    /// Sends the one byte that the next descriptors go with.
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

    /// For a turn, in which there must be room without asking.
    pub(super) fn widen(&mut self, spare: &mut SpareBuffers) {
        spare.widen(&mut self.bytes);
    }

    /// After a turn: keeps a buffer of the size of what waits, unless that is much.
    pub(super) fn narrow(&mut self, spare: &mut SpareBuffers) {
        let sent = spare.narrow(&mut self.bytes, self.sent);
        for (place, _) in &mut self.descriptors {
            *place -= self.sent - sent;
        }
        self.sent = sent;
    }
}
