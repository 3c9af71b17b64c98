//! A child of `farpool up` ends with it, however that ends.
//!
//! The kernel kills it (`PR_SET_PDEATHSIG`) once its parent is gone. It asks for that itself, so that no code
//! runs between fork and exec; for the moment before, it looks who its parent is.

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// The option that `up` gives its children.
pub const OPTION: &str = "--end-with";

/// Ties a process to its parent.
#[derive(Debug, clap::Args)]
pub struct Tether {
    /// Process id of the parent, without which this process ends
    #[arg(long = "end-with", value_name = "PID", hide = true)]
    parent: Option<i32>,
}

/// Takes effect for the rest of the process's life. Call it on the main thread, before anything else.
pub fn fasten(tether: &Tether) -> Result<()> {
    let Some(parent) = tether.parent else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().map(Pid::as_raw_pid) != Some(parent) {
        bail!("process {parent}, which started this one, has ended");
    }
    Ok(())
}
