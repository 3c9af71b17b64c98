//! Grants: one client process's access to a lease.

/// Grants of one region at a time, the owner's own included: the compute servers that share an owner's
/// regions (paper 3 runs 56 machines), and a bound on what a node keeps per region.
pub const MAX_GRANTS_PER_REGION: usize = 64;

/// What a grant's holder may do with the region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GrantMode {
    /// READ only; every other operation is refused.
    ReadOnly,
    /// READ, WRITE and atomics.
    ReadWrite,
}
