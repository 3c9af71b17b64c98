//! Ties a child process of `farpool up` to its parent: it ends when the parent ends, for whatever reason.
//!
//! The kernel kills the child (`PR_SET_PDEATHSIG`) once the thread that started it has ended. So the parent
//! must start it on a thread that lives as long as the parent does. The child requests the signal itself, so
//! that the parent needs no code between fork and exec. It then checks that the parent did not end before.

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// The option that `up` gives its children.
pub const OPTION: &str = "--end-with";

/// Ties a process to its parent.
#[derive(Debug, clap::Args)]
pub struct Tether {
    /// Process id of the parent; this process ends when the parent ends
    #[arg(long = "end-with", value_name = "PID", hide = true)]
    parent: Option<i32>,
}

/// Makes this process end with its parent. Call it on the main thread, before anything else.
pub fn fasten(tether: &Tether) -> Result<()> {
    let Some(parent) = tether.parent else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().map(Pid::as_raw_pid) != Some(parent) {
        bail!("process {parent}, which started this one, has ended");
    }
    Ok(())
}
