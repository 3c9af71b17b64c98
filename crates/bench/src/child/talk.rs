//! Children that print `ready` and then, if asked, answer line by line.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Child, POLL, READY_DEADLINE};
use crate::stop::check_stop;

/// Each child has one such thread.
pub(super) const NO_THREAD: &str = "cannot start a thread that reads a child's output: raise the limits \
                                    (ulimit -u, ulimit -v)";
/// The word that a process of this program prints when it is ready to serve.
pub(crate) const READY: &str = "ready";

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

impl Child {
    /// Starts a command that prints `ready` and then answers each line with a line.
    pub fn talking(name: impl Into<String>, mut command: Command) -> Result<(Self, Talk)> {
        command.stdin(Stdio::piped());
        let (mut child, _, said) = Self::start_heard(name, command, READY_DEADLINE)?;
        let input = child.process.stdin.take().context("a child without input")?;
        let name = child.name.clone();
        Ok((child, Talk { name, input, said }))
    }

    /// Starts a command and waits until it prints `ready`. Returns the rest of that line, and what it says
    /// afterwards.
    pub(super) fn start_heard(
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
            let lines = BufReader::new(pipe).split(b'\n').map_while(Result::ok);
            let lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
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
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    fn refusal(script: &str, deadline: Duration) -> String {
        Child::start_heard("the child", shell(script), deadline).unwrap_err().to_string()
    }

    #[test]
    fn child_is_ready_when_it_says_so_and_ended_when_dropped() {
        let script = shell("echo starting; echo ready at last; exec sleep 600");
        let (child, said) = Child::ready("the child", script).unwrap();
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
        let error = refusal("exit 3", READY_DEADLINE);
        assert!(error.contains("ended before"), "{error}");
    }

    #[test]
    fn child_that_is_silent_past_its_deadline_is_an_error_and_ended() {
        let error = refusal("exec sleep 600", Duration::from_millis(50));
        assert!(error.contains("was not ready"), "{error}");
    }
}
