//! Names and attributes that a successor finds again, if this process is killed.

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

/// What an earlier process has left of a mount, and where this one writes its names down. Dropped before it was mounted, it leaves
/// all of that to a successor.
pub struct KeptMount {
    journal: Arc<dyn Journal>,
    kept: Kept,
    files: BTreeMap<u64, FarFile>,
    /// Of the files, until there is a file system that has them.
    store: Option<FileStore>,
}

impl KeptMount {
    /// What was written down, where to write, and the files that [`kept_files`] named, as far as `store` has found them.
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
        // The files end after this, and that is nothing to be written down.
        if let Some(store) = &self.store {
            store.core().abandon();
        }
    }
}

/// The files that names stand for in a kept state, by the numbers that they are kept under.
pub fn kept_files(kept: &Kept) -> BTreeSet<u64> {
    kept_bodies(kept)
}

/// A mount's names, and where they are written down.
pub(crate) struct Names {
    pub(crate) namespace: Namespace<Arc<Body>>,
    pub(crate) journal: Option<Arc<dyn Journal>>,
}

impl Names {
    /// What was kept; else an empty root that looks like the directory which the mount covers.
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
        // What was left out must not come back under a number that is given out again.
        found.journal.append_in_parts(&namespace.left_out(&kept));
        namespace.note_changes();
        namespace.limit_to(budget);
        found.store = None;
        Names { namespace, journal: Some(found.journal.clone()) }
    }
}

/// The names while somebody changes them. What was changed is written down before others see it.
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
        // A handler that panicked may have left something half done.
        if !changes.is_empty() && !std::thread::panicking() {
            journal.append(&changes);
        }
    }
}
