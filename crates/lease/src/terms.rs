//! The table's answers, and the types in which it gives them.

use farpool_wire::{AccessKey, Epoch, GrantMode, OwnerId, Refusal};

use crate::{LeaseClass, Millis};

/// One grant of one region. A fence names one, and a stale message is recognised by it. A lease is identified
/// by its first grant, the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lending {
    /// Index of the region among the node's regions, from zero.
    pub region: u32,
    /// The grant's epoch.
    pub epoch: Epoch,
}

/// A new grant. A client with `key` may use the region as `mode` says while the lease lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The region and the grant's epoch.
    pub lending: Lending,
    /// Opens the region. Only the grant's holder gets it.
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
    /// Acquire another lease: what was stored in the region is gone.
    #[error("the lease has ended: acquire a new one")]
    Ended,
    /// The lease is another owner's, or the message is damaged.
    #[error("owner or key are not those of the lease")]
    WrongKey,
    /// The holder asked the wrong node, or invented the lease.
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
    /// The lease is not the caller's, or no longer.
    #[error(transparent)]
    Lease(#[from] LeaseRefusal),
    /// Fence a grant that is no longer needed.
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
    /// The region is being returned, or is lent to another owner.
    #[error("the lease has ended")]
    Ended,
    /// Only its owner can give it back.
    #[error("the lease is pinned")]
    Pinned,
    /// The caller invented the lease.
    #[error("this node never granted that lease")]
    Unknown,
}

/// What a release did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Released {
    /// The lease was in force: fence all its grants now.
    Fence,
    /// The lease had ended before: there is nothing to do.
    Already,
}

/// The state of a region. It contains no key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionStatus {
    /// Scrubbed, and not leased.
    Free,
    /// Lent. A lease past `until` has ended, even while the table still lists it as held.
    Held {
        /// The lease's epoch.
        epoch: Epoch,
        /// The lease's owner.
        owner: OwnerId,
        /// Whether it may be taken back.
        class: LeaseClass,
        /// When it ends unless renewed.
        until: Millis,
        /// Grants in force, the owner's own included.
        grants: u32,
        /// The lease is being taken back.
        revoked: bool,
    },
    /// Nothing done under this lease takes effect any more; clients may still have to let go of the memory.
    Fenced {
        /// The lease that ended.
        epoch: Epoch,
    },
    /// Being overwritten with zeros.
    Scrubbing {
        /// The lease that ended.
        epoch: Epoch,
    },
    /// Its memory went back to the machine: the region is not lent until it has memory again.
    Withdrawn,
}

/// Number of regions in each state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionCounts {
    /// Ready to be lent.
    pub free: u32,
    /// Lent.
    pub held: u32,
    /// Fenced or being scrubbed: soon free.
    pub returning: u32,
    /// Without memory, which went back to the machine.
    pub withdrawn: u32,
}
