//! The wish to stop, as a flag that every wait of the demo looks at.
//!
//! Ctrl-C must not end the process where it stands: mounts, loop devices and control groups would stay
//! behind. So a signal only raises this flag; whoever waits sees it, returns an error, and the guards on the
//! way out clean up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

/// Raised once, never lowered; clones share it.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that SIGINT, SIGTERM and SIGHUP raise. A process can have one.
    pub fn on_signals() -> Result<Self> {
        let flag = Self::default();
        let raised = flag.clone();
        ctrlc::set_handler(move || raised.raise()).context("cannot install the handler of Ctrl-C")?;
        Ok(flag)
    }

    /// The flag itself, for those who know no more than that.
    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }

    /// Asks everybody who shares the flag to stop.
    pub fn raise(&self) {
        // Relaxed: the flag carries no data, so there is no access it would have to be paired with.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked to stop.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed) // Relaxed: see `raise`
    }

    /// An error once the flag is raised; for loops that work and never wait.
    pub fn check(&self) -> Result<()> {
        if self.is_raised() {
            bail!("interrupted: stopped and cleaned up as asked");
        }
        Ok(())
    }
}
