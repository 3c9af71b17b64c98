//! What the table answers, and by what names.

use farpool_wire::{AccessKey, Epoch, GrantMode, OwnerId, Refusal};

use crate::{LeaseClass, Millis};

/// One grant of one region: what a fence names, and what a stale message betrays itself by. A lease goes by
/// its first grant, the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lending {
    /// Counts the node's regions from zero.
    pub region: u32,
    /// The grant's number.
    pub epoch: Epoch,
}

/// A grant just made. Whoever has `key` may use the region as `mode` says while the lease lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The region and the grant's epoch.
    pub lending: Lending,
    /// Opens the region; goes to the grant's holder and nobody else.
    pub key: AccessKey,
    /// What the holder may do.
    pub mode: GrantMode,
    /// When the lease ends unless renewed, by the node's clock.
    pub until: Millis,
}

/// What is left of a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Term {
    /// Time until the lease ends unless renewed, counted from the answer.
    pub remaining: Millis,
    /// The region is being taken back: no renewal extends this term.
    pub revoked: bool,
}

/// Why a lease was not renewed or released. The holder drops it in each case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeaseRefusal {
    /// Acquire another one: what was stored there is gone.
    #[error("the lease has ended: acquire a new one")]
    Ended,
    /// Somebody else's lease, or a damaged message.
    #[error("owner or key are not those of the lease")]
    WrongKey,
    /// The holder asks the wrong node, or made the lease up.
    #[error("this node never granted that lease")]
    Unknown,
}

impl From<LeaseRefusal> for Refusal {
    fn from(refusal: LeaseRefusal) -> Refusal {
        match refusal {
            LeaseRefusal::Ended => Refusal::StaleEpoch,
            LeaseRefusal::WrongKey => Refusal::WrongKey,
            LeaseRefusal::Unknown => Refusal::NotAttached,
        }
    }
}

/// Why a grant was not added to a lease, or not fenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrantRefusal {
    /// The lease is not (any longer) the asker's.
    #[error(transparent)]
    Lease(#[from] LeaseRefusal),
    /// Fence one that is not needed any more.
    #[error(
        "the lease has {} grants, the most there may be: fence one first",
        farpool_wire::MAX_GRANTS_PER_REGION
    )]
    Full,
    /// Restart the node.
    #[error("the node has used up its epochs: restart it")]
    EpochsUsedUp,
    /// Release the lease instead.
    #[error("the owner's own grant ends with the lease: release it")]
    OwnersOwn,
}

/// Why a lease was not revoked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RevokeRefusal {
    /// The region is on its way back, or lent to another.
    #[error("the lease has ended")]
    Ended,
    /// Only its owner gives it back.
    #[error("the lease is pinned")]
    Pinned,
    /// Somebody made the lease up.
    #[error("this node never granted that lease")]
    Unknown,
}

/// What a release did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Released {
    /// The lease was in force: fence all its grants now.
    Fence,
    /// It had ended before; nothing to do.
    Already,
}

/// Where a region stands. Holds no key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionStatus {
    /// Scrubbed, nobody's.
    Free,
    /// Lent. A lease past `until` is over even while the table still says so.
    Held {
        /// The lease's number.
        epoch: Epoch,
        /// Whose it is.
        owner: OwnerId,
        /// Whether it may be taken back.
        class: LeaseClass,
        /// When it ends unless renewed.
        until: Millis,
        /// Grants in force, the owner's own included.
        grants: u32,
        /// It is being taken back.
        revoked: bool,
    },
    /// Nothing of this lease takes effect any more; holders may still have to let go of the memory.
    Fenced {
        /// The lease that ended.
        epoch: Epoch,
    },
    /// Being overwritten with zeros.
    Scrubbing {
        /// The lease that ended.
        epoch: Epoch,
    },
}

/// How many regions are where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionCounts {
    /// Ready to be lent.
    pub free: u32,
    /// Lent.
    pub held: u32,
    /// Fenced or being scrubbed: soon free.
    pub returning: u32,
}
