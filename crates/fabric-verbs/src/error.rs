//! Why RDMA cannot be used; each message names the fix.

use std::io;
use std::net::IpAddr;

/// One variant for each usual fault of a set-up.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// rdma-core is not installed.
    #[error(
        "{library} cannot be loaded ({reason}): \
         install rdma-core (Debian: libibverbs1 librdmacm1 ibverbs-providers)"
    )]
    Library {
        /// File name of the library.
        library: &'static str,
        /// The loader's message.
        reason: String,
    },
    /// No device at all.
    #[error(
        "this machine has no RDMA device: load its driver, or make a soft one \
         (rdma link add rxe0 type rxe netdev INTERFACE)"
    )]
    NoDevice,
    /// There are devices, but none can be reached.
    #[error(
        "no RDMA device has an IPv4 address on an active port: set its interface up and give it one \
         (ip link set INTERFACE up, ip addr add ADDRESS dev INTERFACE)"
    )]
    NoAddress,
    /// There are devices, but none with this address.
    #[error(
        "no RDMA device has the address {address}: `rdma link` shows which interface each belongs to; \
         make a soft one with `rdma link add rxe0 type rxe netdev INTERFACE`, and wait for its GID"
    )]
    NoDeviceAt {
        /// The local address.
        address: IpAddr,
    },
    /// The port is down: the cable, or the interface.
    #[error(
        "port {port} of RDMA device {device} is {state}: set its interface up (ip link set INTERFACE up)"
    )]
    PortDown {
        /// The device.
        device: String,
        /// Its port.
        port: u8,
        /// As the kernel calls it.
        state: String,
    },
    /// An Ethernet port without a GID of RoCE version 2 for the address in use.
    #[error(
        "port {port} of RDMA device {device} has no RoCE v2 GID for {address}: give its interface that \
         address (ip addr add), or set the connection manager's default (cma_roce_mode -d {device} -m 2)"
    )]
    NoRoceGid {
        /// The device.
        device: String,
        /// Its port.
        port: u8,
        /// The local address.
        address: IpAddr,
    },
    /// Too little memory may be locked: registered memory counts as locked.
    #[error(
        "the limit on locked memory ({limit_kib} KiB) is too low to register {bytes} bytes with the network \
         card: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity)"
    )]
    Memlock {
        /// What was to be registered.
        bytes: usize,
        /// The limit in force.
        limit_kib: u64,
    },
    /// The address to listen on names no device.
    #[error("RDMA listens on one device: give the address of its interface instead of {address}")]
    Wildcard {
        /// What was given.
        address: IpAddr,
    },
    /// Any other call that failed.
    #[error("{what}: {source}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl VerbsError {
    /// The error of the library call that failed just now.
    pub(crate) fn last(what: &'static str) -> Self {
        VerbsError::Call { what, source: io::Error::last_os_error() }
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            VerbsError::Library { .. } => io::ErrorKind::Unsupported,
            VerbsError::NoDevice | VerbsError::NoAddress | VerbsError::NoDeviceAt { .. } => {
                io::ErrorKind::NotFound
            }
            VerbsError::PortDown { .. } | VerbsError::NoRoceGid { .. } => io::ErrorKind::NetworkDown,
            VerbsError::Memlock { .. } => io::ErrorKind::OutOfMemory,
            VerbsError::Wildcard { .. } => io::ErrorKind::InvalidInput,
            VerbsError::Call { source, .. } => source.kind(),
        }
    }
}

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> Self {
        io::Error::new(error.kind(), error)
    }
}
