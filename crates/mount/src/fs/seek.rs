//! `lseek` for data and holes. The kernel does all other seeks by itself.

use std::time::Instant;

use fuser::{Errno, INodeNo, ReplyLseek};

use super::{FarFs, Outcome, Repeating};
use crate::body::Body;
use crate::errno::Failure;

/// What an `lseek` searches for.
#[derive(Clone, Copy)]
enum Wanted {
    Data,
    Hole,
}

impl FarFs {
    /// Answers `SEEK_DATA` and `SEEK_HOLE`. While a handle is open for writing, the kernel may hold data that
    /// the daemon has not seen; then the kernel is asked for it first.
    pub(super) fn seek(&self, node: INodeNo, handle: u64, offset: i64, whence: i32, reply: ReplyLseek) {
        // ENOSYS tells the kernel not to ask again: it then shows each file as data from start to end.
        let Some(flusher) = &self.flusher else { return reply.error(Errno::ENOSYS) };
        let (body, wanted) = match self.opened(handle).and_then(|body| Ok((body, wanted(whence)?))) {
            Ok(found) => found,
            Err(Failure(errno)) => return reply.error(errno),
        };
        if !body.has_writers() {
            return send(&body, offset, wanted, reply);
        }
        // If `answer` is dropped uncalled, its reply says EIO.
        let answer = move || send(&body, offset, wanted, reply);
        if flusher.flush(node, offset.max(0), answer).is_err()
            && let Some(left_out) = self.warnings.occurs(Repeating::Seeks, Instant::now())
        {
            tracing::warn!(left_out, "too many processes search for data and holes at the same time");
        }
    }
}

fn wanted(whence: i32) -> Outcome<Wanted> {
    match whence {
        libc::SEEK_DATA => Ok(Wanted::Data),
        libc::SEEK_HOLE => Ok(Wanted::Hole),
        _ => Err(Errno::EINVAL.into()),
    }
}

fn send(body: &Body, offset: i64, wanted: Wanted, reply: ReplyLseek) {
    let found = u64::try_from(offset).ok().and_then(|offset| match wanted {
        Wanted::Data => body.far.seek_data(offset),
        Wanted::Hole => body.far.seek_hole(offset),
    });
    match found.and_then(|at| i64::try_from(at).ok()) {
        Some(at) => reply.offset(at),
        None => reply.error(Errno::ENXIO),
    }
}
