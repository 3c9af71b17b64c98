//! Child processes that never outlive the demo, and short commands that always end.
//!
//! C1. Dropping a [`ChildProcess`] ends it: first by its own signal, after a deadline by SIGKILL.
//! C2. A child dies with its parent, even if the parent is killed: by `setpriv --pdeathsig`, which needs no
//!     `unsafe`.
//! C3. Each child has a process group of its own. So Ctrl-C reaches only the demo, which ends its children in
//!     the right order.
//!
//! Signals go to the process id, which the kernel does not reuse until we reap the child, never to a name.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::host::User;
use crate::steps::complain;
use crate::stop::StopFlag;

/// How often a wait polls: short compared with every wait, long compared with the cost of a poll.
const POLL: Duration = Duration::from_millis(20);
/// From the stop signal to SIGKILL: PostgreSQL writes a checkpoint, a mount flushes and unmounts.
const END_DEADLINE: Duration = Duration::from_secs(30);
/// From SIGKILL until the wait ends with an error: only a process stuck in the kernel needs that long.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// Last lines of a log that an error message quotes, and characters of each.
const QUOTED_LINES: usize = 3;
const QUOTED_CHARS: usize = 160;

/// How to start a child: the program, its user, its control group, and the signal that ends it cleanly.
pub struct Launch<'a> {
    /// The child's name in messages.
    pub name: &'static str,
    /// The program to run.
    pub program: &'a Path,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The user it runs as; `None` keeps ours.
    pub user: Option<&'a User>,
    /// The `cgroup.procs` file of its control group. It joins the group before anything else, so that no byte
    /// escapes the limit.
    pub group_file: Option<PathBuf>,
    /// The signal that ends it cleanly.
    pub stop_signal: Signal,
    /// A program with its first arguments that runs the child; empty for none. It must exec the command that
    /// is appended to it.
    pub wrapper: &'a [OsString],
}

impl Launch<'_> {
    fn command(&self) -> Command {
        let mut argv: Vec<OsString> =
            vec!["setpriv".into(), "--pdeathsig".into(), signal_name(self.stop_signal).into()];
        argv.extend(self.user.map(User::setpriv_args).unwrap_or_default());
        argv.push("--".into());
        argv.extend(self.wrapper.iter().cloned());
        argv.push(self.program.into());
        argv.extend(self.args.iter().cloned());
        match &self.group_file {
            None => command(&argv),
            Some(file) => {
                let join: [OsString; 3] = ["sh".into(), "-c".into(), r#"echo 0 >"$0" && exec "$@""#.into()];
                command(&[join.as_slice(), &[file.into()], argv.as_slice()].concat())
            }
        }
    }
}

fn command(argv: &[OsString]) -> Command {
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]);
    command
}

fn signal_name(signal: Signal) -> &'static str {
    if signal == Signal::INT { "INT" } else { "TERM" }
}

/// A running child; see the rules in this module's documentation.
#[derive(Debug)]
pub struct ChildProcess {
    name: &'static str,
    process: Child,
    log: PathBuf,
    stop_signal: Signal,
    ended: bool,
}

impl ChildProcess {
    /// Starts it with standard output and error going to the file `log`.
    pub fn spawn(launch: &Launch<'_>, log: &Path) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let process = launch
            .command()
            .process_group(0)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {} ({})", launch.name, launch.program.display()))?;
        Ok(Self {
            name: launch.name,
            process,
            log: log.into(),
            stop_signal: launch.stop_signal,
            ended: false,
        })
    }

    /// Polls until `ready` returns true; an error if the child ends first, the deadline passes or `stop` is
    /// raised.
    pub fn wait_until(
        &mut self,
        deadline: Duration,
        stop: &StopFlag,
        mut ready: impl FnMut(&Self) -> bool,
    ) -> Result<()> {
        let started = Instant::now();
        while !ready(self) {
            stop.check()?;
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended before it was ready ({status}): {}", self.name, self.last_words());
            }
            if started.elapsed() > deadline {
                bail!("{} was not ready within {deadline:?}: {}", self.name, self.last_words());
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Whether a line of its output starts with `word`. Output is bytes: a log may hold anything.
    pub fn has_said(&self, word: &str) -> bool {
        let said = std::fs::read(&self.log).unwrap_or_default(); // without a log it has said nothing yet
        said.split(|&byte| byte == b'\n').any(|line| line.starts_with(word.as_bytes()))
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.process.try_wait()?.is_none())
    }

    /// The process id of the child itself: every program in between execs the next one.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The last lines of its log, for an error message.
    pub fn last_words(&self) -> String {
        let said = std::fs::read(&self.log).unwrap_or_default(); // the message names the file in any case
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(QUOTED_LINES)..].iter();
        let tail: Vec<String> = tail.map(|line| line.chars().take(QUOTED_CHARS).collect()).collect();
        format!("{} (whole log: {})", tail.join("; "), self.log.display())
    }

