//! Opens an overflow directory on a thread of its own, with a timeout: its file system may hang.

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
const OPEN_TIMEOUT: Duration = LOCK_PATIENCE.saturating_add(Duration::from_secs(3));

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
        Self::spawn(dir, move || Directory::open(&path, limit_bytes, kept.as_ref()))
    }

    /// Runs `open` on a thread.
    fn spawn(
        dir: PathBuf,
        open: impl FnOnce() -> Result<Directory, OverflowError> + Send + 'static,
    ) -> Result<Opening, OverflowError> {
        let give_up_at = Instant::now() + OPEN_TIMEOUT;
        let (done, opened) = sync_channel(1);
        // After a timeout nobody receives: the send fails and drops the directory, which releases its lock.
        let work = move || drop(done.send(open()));
        match thread::Builder::new().name("overflow-open".into()).spawn(work) {
            Ok(_) => Ok(Opening { dir, opened, give_up_at }),
            Err(reason) => Err(OverflowError::Unusable { dir, reason }),
        }
    }

    /// Waits until the directory is open, at most [`OPEN_TIMEOUT`] from the start.
    pub(crate) fn wait(self) -> Result<Directory, OverflowError> {
        let remaining = self.give_up_at.saturating_duration_since(Instant::now());
        self.opened.recv_timeout(remaining).unwrap_or_else(|error| {
            let reason = match error {
                RecvTimeoutError::Timeout => io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("its file system did not answer within {} s", OPEN_TIMEOUT.as_secs()),
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
        let mut opening = Opening::spawn("/spill".into(), move || {
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
    fn wait_returns_what_opening_returned() {
        let opening =
            Opening::spawn("/spill".into(), || Err(OverflowError::InMemory { dir: "/spill".into() }));
        assert!(matches!(opening.unwrap().wait(), Err(OverflowError::InMemory { .. })));
    }

    #[test]
    fn a_panic_while_opening_is_an_error() {
        let opening = Opening::spawn("/spill".into(), || panic!("the opener ends early"));
        assert!(opening.unwrap().wait().err().unwrap().to_string().contains("panicked"));
    }
}
