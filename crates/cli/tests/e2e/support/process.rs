//! Processes that end with their test: by SIGTERM on drop, or by the kernel if the test itself is killed.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{PATIENCE, StoppedThread, eventually, within};

/// From SIGTERM to SIGKILL in a guard.
const END_DEADLINE: Duration = Duration::from_secs(20);

/// The binary under test, without variables of the caller's environment that name brokers.
pub fn farpool<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    tied(env!("CARGO_BIN_EXE_farpool"), args)
}

/// A command that dies with the thread that starts it.
pub fn tied<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args);
    let ours = ["FARPOOL_BROKER", "FARPOOL_TLS_DIR", "FARPOOL_TRANSPORT", "FARPOOL_LOG"];
    for name in ours.into_iter().chain(["DEMO_SCALE", "DEMO_ROUNDS"]) {
        command.env_remove(name);
    }
    // The tests must not find a pool of this user by accident.
    command.env("XDG_RUNTIME_DIR", "/nonexistent");
    command
}

/// The binary under test, which may lock at most this many bytes of memory.
pub fn farpool_that_may_lock(bytes: u64) -> Command {
    // A capability lets root lock any amount, so it is dropped first.
    let drop_it: &[&str] =
        if root() { &["--bounding-set=-ipc_lock", "--", "prlimit"] } else { &["--", "prlimit"] };
    let mut command = tied("setpriv", drop_it);
    command.arg(format!("--memlock={bytes}:{bytes}")).arg("--").arg(env!("CARGO_BIN_EXE_farpool"));
    command
}

/// A library that cargo built beside these tests.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let found = test.ancestors().map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is built by `cargo test`, or by `cargo build` of its own crate"))
}

/// Whether the tests run as root.
pub fn root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A running process.
pub struct Process {
    name: String,
    child: Child,
    stdout: Lines,
    stderr: Lines,
}

struct Lines {
    heard: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Lines {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let lines = heard.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                lines.lock().unwrap().push(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Lines { heard, reader: Some(reader) }
    }

    fn text(&self) -> String {
        self.heard.lock().unwrap().join("\n")
    }

    /// The whole output of a process that has ended.
    fn finish(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.text()
    }
}

impl Process {
    /// Starts it; both outputs are kept.
    pub fn start(name: impl Into<String>, mut command: Command) -> Self {
        command.stderr(Stdio::piped());
        Self::spawn(name.into(), command)
    }

    /// Starts it with a closed standard error.
    pub fn start_unheard(name: impl Into<String>, mut command: Command) -> Self {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stderr(writer);
        Self::spawn(name.into(), command)
    }

    fn spawn(name: String, mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {name} (setpriv is of util-linux): {error}"));
        let stdout = Lines::of(child.stdout.take().unwrap());
        let stderr = match child.stderr.take() {
            Some(pipe) => Lines::of(pipe),
            None => Lines::of(std::io::empty()),
        };
        Process { name, child, stdout, stderr }
    }

    /// What it has printed on standard error so far.
    pub fn complaints(&self) -> String {
        self.stderr.text()
    }

    /// Starts it and waits for its line that starts with `ready`.
    #[track_caller]
    pub fn ready(name: impl Into<String>, command: Command) -> (Self, String) {
        let mut process = Self::start(name, command);
        let line = process.await_line("ready");
        (process, line)
    }

    /// Waits for a line of standard output.
    #[track_caller]
    pub fn await_line(&mut self, start: &str) -> String {
        let started = Instant::now();
        loop {
            let line = self.stdout.heard.lock().unwrap().iter().find(|line| line.starts_with(start)).cloned();
            if let Some(line) = line {
                return line;
            }
            let status = self.child.try_wait().unwrap();
            let waiting = status.is_none() && started.elapsed() < PATIENCE;
            assert!(waiting, "{} did not say `{start}` ({status:?}): {}", self.name, self.stderr.text());
            std::thread::sleep(super::LOOK_EVERY);
        }
    }

    /// Waits until standard error holds `text`.
    #[track_caller]
    pub fn await_complaint(&self, text: &str) {
        let mut said = String::new();
        let name = &self.name;
        eventually(&format!("{name} says `{text}`"), || {
            said = self.stderr.text();
            said.contains(text)
        });
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal. After SIGSTOP, waits until all threads are stopped: one that has not run since could
    /// still take a request of the kernel, for which others would then wait without end.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        if signal == Signal::STOP {
            eventually("all threads are stopped", || self.is_stopped());
        }
    }

    fn is_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            // Stopped, or ended.
            stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['T', 'Z', 'X']))
        })
    }

    /// Stops one of its threads; the others go on.
    #[track_caller]
    pub fn stop_thread(&self, name: &str) -> StoppedThread {
        StoppedThread::stop(self.id(), name)
    }

    /// SIGKILL, and reaped.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, on which every process must end cleanly.
    #[track_caller]
    pub fn end_well(&mut self) -> Output {
        self.signal(Signal::TERM);
        let output = self.wait();
        assert!(output.status.success(), "{} ended with {}: {}", self.name, output.status, output.stderr);
        output
    }

    /// Waits until it ends by itself.
    #[track_caller]
    pub fn wait(&mut self) -> Output {
        self.wait_within(PATIENCE)
    }

    #[track_caller]
    pub fn wait_within(&mut self, deadline: Duration) -> Output {
        let mut status = None;
        within(deadline, &format!("{} ends", self.name), || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        Output { status: status.unwrap(), stdout: self.stdout.finish(), stderr: self.stderr.finish() }
    }

    /// Panics with its output if it has ended.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if !self.is_running() {
            let output = self.wait();
            panic!("{} has ended: {output:?}", self.name);
        }
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Process {
    /// SIGTERM, then SIGKILL; for guards, so it never panics.
    pub fn end(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if started.elapsed() > END_DEADLINE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(super::LOOK_EVERY);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// Exit status and output of a process that has ended.
#[derive(Debug)]
pub struct Output {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `farpool ARGS` to its end.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    run_command(farpool(args))
}

/// Runs a command to its end.
#[track_caller]
pub fn run_command(command: Command) -> Output {
    Process::start(format!("{command:?}"), command).wait()
}

/// Asserts that a command failed with this exit status, and printed only one or two lines on standard error,
/// which name the fix.
#[track_caller]
pub fn assert_complaint(output: &Output, status: i32, fix: &str) {
    let lines = output.stderr.lines().count();
    assert!((1..=2).contains(&lines), "{lines} lines: {output:?}");
    assert!(output.stderr.starts_with("farpool: "), "{output:?}");
    assert!(output.stderr.contains(fix), "`{fix}` is not named: {output:?}");
    assert_eq!(output.status.code(), Some(status), "{output:?}");
    assert_eq!(output.stdout, "", "{output:?}");
}

/// Process ids of the living children of a process.
pub fn children_of(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|&id| stat(id).is_some_and(|(state, ppid)| ppid == parent && state != 'Z')).collect()
}

/// Whether a process that is not our child runs.
pub fn is_running(id: u32) -> bool {
    stat(id).is_some_and(|(state, _)| state != 'Z')
}

/// State and parent of a process (proc(5): the name before them may hold anything but ends with the last
/// bracket).
fn stat(id: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
