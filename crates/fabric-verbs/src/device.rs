//! RDMA devices of this machine: what they can do, and whether they are set up.
//!
//! Ports and GIDs are read from sysfs. The connection manager chooses the GID by address; this module only
//! checks that the choice is a GID of RoCE version 2, the only version that crosses routers.

use std::ffi::CStr;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::ptr::NonNull;

use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;

/// A device that the connection manager has opened; it stays open as long as the process lives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device(NonNull<ffi::Context>);

// SAFETY: a context is never closed, and libibverbs may be called from any thread.
unsafe impl Send for Device {}
// SAFETY: libibverbs locks what its calls on one context share.
unsafe impl Sync for Device {}

/// What a device can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities {
    /// CAS and FAA, atomic at least with respect to each other on this device.
    pub(crate) atomics: bool,
    /// Memory windows bound to one queue pair.
    pub(crate) windows: bool,
    /// READs and atomics that a queue pair may have in flight as requester.
    pub(crate) initiator_depth: u8,
    /// READs and atomics that a queue pair serves at once as responder.
    pub(crate) responder_depth: u8,
    /// Longest completion queue.
    pub(crate) completions: u32,
}

impl Device {
    /// Wraps the context that an identifier was bound to.
    pub(crate) fn new(context: NonNull<ffi::Context>) -> Self {
        Device(context)
    }

    pub(crate) fn raw(self) -> *mut ffi::Context {
        self.0.as_ptr()
    }

    /// All devices. rdma-core guarantees for this call, and for no other, that they stay open.
    pub(crate) fn all(library: &Library) -> Result<Vec<Device>, VerbsError> {
        let mut count = 0;
        // SAFETY: `count` is written before the call returns.
        let list = unsafe { (library.cm.rdma_get_devices)(&mut count) };
        if list.is_null() {
            return Err(VerbsError::NoDevice);
        }
        // SAFETY: the list has `count` entries, all of them open devices.
        let devices = unsafe { std::slice::from_raw_parts(list, count.max(0) as usize) };
        let devices: Vec<_> = devices.iter().filter_map(|&device| NonNull::new(device)).map(Device).collect();
        // SAFETY: the list came from `rdma_get_devices` and is not used any more.
        unsafe { (library.cm.rdma_free_devices)(list) };
        if devices.is_empty() { Err(VerbsError::NoDevice) } else { Ok(devices) }
    }

    pub(crate) fn name(self, library: &Library) -> String {
        // SAFETY: the context is open, and the name lives as long as its device.
        let name = unsafe { CStr::from_ptr((library.verbs.ibv_get_device_name)((*self.raw()).device)) };
        name.to_string_lossy().into_owned()
    }

    pub(crate) fn capabilities(self, library: &Library) -> Result<Capabilities, VerbsError> {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut attributes: ffi::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure has the header's size.
        let failed = unsafe { (library.verbs.ibv_query_device)(self.raw(), &mut attributes) };
        if failed != 0 {
            let source = std::io::Error::from_raw_os_error(failed);
            return Err(VerbsError::Call { what: "asking the RDMA device what it can do", source });
        }
        let windows = ffi::DEVICE_MEM_WINDOW_TYPE_2A | ffi::DEVICE_MEM_WINDOW_TYPE_2B;
        Ok(Capabilities {
            atomics: attributes.atomic_cap != ffi::ATOMIC_NONE,
            windows: attributes.device_cap_flags & windows != 0 && attributes.max_mw > 0,
            initiator_depth: attributes.max_qp_init_rd_atom.clamp(1, u8::MAX.into()) as u8,
            responder_depth: attributes.max_qp_rd_atom.clamp(1, u8::MAX.into()) as u8,
            completions: attributes.max_cqe.max(1) as u32,
        })
    }
}

