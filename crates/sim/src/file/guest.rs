//! Direct clients (called *guests* in the code) work on files directly, as processes with the interposer do.
//! They use the block words and layouts that they share with the owner, and ask the owner only in unusual
//! cases. They die without a chance to clean up.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use farpool_fabric::sim::ProcessId;
use farpool_file::guest::{GuestFileCore, GuestId, GuestMemory, GuestPlace, GuestStore};
use farpool_file::{FileCore, StoreCore};
use farpool_pool::direct::GuestRegion;
use farpool_pool::{EXTENT_BYTES, SessionCore};

use super::broken::Chosen;
use super::client::{CELLS_PER_EXTENT, looked_at};
use super::history::{Asked, CELL, Ended, Entry, filled};
use super::{Phase, Run};

/// A process that works on files directly.
pub(super) struct Guest {
    id: GuestId,
    store: Arc<GuestStore>,
}

impl Guest {
    /// From now on this process changes nothing. What it has left, locks included, stays as it is.
    pub(super) fn dies(&self) {
        self.store.abandon();
    }

    /// The owner learns of the death some time later, and cleans up after the process.
    pub(super) fn recover(self: Rc<Self>, run: &Rc<Run>) {
        let here = run.clone();
        let core = run.session(run.home());
        run.tasks.spawn(run.home(), async move {
            here.store().recover_guest(&core, self.id).await;
        });
    }
}

/// How a client works on files directly.
pub(super) struct AsGuest {
    pub(super) guest: Rc<Guest>,
    run: Rc<Run>,
    core: SessionCore,
    place: GuestPlace,
    /// Files that it has opened, by number.
    files: RefCell<BTreeMap<u64, Rc<GuestFileCore<Chosen>>>>,
}

impl AsGuest {
    /// Registers a process with the owner. Returns `None` if that fails.
    pub(super) fn new(run: &Rc<Run>, process: ProcessId) -> Option<Self> {
        let id = run.store().add_guest().ok()?;
        let owner = run.store();
        let memory = owner.guest_memory();
        let own = |fd: std::os::fd::BorrowedFd<'_>| -> Option<OwnedFd> { fd.try_clone_to_owned().ok() };
        let memory = GuestMemory { words: own(memory.words)?, table: own(memory.table)? };
        let owners: Weak<StoreCore<Chosen>> = Arc::downgrade(&owner);
        let disk = run.disk.clone();
        let ask = move |number| {
            let told = owners.upgrade()?.region_of(number)?;
            let storage = match told.storage {
                Some(_) => Some(disk.as_ref()?.shared(told.id.index)?),
                None => None,
            };
            Some(GuestRegion { storage, ..told })
        };
        let clock = Arc::new(run.world.clock(run.host));
        let store =
            GuestStore::new(id, &memory, run.store().extents_per_region(), clock, Box::new(ask)).ok()?;
        let store = Arc::new(store);
        let place = store.place()?;
        let core = SessionCore::new(store.regions().clone(), run.endpoint(process));
        let guest = Rc::new(Guest { id, store });
        Some(AsGuest { guest, run: run.clone(), core, place, files: RefCell::default() })
    }

    /// Lets go of regions whose leases have ended.
    pub(super) async fn let_go(&self) {
        self.core.let_go().await;
    }

    fn file(&self, number: u64, file: &FileCore<Chosen>) -> Option<Rc<GuestFileCore<Chosen>>> {
        if let Some(known) = self.files.borrow().get(&number) {
            return Some(known.clone());
        }
        let opened =
            GuestFileCore::<Chosen>::open(self.guest.store.clone(), &file.guest_memory().ok()?).ok()?;
        let opened = Rc::new(opened);
        self.files.borrow_mut().insert(number, opened.clone());
        Some(opened)
    }

    /// Finds the extents that an operation touches and whose leases have ended by the owner's clock, even if
    /// the owner has not noticed that yet. No direct client was told of a later end. Returns, for each such
    /// extent, how many cells of the operation lie before it.
    fn extents_with_ended_leases(&self, file: &FileCore<Chosen>, asked: &Asked) -> Vec<u64> {
        let (Asked::Read(cells) | Asked::Write(cells)) = asked else { return Vec::new() };
        let now_ms = self.run.stock().now().0;
        let stripes = cells.start / CELLS_PER_EXTENT..cells.end.div_ceil(CELLS_PER_EXTENT);
        let ended = stripes.filter(|stripe| {
            let until_ms = file.extent_at(stripe * EXTENT_BYTES).map(|it| it.region().usable_until_ms());
            until_ms.is_some_and(|until_ms| until_ms != 0 && now_ms >= until_ms)
        });
        ended.map(|stripe| (stripe * CELLS_PER_EXTENT).saturating_sub(cells.start)).collect()
    }

    /// Carries out the operation directly. Returns `None` if the owner has to be asked.
    pub(super) async fn ask(
        &self,
        number: u64,
        file: &FileCore<Chosen>,
        asked: &Asked,
        entry: &Entry,
    ) -> Option<Ended> {
        let guest_file = self.file(number, file)?;
        let ended_leases = self.extents_with_ended_leases(file, asked);
        let ended = match asked {
            Asked::Read(cells) => {
                let length = ((cells.end - cells.start) * CELL) as usize;
                let read = guest_file.read(&self.core, &self.place, cells.start * CELL, length).await;
                let (buffer, within) = read.ok()?;
                looked_at(&self.run, cells, buffer.as_deref().map_or(&[][..], |bytes| &bytes[within]))
            }
            Asked::Write(cells) => {
                let data = filled(entry.number(), number, cells.clone());
                let written =
                    guest_file.write(&self.core, &self.place, cells.start * CELL, data[..].into()).await;
                written.ok()?;
                Ended::Done
            }
            _ => return None,
        };
        if self.run.phase.get() == Phase::Busy && self.run.shut.borrow().contains(&number) {
            self.run.complain(format!("a direct client works on file {number}, which is closed to it"));
        }
        let reached = match &ended {
            Ended::Found(words) => words.len() as u64,
            _ => u64::MAX,
        };
        if ended_leases.iter().any(|before| *before < reached) {
            self.run.complain(format!("a direct client uses file {number} where a lease has ended"));
        }
        self.run.world.note("done directly: {}", &[entry.number()]);
        Some(ended)
    }
}
