//! Open files, by the handle numbers that the kernel uses.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::body::Body;
use crate::namespace::Ino;

/// Most open files at a time: the default limit of Linux (`fs.nr_open`).
const MAX_HANDLES: usize = 1 << 20;

/// Too many open files.
#[derive(Debug)]
pub(crate) struct NoHandle;

/// An open file.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) ino: Ino,
    pub(crate) body: Arc<Body>,
    /// Whether it was opened for writing.
    pub(crate) writable: bool,
    pub(crate) standing: Standing,
}

/// Whether a handle follows the rules of direct clients (called *guests* in the code).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// It follows the kernel's rules.
    Plain,
    /// It follows the rules of direct clients.
    Registered,
    /// It follows the kernel's rules for good: it can no longer register.
    Barred,
}

/// All open files. A look-up holds a shared lock for two instructions.
#[derive(Default)]
pub(crate) struct Handles {
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    slots: Vec<Option<Handle>>,
    free: Vec<usize>,
}

impl Handles {
    pub(crate) fn insert(&self, handle: Handle) -> Result<u64, NoHandle> {
        let mut table = self.table.write();
        let slot = match table.free.pop() {
            Some(slot) => slot,
            None if table.slots.len() < MAX_HANDLES => {
                table.slots.push(None);
                table.slots.len() - 1
            }
            None => return Err(NoHandle),
        };
        table.slots[slot] = Some(handle);
        Ok(slot as u64)
    }

    pub(crate) fn get(&self, number: u64) -> Option<Arc<Body>> {
        let table = self.table.read();
        table.slots.get(usize::try_from(number).ok()?)?.as_ref().map(|handle| handle.body.clone())
    }

    pub(crate) fn handle(&self, number: u64) -> Option<Handle> {
        let table = self.table.read();
        table.slots.get(usize::try_from(number).ok()?)?.clone()
    }

    /// Changes the standing of a handle, unless it is barred; returns the standing before.
    pub(crate) fn change_standing(&self, number: u64, standing: Standing) -> Option<Standing> {
        let mut table = self.table.write();
        let handle = table.slots.get_mut(usize::try_from(number).ok()?)?.as_mut()?;
        let before = handle.standing;
        if before != Standing::Barred {
            handle.standing = standing;
        }
        Some(before)
    }

    /// The file behind a handle, if it was opened for writing.
    pub(crate) fn get_writable(&self, number: u64) -> Option<Arc<Body>> {
        let table = self.table.read();
        let handle = table.slots.get(usize::try_from(number).ok()?)?.as_ref()?;
        handle.writable.then(|| handle.body.clone())
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Handle> {
        let mut table = self.table.write();
        let slot = usize::try_from(number).ok()?;
        let handle = table.slots.get_mut(slot)?.take()?;
        table.free.push(slot);
        Some(handle)
    }
}
