//! Region memory as the node's card sees it: registered once, and opened to each client separately.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use farpool_fabric::{LentMemory, Mapping};

use super::access::{Opening, remote_access};
use crate::device::Device;
use crate::error::VerbsError;
use crate::ffi;
use crate::library::Library;
use crate::memory::{Domain, Registration, Window};

/// How this node's card opens regions to clients.
pub(super) struct Lending {
    library: &'static Library,
    device: Device,
    /// If windows are used: the domain of all queue pairs and registrations.
    shared: Option<Arc<Domain>>,
    /// By region. The memory of a region may be replaced between two leases.
    registered: HashMap<u32, (Weak<Mapping>, Arc<Registration>)>,
}

impl Lending {
    pub(super) fn new(library: &'static Library, device: Device, windows: bool) -> Result<Self, VerbsError> {
        let shared = if windows { Some(Domain::new(library, device)?) } else { None };
        Ok(Lending { library, device, shared, registered: HashMap::new() })
    }

    /// The domain of a new connection.
    pub(super) fn domain(&self) -> Result<Arc<Domain>, VerbsError> {
        match &self.shared {
            Some(domain) => Ok(domain.clone()),
            // A remote key opens its memory to every queue pair of its domain, so each client gets a domain
            // of its own.
            None => Domain::new(self.library, self.device),
        }
    }

    /// Opens lent memory to a connection of `domain`.
    pub(super) fn open(
        &mut self,
        region: u32,
        lent: &LentMemory,
        domain: &Arc<Domain>,
    ) -> Result<Opening, VerbsError> {
        if self.shared.is_none() {
            let access = ffi::ACCESS_LOCAL_WRITE | remote_access(lent.writable);
            return Ok(Opening::Registration(register(domain, &lent.mapping, access)?));
        }
        let registration = self.registered(region, &lent.mapping, domain)?;
        Ok(Opening::Window(Window::new(registration, self.device)?))
    }

    fn registered(
        &mut self,
        region: u32,
        mapping: &Arc<Mapping>,
        domain: &Arc<Domain>,
    ) -> Result<Arc<Registration>, VerbsError> {
        let known = self.registered.get(&region);
        if let Some((known, registration)) = known
            && known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, mapping))
        {
            return Ok(registration.clone());
        }
        self.registered.remove(&region);
        // The registration itself has no remote rights: its remote key opens nothing, only its windows do.
        let access = ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_MW_BIND;
        let registration = Arc::new(register(domain, mapping, access)?);
        self.registered.insert(region, (Arc::downgrade(mapping), registration.clone()));
        Ok(registration)
    }

    /// Drops the registrations of memory that the host has replaced, so that the memory is freed.
    pub(super) fn forget_replaced(&mut self) {
        self.registered.retain(|_, (mapping, _)| mapping.strong_count() > 0);
    }
}

fn register(domain: &Arc<Domain>, mapping: &Mapping, access: i32) -> Result<Registration, VerbsError> {
    // SAFETY: the mapping is alive, and no Rust reference into region memory exists anywhere. The
    // registration pins the pages. So even if the registration outlives the mapping, the card reaches these
    // pages only, and never pages that belong to something else.
    unsafe { Registration::new(domain, mapping.base(), mapping.len() as usize, access) }
}
