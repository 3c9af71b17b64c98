//! Names and attributes in the journal: which of them a call has changed, and how a later process restores a
//! namespace from what was written.
//!
//! ```text
//! I inode           KeptInode                (inode, parent: 8 bytes, big-endian)
//! E parent name     inode                    (8 bytes, little-endian)
//! X inode name      value of an extended attribute
//! ```
//! A restore leaves out what is inconsistent: an entry whose inode does not exist, a second path to a
//! directory, an inode that no entry names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use farpool_keep::{Change, Kept, tables};
use prost::Message;

use super::{
    Directory, Ino, Inode, Kind, MAX_LINKS, MAX_NAME_BYTES, MAX_SYMLINK_BYTES, MODE_MASK, Namespace,
    Ownership, Times, Xattrs,
};

/// Something that changed and is to be written to the journal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Touched {
    Inode(Ino),
    Entry(Ino, OsString),
    Xattr(Ino, OsString),
}

const FILE: u32 = 1;
const DIRECTORY: u32 = 2;
const SYMLINK: u32 = 3;
const FIFO: u32 = 4;
const SOCKET: u32 = 5;

/// An inode as it is written to the journal. Times are nanoseconds from 1970.
#[derive(Clone, PartialEq, Message)]
struct KeptInode {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(uint32, tag = "2")]
    mode: u32,
    #[prost(uint32, tag = "3")]
    uid: u32,
    #[prost(uint32, tag = "4")]
    gid: u32,
    #[prost(message, optional, tag = "5")]
    accessed: Option<KeptTime>,
    #[prost(message, optional, tag = "6")]
    modified: Option<KeptTime>,
    #[prost(message, optional, tag = "7")]
    changed: Option<KeptTime>,
    /// The target of a symbolic link.
    #[prost(bytes = "vec", tag = "8")]
    target: Vec<u8>,
    /// For a file: the number under which its body is kept.
    #[prost(uint64, tag = "9")]
    file: u64,
}

#[derive(Clone, PartialEq, Message)]
struct KeptTime {
    #[prost(bool, tag = "1")]
    before_1970: bool,
    #[prost(uint64, tag = "2")]
    seconds: u64,
    #[prost(uint32, tag = "3")]
    nanos: u32,
}

impl KeptTime {
    fn of(time: SystemTime) -> Option<Self> {
        let (before_1970, span) = match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => (false, since),
            Err(before) => (true, before.duration()),
        };
        Some(KeptTime { before_1970, seconds: span.as_secs(), nanos: span.subsec_nanos() })
    }

    fn time(&self) -> Option<SystemTime> {
        let span = Duration::from_secs(self.seconds).checked_add(Duration::from_nanos(self.nanos.into()))?;
        let epoch = SystemTime::UNIX_EPOCH;
        if self.before_1970 { epoch.checked_sub(span) } else { epoch.checked_add(span) }
    }
}

impl KeptInode {
    fn times(&self) -> Times {
        let time = |time: &Option<KeptTime>| {
            time.as_ref().and_then(KeptTime::time).unwrap_or(SystemTime::UNIX_EPOCH)
        };
        let (accessed, modified, changed) = (time(&self.accessed), time(&self.modified), time(&self.changed));
        Times { accessed, modified, changed }
    }

    fn ownership(&self) -> Ownership {
        Ownership { mode: self.mode & MODE_MASK, uid: self.uid, gid: self.gid }
    }
}

fn key_of(table: u8, ino: Ino, name: &OsStr) -> Vec<u8> {
    let mut key = vec![table];
    key.extend_from_slice(&ino.0.to_be_bytes());
    key.extend_from_slice(name.as_bytes());
    key
}

fn ino_and_name(key: &[u8]) -> Option<(Ino, &OsStr)> {
    let (ino, name) = key.split_first_chunk()?;
    Some((Ino(u64::from_be_bytes(*ino)), OsStr::from_bytes(name)))
}

fn inodes_of(kept: &Kept) -> BTreeMap<Ino, KeptInode> {
    let inodes = kept.under(&[tables::INODE]).filter_map(|(key, value)| {
        let (ino, _) = ino_and_name(key).filter(|(_, name)| name.is_empty())?;
        Some((ino, KeptInode::decode(value).ok()?))
    });
    inodes.collect()
}

/// The bodies that the inodes of a kept state refer to.
pub fn kept_bodies(kept: &Kept) -> BTreeSet<u64> {
    inodes_of(kept).into_values().filter(|inode| inode.kind == FILE).map(|inode| inode.file).collect()
}

impl<F> Namespace<F> {
    /// Starts to note changes, for [`take_changes`](Self::take_changes).
    pub fn note_changes(&mut self) {
        self.touched = Some(Vec::new());
    }

