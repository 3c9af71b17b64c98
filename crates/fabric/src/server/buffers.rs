//! Large buffers, lent to connections for a turn: one that keeps nothing between its turns holds no memory.

use farpool_wire::{MAX_TRANSFER_BYTES, RESPONSE_HEADER_BYTES};

use super::connection::{SEND_AT_BYTES, SMALL_BYTES};

/// Length of a large buffer: for answers up to where they are sent and the one that passes that, and for what
/// is received, which is less.
pub(super) const BUFFER_BYTES: usize = SEND_AT_BYTES + RESPONSE_HEADER_BYTES + MAX_TRANSFER_BYTES;
/// Large buffers that nobody uses and that are not given back to the system: those of one turn, and as many
/// again for connections that end their turn with something left.
pub(super) const SPARE_BUFFERS: usize = 4;

/// Large buffers that nobody uses. The one used last, which is in the cache, is used next.
#[derive(Default)]
pub(super) struct SpareBuffers {
    buffers: Vec<Vec<u8>>,
}

impl SpareBuffers {
    /// Moves what a buffer holds to a large one.
    pub(super) fn widen(&mut self, buffer: &mut Vec<u8>) {
        if buffer.capacity() < BUFFER_BYTES {
            let mut large = self.buffers.pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES));
            large.extend_from_slice(buffer);
            *buffer = large;
        }
    }

    /// Moves what a buffer holds from `start` on to one of its size, unless it is much. Returns where it
    /// starts now.
    pub(super) fn narrow(&mut self, buffer: &mut Vec<u8>, start: usize) -> usize {
        if buffer.len() - start > SMALL_BYTES {
            return start;
        }
        let mut large = std::mem::take(buffer);
        if start < large.len() {
            *buffer = large[start..].to_vec();
        }
        // One that grew was too short for an answer that its caller had no room for: not worth keeping.
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
    fn what_is_much_is_not_copied() {
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
