//! A pool for one measurement: a broker and nodes of this program on loopback. Dropping the value ends it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use farpool_fabric::{MAX_SOCKET_PATH_BYTES, TransportChoice};

use crate::child::Child;
use crate::folder::Folder;

/// Region size of usual pools, taken unless the footprint is smaller.
const REGION_BYTES: u64 = 64 << 20;
/// The smallest region that a node lends.
const SMALLEST_REGION_BYTES: u64 = 1 << 20;

/// What the nodes lend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lend {
    /// Number of nodes.
    pub nodes: u32,
    /// Bytes that each lends, rounded up to whole regions.
    pub bytes_each: u64,
    /// Size of a region: a power of two.
    pub region_bytes: u64,
}

/// A running broker and its nodes. They are dropped before their folder.
#[derive(Debug)]
pub struct LocalPool {
    /// Where the broker listens.
    pub broker: String,
    nodes: Vec<Child>,
    _broker: Child,
    _dir: Folder,
}

impl LocalPool {
    /// Starts a broker and a node from `farpool`, this program's file. The node lends `footprint_bytes`,
    /// rounded up to whole regions; also over a network card, if `transport` is verbs.
    pub fn start(farpool: &Path, footprint_bytes: u64, transport: TransportChoice) -> Result<Self> {
        let lend =
            Lend { nodes: 1, bytes_each: footprint_bytes, region_bytes: region_bytes(footprint_bytes) };
        Self::lending(farpool, lend, transport)
    }

    /// As [`start`](Self::start), with several nodes.
    pub fn lending(farpool: &Path, lend: Lend, transport: TransportChoice) -> Result<Self> {
        let dir = Folder::make().context("cannot make a folder for the pool")?;
        let store = dir.path().join("broker.redb").into_os_string();
        let args: [OsString; 5] =
            ["broker".into(), "--listen".into(), "127.0.0.1:0".into(), "--store".into(), store];
        let (broker_process, broker) = Child::of_this_program(farpool, "the broker", args, Stdio::null())?;
        let node = |number| {
            let args = node_args(&broker, dir.path(), number, lend, transport)?;
            Ok(Child::of_this_program(farpool, "the node", args, Stdio::null())?.0)
        };
        let nodes = (0..lend.nodes).map(node).collect::<Result<_>>()?;
        Ok(LocalPool { broker, nodes, _broker: broker_process, _dir: dir })
    }

    /// Process id of the first node.
    pub fn node_id(&self) -> u32 {
        self.nodes[0].id()
    }
}

fn node_args(
    broker: &str,
    dir: &Path,
    number: u32,
    lend: Lend,
    transport: TransportChoice,
) -> Result<Vec<OsString>> {
    let region = lend.region_bytes;
    let memory = lend.bytes_each.div_ceil(region) * region;
    let mut args: Vec<OsString> = vec!["node".into(), "--broker".into(), broker.into()];
    for (option, bytes) in [("--memory", memory), ("--region-size", region)] {
        args.extend([option.into(), bytes.to_string().into()]);
    }
    // The memory is prefaulted in any case; locking it would only need a higher limit.
    args.extend(["--no-lock".into(), "--shm-socket".into(), socket_in(dir, number)?.into()]);
    if transport == TransportChoice::Verbs {
        args.extend(["--listen-rdma".into(), "auto".into()]);
    }
    Ok(args)
}

/// Path of the node's socket, in a folder that the environment chose: it may be too long.
fn socket_in(dir: &Path, number: u32) -> Result<PathBuf> {
    let socket = dir.join(format!("node{number}.sock"));
    let bytes = socket.as_os_str().len();
    if bytes > MAX_SOCKET_PATH_BYTES {
        let path = socket.display();
        bail!(
            "{path} has {bytes} bytes, but a socket's path has at most {MAX_SOCKET_PATH_BYTES}: set TMPDIR \
             to a shorter path"
        );
    }
    Ok(socket)
}

/// The largest power of two that is not larger than the footprint, within the sizes that a node lends.
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
