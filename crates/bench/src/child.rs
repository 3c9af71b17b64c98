//! Child processes that never outlive a measurement.
//!
//! C1. Dropping a [`Child`] ends it: by SIGTERM, and by SIGKILL after a deadline. Signals go to the process
//!     id, which the kernel does not reuse until we reap the child, never to a name.
//! C2. Each child has a process group of its own. So Ctrl-C reaches only the benchmark, which ends its
//!     children in order.
//! C3. A child that runs this same program ends when we end, for whatever reason (option `--end-with`). Start
//!     it on the main thread, since the kernel ties it to the thread that started it.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// How often a wait polls: short compared with every wait, long compared with the cost of a poll.
const POLL: Duration = Duration::from_millis(10);
/// A node touches all its memory before it is ready: about a second per gigabyte, more on a busy machine.
const READY_DEADLINE: Duration = Duration::from_secs(100);
/// From SIGTERM to SIGKILL: a node needs this time to free its memory.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// Each child has one such thread.
const NO_THREAD: &str = "cannot start a thread that reads a child's output: raise the limits (ulimit -u, \
                         ulimit -v), or lower --threads";
/// The word that a process of this program prints when it is ready to serve.
const READY: &str = "ready";

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

/// Returns an error once `stop` is set.
pub fn check_stop(stop: &AtomicBool) -> Result<()> {
    // Relaxed: the flag carries no data.
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted: stopped and cleaned up as asked");
    }
    Ok(())
}

/// Prints a line on standard error. A closed or full stream does not end the measurement.
pub fn complain(line: &str) {
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Our ends of a child's standard input and output, used line by line.
#[derive(Debug)]
pub struct Talk {
    name: String,
    input: ChildStdin,
    said: Receiver<String>,
}

impl Talk {
    /// Sends a line.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let told = self.input.write_all(format!("{line}\n").as_bytes());
        told.with_context(|| format!("{} has ended", self.name))
    }

    /// Waits for a line; an error once `stop` is set.
    pub fn hear(&self, patience: Duration, stop: &AtomicBool) -> Result<String> {
        let (name, started) = (&self.name, Instant::now());
        loop {
            match self.said.recv_timeout(POLL) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => bail!("{name} ended without an answer"),
                Err(RecvTimeoutError::Timeout) => check_stop(stop)?,
            }
            ensure!(started.elapsed() < patience, "{name} did not answer within {} s", patience.as_secs());
        }
    }
}