    /// The present state of what has changed since the last call. `kept_as` gives the number under which a
    /// file's body is kept, if it is.
    pub fn take_changes(&mut self, kept_as: impl Fn(&F) -> Option<u64>) -> Vec<Change> {
        let mut touched = match &mut self.touched {
            Some(touched) => std::mem::take(touched),
            None => return Vec::new(),
        };
        touched.sort_unstable();
        touched.dedup();
        let nothing = OsStr::new("");
        let mut changes = Vec::with_capacity(touched.len());
        for touched in touched {
            let (key, value) = match &touched {
                Touched::Inode(ino) => {
                    let kept = self.inodes.get(ino).and_then(|inode| kept_inode(inode, &kept_as));
                    if kept.is_none() {
                        changes.push(Change::RemoveAll { prefix: key_of(tables::XATTR, *ino, nothing) });
                    }
                    (key_of(tables::INODE, *ino, nothing), kept.map(|kept| kept.encode_to_vec()))
                }
                Touched::Entry(parent, name) => {
                    let there = self.directory(*parent).ok().and_then(|directory| directory.get(name));
                    let is_kept = |ino: &Ino| {
                        self.inodes.get(ino).is_some_and(|inode| kept_inode(inode, &kept_as).is_some())
                    };
                    let there = there.filter(is_kept);
                    let value = there.map(|ino| ino.0.to_le_bytes().to_vec());
                    (key_of(tables::ENTRY, *parent, name), value)
                }
                Touched::Xattr(ino, name) => {
                    let named = self.inodes.get(ino).filter(|inode| kept_inode(inode, &kept_as).is_some());
                    let value = named.and_then(|inode| inode.xattrs.get(name)).map(<[u8]>::to_vec);
                    (key_of(tables::XATTR, *ino, name), value)
                }
            };
            changes.push(match value {
                Some(value) => Change::Put { key, value },
                None => Change::Remove { key },
            });
        }
        changes
    }

    pub(super) fn touch(&mut self, touched: impl FnOnce() -> Touched) {
        if let Some(all) = &mut self.touched {
            all.push(touched());
        }
    }

    /// A namespace from a kept state. `body` gives the body that was kept under a number.
    pub fn restore(
        kept: &Kept,
        root: Ownership,
        now: SystemTime,
        limit: usize,
        mut body: impl FnMut(u64) -> Option<F>,
    ) -> Self {
        let mut names = Namespace::new(root, now, limit);
        let mut inodes = inodes_of(kept);
        names.last_ino =
            inodes.keys().last().map_or(Ino::ROOT.0, |last| last.0.clamp(Ino::ROOT.0, u64::MAX / 2));
        if let Some(root) = inodes.remove(&Ino::ROOT)
            && let Some(inode) = names.inodes.get_mut(&Ino::ROOT)
        {
            (inode.ownership, inode.times) = (root.ownership(), root.times());
        }
        let mut directories = VecDeque::from([Ino::ROOT]);
        while let Some(parent) = directories.pop_front() {
            let prefix = key_of(tables::ENTRY, parent, OsStr::new(""));
            for (name, ino) in kept.under(&prefix) {
                let (name, Ok(ino)) = (OsStr::from_bytes(name), ino.try_into()) else { continue };
                let ino = Ino(u64::from_le_bytes(ino));
                if !is_name(name) || names.names >= limit {
                    continue;
                }
                let is_new = !names.inodes.contains_key(&ino);
                if is_new {
                    let made = inodes.remove(&ino).filter(|_| names.inodes.len() < limit);
                    let Some(made) = made.and_then(|kept| found(&kept, parent, &mut body)) else { continue };
                    names.inodes.insert(ino, made);
                }
                if names.link_found(parent, name, ino, is_new) && is_new && names.directory(ino).is_ok() {
                    directories.push_back(ino);
                }
            }
        }
        names.restore_xattrs(kept);
        names.charge_all();
        names
    }

    /// Entries of the kept state that this namespace, restored from it, does not contain. They must be
    /// written to the journal as removed.
    pub fn left_out(&self, kept: &Kept) -> Vec<Change> {
        let mut gone = Vec::new();
        let mut look = |table, is_there: &dyn Fn(Ino, &OsStr, &[u8]) -> bool| {
            for (key, value) in kept.under(&[table]) {
                let is_there = ino_and_name(key).is_some_and(|(ino, name)| is_there(ino, name, value));
                if !is_there {
                    gone.push(Change::Remove { key: [&[table], key].concat() });
                }
            }
        };
        look(tables::INODE, &|ino, name, _| name.is_empty() && self.inodes.contains_key(&ino));
        look(tables::ENTRY, &|parent, name, value| {
            let there = self.directory(parent).ok().and_then(|directory| directory.get(name));
            there.is_some_and(|ino| ino.0.to_le_bytes() == value)
        });
        look(tables::XATTR, &|ino, name, value| {
            self.inodes.get(&ino).is_some_and(|inode| inode.xattrs.get(name) == Some(value))
        });
        gone
    }

