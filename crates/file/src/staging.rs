//! Buffers from a session's memory for transfers, and the error if there is none.

use std::time::Duration;

use farpool_fabric::ArenaBuf;
use farpool_pool::SessionCore;
use farpool_wire::MAX_TRANSFER_BYTES;

use crate::error::FileError;

/// More than any operation takes at a time: the largest transfer, extended to whole blocks at both ends.
const MAX_STAGED_BYTES: usize = 2 * MAX_TRANSFER_BYTES;
/// How long a read waits for buffers of abandoned reads: longer than the deadline of an operation.
const ROOM_PATIENCE: Duration = Duration::from_secs(6);
const ROOM_INTERVAL: Duration = Duration::from_millis(1);

/// A buffer, if there is room for it now.
pub(crate) fn staging(core: &SessionCore, bytes: usize) -> Result<ArenaBuf, FileError> {
    core.buffer(bytes)
        .map_err(|_| if bytes > MAX_STAGED_BYTES { FileError::TooLong } else { FileError::NoStaging })
}

/// A buffer, once abandoned reads have left room for it.
pub(crate) async fn staging_in_time(core: &SessionCore, bytes: usize) -> Result<ArenaBuf, FileError> {
    let give_up_at = core.endpoint().now_ns() + ROOM_PATIENCE.as_nanos() as u64;
    loop {
        match staging(core, bytes) {
            Err(FileError::NoStaging) if core.endpoint().now_ns() <= give_up_at => {
                core.endpoint().sleep(ROOM_INTERVAL).await;
            }
            given => return given,
        }
    }
}
