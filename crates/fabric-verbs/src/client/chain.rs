//! A chain of work requests, which one doorbell hands to the card.

use std::ptr::null_mut;

use crate::ffi;

/// Longest run of work requests of which only the last is signalled. A batch of 16 costs one completion; a
/// longer chain reports in steps, so that its first buffers are not held until its end.
pub(super) const UNSIGNALLED_RUN: usize = 16;
/// Pieces of local memory per work request: a header and a payload.
const PIECES: usize = 2;

/// A chain under construction. Pieces and successors are linked when the chain is complete.
pub(super) struct Chain {
    requests: Vec<ffi::SendWr>,
    pieces: Vec<[ffi::Sge; PIECES]>,
}

const NO_PIECE: ffi::Sge = ffi::Sge { addr: 0, length: 0, lkey: 0 };

impl Chain {
    pub(super) fn with_capacity(requests: usize) -> Self {
        Chain { requests: Vec::with_capacity(requests), pieces: Vec::with_capacity(requests) }
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.pieces.clear();
    }

    /// Appends a request on up to two pieces of local memory; empty ones are left out.
    pub(super) fn push(
        &mut self,
        wr_id: u64,
        opcode: u32,
        send_flags: u32,
        remote: ffi::Remote,
        pieces: &[ffi::Sge],
    ) {
        let mut kept = [NO_PIECE; PIECES];
        let mut count = 0;
        for piece in pieces.iter().filter(|piece| piece.length > 0) {
            kept[count] = *piece;
            count += 1;
        }
        self.pieces.push(kept);
        self.requests.push(ffi::SendWr {
            wr_id,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: count as i32,
            opcode,
            send_flags,
            imm_data: 0,
            wr: remote,
            qp_type: 0,
            bind_mw: ffi::BindMw {
                mw: null_mut(),
                rkey: 0,
                bind_info: ffi::MwBindInfo { mr: null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
            },
        });
    }

    /// Links the chain and marks the requests to be signalled. The result is valid until the chain is
    /// changed.
    pub(super) fn link(&mut self) -> *mut ffi::SendWr {
        let count = self.requests.len();
        let (first, pieces) = (self.requests.as_mut_ptr(), self.pieces.as_mut_ptr());
        for place in 0..count {
            // SAFETY: in bounds: `place` is less than `count`, the length of both vectors. Exclusive: `self`
            // is borrowed mutably, and the reference ends with this iteration. Alive: the vectors are not
            // changed until the chain has been used.
            let (request, next) = unsafe {
                let request = &mut *first.add(place);
                request.sg_list = pieces.add(place).cast();
                (request, first.wrapping_add(place + 1))
            };
            let last = place + 1 == count;
            request.next = if last { null_mut() } else { next };
            if last || (place + 1).is_multiple_of(UNSIGNALLED_RUN) {
                request.send_flags |= ffi::SEND_SIGNALED;
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(length: usize) -> Chain {
        let mut chain = Chain::with_capacity(length);
        let remote = || ffi::Remote { rdma: ffi::RemotePlace { remote_addr: 0, rkey: 0 } };
        let piece = ffi::Sge { addr: 1, length: 2, lkey: 3 };
        (0..length).for_each(|id| chain.push(id as u64, ffi::WR_RDMA_READ, 0, remote(), &[piece]));
        chain
    }

    fn signalled(chain: &mut Chain) -> Vec<u64> {
        let mut found = Vec::new();
        let mut next = chain.link();
        while !next.is_null() {
            // SAFETY: `link` has just linked the requests, and the chain is alive.
            let request = unsafe { &*next };
            if request.send_flags & ffi::SEND_SIGNALED != 0 {
                found.push(request.wr_id);
            }
            next = request.next;
        }
        found
    }

    #[test]
    fn a_batch_of_sixteen_reports_once_and_a_longer_chain_in_steps() {
        assert_eq!(signalled(&mut chain(1)), [0]);
        assert_eq!(signalled(&mut chain(16)), [15]);
        assert_eq!(signalled(&mut chain(17)), [15, 16]);
        assert_eq!(signalled(&mut chain(40)), [15, 31, 39]);
    }

    #[test]
    fn empty_pieces_are_left_out() {
        let mut chain = Chain::with_capacity(1);
        let remote = ffi::Remote { rdma: ffi::RemotePlace { remote_addr: 0, rkey: 0 } };
        chain.push(0, ffi::WR_SEND, 0, remote, &[NO_PIECE, ffi::Sge { addr: 5, length: 6, lkey: 7 }]);
        // SAFETY: `link` has just linked the chain's one request, and the chain is alive.
        let request = unsafe { &*chain.link() };
        assert_eq!(request.num_sge, 1);
        // SAFETY: the request has one piece.
        assert_eq!(unsafe { (*request.sg_list).addr }, 5);
    }
}