    /// Adds an entry of the kept state. False: the inode is a directory that has a name already, or has too
    /// many names.
    fn link_found(&mut self, parent: Ino, name: &OsStr, ino: Ino, is_new: bool) -> bool {
        let Some(inode) = self.inodes.get_mut(&ino) else { return false };
        let is_directory = inode.directory.is_some();
        if is_directory && !is_new || inode.nlink >= MAX_LINKS {
            return false;
        }
        if !is_directory {
            inode.nlink += 1;
        }
        if let Some(above) = self.inodes.get_mut(&parent) {
            above.nlink += u32::from(is_directory);
            above.directory.get_or_insert_with(|| Directory::new(parent)).insert(name, ino);
        }
        self.names += 1;
        true
    }

    fn restore_xattrs(&mut self, kept: &Kept) {
        for (key, value) in kept.under(&[tables::XATTR]) {
            let Some((ino, name)) = ino_and_name(key) else { continue };
            let total = self.xattr_bytes;
            if let Some(inode) = self.inodes.get_mut(&ino)
                && let Some(total) = inode.xattrs.enter(name, value, total)
            {
                self.xattr_bytes = total;
            }
        }
    }
}

fn is_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let is_reserved = bytes.is_empty() || bytes == b"." || bytes == b"..";
    !is_reserved && bytes.len() <= MAX_NAME_BYTES && !bytes.contains(&b'/') && !bytes.contains(&0)
}

/// The inode as it is kept; `None` if it must not be restored.
fn kept_inode<F>(inode: &Inode<F>, kept_as: impl Fn(&F) -> Option<u64>) -> Option<KeptInode> {
    if inode.nlink == 0 {
        return None;
    }
    let (mut target, mut file) = (Vec::new(), 0);
    let kind = match &inode.kind {
        Kind::File(body) => {
            file = kept_as(body)?;
            FILE
        }
        Kind::Directory => DIRECTORY,
        Kind::Symlink(to) => {
            target = to.as_bytes().to_vec();
            SYMLINK
        }
        Kind::Fifo => FIFO,
        Kind::Socket => SOCKET,
    };
    let Ownership { mode, uid, gid } = inode.ownership;
    let Times { accessed, modified, changed } = inode.times;
    let (accessed, modified, changed) =
        (KeptTime::of(accessed), KeptTime::of(modified), KeptTime::of(changed));
    Some(KeptInode { kind, mode, uid, gid, accessed, modified, changed, target, file })
}

