//! Transfers to and from the overflow directory.

use std::pin::pin;
use std::time::Duration;

use farpool_fabric::ArenaBuf;
use futures_util::future::{Either, select};

use super::{Direction, Failure, SessionCore};
use crate::error::AccessError;
use crate::overflow::OverflowRegion;
use crate::space::Extent;

/// How long a transfer may take: longer than a busy disk needs.
const TRANSFER_WITHIN: Duration = Duration::from_secs(10);

/// A write in progress. If it is given up, it may still be carried out, so the extent is in doubt. If it
/// fails, the place may be bad: the doubt keeps others from getting it.
struct Landing<'a> {
    extent: &'a Extent,
    may_land: bool,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if self.may_land {
            self.extent.doubt();
        }
    }
}

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
            Some(Err(error)) => error.to_string(),
            None => format!("no answer within {} s", TRANSFER_WITHIN.as_secs()),
        };
        storage.log_failure(&reason);
        (buffer, Err(Failure::Error(AccessError::Storage)))
    }
}
