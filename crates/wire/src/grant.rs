//! Grants: one client process's access to a lease.

/// Most grants of one region at a time, including the owner's own. It must suffice for the compute servers
/// that share an owner's regions (paper 3 runs 56 machines), and bounds a node's memory per region.
pub const MAX_GRANTS_PER_REGION: usize = 64;

/// What a grant's holder may do with the region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GrantMode {
    /// READ only; every other operation is refused.
    ReadOnly,
    /// READ, WRITE and atomics.
    ReadWrite,
}
