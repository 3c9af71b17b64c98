//! A running `farpool up` on a free port, in a folder of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::{Process, children_of, farpool, run_command};

const SMALL: [&str; 7] = ["--nodes", "2", "--memory", "16MiB", "--region-size", "4MiB", "--no-lock"];

/// The pool of one test.
pub struct Up {
    pub process: Process,
    pub address: String,
    /// Takes the place of XDG_RUNTIME_DIR, so that other subcommands find the pool by themselves.
    runtime_dir: TempDir,
}

impl Up {
    /// Two small nodes.
    #[track_caller]
    pub fn start() -> Self {
        Self::with(&SMALL)
    }

    /// With these options.
    #[track_caller]
    pub fn with(options: &[&str]) -> Self {
        Self::started_by(|command| Process::start("farpool up", command), options)
    }

    /// Two small nodes, and a closed standard error.
    #[track_caller]
    pub fn start_unheard() -> Self {
        Self::started_by(|command| Process::start_unheard("farpool up", command), &SMALL)
    }

    #[track_caller]
    fn started_by(start: impl Fn(Command) -> Process, options: &[&str]) -> Self {
        let runtime_dir = tempfile::tempdir().unwrap();
        let mut command = farpool(["up", "--listen", "127.0.0.1:0"]);
        command.args(options).env("XDG_RUNTIME_DIR", runtime_dir.path());
        let mut process = start(command);
        process.await_line("ready");
        let address = process.await_line("broker ").strip_prefix("broker ").unwrap().to_owned();
        Up { process, address, runtime_dir }
    }

    /// The pool's folder.
    pub fn run_dir(&self) -> PathBuf {
        self.runtime_dir.path().join("farpool")
    }

    /// The folder that contains the pool's folder.
    pub fn runtime_dir(&self) -> &Path {
        self.runtime_dir.path()
    }

    /// Another subcommand of the same user, without options that name a broker.
    pub fn farpool(&self, args: &[&str]) -> Command {
        let mut command = farpool(args);
        command.env("XDG_RUNTIME_DIR", self.runtime_dir.path());
        command
    }

    #[track_caller]
    pub fn status(&self) -> Value {
        let output = run_command(self.farpool(&["status", "--json"]));
        assert!(output.status.success(), "{output:?}");
        serde_json::from_str(&output.stdout).unwrap()
    }

    /// Process ids of broker and nodes.
    pub fn children(&self) -> Vec<u32> {
        children_of(self.process.id())
    }

    /// The process id of the child that runs this subcommand.
    #[track_caller]
    pub fn child(&self, subcommand: &str) -> u32 {
        self.running_child(subcommand).unwrap_or_else(|| panic!("`up` runs no {subcommand}"))
    }

    /// The same, but `None` if there is none (yet): between fork and exec a child has another command line.
    pub fn running_child(&self, subcommand: &str) -> Option<u32> {
        let is_it = |id: &u32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            line.split(|&byte| byte == 0).nth(1) == Some(subcommand.as_bytes())
        };
        self.children().into_iter().find(is_it)
    }
}
