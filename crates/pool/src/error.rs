//! What can go wrong, one variant per decision of the caller.

use std::io;
use std::path::PathBuf;

use farpool_control::ControlError;
use farpool_fabric::OpError;
use farpool_wire::{NodeId, RegionId};
use rustix::io::Errno;

/// Why there is no connection to the pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Correct the address or the certificates.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Start a broker, or name the right one.
    #[error("the broker at {broker} gives no answer: {reason}")]
    BrokerUnreachable {
        /// The broker's address.
        broker: String,
        /// The reason, and what to do about it.
        reason: String,
    },
    /// The limit on threads or descriptors is too low.
    #[error("cannot start the pool's threads: {0}; raise the limits on processes and open files")]
    Start(#[source] std::io::Error),
    /// Allow at least one region.
    #[error(
        "a limit of {limit_bytes} bytes is less than one region of the pool ({region_bytes}); raise --limit"
    )]
    LimitTooSmall {
        /// What was allowed.
        limit_bytes: u64,
        /// What the nodes lend.
        region_bytes: u64,
    },
    /// Name another directory for overflow.
    #[error(transparent)]
    Overflow(#[from] OverflowError),
    /// Start empty, or start the nodes as they were.
    #[error(
        "the mount that is to be found again used regions of {kept} bytes and the pool now has regions of {found}: delete the \
         directory of --keep to start empty, or start the nodes with the region size of before"
    )]
    OtherRegionSize {
        /// The region size in the kept state.
        kept: u64,
        /// What the nodes lend.
        found: u64,
    },
    /// Use a region size that is a multiple of the extent size.
    #[error(
        "the pool's regions have {region_bytes} bytes; clients need a multiple of {extent_bytes}: start the nodes with another --region-size"
    )]
    RegionSize {
        /// What the nodes lend.
        region_bytes: u64,
        /// What this side carves them into.
        extent_bytes: u64,
    },
}

/// Why a directory cannot take what the pool has no room for.
#[derive(Debug, thiserror::Error)]
pub enum OverflowError {
    /// Name a directory on a disk.
    #[error(
        "{} lies in this machine's memory (tmpfs), of which overflow would take more: name a directory on a disk",
        dir.display()
    )]
    InMemory {
        /// The directory.
        dir: PathBuf,
    },
    /// Name a directory of a file system that keeps what it has allocated.
    #[error(
        "the file system of {} may need new space for each write, so it can be full at any write: name a directory \
         on ext4 or xfs",
        dir.display()
    )]
    NotInPlace {
        /// The directory.
        dir: PathBuf,
    },
    /// Name the directory of before.
    #[error(
        "the state in {} says that data lie in an overflow directory: mount with the --overflow of before, or delete \
         the state to start empty",
        state.display()
    )]
    NotNamed {
        /// The directory of the state.
        state: PathBuf,
    },
    /// Correct what the reason names.
    #[error("{} cannot be used for overflow: {reason}", dir.display())]
    Unusable {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
}

/// The pool, or this client's share of it, is used up; or it cannot grow since no broker answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no memory left: add a node, raise --limit or --overflow-limit, use --overflow, or delete files")]
pub struct NoSpace;

/// Why an extent could not be read or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AccessError {
    /// The region's data are lost.
    #[error("region {region}: its lease has ended and its contents are lost")]
    LeaseLost {
        /// The region.
        region: RegionId,
    },
    /// All data on the node are lost.
    #[error("node {node} does not answer; its data are lost")]
    NodeLost {
        /// The node.
        node: NodeId,
    },
    /// Nothing happened and nothing is lost: close files, raise the limits (`ulimit -n`), use fewer clients,
    /// and try again.
    #[error(
        "this process or node {node} is short of descriptors, memory or connections; nothing is lost: raise the \
         limits (ulimit -n), or use fewer clients"
    )]
    Short {
        /// The node.
        node: NodeId,
    },
    /// The node refused for a reason that no lease explains: a bug on one of the two sides.
    #[error("unexpected refusal: {0}")]
    Refused(OpError),
    /// Try again later: the overflow directory's disk failed, or did not answer in time. After a write, the
    /// contents there are indeterminate.
    #[error("the overflow directory failed, or did not answer in time")]
    Storage,
    /// The session's staging arena has no room for the transfer.
    #[error("the session's staging arena is full")]
    ArenaFull,
}

/// Whether an error is a shortage on this machine, which says nothing about the peer.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let shortage = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS));
    shortage || error.kind() == io::ErrorKind::OutOfMemory
}

/// Why another client was not admitted to a region, or its grant was not fenced.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantError {
    /// This process does not hold the region any more: all its grants have ended or will end, and none can be
    /// added or fenced.
    #[error("region {region}: its lease has ended")]
    LeaseLost {
        /// The region.
        region: RegionId,
    },
    /// The node refused, for the reason given.
    #[error("node {node} refuses: {reason}")]
    Refused {
        /// The node.
        node: NodeId,
        /// What it said.
        reason: String,
    },
    /// Ask again: it is unknown whether the node carried the request out. After a fence, the client may still
    /// use the region. After an admission, the client has no key; if the node has made a grant, the grant
    /// takes a place until the lease ends.
    #[error("node {node} gave no usable answer: {reason}")]
    NoAnswer {
        /// The node.
        node: NodeId,
        /// What is known.
        reason: String,
    },
}

/// Why a process could not become one of several holders of leases.
#[derive(Debug, thiserror::Error)]
pub enum JointError {
    /// The pool cannot be reached.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Correct the address or the certificates.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A node does not answer, or not as it should.
    #[error(transparent)]
    Node(#[from] GrantError),
    /// Start a node.
    #[error("no node lends memory to the broker at {broker}: start one with `farpool node`")]
    NoNode {
        /// The broker's address.
        broker: String,
    },
    /// Lend more memory, or ask for less.
    #[error(
        "{wanted_mib} MiB are wanted, but {free_mib} MiB are free: add a node, or ask for less ({reason})"
    )]
    NoSpace {
        /// What was asked for.
        wanted_mib: u64,
        /// What the pool could lend.
        free_mib: u64,
        /// What the broker said to the last request.
        reason: String,
    },
    /// The lease was not renewed: the region's data are lost.
    #[error("the lease of region {region} has ended: its data are lost")]
    Ended {
        /// The region.
        region: RegionId,
    },
    /// The bytes are not keys that a holder has encoded.
    #[error("the keys of the leases are damaged")]
    Damaged,
    /// This process is giving the leases up.
    #[error("the leases are being closed: acquire or join them again")]
    Closed,
    /// The limit on threads or descriptors is too low.
    #[error("cannot start the thread that renews leases: {0}; raise the limits on processes and open files")]
    Start(#[source] std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_shortage_is_distinguished_from_a_lost_node() {
        let from = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS] {
            assert!(is_shortage(&from(errno)), "{errno}");
        }
        for errno in [Errno::CONNREFUSED, Errno::NOENT, Errno::AGAIN, Errno::TIMEDOUT] {
            assert!(!is_shortage(&from(errno)), "{errno}");
        }
    }
}
