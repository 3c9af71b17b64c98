//! Large buffers, lent to connections for a turn. A connection that keeps nothing between its turns holds no
//! buffer.

use farpool_wire::{MAX_TRANSFER_BYTES, RESPONSE_HEADER_BYTES};

use super::connection::{SEND_AT_BYTES, SMALL_BYTES};

/// Length of a large buffer. It holds answers up to the length at which they are sent, plus the answer that
/// exceeds it. Received bytes need less.
pub(super) const BUFFER_BYTES: usize = SEND_AT_BYTES + RESPONSE_HEADER_BYTES + MAX_TRANSFER_BYTES;
/// Unused large buffers that are kept for reuse: those of one turn, and as many again for connections that
/// end their turn with something left.
pub(super) const SPARE_BUFFERS: usize = 4;

/// Unused large buffers. The most recently used one, which is still in the cache, is used next.
#[derive(Default)]
pub(super) struct SpareBuffers {
    buffers: Vec<Vec<u8>>,
}

impl SpareBuffers {
    /// Moves a buffer's contents to a large buffer.
    pub(super) fn widen(&mut self, buffer: &mut Vec<u8>) {
        if buffer.capacity() < BUFFER_BYTES {
            let mut large = self.buffers.pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES));
            large.extend_from_slice(buffer);
            *buffer = large;
        }
    }

    /// Moves a buffer's contents from `start` on to a buffer of just their size, unless they exceed
    /// [`SMALL_BYTES`]. Returns where they start now.
    pub(super) fn narrow(&mut self, buffer: &mut Vec<u8>, start: usize) -> usize {
        if buffer.len() - start > SMALL_BYTES {
            return start;
        }
        let mut large = std::mem::take(buffer);
        if start < large.len() {
            *buffer = large[start..].to_vec();
        }
        // A buffer that grew held an answer longer than its client had room for; its size is not worth
        // keeping.
        if large.capacity() == BUFFER_BYTES && self.buffers.len() < SPARE_BUFFERS {
            large.clear();
            self.buffers.push(large);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_keeps_what_it_held_and_no_more_room_than_that() {
        let mut spare = SpareBuffers::default();
        let mut buffer = vec![1, 2, 3];
        spare.widen(&mut buffer);
        assert!(buffer.capacity() >= BUFFER_BYTES && buffer == [1, 2, 3]);
        assert_eq!(spare.narrow(&mut buffer, 1), 0);
        assert!(buffer.capacity() < 64 && buffer == [2, 3]);
        spare.narrow(&mut buffer, 2);
        assert_eq!(buffer.capacity(), 0);
    }

    #[test]
    fn large_contents_are_not_copied() {
        let mut spare = SpareBuffers::default();
        let mut buffer = Vec::new();
        spare.widen(&mut buffer);
        buffer.resize(SMALL_BYTES + 2, 7);
        let place = buffer.as_ptr();
        assert_eq!(spare.narrow(&mut buffer, 1), 1);
        assert_eq!(buffer.as_ptr(), place);
    }

    #[test]
    fn few_buffers_are_kept_for_later() {
        let mut spare = SpareBuffers::default();
        let mut used = vec![Vec::new(); 3 * SPARE_BUFFERS];
        used.iter_mut().for_each(|buffer| spare.widen(buffer));
        used.iter_mut().for_each(|buffer| assert_eq!(spare.narrow(buffer, 0), 0));
        assert_eq!(spare.buffers.len(), SPARE_BUFFERS);
    }
}
