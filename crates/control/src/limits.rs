//! Sizes that both ends of the control plane must agree on.

/// Most regions of one node: 4 TiB of 64 MiB regions. Their states fit in a message of 4 MiB, gRPC's default
/// limit.
pub const MAX_REGIONS_PER_NODE: u32 = 65_536;

/// The size of a region is a positive multiple of this, which has room for several extents of a file.
pub const REGION_GRANULE_BYTES: u64 = 1 << 20;

/// Most regions in one request of an owner: 256 GiB of 64 MiB regions. An owner that needs more asks again.
pub const MAX_REGIONS_PER_ACQUIRE: u32 = 4_096;

/// Most leases named in one renewal or release: an owner with more at one node sends several.
pub const MAX_LEASES_PER_REQUEST: usize = 4_096;

/// Longest `host:port`, socket path or host name that a node may announce. The kernel allows 108 bytes for
/// the path of a Unix socket; DNS allows 253 for a name.
pub const MAX_ADDRESS_BYTES: usize = 300;
