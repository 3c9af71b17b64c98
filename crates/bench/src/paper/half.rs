//! Runs for whose temporary files far memory has too little room: from the beginning, or because a node gives
//! its memory back during the query.

use std::path::PathBuf;
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::child::{output, tied};
use crate::far_memory::FarMemory;
use crate::stop::StopFlag;

/// Interval of the looks at the mount, each of which looks at every extent.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A node gives its memory back once the files use this part of the pool: a quarter.
const FILLED_DIVISOR: u64 = 4;

/// How far memory and the overflow directory shared a run's temporary files.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Overflowed {
    /// The most that lay in the overflow directory at a time.
    pub most_mib: u64,
    /// If a node gave its memory back during the run: how long that took.
    pub taken_back: Option<Duration>,
}

/// Watches a run.
pub(super) struct OverflowWatch<'a> {
    far: &'a FarMemory,
    looked_at: Instant,
    most_bytes: u64,
    /// At how many bytes in use to shrink the node, and how. `None`: never, or done.
    shrink_at: Option<(u64, Command)>,
    shrinking: Option<JoinHandle<Result<Duration>>>,
    stop: StopFlag,
}

/// Asks and resizes the nodes of a pool.
pub(super) struct Operator {
    farpool: PathBuf,
    node: String,
    args: Vec<std::ffi::OsString>,
}

impl Operator {
    /// For the first node of a pool.
    pub(super) fn of(farpool: PathBuf, far: &FarMemory, stop: &StopFlag) -> Result<Self> {
        let args = far.operator_args();
        let mut command = tied(&farpool);
        command.args(["status", "--json"]).args(&args);
        let status: Value = serde_json::from_str(&output("farpool status", command, stop.flag())?)?;
        let node = status["nodes"][0]["id"].as_str().context("farpool status shows no node")?;
        Ok(Operator { node: node.to_owned(), farpool, args })
    }

    fn resize(&self, how: &str, mib: u64) -> Command {
        let mut command = tied(&self.farpool);
        let to = if mib == 0 { "0".to_owned() } else { format!("{mib}MiB") };
        command.args(["node", how, "--to", &to, "--node", &self.node, "--json"]).args(&self.args);
        command
    }

    /// Has the node lend all of its memory again.
    pub(super) fn restore(&self, mib: u64, stop: &StopFlag) -> Result<()> {
        output("farpool node grow", self.resize("grow", mib), stop.flag()).map(drop)
    }
}

impl<'a> OverflowWatch<'a> {
    /// Watches only.
    pub(super) fn new(far: &'a FarMemory, stop: &StopFlag) -> Self {
        let stop = stop.clone();
        OverflowWatch {
            far,
            looked_at: Instant::now(),
            most_bytes: 0,
            shrink_at: None,
            shrinking: None,
            stop,
        }
    }

    /// Also empties a node once the files use part of a pool of `pool_mib`.
    pub(super) fn emptying(far: &'a FarMemory, operator: &Operator, pool_mib: u64, stop: &StopFlag) -> Self {
        let bytes = (pool_mib << 20) / FILLED_DIVISOR;
        OverflowWatch { shrink_at: Some((bytes, operator.resize("shrink", 0))), ..Self::new(far, stop) }
    }

    /// To be called often during the run.
    pub(super) fn look(&mut self) {
        if self.looked_at.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked_at = Instant::now();
        // If the mount does not answer, the query fails as well.
        let Ok(volume) = self.far.volume() else { return };
        self.most_bytes = self.most_bytes.max(volume["overflow_bytes"].as_u64().unwrap_or(0));
        let Ok(found) = rustix::fs::statvfs(self.far.mount_point()) else { return };
        let used = (found.f_blocks - found.f_bfree) * found.f_frsize;
        if let Some((_, command)) = self.shrink_at.take_if(|(bytes, _)| used >= *bytes) {
            let stop = self.stop.clone();
            self.shrinking = Some(thread::spawn(move || {
                let started = Instant::now();
                output("farpool node shrink", command, stop.flag())?;
                Ok(started.elapsed())
            }));
        }
    }

    /// To be called when the run has ended. A short run may have ended before anything was taken back.
    pub(super) fn end(self) -> Result<Overflowed> {
        let taken_back = match self.shrinking.map(JoinHandle::join) {
            None => None,
            Some(Ok(ended)) => Some(ended?),
            Some(Err(_)) => bail!("the thread that emptied the node panicked"),
        };
        Ok(Overflowed { most_mib: self.most_bytes >> 20, taken_back })
    }
}
