//! `copy_file_range` between files of the mount, without the bytes passing through the kernel. Before the
//! request the kernel writes back what it holds of the source; it drops what it holds of the target.

use std::time::SystemTime;

use farpool_wire::MAX_TRANSFER_BYTES;
use fuser::Errno;

use super::{FarFs, Outcome};
use crate::body::Body;
use crate::worker::with_session;

/// Most bytes of one call; the caller calls again for the rest. They are copied within milliseconds, so that
/// no other request waits long.
const MAX_COPY_BYTES: u64 = 8 << 20;

impl FarFs {
    /// Copies up to `length` bytes from an offset of one open file to an offset of another. Copies fewer at
    /// the end of the source. Returns an error only if nothing was copied.
    pub(super) fn copy_range(&self, from: (u64, u64), to: (u64, u64), length: u64) -> Outcome<u32> {
        let (source, target) = (self.opened(from.0)?, self.opened(to.0)?);
        let mut room = Vec::with_capacity(MAX_TRANSFER_BYTES);
        let mut copied = 0;
        let most = length.min(MAX_COPY_BYTES);
        while copied < most {
            let offset = |start: u64| start.checked_add(copied).ok_or(Errno::EFBIG);
            let wished = (most - copied).min(MAX_TRANSFER_BYTES as u64) as usize;
            let (read_at, write_at) = (offset(from.1)?, offset(to.1)?);
            match self.copy_part(&source, read_at, &target, write_at, wished, &mut room) {
                Ok(0) => break,
                Ok(bytes) => copied += bytes as u64,
                Err(failure) if copied == 0 => return Err(failure),
                Err(_) => break, // the next call gets the error again
            }
        }
        if copied > 0 {
            target.mark_written(SystemTime::now());
        }
        Ok(copied as u32)
    }

    fn copy_part(
        &self,
        source: &Body,
        read_at: u64,
        target: &Body,
        write_at: u64,
        length: usize,
        room: &mut Vec<u8>,
    ) -> Outcome<usize> {
        with_session(&self.store, |session| {
            room.clear();
            // Copied out, because they lie in the session's arena, which `write` needs.
            room.extend_from_slice(&source.far.read(session, read_at, length)?);
            if !room.is_empty() {
                target.far.write(session, write_at, room)?;
            }
            Ok(room.len())
        })
    }
}