    /// Ends it cleanly; an error if it had to be killed or failed. A second call does nothing.
    pub fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        if self.process.try_wait()?.is_none() {
            self.signal(self.stop_signal)?;
        }
        if let Some(status) = self.wait(END_DEADLINE)? {
            if !status.success() {
                bail!("{} failed ({status}): {}", self.name, self.last_words());
            }
            return Ok(());
        }
        self.signal(Signal::KILL)?;
        match self.wait(KILL_DEADLINE)? {
            Some(_) => bail!("{} did not end within {END_DEADLINE:?} and was killed", self.name),
            None => {
                bail!("{} (process {}) cannot be killed: it is stuck in the kernel", self.name, self.id())
            }
        }
    }

    /// Sends it another signal than its stop signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    fn wait(&mut self, deadline: Duration) -> Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            let status = self.process.try_wait()?;
            if status.is_some() || started.elapsed() > deadline {
                return Ok(status);
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Callers end children explicitly. One that still runs here is dropped because of an error, which the
        // caller returns; an error of `end` is only printed.
        if let Err(error) = self.end() {
            complain(&format!("farpool demo: {error:#}"));
        }
    }
}

/// Runs a short command to its end and returns its standard output; an error quotes its standard error.
///
/// For commands that print less than a pipe holds (64 KiB): the output is read only after the command has
/// ended.
pub fn run(program: impl AsRef<OsStr>, args: &[&OsStr], deadline: Duration) -> Result<String> {
    let mut command = Command::new(program.as_ref());
    command.args(args);
    run_command(command, deadline)
}

/// Like [`run`], but as another user, and in the root directory, which every user may enter.
pub fn run_as(user: Option<&User>, program: &Path, args: &[&OsStr], deadline: Duration) -> Result<String> {
    let mut argv: Vec<OsString> = Vec::new();
    if let Some(user) = user {
        argv.push("setpriv".into());
        argv.extend(user.setpriv_args());
        argv.push("--".into());
    }
    argv.push(program.into());
    argv.extend(args.iter().map(Into::into));
    let mut command = command(&argv);
    command.current_dir("/");
    run_command(command, deadline)
}

fn run_command(mut command: Command, deadline: Duration) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {name}: is it installed? (scripts/setup installs it)"))?;
    let started = Instant::now();
    while child.try_wait()?.is_none() {
        if started.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("{name} did not end within {deadline:?} and was killed");
        }
        thread::sleep(POLL);
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {}", output.status, complaint.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell<'a>(script: &str) -> Launch<'a> {
        Launch {
            name: "the child",
            program: Path::new("/bin/sh"),
            args: vec!["-c".into(), script.into()],
            user: None,
            group_file: None,
            stop_signal: Signal::TERM,
            wrapper: &[],
        }
    }

    #[test]
    fn child_that_says_ready_is_waited_for_and_ended_by_its_signal() {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap 'exit 0' TERM; echo ready now; while :; do sleep 0.02; done";
        let mut child = ChildProcess::spawn(&shell(script), &dir.path().join("log")).unwrap();
        let stop = StopFlag::default();
        child.wait_until(Duration::from_secs(10), &stop, |child| child.has_said("ready")).unwrap();
        child.end().unwrap();
        assert!(!child.is_running().unwrap());
    }

    #[test]
    fn child_that_ends_before_it_is_ready_is_an_error_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut child = ChildProcess::spawn(&shell("echo no such device; exit 3"), &log).unwrap();
        let stop = StopFlag::default();
        let error = child.wait_until(Duration::from_secs(10), &stop, |_| false).unwrap_err().to_string();
        assert!(error.contains("no such device") && error.contains("exit status: 3"), "{error}");
    }

    #[test]
    fn raised_stop_flag_ends_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = ChildProcess::spawn(&shell("exec sleep 60"), &dir.path().join("log")).unwrap();
        let stop = StopFlag::default();
        stop.raise();
        assert!(child.wait_until(Duration::from_secs(60), &stop, |_| false).is_err());
    }

    #[test]
    fn child_joins_its_group_before_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let procs = dir.path().join("cgroup.procs");
        let launch = Launch { group_file: Some(procs.clone()), ..shell("test -s \"$0\" && echo ready") };
        let launch = Launch { args: [launch.args, vec![procs.clone().into()]].concat(), ..launch };
        let mut child = ChildProcess::spawn(&launch, &dir.path().join("log")).unwrap();
        let stop = StopFlag::default();
        child.wait_until(Duration::from_secs(10), &stop, |child| child.has_said("ready")).unwrap();
        assert_eq!(std::fs::read_to_string(procs).unwrap(), "0\n");
    }

    #[test]
    fn wrapped_child_is_run_by_its_wrapper() {
        let dir = tempfile::tempdir().unwrap();
        let wrapper = ["env".into(), "WRAPPED=ready indeed".into()];
        let launch = Launch { wrapper: &wrapper, ..shell("echo $WRAPPED") };
        let mut child = ChildProcess::spawn(&launch, &dir.path().join("log")).unwrap();
        child.wait(Duration::from_secs(10)).unwrap();
        assert!(child.has_said("ready indeed"));
    }

    #[test]
    fn second_end_of_a_failed_child_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = ChildProcess::spawn(&shell("exit 3"), &dir.path().join("log")).unwrap();
        assert!(child.end().is_err());
        child.end().unwrap();
    }

    #[test]
    fn command_that_fails_is_an_error_that_quotes_its_standard_error() {
        let args = ["-c".as_ref(), "echo broken >&2; exit 1".as_ref()];
        let error = run("sh", &args, Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("broken"), "{error}");
    }

    #[test]
    fn command_that_does_not_end_is_killed_at_its_deadline() {
        let error = run("sleep", &["60".as_ref()], Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("did not end within"), "{error}");
    }
}
