//! A flag that requests a stop; every wait checks it.
//!
//! Ctrl-C must not end the process at once: mounts, loop devices and control groups would be left behind. So
//! a signal only raises this flag. The current wait sees it and returns an error, and guards clean up on the
//! way out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

/// Raised once, never lowered; clones share it.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that SIGINT, SIGTERM and SIGHUP raise. A process can have only one.
    pub fn on_signals() -> Result<Self> {
        let flag = Self::default();
        let raised = flag.clone();
        ctrlc::set_handler(move || raised.raise()).context("cannot install the handler of Ctrl-C")?;
        Ok(flag)
    }

    /// The flag itself, for code that takes an `AtomicBool`.
    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }

    /// Raises the flag, which all clones share.
    pub fn raise(&self) {
        // Relaxed: the flag carries no data, so there is no access it would have to be paired with.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed) // Relaxed: see `raise`
    }

    /// Returns an error if the flag is raised; for loops that never wait.
    pub fn check(&self) -> Result<()> {
        check_stop(&self.0)
    }
}

/// Returns an error once `stop` is set.
pub fn check_stop(stop: &AtomicBool) -> Result<()> {
    // Relaxed: see `StopFlag::raise`.
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted: stopped and cleaned up as asked");
    }
    Ok(())
}
