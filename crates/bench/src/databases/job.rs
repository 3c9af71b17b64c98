//! Programs that read a script, write a result and end: the shells of SQLite and DuckDB, and our own workers.
//!
//! A job dies with the thread that started it, and is killed when its guard is dropped.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::OFlags;
use tempfile::NamedTempFile;

use crate::child::{tied, wait_for_end};
use crate::stop::StopFlag;

/// Longest time of a job: more than any takes on a busy machine at full scale, unless it hangs.
const DEADLINE: Duration = Duration::from_secs(20 * 60);
/// How often a wait looks at the stop flag and at the output.
const POLL: Duration = Duration::from_millis(1);
/// Characters of standard error that an error message quotes.
const QUOTED_CHARS: usize = 400;

/// A program with its arguments, environment and input.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Additions to the environment.
    pub env: Vec<(OsString, OsString)>,
    /// Its standard input.
    pub script: String,
}

/// The results of a job that has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: String,
    /// From its start to its end.
    pub seconds: f64,
}

impl Finished {
    /// Returns an error that quotes standard error if the job failed or wrote there.
    pub fn check(self) -> Result<Self> {
        // SQLite's shell continues after an error, and its exit status tells only about the last statement.
        let is_silent = self.stderr.is_empty();
        self.succeeded_if(is_silent)
    }

    /// Returns an error that quotes standard error if the job failed. Text on standard error alone is no
    /// failure.
    pub fn check_status(self) -> Result<Self> {
        self.succeeded_if(true)
    }

    /// Returns an error that quotes standard error unless the job succeeded and the condition holds.
    fn succeeded_if(self, condition: bool) -> Result<Self> {
        let said: String = self.stderr.chars().take(QUOTED_CHARS).collect();
        ensure!(self.status.success() && condition, "a job ended with {}: {said}", self.status);
        Ok(self)
    }

    /// Its standard output as text, without the final line break.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

impl Job {
    /// A job that runs `program` with `script` as standard input.
    pub fn new(program: impl Into<PathBuf>, script: impl Into<String>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new(), script: script.into() }
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds an environment variable.
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Runs it to its end; an error if it fails.
    pub fn run(&self, wrapper: &[OsString], stop: &StopFlag) -> Result<Finished> {
        let mut running = self.start(wrapper, stop)?;
        running.end_input();
        running.wait(stop)?.check().with_context(|| format!("{}", self.program.display()))
    }

    /// Starts it and writes the script; its input stays open.
    pub fn start(&self, wrapper: &[OsString], stop: &StopFlag) -> Result<Running> {
        let (stdout, stderr) = (NamedTempFile::new()?, NamedTempFile::new()?);
        let words: Vec<&OsStr> =
            wrapper.iter().map(OsString::as_os_str).chain([self.program.as_os_str()]).collect();
        let mut command = tied(words[0]);
        command.args(&words[1..]).args(&self.args);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).process_group(0);
        command.stdout(reopen(stdout.path())?).stderr(reopen(stderr.path())?);
        let started = Instant::now();
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let input = child.stdin.take();
        let mut running = Running { child, input, stdout, stderr, started };
        let written = running.write(self.script.as_bytes(), stop);
        written.with_context(|| format!("{} does not read its input", self.program.display()))?;
        Ok(running)
    }
}

fn reopen(path: &Path) -> Result<File> {
    File::options().append(true).open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// A running job; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    input: Option<ChildStdin>,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
    started: Instant,
}

impl Running {
    /// Closes its standard input: the script is complete.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Writes to its standard input as fast as it reads: a pipe holds less than a long script.
    fn write(&mut self, mut script: &[u8], stop: &StopFlag) -> Result<()> {
        let Some(mut input) = self.input.take() else { return Ok(()) };
        let flags = rustix::fs::fcntl_getfl(&input)?;
        rustix::fs::fcntl_setfl(&input, flags | OFlags::NONBLOCK)?;
        while !script.is_empty() {
            match input.write(script) {
                Ok(written) => script = &script[written..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    self.look(stop)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.input = Some(input);
        Ok(())
    }

    /// Waits until its output has a line that starts with `word`.
    pub fn wait_for(&mut self, word: &str, stop: &StopFlag) -> Result<()> {
        loop {
            let said = fs::read(self.stdout.path())?;
            if said.split(|&byte| byte == b'\n').any(|line| line.starts_with(word.as_bytes())) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the job ended before it printed {word} ({status}): {}", self.complaint()?);
            }
            self.look(stop)?;
        }
    }

    /// Kills it with SIGKILL, and reaps it.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill a job")?;
        self.child.wait().context("cannot wait for a job")?;
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(&mut self, stop: &StopFlag) -> Result<Finished> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                let seconds = self.started.elapsed().as_secs_f64();
                let (stdout, stderr) = (fs::read(self.stdout.path())?, self.complaint()?);
                return Ok(Finished { status, stdout, stderr, seconds });
            }
            self.look(stop)?;
        }
    }

    fn complaint(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(self.stderr.path())?).trim().to_owned())
    }

    fn look(&mut self, stop: &StopFlag) -> Result<()> {
        stop.check()?;
        if self.started.elapsed() > DEADLINE {
            bail!("a job did not end within {DEADLINE:?}: {}", self.complaint()?);
        }
        wait_for_end(&self.child, POLL)?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // If it has ended already, there is nothing to kill, and nothing to report.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_reads_its_script_and_returns_its_output() {
        let job = Job::new("sh", "echo $WORD; exit 0").env("WORD", "here");
        assert_eq!(job.run(&[], &StopFlag::default()).unwrap().text(), "here");
    }

    #[test]
    fn job_that_fails_or_writes_to_stderr_is_an_error_that_quotes_it() {
        for script in ["echo broken >&2; exit 1", "echo broken >&2"] {
            let error = Job::new("sh", script).run(&[], &StopFlag::default()).unwrap_err();
            assert!(format!("{error:#}").contains("broken"), "{error:#}");
        }
    }

    #[test]
    fn job_whose_input_stays_open_waits_until_it_is_killed() {
        let mut running = Job::new("sh", "echo ready\n").start(&[], &StopFlag::default()).unwrap();
        running.wait_for("ready", &StopFlag::default()).unwrap();
        running.kill().unwrap();
        assert!(!running.wait(&StopFlag::default()).unwrap().status.success());
    }

    #[test]
    fn script_longer_than_a_pipe_is_read_to_its_end() {
        let script = format!("{}echo done\n", ": a line that says nothing\n".repeat(10_000));
        assert_eq!(Job::new("sh", script).run(&[], &StopFlag::default()).unwrap().text(), "done");
    }

    #[test]
    fn job_that_does_not_read_its_input_cannot_delay_a_stop() {
        let stop = StopFlag::default();
        stop.raise();
        let never_read = Job::new("sleep", "x".repeat(1 << 20)).arg("60");
        let error = never_read.start(&[], &stop).unwrap_err();
        assert!(format!("{error:#}").contains("does not read"), "{error:#}");
    }

    #[test]
    fn raised_stop_flag_ends_a_wait_and_the_guard_the_job() {
        let stop = StopFlag::default();
        stop.raise();
        assert!(Job::new("sleep", "").arg("60").run(&[], &stop).is_err());
    }
}
