//! Where regions lie that are kept for a later process: as files in a folder of their owner.
//!
//! F1. A folder belongs to one owner, which holds its lock as long as it lives. Folders and files are for
//!     their user only (0700, 0600).
//! F2. A process that opens the directory removes files and folders of its user that nothing refers to:
//!     - in its own folder, files of regions that its state does not name;
//!     - folders that no process has locked and whose state is gone. A state is gone if its directory
//!       (`--keep`) does not exist, is from an earlier boot, or now has another owner's state. What processes
//!       of another mount namespace refer to stays: they see other directories. A folder whose owner died
//!       before it had named its state has no state.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_keep::{LOCK_PATIENCE, boot_id, lock_exclusive};
use farpool_wire::OwnerId;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstat, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;

/// What folders are called, before the owner's id.
const PREFIX: &str = "farpool-";
/// In a folder: the directory with the owner's state ([`Referrer`]).
const KEPT_BY: &CStr = c"kept-by";
const NEW_KEPT_BY: &CStr = c"kept-by.new";
/// Most attempts to make a folder. Other processes may remove it; each of them removes it once at most.
const MAX_TRIES: u32 = 16;
/// A link that names the mount namespace of this process.
const NAMESPACE: &str = "/proc/self/ns/mnt";
/// Longer than any `kept-by`, even with the longest path (4,096 bytes).
const MAX_KEPT_BY_BYTES: u64 = 8 << 10;

/// The state that names regions.
#[derive(Clone, Debug)]
pub(crate) struct KeptBy {
    /// The owner of the state.
    pub(crate) owner: OwnerId,
    /// The directory in which the state lies.
    pub(crate) dir: PathBuf,
    /// The indices of the regions that it names.
    pub(crate) named: BTreeSet<u32>,
}

impl KeptBy {
    /// The folder of this owner, and the place of its state.
    pub(super) fn own_folder(&self) -> (CString, Option<PathBuf>) {
        (name_of(self.owner), self.dir.canonicalize().ok())
    }
}

/// Opens and locks the folder of an owner, and removes what the owner's state does not name.
pub(super) fn take(dir: &File, by: &KeptBy) -> io::Result<File> {
    // Another process may remove a folder that was just made, since nothing refers to it yet.
    let made = (0..MAX_TRIES).find_map(|_| make(dir, by).transpose());
    let folder = made.unwrap_or_else(|| Err(io::ErrorKind::ResourceBusy.into()))?;
    let wanted = Referrer::here(&by.dir)?.to_bytes();
    if kept_by(&folder).ok().as_ref() != Some(&wanted) {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&folder, NEW_KEPT_BY, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(&wanted)?;
        renameat(&folder, NEW_KEPT_BY, &folder, KEPT_BY)?;
    }
    for name in names(&folder)? {
        let index = name.to_str().ok().and_then(|name| name.parse().ok());
        if index.is_some_and(|index: u32| !by.named.contains(&index)) {
            remove(&folder, &name)?;
        }
    }
    Ok(folder)
}

