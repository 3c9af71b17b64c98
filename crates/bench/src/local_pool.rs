//! A pool for one measurement: a broker and a node of this program on loopback, gone with the value.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use farpool_fabric::TransportChoice;

use crate::child::Child;
use crate::folder::Folder;

/// Regions as large as a pool's usually are, unless the footprint is smaller.
const REGION_BYTES: u64 = 64 << 20;
/// Smallest region that a node lends.
const SMALLEST_REGION_BYTES: u64 = 1 << 20;
/// Longest path of a Unix socket without its final zero (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// A running broker and node. They are dropped before their folder.
#[derive(Debug)]
pub struct LocalPool {
    /// Where the broker listens.
    pub broker: String,
    node: Child,
    _broker: Child,
    _dir: Folder,
}

impl LocalPool {
    /// Starts both from `farpool`, this program's file. The node lends `footprint_bytes`, rounded up to whole
    /// regions; over a network card as well where that is what is measured.
    pub fn start(farpool: &Path, footprint_bytes: u64, transport: TransportChoice) -> Result<Self> {
        let dir = Folder::make().context("there is no place for the pool")?;
        let socket = socket_in(dir.path())?;
        let region = region_bytes(footprint_bytes);
        let memory = footprint_bytes.div_ceil(region) * region;
        let store = dir.path().join("broker.redb").into_os_string();
        let args: [OsString; 5] =
            ["broker".into(), "--listen".into(), "127.0.0.1:0".into(), "--store".into(), store];
        let (broker_process, broker) = Child::of_this_program(farpool, "the broker", args, Stdio::null())?;
        let numbers = [("--memory", memory), ("--region-size", region)];
        let mut args: Vec<OsString> = vec!["node".into(), "--broker".into(), broker.clone().into()];
        args.extend(
            numbers.into_iter().flat_map(|(option, bytes)| [option.into(), bytes.to_string().into()]),
        );
        // Prefaulted either way; locking would only ask for a higher limit.
        args.extend(["--no-lock".into(), "--shm-socket".into(), socket.into()]);
        if transport == TransportChoice::Verbs {
            args.extend(["--listen-rdma".into(), "auto".into()]);
        }
        let (node, _) = Child::of_this_program(farpool, "the node", args, Stdio::null())?;
        Ok(LocalPool { broker, node, _broker: broker_process, _dir: dir })
    }

    /// Process id of the node.
    pub fn node_id(&self) -> u32 {
        self.node.id()
    }
}

/// Where the node listens, in a folder whose place the environment chose.
fn socket_in(dir: &Path) -> Result<PathBuf> {
    let socket = dir.join("node.sock");
    let bytes = socket.as_os_str().len();
    if bytes > SOCKET_PATH_MAX {
        let path = socket.display();
        bail!(
            "{path} has {bytes} bytes, and a socket's path at most {SOCKET_PATH_MAX}: set TMPDIR to a shorter folder"
        );
    }
    Ok(socket)
}

/// The largest power of two that fits the footprint, within what a node lends.
fn region_bytes(footprint_bytes: u64) -> u64 {
    let fitting = 1 << footprint_bytes.max(1).ilog2();
    u64::clamp(fitting, SMALLEST_REGION_BYTES, REGION_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_fit_the_footprint() {
        assert_eq!(region_bytes(1 << 30), REGION_BYTES);
        assert_eq!(region_bytes(5 << 20), 4 << 20);
        assert_eq!(region_bytes(1), SMALLEST_REGION_BYTES);
    }
}
