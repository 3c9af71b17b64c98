//! Shared by the tests: the address of the testbed's device.

use std::net::SocketAddr;

use farpool_fabric::Peer;

/// An address of the RDMA device under test, with port zero. Without a device the tests fail, they are not
/// skipped.
pub fn device_address() -> SocketAddr {
    let address = std::env::var("FARPOOL_RDMA_ADDRESS").expect(
        "FARPOOL_RDMA_ADDRESS does not name the address of an RDMA device: `make test-rdma` runs these tests \
         where there is one",
    );
    SocketAddr::new(address.parse().expect("FARPOOL_RDMA_ADDRESS is an IP address"), 0)
}

/// Where to listen: anywhere on the device, or where an earlier node did.
#[allow(dead_code)] // not all test programs restart nodes
pub fn listen_at(earlier: Option<&Peer>) -> SocketAddr {
    earlier.and_then(|peer| peer.verbs).unwrap_or_else(device_address)
}
