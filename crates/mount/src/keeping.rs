//! Names and attributes that survive this process: they are written to a journal, from which a later process
//! restores them.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::SystemTime;

use farpool_file::{FarFile, FileStore};
use farpool_keep::{Journal, Kept};
use parking_lot::RwLockWriteGuard;

use crate::body::Body;
use crate::namespace::{Budget, MAX_INODES, Namespace, Ownership, kept_bodies};

/// What an earlier process left of a mount, and the journal to which this process writes its names. If it is
/// dropped before it is mounted, all of that stays for a later process.
pub struct KeptMount {
    journal: Arc<dyn Journal>,
    kept: Kept,
    files: BTreeMap<u64, FarFile>,
    /// The store of the files, until a file system takes them over.
    store: Option<FileStore>,
}

impl KeptMount {
    /// The kept state, the journal to write to, and those of the files named by [`kept_files`] that `store`
    /// has found.
    pub fn new(
        journal: Arc<dyn Journal>,
        kept: Kept,
        store: FileStore,
        files: BTreeMap<u64, FarFile>,
    ) -> Self {
        KeptMount { journal, kept, files, store: Some(store) }
    }
}

impl Drop for KeptMount {
    fn drop(&mut self) {
        // The files are dropped after this; the journal must not record that.
        if let Some(store) = &self.store {
            store.core().abandon();
        }
    }
}

/// The files that a kept state names, by the numbers under which they are kept.
pub fn kept_files(kept: &Kept) -> BTreeSet<u64> {
    kept_bodies(kept)
}

/// The names of a mount, and the journal to which they are written.
pub(crate) struct Names {
    pub(crate) namespace: Namespace<Arc<Body>>,
    pub(crate) journal: Option<Arc<dyn Journal>>,
}

impl Names {
    /// Restores what was kept; otherwise makes an empty root with the mode and owner of the directory that
    /// the mount covers.
    pub(crate) fn of(root: Ownership, budget: Budget, kept: Option<KeptMount>) -> Self {
        let now = SystemTime::now();
        let Some(mut found) = kept else {
            let mut namespace = Namespace::new(root, now, MAX_INODES);
            namespace.limit_to(budget);
            return Names { namespace, journal: None };
        };
        let (kept, mut files) = (mem::take(&mut found.kept), mem::take(&mut found.files));
        let body = |file| Some(Arc::new(Body::new(files.remove(&file)?)));
        let mut namespace = Namespace::restore(&kept, root, now, MAX_INODES, body);
        // What was left out must not reappear under a number that is assigned again.
        found.journal.append_in_parts(&namespace.left_out(&kept));
        namespace.note_changes();
        namespace.limit_to(budget);
        found.store = None;
        Names { namespace, journal: Some(found.journal.clone()) }
    }
}

/// The names, locked for a change. The change is written to the journal before other threads see it.
pub(crate) struct NamesMut<'a> {
    pub(crate) names: RwLockWriteGuard<'a, Namespace<Arc<Body>>>,
    pub(crate) journal: Option<&'a Arc<dyn Journal>>,
}

impl Deref for NamesMut<'_> {
    type Target = Namespace<Arc<Body>>;

    fn deref(&self) -> &Self::Target {
        &self.names
    }
}

impl DerefMut for NamesMut<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.names
    }
}

impl Drop for NamesMut<'_> {
    fn drop(&mut self) {
        let Some(journal) = self.journal else { return };
        let changes = self.names.take_changes(|body| body.far.core().kept_id());
        // A handler that panicked may have left the names half changed.
        if !changes.is_empty() && !std::thread::panicking() {
            journal.append(&changes);
        }
    }
}
