//! A page cache as a user gets it: `farpool cache attach` as a child process, and what its commands say.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::child::{Child, run};
use crate::progress::warn;
use crate::stop::StopFlag;

/// How long the cache may take until it has all its memory and is open: some rounds of its keeper.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
const COMMAND_WITHIN: Duration = Duration::from_secs(30);
/// Comparing a page takes some microseconds, or a second if it differs.
const VERIFY_WITHIN: Duration = Duration::from_secs(300);
/// What stands behind the number of pages in the answer of `farpool cache verify`.
const VERIFIED: &str = " pages in the cache are as on the disk";

/// A cache of the files in a directory. Dropping it detaches it, and removes its door.
#[derive(Debug)]
pub struct PageCache {
    daemon: Child, // ended before its door is removed
    _door: Door,
    farpool: PathBuf,
    data: PathBuf,
}

impl PageCache {
    /// Attaches a cache to the files in `data`; `options` are those of `farpool cache attach`.
    pub fn attach(farpool: &Path, data: &Path, options: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let args = ["cache".into(), "attach".into(), data.into()].into_iter().chain(options);
        let (daemon, _) = Child::of_this_program(farpool, "the cache", args, Stdio::null())?;
        let door = status(farpool, data)?["door"].as_str().map(PathBuf::from);
        let door = Door(door.context("the cache has no door")?);
        Ok(Self { daemon, _door: door, farpool: farpool.into(), data: data.into() })
    }

    /// Waits until the cache is open and has all its memory.
    pub fn await_open(&mut self, stop: &StopFlag) -> Result<()> {
        self.daemon.wait_until(OPEN_WITHIN, |_| {
            stop.check()?;
            let status = status(&self.farpool, &self.data)?;
            let cache = &status["cache"];
            Ok(status["state"] == "open" && cache["memory_bytes"] == cache["wanted_bytes"])
        })
    }

    /// What `farpool cache status --json` says.
    pub fn status(&self) -> Result<Value> {
        status(&self.farpool, &self.data)
    }

    /// Compares one in so many pages in the cache with the disk, and returns how many that were; an error if
    /// one differs.
    pub fn verify(&self, one_in: u32) -> Result<u64> {
        let sample = format!("1/{one_in}");
        let args = ["cache", "verify", "--sample", &sample].map(OsStr::new);
        let said = run(&self.farpool, &[&args[..], &[self.data.as_os_str()]].concat(), VERIFY_WITHIN)
            .context("cannot verify the cache")?;
        // Without that text, nothing was compared.
        let pages = said.split_once(VERIFIED).and_then(|(before, _)| before.rsplit(' ').next());
        Ok(pages.map_or(Ok(0), str::parse)?)
    }

    /// An error if the daemon has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        ensure!(self.daemon.is_running()?, "farpool cache attach has ended");
        Ok(())
    }

    /// Detaches it; an error if the daemon fails.
    pub fn detach(&mut self) -> Result<()> {
        self.daemon.end()
    }
}

/// The door of a cache, which lies outside of the folders that end with a measurement.
#[derive(Debug)]
struct Door(PathBuf);

impl Drop for Door {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            warn(&format!("cannot remove {}: {error}", self.0.display()));
        }
    }
}

fn status(farpool: &Path, data: &Path) -> Result<Value> {
    let args = ["cache", "status", "--json"].map(OsStr::new);
    let said = run(farpool, &[&args[..], &[data.as_os_str()]].concat(), COMMAND_WITHIN)?;
    serde_json::from_str(&said).context("cannot parse the cache's status")
}
