//! `farpool up --detach`: a second process is the pool; the first one passes on what it says until it is ready.
//!
//! The second process ends with the first (see [`tether`](crate::tether)) until it is ready, so that Ctrl-C ends both.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::{set_parent_process_death_signal, setsid};

use crate::output::say;
use crate::tether::{self, Tether};

/// What the user gave, and what the second process is given in its place.
const ASKED: &str = "--detach";
const DONE: &str = "--detached";

/// Whether this is the second process.
#[derive(Debug, clap::Args)]
pub struct Detached {
    #[arg(long = "detached", hide = true, conflicts_with = "detach")]
    is_detached: bool,

    #[command(flatten)]
    tether: Tether,
}

/// Starts the second process, and comes back once it is ready; ends as it does if it ends before.
pub fn start() -> Result<()> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut pool = Command::new(program)
        .args(std::env::args_os().skip(1).filter(|arg| arg != ASKED))
        .arg(DONE)
        .args([tether::OPTION, &std::process::id().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the pool")?;
    let mut is_ready = false;
    // It closes its end once it is ready.
    for line in pool.stdout.take().into_iter().flat_map(|pipe| BufReader::new(pipe).lines()) {
        let line = line.context("cannot hear the pool")?;
        is_ready |= line.starts_with("ready");
        say(line);
    }
    if is_ready {
        return Ok(());
    }
    let status = pool.wait().context("cannot wait for the pool")?;
    // It has complained itself.
    std::process::exit(status.code().unwrap_or(1));
}

impl Detached {
    /// Leaves the terminal's session, whose end would end this process, too.
    pub fn leave_terminal(&self) -> Result<()> {
        if self.is_detached {
            tether::fasten(&self.tether)?;
            setsid().context("cannot leave the terminal's session")?;
        }
        Ok(())
    }

    /// From now on this process outlives the first, and complains to a file.
    pub fn leave_parent(&self, log: &Path) -> Result<()> {
        if !self.is_detached {
            return Ok(());
        }
        let cannot = || format!("cannot write {}", log.display());
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(log).with_context(cannot)?;
        let nowhere = OpenOptions::new().write(true).open("/dev/null").context("cannot open /dev/null")?;
        set_parent_process_death_signal(None)?;
        for (file, stream) in [(&log, libc::STDERR_FILENO), (&nowhere, libc::STDOUT_FILENO)] {
            // SAFETY: both descriptors are open, and no code of this process holds one of the streams' descriptors as its own.
            if unsafe { libc::dup2(file.as_raw_fd(), stream) } < 0 {
                return Err(std::io::Error::last_os_error()).context("cannot leave the terminal");
            }
        }
        Ok(())
    }

    /// What ends the pool.
    pub fn how_to_end(&self) -> String {
        if self.is_detached { format!("kill {}", std::process::id()) } else { "Ctrl-C".to_owned() }
    }
}
