//! Transfers to and from the overflow directory.

use std::io;
use std::pin::pin;
use std::time::Duration;

use farpool_fabric::ArenaBuf;
use futures_util::future::{Either, select};

use super::{Direction, Failure, Landing, SessionCore};
use crate::error::AccessError;
use crate::overflow::{OVERFLOW_NODE, OverflowRegion};
use crate::space::Extent;

/// How long a transfer may take: longer than a busy disk needs. In a direct client, which waits for its own
/// system call, no limit applies.
const TRANSFER_WITHIN: Duration = Duration::from_secs(10);

impl SessionCore {
    pub(super) async fn transfer_overflow(
        &self,
        direction: Direction,
        extent: &Extent,
        storage: &dyn OverflowRegion,
        offset: u64,
        mut buffer: ArenaBuf,
    ) -> (ArenaBuf, Result<(), Failure>) {
        let at = extent.address(offset).offset;
        // If the write is given up, it may still be carried out; if it fails, the place may be bad (O3).
        let mut landing = Landing { extent, may_land: direction == Direction::Write };
        let moved = {
            let transfer = match direction {
                Direction::Read => storage.read(at, &mut buffer),
                Direction::Write => storage.write(at, &buffer),
            };
            match select(transfer, pin!(self.endpoint.sleep(TRANSFER_WITHIN))).await {
                Either::Left((ended, _)) => Some(ended),
                Either::Right(_) => None,
            }
        };
        let reason = match moved {
            Some(Ok(())) => {
                landing.may_land = false;
                return (buffer, Ok(()));
            }
            Some(Err(error)) if error.kind() == io::ErrorKind::NotConnected => {
                landing.may_land = false;
                return (buffer, Err(Failure::Error(AccessError::Short { node: OVERFLOW_NODE })));
            }
            Some(Err(error)) => error.to_string(),
            None => format!("no answer within {} s", TRANSFER_WITHIN.as_secs()),
        };
        storage.log_failure(&reason);
        (buffer, Err(Failure::Error(AccessError::Storage)))
    }
}