/// An inode from the kept state, not yet named.
fn found<F>(kept: &KeptInode, parent: Ino, body: &mut impl FnMut(u64) -> Option<F>) -> Option<Inode<F>> {
    let kind = match kept.kind {
        FILE => Kind::File(body(kept.file)?),
        DIRECTORY => Kind::Directory,
        SYMLINK if kept.target.len() <= MAX_SYMLINK_BYTES => {
            Kind::Symlink(OsStr::from_bytes(&kept.target).to_owned())
        }
        FIFO => Kind::Fifo,
        SOCKET => Kind::Socket,
        _ => return None,
    };
    let directory = matches!(kind, Kind::Directory).then(|| Directory::new(parent));
    let nlink = if directory.is_some() { 2 } else { 0 };
    let (ownership, times, xattrs) = (kept.ownership(), kept.times(), Xattrs::default());
    let (charged, lookups, opens) = (0, 0, 0);
    Some(Inode { kind, directory, ownership, times, nlink, xattrs, charged, lookups, opens })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::namespace::{MAX_INODES, RenameMode, XattrMode};

    const ROOT: Ownership = Ownership { mode: 0o755, uid: 1, gid: 2 };

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn names() -> Namespace<u64> {
        let mut names = Namespace::new(ROOT, at(0), MAX_INODES);
        names.note_changes();
        names
    }

    fn restored(kept: &Kept) -> Namespace<u64> {
        Namespace::restore(kept, ROOT, at(0), MAX_INODES, Some)
    }

    /// Everything that can be seen from the root.
    fn seen(names: &Namespace<u64>) -> BTreeMap<OsString, String> {
        let mut seen = BTreeMap::new();
        let mut open = vec![(OsString::new(), Ino::ROOT)];
        while let Some((path, ino)) = open.pop() {
            let found = names.attributes(ino).unwrap();
            let kind = format!("{:?}", found.kind);
            let xattrs: Vec<_> = names.xattr_names(ino).unwrap().map(OsStr::to_owned).collect();
            let values: Vec<_> = xattrs.iter().map(|name| names.xattr(ino, name).unwrap().to_vec()).collect();
            let what = format!(
                "{kind} {ino:?} {:?} {:?} {} {xattrs:?} {values:?}",
                found.ownership, found.times, found.nlink
            );
            seen.insert(path.clone(), what);
            if let Ok(entries) = names.entries(ino, 0) {
                for entry in entries.filter(|entry| entry.name != "." && entry.name != "..") {
                    let mut path = path.clone();
                    path.push("/");
                    path.push(entry.name);
                    open.push((path, entry.ino));
                }
            }
        }
        seen
    }

    fn own(mode: u32) -> Ownership {
        Ownership { mode, uid: 5, gid: 6 }
    }

    /// Tries one operation, which may fail.
    fn step(names: &mut Namespace<u64>, (what, a, b, c): (u8, u8, u8, u8), now: SystemTime) {
        let known: Vec<Ino> = names.inodes.keys().copied().collect::<BTreeSet<_>>().into_iter().collect();
        let some = |index: u8| known[index as usize % known.len()];
        let name = |number: u8| OsString::from(format!("n{}", number % 4));
        let _possible = match what % 12 {
            0..3 => {
                names.make(some(a), &name(b), Kind::File(names.last_ino + 100), own(0o644), now).map(drop)
            }
            3..5 => names.make(some(a), &name(b), Kind::Directory, own(0o2755), now).map(drop),
            5 => names.make(some(a), &name(b), Kind::Symlink(name(c)), own(0o777), now).map(drop),
            6 => names.link(some(a), some(b), &name(c), now),
            7 => names.unlink(some(a), &name(b), now).map(drop),
            8 => names.rmdir(some(a), &name(b), now),
            9 => {
                let mode = [RenameMode::Replace, RenameMode::Exchange][usize::from(c % 2)];
                names.rename((some(a), &name(b)), (some(b), &name(c)), mode, now).map(drop)
            }
            10 => names.set_xattr(some(a), &name(b), &[c], XattrMode::Set, now),
            _ if c % 2 == 0 => names.remove_xattr(some(a), &name(b), now),
            _ => {
                let change = crate::namespace::Change { mode: Some(u32::from(c)), ..Default::default() };
                names.change(some(a), change, now)
            }
        };
    }

    proptest! {
        #[test]
        fn the_journal_written_after_each_call_restores_the_same_names(
            steps in vec((any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>()), 0..80), opened: bool,
        ) {
            let (mut names, mut kept) = (names(), Kept::default());
            for (second, step_of) in steps.into_iter().enumerate() {
                step(&mut names, step_of, at(second as u64));
                kept.apply(names.take_changes(|body| Some(*body)));
                if opened && second == 10 {
                    // An open inode without a name lives on here, and is not restored.
                    let all: Vec<Ino> = names.inodes.keys().copied().collect();
                    all.into_iter().for_each(|ino| _ = names.open(ino));
                }
            }
            let mut again = restored(&kept);
            prop_assert_eq!(seen(&again), seen(&names));
            names.check_account();
            again.check_account();
            prop_assert_eq!(again.xattr_bytes, again.inodes.values().map(|inode| inode.xattrs.bytes()).sum::<usize>());
            // Inode numbers are not reused.
            let fresh = again.make(Ino::ROOT, OsStr::new("fresh"), Kind::File(1), own(0), at(0)).unwrap();
            prop_assert!(names.inodes.get(&fresh).is_none_or(|inode| inode.nlink == 0));
        }

        #[test]
        fn arbitrary_kept_state_restores_a_consistent_namespace(
            entries in vec((0..3usize, 0..4u64, vec(any::<u8>(), 0..3), 0..4u64, any::<bool>()), 0..30),
            kinds in vec(0..7u32, 4), garbage in vec(any::<u8>(), 0..20),
        ) {
            let mut kept = Kept::default();
            for (ino, kind) in (1..).zip(kinds) {
                let inode = KeptInode { kind, ..Default::default() };
                let key = key_of(tables::INODE, Ino(ino), OsStr::new(""));
                kept.apply([Change::Put { key, value: inode.encode_to_vec() }]);
            }
            for (table, parent, name, ino, is_garbage) in entries {
                let table = [tables::ENTRY, tables::XATTR, tables::INODE][table];
                let value = if is_garbage { garbage.clone() } else { ino.to_le_bytes().to_vec() };
                kept.apply([Change::Put { key: key_of(table, Ino(parent), OsStr::from_bytes(&name)), value }]);
            }
            let names = restored(&kept);
            prop_assert!(seen(&names).len() <= names.names + 1);
        }
    }
}
