//! SIGINT, SIGTERM and SIGHUP as one request to stop.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::notify;

/// Receives signals from its creation on, so that none is lost before the process waits for one.
pub struct Shutdown {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Shutdown {
    /// Starts to listen. Call it within a runtime.
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
