//! `farpool up --detach`: a second process runs the pool. The first one passes on its output until the pool
//! is ready.
//!
//! Until the pool is ready, the second process ends with the first (see [`tether`](crate::tether)), so Ctrl-C
//! ends both.

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

/// The option that the user gives, and the one that the second process gets in its place.
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

/// Starts the second process and returns once the pool is ready. If that process ends before, this one exits
/// with its status.
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
    // The second process closes its end of the pipe once the pool is ready.
    for line in pool.stdout.take().into_iter().flat_map(|pipe| BufReader::new(pipe).lines()) {
        let line = line.context("cannot read what the pool says")?;
        is_ready |= line.starts_with("ready");
        say(line);
    }
    if is_ready {
        return Ok(());
    }
    let status = pool.wait().context("cannot wait for the pool")?;
    // The second process has printed the error.
    std::process::exit(status.code().unwrap_or(1));
}

impl Detached {
    /// Leaves the session of the terminal: closing the terminal would otherwise end this process.
    pub fn leave_terminal(&self) -> Result<()> {
        if self.is_detached {
            tether::fasten(&self.tether)?;
            setsid().context("cannot leave the terminal's session")?;
        }
        Ok(())
    }

    /// From now on this process outlives the first, and its standard error is a file.
    pub fn leave_parent(&self, log: &Path) -> Result<()> {
        if !self.is_detached {
            return Ok(());
        }
        let cannot = || format!("cannot write {}", log.display());
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(log).with_context(cannot)?;
        let nowhere = OpenOptions::new().write(true).open("/dev/null").context("cannot open /dev/null")?;
        set_parent_process_death_signal(None)?;
        for (file, stream) in [(&log, libc::STDERR_FILENO), (&nowhere, libc::STDOUT_FILENO)] {
            // SAFETY: the call takes two numbers and no memory.
            // - In bounds: `file` is open for as long as it is borrowed, and the standard streams are always
            //   open.
            // - Exclusive: no code of this process owns a standard stream's descriptor, so none is closed
            //   behind its owner.
            if unsafe { libc::dup2(file.as_raw_fd(), stream) } < 0 {
                return Err(std::io::Error::last_os_error()).context("cannot leave the terminal");
            }
        }
        Ok(())
    }

    /// What a user does to end the pool.
    pub fn how_to_end(&self) -> String {
        if self.is_detached { format!("kill {}", std::process::id()) } else { "Ctrl-C".to_owned() }
    }
}
