//! The memory that one client's card may reach, and how that access ends.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use farpool_fabric::{CutOff, LentMemory};
use farpool_wire::{Epoch, VerbsAttached};
use rustix_futex_sync::Mutex;

use crate::cm::CmId;
use crate::ffi;
use crate::memory::{Registration, Window};

/// A connection's queue pair and the regions lent to it. The host shares it: its fences cut the connection,
/// from any thread. The lock is never held while the host is called.
pub(super) struct CardAccess {
    state: Mutex<State>,
}

struct State {
    /// `None` once the server's thread has ended the connection.
    id: Option<CmId>,
    /// The queue pair is destroyed, and no region is lent any more.
    cut: bool,
    granted: HashMap<u32, Granted>,
}

/// One region, open to the client's card. Fields drop in this order: the access ends before the memory is
/// released.
pub(super) struct Granted {
    pub(super) epoch: Epoch,
    pub(super) opening: Opening,
    pub(super) lent: LentMemory,
}

/// The card's access to a region.
pub(super) enum Opening {
    Window(Window),
    Registration(Registration),
}

/// The error that the connection was cut meanwhile.
pub(super) struct WasCut;

impl CardAccess {
    pub(super) fn new(id: CmId) -> Arc<Self> {
        Arc::new(CardAccess {
            state: Mutex::new(State { id: Some(id), cut: false, granted: HashMap::new() }),
        })
    }

    pub(super) fn is_cut(&self) -> bool {
        self.state.lock().cut
    }

    /// The epoch under which the region is attached; `None` if it is not attached.
    pub(super) fn epoch(&self, region: u32) -> Option<Epoch> {
        self.state.lock().granted.get(&region).map(|granted| granted.epoch)
    }

    pub(super) fn regions(&self) -> usize {
        self.state.lock().granted.len()
    }

    /// Adds a region. If it has a window, a work request binds the window before the client is told. Returns
    /// the message for the client, and the description of the work request.
    pub(super) fn grant(
        &self,
        region: u32,
        granted: Granted,
    ) -> Result<(VerbsAttached, Option<ffi::BindMw>), WasCut> {
        let mut state = self.state.lock();
        if state.cut {
            return Err(WasCut);
        }
        let mapping = &granted.lent.mapping;
        let (address, region_bytes) = (mapping.base() as u64, mapping.len());
        let (remote_key, bind) = match &granted.opening {
            Opening::Registration(registration) => (registration.remote_key(), None),
            Opening::Window(window) => {
                let bind_info = ffi::MwBindInfo {
                    mr: window.registration().raw(),
                    addr: address,
                    length: region_bytes,
                    mw_access_flags: remote_access(granted.lent.writable) as u32,
                };
                let rkey = window.next_key();
                (rkey, Some(ffi::BindMw { mw: window.raw(), rkey, bind_info }))
            }
        };
        let attached = VerbsAttached { address, region_bytes, remote_key, writable: granted.lent.writable };
        state.granted.insert(region, granted); // an older one of the same region ends here
        Ok((attached, bind))
    }

    /// Ends the card's access to a region and releases its memory.
    pub(super) fn revoke(&self, region: u32) {
        let granted = self.state.lock().granted.remove(&region);
        drop(granted);
    }

    /// Runs `post` on the identifier, unless it was cut.
    pub(super) fn with_id<T>(&self, post: impl FnOnce(&CmId) -> io::Result<T>) -> io::Result<T> {
        let state = self.state.lock();
        match &state.id {
            Some(id) if !state.cut => post(id),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Ends the connection for good. Only the server's thread calls this: it takes the identifier's events.
    pub(super) fn close(&self) {
        self.cut();
        let id = self.state.lock().id.take();
        drop(id); // destroying it needs no lock
    }
}

impl CutOff for CardAccess {
    fn cut(&self) {
        let mut state = self.state.lock();
        if state.cut {
            return;
        }
        state.cut = true;
        if let Some(id) = &state.id {
            id.disconnect(); // otherwise the client would learn it only after its retransmissions
        }
        // Windows first: destroying a queue pair may have to wait for the windows bound to it.
        let granted = std::mem::take(&mut state.granted);
        let mut lent = Vec::with_capacity(granted.len());
        let mut registrations = Vec::new();
        for (_, granted) in granted {
            match granted.opening {
                Opening::Window(window) => drop(window),
                Opening::Registration(registration) => registrations.push(registration),
            }
            lent.push(granted.lent);
        }
        if let Some(id) = &state.id {
            id.destroy_queue_pair();
        }
        drop(registrations);
        drop(lent); // N1: nothing reaches the memory any more
    }
}

/// Access rights for a client's card.
pub(super) fn remote_access(writable: bool) -> i32 {
    let write = ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_ATOMIC;
    ffi::ACCESS_REMOTE_READ | if writable { write } else { 0 }
}
