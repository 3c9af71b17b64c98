//! SIGINT, SIGTERM and SIGHUP as one wish to stop.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::notify;

/// Hears signals from the moment it is made, so that none is lost before somebody waits.
pub struct Shutdown {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Shutdown {
    /// Starts to listen; within a runtime.
    pub fn listen() -> Result<Self> {
        let hear = |kind| signal(kind).context("cannot install signal handlers");
        Ok(Shutdown {
            interrupt: hear(SignalKind::interrupt())?,
            terminate: hear(SignalKind::terminate())?,
            hang_up: hear(SignalKind::hangup())?,
        })
    }

    /// Returns once the process is asked to stop.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
        notify::stopping();
    }
}
