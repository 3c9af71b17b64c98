//! Child processes that never outlive a measurement, and commands that always end.
//!
//! C1. Dropping a [`Child`] ends it: by its own signal, and by SIGKILL after a deadline. Signals go to the
//!     process id, which the kernel does not reuse until we reap the child, never to a name.
//! C2. Each child has a process group of its own. So Ctrl-C reaches only us, and we end our children in the
//!     right order.
//! C3. A child ends when we end, even if we are killed. [`Child::of_this_program`] passes `--end-with`; all
//!     others go through `setpriv --pdeathsig` ([`Launch`], [`tied`], [`tied_politely`]), which needs no
//!     `unsafe`. Callers of [`Child::start`], [`Child::ready`] and [`Child::talking`] pass a tied command.
//!     Start children on the main thread, since the kernel ties them to the thread that starts them.

mod command;
mod talk;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::progress::warn;
pub use command::{Launch, joining, output, run, run_as, tied, tied_politely};
pub(crate) use talk::READY;
pub use talk::Talk;

/// How often a wait polls: short compared with every wait, long compared with the cost of a poll.
const POLL: Duration = Duration::from_millis(10);
/// A node touches all its memory before it is ready: about a second per gigabyte, more on a busy machine.
const READY_DEADLINE: Duration = Duration::from_secs(100);
/// From the stop signal to SIGKILL: PostgreSQL writes a checkpoint, a mount flushes and unmounts, a node
/// frees its memory.
const END_DEADLINE: Duration = Duration::from_secs(30);
/// From SIGKILL until the wait ends with an error: only a process stuck in the kernel needs that long.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// Last lines of a log that an error message quotes, and characters of each.
const QUOTED_LINES: usize = 3;
const QUOTED_CHARS: usize = 160;

/// A running child; see the rules in this module's documentation.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
    /// Where its output goes, if we are to read it.
    log: Option<PathBuf>,
    stop_signal: Signal,
    ended: bool,
}

impl Child {
    /// Starts our `program` with `args`; it ends when this thread ends. Waits until it prints `ready`, and
    /// returns the rest of that line. Its standard error goes to ours.
    pub fn of_this_program(
        program: &Path,
        name: impl Into<String>,
        args: impl IntoIterator<Item = OsString>,
        input: Stdio,
    ) -> Result<(Self, String)> {
        let mut command = Command::new(program);
        command.args(args).arg("--end-with").arg(std::process::id().to_string()).stdin(input);
        Self::ready(name, command)
    }

    /// Starts a command without waiting for its output.
    pub fn start(name: impl Into<String>, command: Command) -> Result<Self> {
        let name = name.into();
        Self::spawn(&name, command, Signal::TERM).with_context(|| format!("cannot start {name}"))
    }

    /// Starts a program with standard output and error going to the file `log`, which error messages quote.
    pub fn logged(launch: &Launch<'_>, log: &Path) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = launch.command();
        command.current_dir("/").stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = Self::spawn(launch.name, command, launch.stop_signal);
        let mut child =
            child.with_context(|| format!("cannot start {} ({})", launch.name, launch.program.display()))?;
        child.log = Some(log.into());
        Ok(child)
    }

    fn spawn(name: &str, mut command: Command, stop_signal: Signal) -> io::Result<Self> {
        let process = command.process_group(0).spawn()?;
        Ok(Child { name: name.into(), process, log: None, stop_signal, ended: false })
    }

    /// Starts a command that prints `ready`, as ours do. Returns the rest of that line.
    pub fn ready(name: impl Into<String>, command: Command) -> Result<(Self, String)> {
        let (child, rest, _) = Self::start_heard(name, command, READY_DEADLINE)?;
        Ok((child, rest))
    }

    /// Polls until `is_ready` returns true; an error if it fails, the child ends first or the deadline
    /// passes.
    pub fn wait_until(
        &mut self,
        deadline: Duration,
        mut is_ready: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()> {
        let started = Instant::now();
        while !is_ready(self)? {
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended before it was ready ({status}){}", self.name, self.last_words());
            }
            if started.elapsed() > deadline {
                let seconds = deadline.as_secs();
                bail!("{} was not ready within {seconds} s{}", self.name, self.last_words());
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Whether a line of its log starts with `word`. Output is bytes: a log may hold anything.
    pub fn has_said(&self, word: &str) -> bool {
        let said = self.log.as_ref().and_then(|log| std::fs::read(log).ok());
        let said = said.unwrap_or_default(); // without a log it has said nothing yet
        said.split(|&byte| byte == b'\n').any(|line| line.starts_with(word.as_bytes()))
    }

    /// The last lines of its log after a colon, for an error message; nothing if it has no log.
    pub fn last_words(&self) -> String {
        let Some(log) = &self.log else { return String::new() };
        let said = std::fs::read(log).unwrap_or_default(); // the message names the file in any case
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(QUOTED_LINES)..].iter();
        let tail: Vec<String> = tail.map(|line| line.chars().take(QUOTED_CHARS).collect()).collect();
        format!(": {} (whole log: {})", tail.join("; "), log.display())
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.process.try_wait()?.is_none())
    }

    /// The process id of the child itself: every program in between execs the next one.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends it another signal than its stop signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Ends it cleanly; an error if it had to be killed or failed. A second call does nothing.
    pub fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let status = self.shut_down()?;
        ensure!(status.success(), "{} failed ({status}){}", self.name, self.last_words());
        Ok(())
    }

