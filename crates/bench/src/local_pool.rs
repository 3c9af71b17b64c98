//! A pool for one measurement: a broker and nodes of this program on loopback. Dropping the value ends it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use farpool_fabric::{MAX_SOCKET_PATH_BYTES, TransportChoice};

use crate::child::{Child, joining};
use crate::folder::Folder;

/// Region size of usual pools, taken unless the footprint is smaller.
const REGION_BYTES: u64 = 64 << 20;
/// The smallest region that a node lends.
const SMALLEST_REGION_BYTES: u64 = 1 << 20;

/// The variable with the log filter of the program's processes.
const LOG_VARIABLE: &str = "FARPOOL_LOG";

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

/// A control group with a memory limit, and what a node in it leaves of the limit.
#[derive(Clone, Copy, Debug)]
pub struct Confined<'a> {
    /// The group's `cgroup.procs` file.
    pub procs_file: &'a Path,
    /// How much is to stay available.
    pub reserve_bytes: u64,
}

/// A running broker and its nodes. They are dropped before their folder.
#[derive(Debug)]
pub struct LocalPool {
    /// Where the broker listens.
    pub broker: String,
    nodes: Vec<Child>,
    _broker: Child,
    dir: Folder,
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
        let mut pool = Self::without_nodes(farpool)?;
        for _ in 0..lend.nodes {
            pool.add_node(farpool, lend, transport, None)?;
        }
        Ok(pool)
    }

    /// Starts a broker.
    pub fn without_nodes(farpool: &Path) -> Result<Self> {
        let dir = Folder::make().context("cannot make a folder for the pool")?;
        let store = dir.path().join("broker.redb").into_os_string();
        let args: [OsString; 5] =
            ["broker".into(), "--listen".into(), "127.0.0.1:0".into(), "--store".into(), store];
        let (broker_process, broker) = Child::of_this_program(farpool, "the broker", args, Stdio::null())?;
        Ok(LocalPool { broker, nodes: Vec::new(), _broker: broker_process, dir })
    }

    /// Starts one more node, perhaps in a control group.
    pub fn add_node(
        &mut self,
        farpool: &Path,
        lend: Lend,
        transport: TransportChoice,
        confined: Option<Confined<'_>>,
    ) -> Result<()> {
        let number = self.nodes.len() as u32;
        let mut args = node_args(&self.broker, self.dir.path(), number, lend, transport)?;
        let mut program = PathBuf::from(farpool);
        // Otherwise a node might give memory back in the middle of a measurement.
        let reserve_bytes = confined.map_or(0, |confined| confined.reserve_bytes);
        args.extend(["--reserve".into(), reserve_bytes.to_string().into()]);
        if let Some(Confined { procs_file, .. }) = confined {
            let [shell, words @ ..] = joining(procs_file);
            // The node gives memory back on purpose, and would say so each time.
            let quiet = std::env::var_os(LOG_VARIABLE).is_none().then(|| format!("{LOG_VARIABLE}=error"));
            let run = ["env".into()].into_iter().chain(quiet.map(OsString::from)).chain([farpool.into()]);
            args.splice(..0, words.into_iter().chain(run));
            program = shell.into();
        }
        self.nodes.push(Child::of_this_program(&program, "the node", args, Stdio::null())?.0);
        Ok(())
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