/// Makes the folder of an owner if it is not there, and opens and locks it. `None`: it was removed meanwhile.
fn make(dir: &File, by: &KeptBy) -> io::Result<Option<File>> {
    let name = name_of(by.owner);
    let advise = |advice: &str| io::Error::other(format!("its folder {} {advice}", name.to_string_lossy()));
    match mkdirat(dir, &name, Mode::RWXU) {
        Ok(()) if !by.named.is_empty() => {
            unlinkat(dir, &name, AtFlags::REMOVEDIR)?;
            return Err(advise("is missing, in which data of this mount lie: name the directory of before"));
        }
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let folder = match open_own(dir, &name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder.map_err(|_| {
            advise(
                "belongs to another user, or is open to others: remove it, or name a directory of your own",
            )
        })?,
    };
    if !lock_exclusive(&folder, LOCK_PATIENCE)? {
        return Err(advise("is in use: end the other process, or name another directory"));
    }
    let is_there = fstat(&folder)?.st_nlink > 0;
    Ok(is_there.then_some(folder))
}

/// Removes folders of this user to which nothing refers any more (F2). `own`: this process's own folder, and
/// the directory of its state, which it has to itself. A folder that cannot be removed is left to the next
/// process.
pub(super) fn clear_others(dir: &File, own: Option<&(CString, Option<PathBuf>)>) {
    let names = names(dir).unwrap_or_default();
    for name in names.into_iter().filter(|name| name.to_bytes().starts_with(PREFIX.as_bytes())) {
        if own.is_some_and(|(own, _)| *own == name) {
            continue;
        }
        match clear_other(dir, &name, own.and_then(|(_, place)| place.as_deref())) {
            Ok(true) => tracing::info!(folder = ?name, "removed overflow that nothing refers to any more"),
            Ok(false) => {}
            // Another user's, or no folder.
            Err(error) => tracing::debug!(folder = ?name, %error, "left alone"),
        }
    }
}

/// Removes a folder if nothing refers to it any more. Returns whether it has.
fn clear_other(dir: &File, name: &CStr, own_place: Option<&Path>) -> io::Result<bool> {
    let folder = open_own(dir, name)?;
    // The lock is held until `folder` is dropped: no process takes the folder over meanwhile.
    if !lock_exclusive(&folder, Duration::ZERO)? {
        return Ok(false);
    }
    let is_gone = match kept_by(&folder) {
        Ok(found) => Referrer::from_bytes(&found).is_some_and(|by| by.is_gone(own_place)),
        // Other programs' folders may have such a name, too. They are not empty.
        Err(error) if error.kind() == io::ErrorKind::NotFound => names(&folder)?.is_empty(),
        Err(error) => return Err(error),
    };
    if !is_gone {
        return Ok(false);
    }
    for name in names(&folder)? {
        remove(&folder, &name)?;
    }
    unlinkat(dir, name, AtFlags::REMOVEDIR)?;
    Ok(true)
}

/// What refers to a folder: a state in a directory, as processes of one mount namespace and boot see it.
///
/// ```text
/// boot id of the host (36 bytes), newline, mount namespace, newline, path of the directory
/// ```
struct Referrer {
    boot_id: Vec<u8>,
    /// Processes in other namespaces may see another directory under the path, or none.
    namespace: Vec<u8>,
    place: PathBuf,
}

impl Referrer {
    fn here(place: &Path) -> io::Result<Self> {
        let namespace = std::fs::read_link(NAMESPACE)?.into_os_string().into_vec();
        Ok(Referrer { boot_id: boot_id()?.to_vec(), namespace, place: place.canonicalize()? })
    }

    fn to_bytes(&self) -> Vec<u8> {
        [&self.boot_id, &b"\n"[..], &self.namespace, b"\n", self.place.as_os_str().as_bytes()].concat()
    }

    /// `None`: the bytes are cut off, or of another version.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts = bytes.splitn(3, |byte| *byte == b'\n').map(<[u8]>::to_vec);
        let (boot_id, namespace) = (parts.next()?, parts.next()?);
        let place = PathBuf::from(OsString::from_vec(parts.next()?));
        place.is_absolute().then_some(Referrer { boot_id, namespace, place })
    }

    /// Whether the state is gone. `own`: a directory that has another owner's state now. A state that this
    /// process cannot judge counts as there.
    fn is_gone(&self, own: Option<&Path>) -> bool {
        let Ok(here) = Referrer::here(Path::new("/")) else { return false };
        let is_missing = || matches!(self.place.try_exists(), Ok(false));
        self.boot_id != here.boot_id
            || self.namespace == here.namespace && (own == Some(&self.place) || is_missing())
    }
}

fn name_of(owner: OwnerId) -> CString {
    CString::new(format!("{PREFIX}{owner}")).expect("digits are no zero bytes")
}

/// Opens a folder that belongs to this user, and to nobody else.
fn open_own(dir: &File, name: &CStr) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder: File = openat(dir, name, flags, Mode::empty())?.into();
    let found = fstat(&folder)?;
    let is_private = found.st_uid == rustix::process::geteuid().as_raw() && found.st_mode & 0o077 == 0;
    if is_private { Ok(folder) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

fn kept_by(folder: &File) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: File = openat(folder, KEPT_BY, flags, Mode::empty())?.into();
    let mut found = Vec::new();
    file.take(MAX_KEPT_BY_BYTES).read_to_end(&mut found)?;
    Ok(found)
}

/// The names in a folder, without `.` and `..`.
fn names(folder: &File) -> io::Result<Vec<CString>> {
    let entries = Dir::read_from(folder)?.map(|entry| Ok(entry?.file_name().to_owned()));
    let names: Vec<CString> = entries.collect::<io::Result<_>>()?;
    Ok(names.into_iter().filter(|name| !matches!(name.to_bytes(), b"." | b"..")).collect())
}

/// Removes a file, unless it is not there any more.
fn remove(folder: &File, name: &CStr) -> io::Result<()> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Removes the file of a region.
pub(super) fn remove_region(folder: &File, index: u32) {
    if let Err(error) = remove(folder, &file_name(index)) {
        tracing::warn!(%error, index, "a region of the overflow directory cannot be removed");
    }
}

/// A new file for a region.
pub(super) fn create_file(folder: &File, index: u32) -> rustix::io::Result<File> {
    open(folder, index, OFlags::CREATE | OFlags::EXCL)
}

/// The file of a region.
pub(super) fn open_file(folder: &File, index: u32) -> rustix::io::Result<File> {
    open(folder, index, OFlags::empty())
}

fn open(folder: &File, index: u32, more: OFlags) -> rustix::io::Result<File> {
    let flags = more | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(folder, file_name(index), flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// What the file of a region is called.
fn file_name(index: u32) -> CString {
    CString::new(index.to_string()).expect("digits are no zero bytes")
}
