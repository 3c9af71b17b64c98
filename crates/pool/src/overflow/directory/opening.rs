//! Opens a directory beside other work, and gives up after a while: its disk may hang.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use farpool_keep::LOCK_PATIENCE;

use super::{Directory, KeptBy};
use crate::error::OverflowError;
use crate::pool::OverflowConfig;

/// How long opening may take: longer than the wait for the lock of another process.
const OPEN_WITHIN: Duration = LOCK_PATIENCE.saturating_add(Duration::from_secs(3));

/// A directory that a thread is opening.
pub(crate) struct Opening {
    dir: PathBuf,
    opened: Receiver<Result<Directory, OverflowError>>,
    give_up_at: Instant,
}

impl Opening {
    /// Starts to open a directory. `kept`: as for [`Directory::open`].
    pub(crate) fn start(config: &OverflowConfig, kept: Option<KeptBy>) -> Result<Opening, OverflowError> {
        let OverflowConfig { dir, limit_bytes } = config.clone();
        let path = dir.clone();
        Self::of(dir, move || Directory::open(&path, limit_bytes, kept.as_ref()))
    }

    fn of(
        dir: PathBuf,
        open: impl FnOnce() -> Result<Directory, OverflowError> + Send + 'static,
    ) -> Result<Opening, OverflowError> {
        let give_up_at = Instant::now() + OPEN_WITHIN;
        let (done, opened) = sync_channel(1);
        // If nobody waits any more, the directory is closed, which ends its lock.
        let work = move || drop(done.send(open()));
        match thread::Builder::new().name("overflow-open".into()).spawn(work) {
            Ok(_) => Ok(Opening { dir, opened, give_up_at }),
            Err(reason) => Err(OverflowError::Unusable { dir, reason }),
        }
    }

    /// Waits until the directory is open, at most [`OPEN_WITHIN`] from the start.
    pub(crate) fn wait(self) -> Result<Directory, OverflowError> {
        let patience = self.give_up_at.saturating_duration_since(Instant::now());
        self.opened.recv_timeout(patience).unwrap_or_else(|error| {
            let reason = match error {
                RecvTimeoutError::Timeout => io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("its file system did not answer within {} s", OPEN_WITHIN.as_secs()),
                ),
                RecvTimeoutError::Disconnected => io::Error::other("the thread that opened it panicked"),
            };
            Err(OverflowError::Unusable { dir: self.dir, reason })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_whose_file_system_hangs_is_given_up() {
        let (release, hang) = sync_channel::<()>(0);
        let mut opening = Opening::of("/spill".into(), move || {
            let _ended = hang.recv();
            Err(OverflowError::InMemory { dir: "/spill".into() })
        })
        .unwrap();
        opening.give_up_at = Instant::now() + Duration::from_millis(10);
        let refused = opening.wait().err().unwrap().to_string();
        assert_eq!(refused, "/spill cannot be used for overflow: its file system did not answer within 6 s");
        drop(release);
    }

    #[test]
    fn what_opening_found_is_what_waiting_returns() {
        let opening = Opening::of("/spill".into(), || Err(OverflowError::InMemory { dir: "/spill".into() }));
        assert!(matches!(opening.unwrap().wait(), Err(OverflowError::InMemory { .. })));
        let opening = Opening::of("/spill".into(), || panic!("the opener ends early"));
        assert!(opening.unwrap().wait().err().unwrap().to_string().contains("panicked"));
    }
}
