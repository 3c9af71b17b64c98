//! Names and attributes that a successor finds again, if this process is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::SystemTime;

use farpool_file::FarFile;
use farpool_keep::{Journal, Kept};
use parking_lot::RwLockWriteGuard;

use crate::body::Body;
use crate::namespace::{MAX_INODES, Namespace, Ownership, kept_bodies};

/// What an earlier process has left of a mount, and where this one writes its names down.
pub struct KeptMount {
    /// Where names are written down.
    pub journal: Arc<dyn Journal>,
    /// What was written down.
    pub kept: Kept,
    /// The files that [`kept_files`] named, as far as they were found.
    pub files: BTreeMap<u64, FarFile>,
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
    pub(crate) fn of(root: Ownership, kept: Option<KeptMount>) -> Self {
        let now = SystemTime::now();
        let Some(KeptMount { journal, kept, mut files }) = kept else {
            return Names { namespace: Namespace::new(root, now, MAX_INODES), journal: None };
        };
        let body = |file| Some(Arc::new(Body::new(files.remove(&file)?)));
        let mut namespace = Namespace::restore(&kept, root, now, MAX_INODES, body);
        namespace.note_changes();
        Names { namespace, journal: Some(journal) }
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