    fn shut_down(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.process.try_wait()? {
            return Ok(status);
        }
        self.signal(self.stop_signal)?;
        if let Some(status) = self.wait(END_DEADLINE)? {
            return Ok(status);
        }
        self.signal(Signal::KILL)?;
        match self.wait(KILL_DEADLINE)? {
            Some(_) => bail!("{} did not end within {END_DEADLINE:?} and was killed", self.name),
            None => {
                bail!("{} (process {}) cannot be killed: it is stuck in the kernel", self.name, self.id())
            }
        }
    }

    fn wait(&mut self, deadline: Duration) -> Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            let status = self.process.try_wait()?;
            if status.is_some() || started.elapsed() > deadline {
                return Ok(status);
            }
            wait_for_end(&self.process, POLL)?;
        }
    }
}

/// Waits until a process that we started ends, for at most `patience`.
pub(crate) fn wait_for_end(process: &std::process::Child, patience: Duration) -> io::Result<()> {
    let ended = pidfd_open(Pid::from_child(process), PidfdFlags::empty())?;
    let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&patience)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Children with a log are ended explicitly. One that still runs here is dropped because of an error,
        // which the caller returns; an error of `end` is only printed. Of the others many count a signal as a
        // failure, so their status does not matter.
        let ended = if self.log.is_some() { self.end() } else { self.shut_down().map(drop) };
        if let Err(error) = ended {
            warn(&format!("{error:#}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::StopFlag;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn shell<'a>(script: &str) -> Launch<'a> {
        Launch::new("the child", Path::new("/bin/sh"), vec!["-c".into(), script.into()])
    }

    #[test]
    fn child_that_says_ready_is_waited_for_and_ended_by_its_signal() {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap 'exit 0' TERM; echo ready now; while :; do sleep 0.02; done";
        let mut child = Child::logged(&shell(script), &dir.path().join("log")).unwrap();
        child.wait_until(PATIENCE, |child| Ok(child.has_said("ready"))).unwrap();
        child.end().unwrap();
        assert!(!child.is_running().unwrap());
    }

    #[test]
    fn child_that_ends_before_it_is_ready_is_an_error_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut child = Child::logged(&shell("echo no such device; exit 3"), &log).unwrap();
        let error = child.wait_until(PATIENCE, |_| Ok(false)).unwrap_err().to_string();
        assert!(error.contains("no such device") && error.contains("exit status: 3"), "{error}");
    }

    #[test]
    fn raised_stop_flag_ends_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Child::logged(&shell("exec sleep 60"), &dir.path().join("log")).unwrap();
        let stop = StopFlag::default();
        stop.raise();
        assert!(child.wait_until(Duration::from_secs(60), |_| stop.check().map(|()| false)).is_err());
    }

    #[test]
    fn child_joins_its_group_before_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let procs = dir.path().join("cgroup.procs");
        let launch = Launch { group_file: Some(procs.clone()), ..shell("test -s \"$0\" && echo ready") };
        let launch = Launch { args: [launch.args, vec![procs.clone().into()]].concat(), ..launch };
        let mut child = Child::logged(&launch, &dir.path().join("log")).unwrap();
        child.wait_until(PATIENCE, |child| Ok(child.has_said("ready"))).unwrap();
        assert_eq!(std::fs::read_to_string(procs).unwrap(), "0\n");
    }

    #[test]
    fn wrapped_child_is_run_by_its_wrapper() {
        let dir = tempfile::tempdir().unwrap();
        let wrapper = ["env".into(), "WRAPPED=ready indeed".into()];
        let launch = Launch { wrapper: &wrapper, ..shell("echo $WRAPPED") };
        let mut child = Child::logged(&launch, &dir.path().join("log")).unwrap();
        child.wait(PATIENCE).unwrap();
        assert!(child.has_said("ready indeed"));
    }

    #[test]
    fn second_end_of_a_failed_child_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Child::logged(&shell("exit 3"), &dir.path().join("log")).unwrap();
        assert!(child.end().is_err());
        child.end().unwrap();
    }
}