/// IPv4 addresses at which this machine's devices can be reached now, by their GIDs.
///
/// # Errors
/// Without rdma-core, any device, or any address on one.
pub fn device_addresses() -> Result<Vec<IpAddr>, VerbsError> {
    let library = Library::get()?;
    let names = Device::all(library)?.into_iter().map(|device| device.name(library));
    let ports = names.flat_map(|name| Port::of(&name)).filter(|port| port.state() == "ACTIVE");
    let mut found: Vec<IpAddr> = ports
        .flat_map(|port| port.roce_v2_gids())
        .filter_map(|gid| Ipv6Addr::from(gid).to_ipv4_mapped().map(IpAddr::from))
        .collect();
    found.sort();
    found.dedup();
    if found.is_empty() { Err(VerbsError::NoAddress) } else { Ok(found) }
}

/// One port, as described in sysfs.
pub(crate) struct Port {
    pub(crate) device: String,
    pub(crate) number: u8,
    folder: PathBuf,
}

impl Port {
    pub(crate) fn new(device: String, number: u8) -> Self {
        let folder = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{number}"));
        Port { device, number, folder }
    }

    /// All ports of a device.
    pub(crate) fn of(device: &str) -> Vec<Port> {
        let Ok(entries) = fs::read_dir(format!("/sys/class/infiniband/{device}/ports")) else {
            return Vec::new();
        };
        let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.map(|number| Port::new(device.to_owned(), number)).collect()
    }

    fn read(&self, file: &str) -> Option<String> {
        Some(fs::read_to_string(self.folder.join(file)).ok()?.trim().to_owned())
    }

    /// "ACTIVE" when it can be used.
    pub(crate) fn state(&self) -> String {
        let state = self.read("state").unwrap_or_else(|| "UNKNOWN".into());
        // The kernel writes "4: ACTIVE".
        state.rsplit(' ').next().unwrap_or_default().to_owned()
    }

    pub(crate) fn is_ethernet(&self) -> bool {
        self.read("link_layer").as_deref() == Some("Ethernet")
    }

    /// The GIDs of RoCE version 2.
    pub(crate) fn roce_v2_gids(&self) -> Vec<[u8; 16]> {
        let Ok(entries) = fs::read_dir(self.folder.join("gid_attrs/types")) else { return Vec::new() };
        let indices = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let v2 = indices.filter(|index| {
            // Reading the type of an unused index fails.
            self.read(&format!("gid_attrs/types/{index}")).as_deref() == Some("RoCE v2")
        });
        v2.filter_map(|index| parse_gid(&self.read(&format!("gids/{index}"))?)).collect()
    }

    /// Whether the port can carry connections of `address` under the GID that the connection manager chose.
    pub(crate) fn check(&self, address: IpAddr, gid: &[u8; 16]) -> Result<(), VerbsError> {
        let state = self.state();
        if state != "ACTIVE" {
            return Err(VerbsError::PortDown { device: self.device.clone(), port: self.number, state });
        }
        if self.is_ethernet() && !self.roce_v2_gids().contains(gid) {
            return Err(VerbsError::NoRoceGid { device: self.device.clone(), port: self.number, address });
        }
        Ok(())
    }
}

/// "0000:0000:0000:0000:0000:ffff:0a09:0001" as bytes.
fn parse_gid(text: &str) -> Option<[u8; 16]> {
    text.parse::<Ipv6Addr>().ok().map(|address| address.octets())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_of_an_ipv4_address_is_read() {
        let gid = parse_gid("0000:0000:0000:0000:0000:ffff:0a09:0001").unwrap();
        assert_eq!(gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]);
        assert_eq!(parse_gid("nonsense"), None);
    }

    #[test]
    fn a_port_that_is_not_there_is_not_active() {
        let port = Port::new("no-such-device".into(), 1);
        let error = port.check("10.0.0.1".parse().unwrap(), &[0; 16]).unwrap_err();
        assert!(matches!(error, VerbsError::PortDown { .. }), "{error}");
    }
}