/// A running child; see the rules in this module's documentation.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: std::process::Child,
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
        Self::start_ready(name, command, READY_DEADLINE)
    }

    /// Starts a command without waiting for its output.
    pub fn start(name: impl Into<String>, mut command: Command) -> Result<Self> {
        let name = name.into();
        let process = command.process_group(0).spawn();
        let process = process.with_context(|| format!("cannot start {name}"))?;
        Ok(Child { name, process })
    }

    /// Starts a command that prints `ready`, as ours do. Returns the rest of that line.
    pub fn ready(name: impl Into<String>, command: Command) -> Result<(Self, String)> {
        Self::start_ready(name, command, READY_DEADLINE)
    }

    /// Starts a command that prints `ready` and then answers each line with a line.
    pub fn talking(name: impl Into<String>, mut command: Command) -> Result<(Self, Talk)> {
        command.stdin(Stdio::piped());
        let (mut child, _, said) = Self::start_heard(name, command, READY_DEADLINE)?;
        let input = child.process.stdin.take().context("a child without input")?;
        let name = child.name.clone();
        Ok((child, Talk { name, input, said }))
    }

    fn start_ready(name: impl Into<String>, command: Command, deadline: Duration) -> Result<(Self, String)> {
        Self::start_heard(name, command, deadline).map(|(child, rest, _)| (child, rest))
    }

    fn start_heard(
        name: impl Into<String>,
        mut command: Command,
        deadline: Duration,
    ) -> Result<(Self, String, Receiver<String>)> {
        command.stdout(Stdio::piped());
        let mut child = Self::start(name, command)?;
        let (say, said) = channel();
        let pipe = child.process.stdout.take().context("a child without output")?;
        // Reads to the end of the output, since a full pipe would block the child.
        let hear = move || {
            let lines = BufReader::new(pipe).lines().map_while(Result::ok);
            lines.for_each(|line| drop(say.send(line))); // fails once the receiver is dropped: after `ready`
        };
        std::thread::Builder::new().name("child-output".into()).spawn(hear).context(NO_THREAD)?;
        let until = Instant::now() + deadline;
        loop {
            let name = &child.name;
            match said.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix(READY) {
                        let rest = rest.trim().to_owned();
                        return Ok((child, rest, said));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => bail!("{name} ended before it was ready"),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{name} was not ready within {} s", deadline.as_secs())
                }
            }
        }
    }

    /// Runs a command to its end and returns its output; an error if it fails or `stop` is set meanwhile.
    pub fn output(name: &str, mut command: Command, stop: &AtomicBool) -> Result<String> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = Self::start(name, command)?;
        let mut pipe = child.process.stdout.take().context("a child without output")?;
        let read = move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        };
        let reading =
            std::thread::Builder::new().name("child-output".into()).spawn(read).context(NO_THREAD)?;
        let status = loop {
            if let Some(status) = child.process.try_wait()? {
                break status;
            }
            check_stop(stop)?;
            std::thread::sleep(POLL);
        };
        let text =
            reading.join().map_err(|_| anyhow!("the thread that read the output of {name} panicked"))??;
        ensure!(status.success(), "{name} failed ({status})");
        Ok(text)
    }

    /// Polls until `is_ready` returns true; an error if the child ends first or the deadline passes.
    pub fn wait_until(&mut self, deadline: Duration, mut is_ready: impl FnMut() -> bool) -> Result<()> {
        let started = Instant::now();
        while !is_ready() {
            if let Some(status) = self.process.try_wait()? {
                bail!("{} ended before it was ready ({status})", self.name);
            }
            if started.elapsed() > deadline {
                bail!("{} was not ready within {} s", self.name, deadline.as_secs());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    fn end(&mut self) -> Result<()> {
        if self.process.try_wait()?.is_some() {
            return Ok(());
        }
        kill_process(Pid::from_child(&self.process), Signal::TERM)?;
        let started = Instant::now();
        while started.elapsed() < END_DEADLINE {
            if self.process.try_wait()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        self.process.kill()?;
        self.process.wait()?;
        Err(anyhow!("did not end within {} s and was killed", END_DEADLINE.as_secs()))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            complain(&format!("farpool bench: {}: {error:#}", self.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    #[test]
    fn child_is_ready_when_it_says_so_and_ended_when_dropped() {
        let script = shell("echo starting; echo ready at last; exec sleep 600");
        let (child, said) = Child::start_ready("the child", script, READY_DEADLINE).unwrap();
        assert_eq!(said, "at last");
        let id = child.id();
        drop(child);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn child_that_talks_answers_until_it_ends() {
        let script = shell("echo ready; read line; echo heard $line; read line");
        let (child, mut talk) = Child::talking("the child", script).unwrap();
        talk.tell("a word").unwrap();
        let hear =
            |stop| talk.hear(READY_DEADLINE, &AtomicBool::new(stop)).map_err(|error| error.to_string());
        assert_eq!(hear(false).unwrap(), "heard a word");
        assert!(hear(true).unwrap_err().contains("interrupted"));
        talk.tell("the end").unwrap();
        let error = talk.hear(READY_DEADLINE, &AtomicBool::new(false)).unwrap_err().to_string();
        assert!(error.contains("ended"), "{error}");
        drop(child);
    }

    #[test]
    fn child_that_ends_before_it_is_ready_is_an_error() {
        let error = Child::start_ready("the child", shell("exit 3"), READY_DEADLINE).unwrap_err().to_string();
        assert!(error.contains("ended before"), "{error}");
    }

    #[test]
    fn child_that_is_silent_past_its_deadline_is_an_error_and_ended() {
        let script = shell("exec sleep 600");
        let error =
            Child::start_ready("the child", script, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("was not ready"), "{error}");
    }
}
