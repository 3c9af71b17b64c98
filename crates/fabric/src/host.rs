//! The node's side of the seam: what a server of any transport asks of the memory's owner.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use farpool_wire::{AccessKey, Epoch, NodeId, OwnerId, Refusal, ShmAttached};

use crate::memory::{AccessError, Mapping};
use crate::regions::RegionSet;

/// What a host tells about itself in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostIdentity {
    /// The node.
    pub node: NodeId,
    /// Size of each region.
    pub region_bytes: u64,
    /// How many there are.
    pub regions: u32,
}

/// A region's memory, handed to a process of the same host.
pub struct SharedRegion {
    /// The memory; read-only for a read-only grant.
    pub memory: OwnedFd,
    /// The page of words, read-only.
    pub words: OwnedFd,
    /// Sizes and places for the client.
    pub attached: ShmAttached,
}

/// Whether an access changes memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// READ.
    Read,
    /// WRITE and the atomics: refused to read-only grants.
    Write,
}

/// Cuts remote access that no check per operation guards, such as a network card's.
pub trait CutOff: Send + Sync {
    /// When this returns, nothing of the access takes effect any more.
    ///
    /// It may be called before the access was established, which must then not happen. It may be called
    /// again, and by several threads; each call returns only when the access is cut. It may wait for the
    /// transport's own threads, since no lock of the regions is held; it must not itself ask for a fence.
    fn cut(&self);
}

/// A region's memory, lent to a transport of this process that gives others access past the host, such as a
/// network card.
pub struct LentMemory {
    /// The memory.
    pub mapping: Arc<Mapping>,
    /// Whether the grant allows more than READ.
    pub writable: bool,
    /// Kept until the access has ended: while it lives, the region is not lent to a new owner.
    pub holder: Arc<dyn Send + Sync>,
}

/// The side of a server that lends: a set of regions, and rules of access that come on top of the server's.
///
/// The server's thread calls these methods, so they must not wait for anything slow.
pub trait Host: Send + Sync + 'static {
    /// The node that lends the regions.
    fn node(&self) -> NodeId;

    /// The regions.
    fn regions(&self) -> &RegionSet;

    /// The host's own rule for a client that shows a key. The regions check the key itself.
    fn admit(&self, _region: u32, _epoch: Epoch, _key: &AccessKey) -> Result<(), Refusal> {
        Ok(())
    }

    /// The host's identity.
    fn identity(&self) -> HostIdentity {
        let regions = self.regions();
        HostIdentity { node: self.node(), region_bytes: regions.region_bytes(), regions: regions.regions() }
    }

    /// Checks a key once, when a queue opens a region.
    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.admit(region, epoch, key)?;
        self.regions().check(region, epoch, key)
    }

    /// Runs `access`, an access of the given `kind`, on a region's memory. A fence of the grant that starts
    /// meanwhile takes effect only after it.
    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        self.regions().with_region(region, epoch, kind, access)
    }

    /// Hands a region's memory to a process of this host, after checking the key.
    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.admit(region, epoch, key)?;
        self.regions().share(region, epoch, key)
    }

    /// Lends a region's memory to a transport, after checking the key. `cut` is called before a fence of the
    /// grant returns, and before the memory moves because another grant of the region was fenced.
    fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn CutOff>,
    ) -> Result<LentMemory, Refusal> {
        self.admit(region, epoch, key)?;
        self.regions().lend(region, epoch, key, cut)
    }

    /// The owner of the lease that a grant belongs to, if the host knows it: connections are counted by
    /// owner. Called after the key was checked. Where it is `None`, each grant counts as an owner of its own.
    fn owner(&self, _region: u32, _epoch: Epoch) -> Option<OwnerId> {
        None
    }

    /// Answers a call of a connection that has something attached by appending to `answer`.
    fn call(&self, _request: &[u8], _answer: &mut Vec<u8>) -> Result<(), Refusal> {
        Err(Refusal::UnknownCall)
    }

    /// A peer sent something malformed and was cut off.
    fn rejected(&self) {}
}

/// What a client is told about an access that the mapping did not allow.
pub fn access_refusal(error: AccessError) -> Refusal {
    match error {
        AccessError::OutOfBounds => Refusal::OutOfBounds,
        AccessError::Misaligned => Refusal::Misaligned,
        AccessError::ReadOnly => Refusal::ReadOnly,
    }
}
