//! A file in the memory of nbdkit: nbdfuse makes a file of a network block device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Result;

use crate::child::{Child, tied_politely};
use crate::folder::{Folder, mountpoint};
use crate::table::peers::nbd::Nbdkit;

/// For servers that have nothing to prepare before they serve.
const MOUNT_DEADLINE: Duration = Duration::from_secs(30);

/// The file, and what serves it. Fields are dropped in this order.
pub struct NbdFile {
    _nbdfuse: Child,
    /// `None`: nbdfuse has started it.
    _nbdkit: Option<Nbdkit>,
    /// It is locked, so that no other run removes it as a leftover.
    _folder: Folder,
    path: PathBuf,
}

impl NbdFile {
    /// A file of so many zeros, with a Unix socket between nbdfuse and nbdkit.
    pub fn over_unix(bytes: u64) -> Result<Self> {
        Self::start(bytes, &["[", "nbdkit", "--exit-with-parent", "memory", &bytes.to_string(), "]"], None)
    }

    /// The same with TCP over loopback.
    pub fn over_tcp(bytes: u64) -> Result<Self> {
        let nbdkit = Nbdkit::start_empty(bytes)?;
        Self::start(bytes, &[&format!("nbd://{}", nbdkit.address())], Some(nbdkit))
    }

    fn start(bytes: u64, source: &[&str], nbdkit: Option<Nbdkit>) -> Result<Self> {
        let (folder, dir) = mountpoint()?;
        let path = dir.join("data");
        let mut command = tied_politely("nbdfuse");
        // It prints an error when it is ended.
        command.arg(&path).args(source).stdout(Stdio::null()).stderr(Stdio::null());
        let mut nbdfuse = Child::start("nbdfuse", command)?;
        let serves = |_: &_| Ok(fs::metadata(&path).is_ok_and(|file| file.len() == bytes));
        nbdfuse.wait_until(MOUNT_DEADLINE, serves)?;
        Ok(NbdFile { _nbdfuse: nbdfuse, _nbdkit: nbdkit, _folder: folder, path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
