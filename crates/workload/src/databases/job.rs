//! Programs that read a script, write a result and end: SQLite's and DuckDB's shells, workers of our own.
//!
//! A job dies with the thread that started it, and is killed when its guard is dropped.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use tempfile::NamedTempFile;

use crate::stop::StopFlag;

/// No job here takes as long, on a busy machine and at full scale, unless it hangs.
const DEADLINE: Duration = Duration::from_secs(20 * 60);
/// How often a wait looks again. Short, since jobs are timed.
const POLL: Duration = Duration::from_millis(1);
/// Characters of standard error that an error message quotes.
const QUOTED_CHARS: usize = 400;

/// A program with what it is given.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// What is added to the environment.
    pub env: Vec<(OsString, OsString)>,
    /// What is written to its standard input.
    pub script: String,
}

/// What a job left that ended.
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
    /// An error, with what it complained of, unless it succeeded.
    pub fn check(self) -> Result<Self> {
        // SQLite's shell goes on after an error and tells by its status only of the last statement.
        if self.status.success() && self.stderr.is_empty() {
            return Ok(self);
        }
        let said: String = self.stderr.chars().take(QUOTED_CHARS).collect();
        bail!("a job ended with {}: {said}", self.status)
    }

    /// An error, with what it complained of, if it failed; what it says on standard error besides is no
    /// complaint.
    pub fn check_status(self) -> Result<Self> {
        if self.status.success() {
            return Ok(self);
        }
        let said: String = self.stderr.chars().take(QUOTED_CHARS).collect();
        bail!("a job ended with {}: {said}", self.status)
    }

    /// Its standard output as text, without the last line's end.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

impl Job {
    /// A program that reads `script`.
    pub fn new(program: impl Into<PathBuf>, script: impl Into<String>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new(), script: script.into() }
    }

    /// With one more argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// With one more variable.
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
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(wrapper).arg(&self.program).args(&self.args);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).process_group(0);
        command.stdout(reopen(stdout.path())?).stderr(reopen(stderr.path())?);
        let started = Instant::now();
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let input = child.stdin.take();
        let mut running = Running { child, input, stdout, stderr, started };
        let written = running.write(self.script.as_bytes(), stop);
        written.with_context(|| format!("{} does not read", self.program.display()))?;
        Ok(running)
    }
}

fn reopen(path: &Path) -> Result<File> {
    File::options().append(true).open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// A job under way; killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    input: Option<ChildStdin>,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
    started: Instant,
}

impl Running {
    /// Lets it know that the script is over.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Writes to its standard input as it reads: a pipe holds less than a long script.
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

    /// Waits until it has written a line that starts with `word`.
    pub fn wait_for(&mut self, word: &str, stop: &StopFlag) -> Result<()> {
        loop {
            let said = fs::read(self.stdout.path())?;
            if said.split(|&byte| byte == b'\n').any(|line| line.starts_with(word.as_bytes())) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the job ended before it said {word} ({status}): {}", self.complaint()?);
            }
            self.look(stop)?;
        }
    }

    /// SIGKILL, and reaped.
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
        thread::sleep(POLL);
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Where it has ended already there is nothing to kill, and nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_reads_its_script_and_gives_back_what_it_said() {
        let job = Job::new("sh", "echo $WORD; exit 0").env("WORD", "here");
        assert_eq!(job.run(&[], &StopFlag::default()).unwrap().text(), "here");
    }

    #[test]
    fn job_that_fails_or_complains_is_an_error_with_its_complaint() {
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
    fn script_that_is_longer_than_a_pipe_is_read_to_its_end() {
        let script = format!("{}echo done\n", ": a line that says nothing\n".repeat(10_000));
        assert_eq!(Job::new("sh", script).run(&[], &StopFlag::default()).unwrap().text(), "done");
    }

    #[test]
    fn job_that_does_not_read_does_not_keep_whoever_asks_to_stop() {
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
