//! One directory: entries by name for look-ups, and by cookie for `readdir`.
//!
//! An entry's cookie is the number of its insertion. So a listing that continues from a cookie returns every
//! entry that existed during the whole listing exactly once, in directories of any size, without a copy for
//! each open directory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::sync::Arc;

use super::Ino;

const DOT_COOKIE: u64 = 1;
const DOT_DOT_COOKIE: u64 = 2;

/// One line of a listing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectoryEntry<'a> {
    /// The cookie from which to continue after this entry.
    pub cookie: u64,
    /// The inode.
    pub ino: Ino,
    /// The name.
    pub name: &'a OsStr,
}

#[derive(Debug)]
pub(super) struct Directory {
    /// The directory that contains this one; for the root, the root itself.
    pub(super) parent: Ino,
    by_name: HashMap<Arc<OsStr>, (u64, Ino)>,
    by_cookie: BTreeMap<u64, (Arc<OsStr>, Ino)>,
    last_cookie: u64,
}

impl Directory {
    pub(super) fn new(parent: Ino) -> Self {
        let (by_name, by_cookie) = (HashMap::new(), BTreeMap::new());
        Directory { parent, by_name, by_cookie, last_cookie: DOT_DOT_COOKIE }
    }

    pub(super) fn get(&self, name: &OsStr) -> Option<Ino> {
        self.by_name.get(name).map(|&(_, ino)| ino)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Adds an entry; the name must be free.
    pub(super) fn insert(&mut self, name: &OsStr, ino: Ino) {
        self.last_cookie += 1;
        let name: Arc<OsStr> = Arc::from(name);
        let previous = self.by_name.insert(name.clone(), (self.last_cookie, ino));
        assert!(previous.is_none(), "two entries of one name");
        self.by_cookie.insert(self.last_cookie, (name, ino));
    }

    /// Lets a name stand for another inode; its place in the listing stays.
    pub(super) fn replace(&mut self, name: &OsStr, ino: Ino) {
        if let Some(entry) = self.by_name.get_mut(name) {
            entry.1 = ino;
            if let Some(listed) = self.by_cookie.get_mut(&entry.0) {
                listed.1 = ino;
            }
        }
    }

    pub(super) fn remove(&mut self, name: &OsStr) {
        if let Some((cookie, _)) = self.by_name.remove(name) {
            self.by_cookie.remove(&cookie);
        }
    }

    /// All but `.` and `..`.
    pub(super) fn named(&self, own: Ino) -> impl Iterator<Item = DirectoryEntry<'_>> {
        self.entries(own, DOT_DOT_COOKIE)
    }

    pub(super) fn entries(&self, own: Ino, cookie: u64) -> impl Iterator<Item = DirectoryEntry<'_>> {
        let dots = [(DOT_COOKIE, own, "."), (DOT_DOT_COOKIE, self.parent, "..")];
        let dots = dots.into_iter().map(|(cookie, ino, name)| (cookie, ino, OsStr::new(name)));
        let named = self.by_cookie.range(cookie.saturating_add(1)..);
        let named = named.map(|(&cookie, (name, ino))| (cookie, *ino, &**name));
        let all = dots.filter(move |&(own_cookie, ..)| own_cookie > cookie).chain(named);
        all.map(|(cookie, ino, name)| DirectoryEntry { cookie, ino, name })
    }
}
