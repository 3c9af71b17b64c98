//! A child process of `farpool up`, started from this same program: `up` reads its output, waits for its end,
//! and stops it.
//!
//! C1. The child ends when `up` ends, for whatever reason (see [`tether`](crate::tether)).
//! C2. The child has a process group of its own: Ctrl-C reaches `up` alone, which ends the pool in order.
//! C3. Until the child is ready, its standard error is kept for one error message; afterwards it is passed
//!     on.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child as Process, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::notify;
use crate::output::complain;
use crate::tether;

/// Lines of the child's standard error that an error message quotes.
const QUOTED_LINES: usize = 2;
/// From SIGTERM to SIGKILL: a server ends its requests within two seconds and then frees its memory.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// How long to read the pipe of a process that has ended. Only a busy machine needs as much.
const LAST_WORDS_DEADLINE: Duration = Duration::from_secs(2);
/// How the line begins that a process prints once it serves.
const READY: &str = "ready";

/// A running process. Dropping it kills it.
pub struct Child {
    name: String,
    process: Process,
    ready: Option<oneshot::Receiver<String>>,
    words: Arc<Words>,
    listening: Option<JoinHandle<()>>,
}

/// What a process printed on standard error.
#[derive(Default)]
struct Words {
    last: Mutex<VecDeque<String>>,
    passed_on: AtomicBool,
}

impl Child {
    /// Starts `farpool ARGS`.
    pub fn start(name: impl Into<String>, args: Vec<OsString>) -> Result<Self> {
        let name = name.into();
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut process = Command::new(program)
            .args(args)
            .args([tether::OPTION, &std::process::id().to_string()])
            .env_remove(notify::VARIABLE) // systemd waits for `up`
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let (said_ready, ready) = oneshot::channel();
        let words = Arc::new(Words::default());
        let listening =
            process.stderr.take().map(|pipe| tokio::spawn(listen(name.clone(), pipe, words.clone())));
        if let Some(pipe) = process.stdout.take() {
            tokio::spawn(await_ready(pipe, said_ready));
        }
        Ok(Child { name, process, ready: Some(ready), words, listening })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the child serves, and returns the rest of its ready line. An error quotes its last lines.
    pub async fn ready(&mut self, deadline: Duration) -> Result<String> {
        let Some(ready) = self.ready.take() else { bail!("{} was waited for already", self.name) };
        match timeout(deadline, ready).await {
            Ok(Ok(said)) => {
                // A flag without data: pairs with nothing.
                self.words.passed_on.store(true, Ordering::Relaxed);
                Ok(said)
            }
            // It closed its standard output, so it is ending.
            Ok(Err(_)) => match timeout(END_DEADLINE, self.ended()).await {
                Ok(status) => Err(self.failure(&format!("did not start ({status})")).await),
                Err(_) => Err(self.failure("did not start and does not end").await),
            },
            Err(_) => Err(self.failure(&format!("was not ready within {} s", deadline.as_secs())).await),
        }
    }

    async fn failure(&mut self, what: &str) -> anyhow::Error {
        if let Some(listening) = self.listening.take() {
            let _ = timeout(LAST_WORDS_DEADLINE, listening).await; // on expiry, quote the lines so far
        }
        let words = self.words.last();
        anyhow!("{} {what}: {}", self.name, if words.is_empty() { "it printed nothing" } else { &words })
    }

    /// Waits until the child has ended, and says how.
    pub async fn ended(&mut self) -> String {
        match self.process.wait().await {
            Ok(status) => describe(status),
            Err(error) => format!("lost: {error}"),
        }
    }

    /// Ends the child: by SIGTERM, and by SIGKILL if it misses the deadline.
    pub async fn end(&mut self) {
        let Some(pid) = self.process.id().and_then(|id| Pid::from_raw(id as i32)) else { return };
        if kill_process(pid, Signal::TERM).is_ok() && timeout(END_DEADLINE, self.process.wait()).await.is_ok()
        {
            return;
        }
        tracing::warn!(process = self.name, "does not end on SIGTERM; killing it");
        if let Err(error) = self.process.kill().await {
            tracing::warn!(process = self.name, %error, "cannot be killed");
        }
    }
}

impl Words {
    fn hear(&self, name: &str, line: &str) {
        if self.passed_on.load(Ordering::Relaxed) {
            complain(format!("{name}: {line}"));
        }
        if let Ok(mut last) = self.last.lock() {
            last.push_back(line.to_owned());
            while last.len() > QUOTED_LINES {
                last.pop_front();
            }
        }
    }

    fn last(&self) -> String {
        let last = self.last.lock().map(|last| last.iter().cloned().collect::<Vec<_>>()).unwrap_or_default();
        let own = |line: &String| line.strip_prefix("farpool: ").unwrap_or(line).to_owned();
        last.iter().map(own).collect::<Vec<_>>().join(" ")
    }
}

async fn listen(name: String, pipe: impl AsyncRead + Unpin, words: Arc<Words>) {
    let mut lines = BufReader::new(pipe).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        words.hear(&name, &line);
    }
}

/// Reads to the end, since a full pipe would block the process.
async fn await_ready(pipe: impl AsyncRead + Unpin, said_ready: oneshot::Sender<String>) {
    let mut lines = BufReader::new(pipe).lines();
    let mut said_ready = Some(said_ready);
    while let Ok(Some(line)) = lines.next_line().await {
        if let Some(rest) = line.strip_prefix(READY)
            && let Some(said_ready) = said_ready.take()
        {
            let _ = said_ready.send(rest.trim().to_owned()); // after a deadline there is no receiver
        }
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
