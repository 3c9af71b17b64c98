//! How a child is started, and commands that run to their end.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::talk::NO_THREAD;
use super::{Child, POLL, wait_for_end};
use crate::machine::User;
use crate::stop::check_stop;

/// From the end of a command until its output must have ended, too.
const OUTPUT_DEADLINE: Duration = Duration::from_secs(5);

/// What runs a program in the control group with this `cgroup.procs` file. It joins the group before anything
/// else, so that no byte escapes the group's limit.
pub fn joining(procs_file: &Path) -> [OsString; 4] {
    ["sh".into(), "-c".into(), r#"echo 0 >"$0" && exec "$@""#.into(), procs_file.into()]
}

/// A command that the kernel kills when the thread that started it ends, for programs that are not ours.
pub fn tied(program: impl AsRef<OsStr>) -> Command {
    tied_by("KILL", program)
}

/// As [`tied`], but by SIGTERM, for programs that must clean up: those that mount.
pub fn tied_politely(program: impl AsRef<OsStr>) -> Command {
    tied_by("TERM", program)
}

fn tied_by(signal: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal, "--"]).arg(program).stdin(Stdio::null());
    command
}

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
    /// The `cgroup.procs` file of its control group.
    pub group_file: Option<PathBuf>,
    /// The signal that ends it cleanly.
    pub stop_signal: Signal,
    /// A program with its first arguments that runs the child; empty for none. It must exec the command that
    /// is appended to it.
    pub wrapper: &'a [OsString],
}

impl<'a> Launch<'a> {
    /// A program that runs as we do and ends cleanly on SIGTERM.
    pub fn new(name: &'static str, program: &'a Path, args: Vec<OsString>) -> Self {
        Self { name, program, args, user: None, group_file: None, stop_signal: Signal::TERM, wrapper: &[] }
    }

    pub(super) fn command(&self) -> Command {
        let mut argv: Vec<OsString> = Vec::new();
        if let Some(file) = &self.group_file {
            argv.extend(joining(file));
        }
        argv.extend(["setpriv".into(), "--pdeathsig".into(), signal_name(self.stop_signal).into()]);
        argv.extend(self.user.map(User::setpriv_args).unwrap_or_default());
        argv.push("--".into());
        argv.extend(self.wrapper.iter().cloned());
        argv.push(self.program.into());
        argv.extend(self.args.iter().cloned());
        command(&argv)
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

/// Runs a command to its end and returns its output; an error if it fails or `stop` is set meanwhile. Its
/// standard error goes to ours.
pub fn output(name: &str, command: Command, stop: &AtomicBool) -> Result<String> {
    let cannot = || format!("cannot start {name}");
    let ended = run_to_end(name, command, Signal::TERM, cannot, || check_stop(stop))?;
    ensure!(ended.status.success(), "{name} failed ({})", ended.status);
    Ok(ended.said)
}

/// Runs a short command to its end and returns its standard output; an error quotes its standard error.
pub fn run(program: impl AsRef<OsStr>, args: &[&OsStr], deadline: Duration) -> Result<String> {
    let mut command = Command::new(program.as_ref());
    command.args(args);
    run_within(command, deadline)
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
    run_within(command, deadline)
}

fn run_within(mut command: Command, deadline: Duration) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stderr(Stdio::piped());
    let cannot = || format!("cannot run {name}: is it installed? (scripts/setup installs it)");
    let until = Instant::now() + deadline;
    let ended = run_to_end(&name, command, Signal::KILL, cannot, || {
        ensure!(Instant::now() < until, "{name} did not end within {deadline:?} and was killed");
        Ok(())
    })?;
    ensure!(ended.status.success(), "{name} failed ({}): {}", ended.status, ended.complained.trim());
    Ok(ended.said)
}

struct Ended {
    status: ExitStatus,
    said: String,
    /// Empty unless its standard error was a pipe.
    complained: String,
}

/// Runs a command until it ends or `check` returns an error; then it gets the signal.
fn run_to_end(
    name: &str,
    mut command: Command,
    stop_signal: Signal,
    cannot: impl FnOnce() -> String,
    check: impl Fn() -> Result<()>,
) -> Result<Ended> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = Child::spawn(name, command, stop_signal).with_context(cannot)?;
    let said = read_all(child.process.stdout.take())?;
    let complained = read_all(child.process.stderr.take())?;
    let status = loop {
        if let Some(status) = child.process.try_wait()? {
            break status;
        }
        check()?;
        wait_for_end(&child.process, POLL)?;
    };
    let read = |reading: Option<Reading>| -> Result<String> {
        let Some(reading) = reading else { return Ok(String::new()) };
        let read = reading.recv_timeout(OUTPUT_DEADLINE);
        let open = || format!("{name} has ended, but a process that it started keeps its output open");
        Ok(read.with_context(open)??)
    };
    Ok(Ended { status, said: read(said)?, complained: read(complained)? })
}

type Reading = Receiver<std::io::Result<String>>;

/// Reads a pipe to its end in a thread, since a full pipe would block the child.
fn read_all(pipe: Option<impl Read + Send + 'static>) -> Result<Option<Reading>> {
    let Some(mut pipe) = pipe else { return Ok(None) };
    let (done, reading) = channel();
    let read = move || {
        let mut bytes = Vec::new();
        let read = pipe.read_to_end(&mut bytes).map(|_| String::from_utf8_lossy(&bytes).into_owned());
        drop(done.send(read)); // fails once the receiver has given up
    };
    thread::Builder::new().name("child-output".into()).spawn(read).context(NO_THREAD)?;
    Ok(Some(reading))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn command_that_leaves_a_process_with_its_output_is_an_error_soon_after_its_end() {
        let args = ["-c".as_ref(), "sleep 20 & echo started".as_ref()];
        let started = Instant::now();
        let error = run("sh", &args, Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("keeps its output open"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn output_longer_than_a_pipe_is_read_to_its_end() {
        let args = ["-c".as_ref(), "head -c 200000 /dev/zero".as_ref()];
        assert_eq!(run("sh", &args, Duration::from_secs(10)).unwrap().len(), 200_000);
    }
}
