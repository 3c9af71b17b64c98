//! The door file: the door to the index, and the places of all processes that use the files of one directory.
//! It is there before a cache is, so that a cache can be attached while the database runs (C4, C5).

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use farpool_fabric::{Mapping, Protection};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, flock, linkat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};

use crate::at_once;
use crate::ground::{Ground, PageSink};
use crate::layout::{self, Layout, MAX_PLACES, WORD_BYTES};
use crate::living::{self, Living};
use crate::overlap;
use crate::places::Place;
use crate::vacating;
use crate::words::Door;

/// Where doors lie: a file system in memory that every Linux has, and in which every user may make files.
const DIR: &str = "/dev/shm";
/// How the names of doors begin.
pub(crate) const DOOR_PREFIX: &str = "farpool-cache-";
/// Changes with every change of the words' meaning.
const LAYOUT_VERSION: u32 = 6;
/// Files that databases write as streams, and read once if at all: the journal, the log and the index of the
/// log (a mapping) of SQLite, and the log of DuckDB.
const UNCACHED_SUFFIXES: [&[u8]; 4] = [b"-journal", b"-wal", b"-shm", b".wal"];
/// How long a daemon waits for the lock of one that is ending.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The door of the files in one directory.
#[derive(Debug)]
pub struct DoorFile {
    path: PathBuf,
    data: PathBuf,
    words: Arc<Mapping>,
    places: u32,
    /// The user to whom the files belong.
    owner: u32,
    /// Whether the directory is that of a PostgreSQL server.
    is_postgres: bool,
    /// `None`: it was closed.
    file: Option<File>,
}

/// How a door is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DoorStatus {
    /// Its state.
    pub door: Door,
    /// How often its state has changed. The cache loses all pages each time it is closed.
    pub turns: u64,
    /// Blocks that were found in the cache, since the door was made.
    pub hits: u64,
    /// Blocks of known files that were read from the disk.
    pub misses: u64,
    /// Places that are taken: one for each thread that has used the cache and has not ended.
    pub places: u32,
    /// Processes that are changing a file without a place.
    pub outsiders: u64,
}

/// The reason for which there is no door.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// The directory with the files cannot be used.
    #[error("cannot cache the files in {}: {source}", path.display())]
    Data {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The door cannot be opened or made.
    #[error("cannot open the door {}: {source}", path.display())]
    Door {
        /// The door.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another user could open the door, or owns it.
    #[error("the door {} must belong to the owner of the files, with mode 600: stop the programs that use the files, and \
         remove the door",
        path.display()
    )]
    Foreign {
        /// The door.
        path: PathBuf,
    },
    /// The door is not what was made.
    #[error("the door {} is damaged: stop the programs that use the files, and remove the door", path.display())]
    Damaged {
        /// The door.
        path: PathBuf,
    },
    /// The door was made by another version.
    #[error(
        "the door {} has version {found}, and this program needs {LAYOUT_VERSION}: stop the programs that use \
         the files, and remove the door",
        path.display()
    )]
    Version {
        /// The door.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
}

/// A directory with files.
struct Directory {
    whole: PathBuf,
    found: Metadata,
}

impl Directory {
    fn find(data: &Path) -> Result<Directory, DoorError> {
        let found = data.canonicalize().and_then(|whole| {
            let found = std::fs::metadata(&whole)?;
            if found.is_dir() { Ok(Directory { whole, found }) } else { Err(Errno::NOTDIR.into()) }
        });
        found.map_err(|source| DoorError::Data { path: data.to_owned(), source })
    }

    /// Where its door lies.
    fn door_in(&self, dir: &Path) -> PathBuf {
        dir.join(door_name(&self.found))
    }

    /// Its door, if there is one.
    fn open_door(&self, path: &Path) -> Result<Option<DoorFile>, DoorError> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let (path, whole) = (path.to_owned(), self.whole.clone());
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(file) => DoorFile::check(file.into(), self.found.uid(), path, whole).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(DoorError::Door { path, source: errno.into() }),
        }
    }
}

/// The name of the door of a directory.
pub(crate) fn door_name(directory: &Metadata) -> String {
    format!("{DOOR_PREFIX}{:x}-{}", directory.dev(), directory.ino())
}

impl DoorFile {
    /// The door of the files in this directory. It is made if there is none.
    ///
    /// # Errors
    /// If the directory cannot be used, or the door cannot be opened, or should not be.
    pub fn open(data: &Path) -> Result<DoorFile, DoorError> {
        Self::open_in(Path::new(DIR), data)
    }

    /// As [`open`](Self::open), with doors in another directory of a file system in memory. All programs that
    /// use the files must use the same.
    ///
    /// # Errors
    /// The same.
    pub fn open_in(dir: &Path, data: &Path) -> Result<DoorFile, DoorError> {
        let directory = Directory::find(data)?;
        let path = directory.door_in(dir);
        loop {
            if let Some(door) = directory.open_door(&path)? {
                return Ok(door);
            }
            match make(dir, &path, (directory.found.uid(), directory.found.gid())) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(DoorError::Door { path, source }),
            }
        }
    }

    /// The door of the files in this directory, if there is one.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn find(data: &Path) -> Result<Option<DoorFile>, DoorError> {
        let directory = Directory::find(data)?;
        directory.open_door(&directory.door_in(Path::new(DIR)))
    }

    fn check(file: File, owner: u32, path: PathBuf, data: PathBuf) -> Result<DoorFile, DoorError> {
        let failed = |source| DoorError::Door { path: path.clone(), source };
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() || found.uid() != owner || found.mode() & 0o077 != 0 {
            return Err(DoorError::Foreign { path });
        }
        let mut version = [0; WORD_BYTES as usize];
        match file.read_exact_at(&mut version, layout::VERSION as u64 * WORD_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(DoorError::Damaged { path });
            }
            read => read.map_err(failed)?,
        }
        let version = u64::from_ne_bytes(version);
        let (version, places) = ((version >> 32) as u32, version as u32);
        if version != LAYOUT_VERSION {
            return Err(DoorError::Version { path, found: version });
        }
        if places > MAX_PLACES || found.len() < Layout::door_bytes(places) {
            return Err(DoorError::Damaged { path });
        }
        let words = Mapping::new(file.as_fd(), Layout::door_bytes(places), Protection::ReadWrite);
        let words = Arc::new(words.map_err(failed)?);
        let is_postgres = data.join("PG_VERSION").exists();
        Ok(DoorFile { path, data, words, places, owner, is_postgres, file: Some(file) })
    }

    /// Closes the descriptor, and keeps the memory: a program does not expect descriptors that it has not
    /// opened. Such a door cannot be locked.
    pub fn without_descriptor(self) -> DoorFile {
        DoorFile { file: None, ..self }
    }

    /// Where the door is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the directory is that of a PostgreSQL server.
    pub fn is_postgres(&self) -> bool {
        self.is_postgres
    }

    /// The directory, without symbolic links.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Whether pages of an open file are to be cached, by its path.
    pub(crate) fn is_cacheable(&self, fd: BorrowedFd<'_>) -> bool {
        let path = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
        path.is_ok_and(|path| self.is_cacheable_path(Path::new(OsStr::from_bytes(path.as_bytes()))))
    }

    /// Whether pages of the file with this path are to be cached: it lies in the directory, and holds data
    /// that a database reads by pages. Changes of all files are announced, whatever their names.
    pub(crate) fn is_cacheable_path(&self, path: &Path) -> bool {
        let Ok(within) = path.strip_prefix(&self.data) else { return false };
        let name = within.file_name().unwrap_or_default().as_encoded_bytes();
        if self.is_postgres {
            // Tables and indexes, without maps of free space and what the server writes as streams.
            within.starts_with("base")
                && name.first().is_some_and(u8::is_ascii_digit)
                && !name.split(|&byte| byte == b'.').next().is_some_and(|fork| fork.ends_with(b"_fsm"))
        } else {
            !UNCACHED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
        }
    }

    /// Frees the places of processes that have ended, if no daemon has the door and it is closed: then nobody
    /// uses what they may have left behind. Returns whether it did so.
    pub(crate) fn free_dead_places(&self) -> bool {
        let Ok(file) = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&self.path)
        else {
            return false;
        };
        // As long as this one has the lock, no daemon begins.
        let is_ours = farpool_keep::lock_exclusive(&file, Duration::ZERO).is_ok_and(|locked| locked);
        if !is_ours || Door::of(at_once(self.load(layout::DOOR))) != Door::Closed {
            return false;
        }
        let living = Living::default();
        at_once(vacating::free_dead_places(self, self.places, |holder| living.is_alive(holder)));
        true
    }

    /// Its words, and the places.
    pub fn words(&self) -> &Arc<Mapping> {
        &self.words
    }

    /// Whether the process that made the door knows this one by the same process id. Otherwise this process
    /// would count as a dead one.
    pub fn shares_process_ids(&self) -> bool {
        living::namespace().is_ok_and(|own| at_once(self.load(layout::NAMESPACE)) == own)
    }

    /// How many places there are.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// How many pages of 8 KiB the cache is to have memory for.
    pub fn wanted_slots(&self) -> u32 {
        at_once(self.load(layout::WANTED_SLOTS)).try_into().unwrap_or(u32::MAX)
    }

    /// Asks the daemon for another size, within what its index has room for.
    pub fn want_slots(&self, slots: u32) {
        at_once(self.store(layout::WANTED_SLOTS, slots.into()));
    }

    /// Takes the door's lock, and keeps it until this value is dropped. One daemon has it at a time. Waits
    /// for up to [`LOCK_PATIENCE`]; `false`: another daemon still has it.
    ///
    /// # Errors
    /// Those of `flock`.
    pub(crate) fn lock(&self) -> io::Result<bool> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        farpool_keep::lock_exclusive(file, LOCK_PATIENCE)
    }

    /// Whether a daemon has the door, or a command has its lock for a moment.
    ///
    /// # Errors
    /// Those of `open` and `flock`.
    pub fn is_locked(&self) -> io::Result<bool> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        // Another descriptor, which is closed at once: a lock of this one would keep daemons away for longer.
        is_locked(&File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?)
    }

    /// A directory above or below that has a daemon.
    pub(crate) fn overlapping(&self) -> Option<PathBuf> {
        overlap::overlapping(self.path.parent()?, &self.data)
    }

    /// Whether a daemon of this user may serve these files.
    pub(crate) fn trusts(&self, uid: u32) -> bool {
        uid == 0 || uid == self.owner
    }

    /// The user to whom the files belong.
    pub(crate) fn owner_uid(&self) -> u32 {
        self.owner
    }

    /// Removes the door. A cache behind it is closed; processes that start later make another door.
    ///
    /// # Errors
    /// Those of `unlink`.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }

    /// The door's state, and the number of the index behind it.
    pub(crate) fn state(&self) -> (Door, u64) {
        (Door::of(at_once(self.load(layout::DOOR))), at_once(self.load(layout::INDEX)))
    }

    /// The door's state, and what was counted in all places.
    pub fn status(&self) -> DoorStatus {
        let word = at_once(self.load(layout::DOOR));
        let mut usage =
            DoorStatus { door: Door::of(word), turns: Door::turns(word), ..DoorStatus::default() };
        let (knows_ids, living) = (self.shares_process_ids(), Living::default());
        for place in (0..self.places).map(|place| Place::new(self, place)) {
            let (hits, misses) = at_once(place.reads());
            usage.hits += hits;
            usage.misses += misses;
            // Without a daemon, the places of dead processes are not freed.
            let holder = at_once(place.holder());
            usage.places += u32::from(holder != 0 && (!knows_ids || living.is_alive(holder)));
        }
        usage.outsiders = at_once(self.load(layout::OUTSIDERS));
        usage
    }

    /// Whether processes that start from now on find this door. If it was removed, they make another one.
    pub fn is_there(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.metadata().is_ok_and(|found| found.nlink() > 0))
    }
}

/// The reason for which accesses succeed: the file's length was checked, and only words of the door and
/// places are accessed.
const WITHIN: &str = "words of the door lie within its file";

/// The door and the places, without an index.
impl Ground for DoorFile {
    async fn load(&self, at: usize) -> u64 {
        self.words.load(at as u64 * WORD_BYTES).expect(WITHIN)
    }

    async fn store(&self, at: usize, value: u64) {
        self.words.store(at as u64 * WORD_BYTES, value).expect(WITHIN);
    }

    async fn replace(&self, at: usize, old: u64, new: u64) -> bool {
        self.words.compare_and_swap(at as u64 * WORD_BYTES, old, new).expect(WITHIN) == old
    }

    async fn add(&self, at: usize, addend: u64) -> u64 {
        self.words.fetch_and_add(at as u64 * WORD_BYTES, addend).expect(WITHIN)
    }

    async fn layout(&self) -> Option<Layout> {
        None
    }

    async fn barrier(&self) {
        fence(Ordering::SeqCst); // pairs with the barriers of `Shared`
    }

    async fn read_slot(&self, _: u32, _: &mut PageSink<'_>) -> bool {
        false
    }

    async fn write_slot(&self, _: u32, _: &[u8]) -> bool {
        false
    }
}

/// Whether another process, or another descriptor of this one, has a door's lock. Keeps it from others until
/// the file is closed.
pub(crate) fn is_locked(door: &File) -> io::Result<bool> {
    // Shared: two that look at the same time do not take each other for a daemon.
    match flock(door, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a door, which appears under its name once it is complete.
fn make(dir: &Path, path: &Path, (uid, gid): (u32, u32)) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file: File = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?.into();
    // Allocated at once: a store to a file of a full file system would end the process.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, Layout::door_bytes(MAX_PLACES))?;
    let version = u64::from(LAYOUT_VERSION) << 32 | u64::from(MAX_PLACES);
    for (at, word) in [(layout::VERSION, version), (layout::NAMESPACE, living::namespace()?)] {
        file.write_all_at(&word.to_ne_bytes(), at as u64 * WORD_BYTES)?;
    }
    if geteuid().is_root() {
        rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, &link, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn all_who_open_the_door_of_a_directory_have_the_same_one() {
        let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open = || DoorFile::open_in(dir.path(), data.path()).unwrap();
        let (one, other) = (open(), open());
        one.words().store(8, 7).unwrap();
        assert_eq!((other.words().load(8), other.places()), (Ok(7), MAX_PLACES));
        let elsewhere = DoorFile::open_in(dir.path(), dir.path()).unwrap();
        assert_eq!(elsewhere.words().load(8), Ok(0));
        assert!(one.is_there() && one.shares_process_ids());
        one.words().store(layout::NAMESPACE as u64 * WORD_BYTES, 7).unwrap();
        assert!(!other.shares_process_ids());
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|name| name.unwrap().path()).collect();
        names.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        assert!(!one.is_there() && !other.is_there());
        assert_eq!((open().words().load(8), open().is_there()), (Ok(0), true));
    }

    #[test]
    fn a_door_that_others_may_open_or_another_version_made_is_refused() {
        let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open = || DoorFile::open_in(dir.path(), data.path());
        let door = open().unwrap();
        door.file.as_ref().unwrap().set_permissions(std::fs::Permissions::from_mode(0o660)).unwrap();
        assert!(matches!(open(), Err(DoorError::Foreign { .. })));
        door.file.as_ref().unwrap().set_permissions(std::fs::Permissions::from_mode(0o600)).unwrap();
        door.words().store(layout::VERSION as u64 * WORD_BYTES, 9 << 32 | 4).unwrap();
        assert!(matches!(open(), Err(DoorError::Version { found: 9, .. })));
        for places in [MAX_PLACES, MAX_PLACES + 1] {
            let version = u64::from(LAYOUT_VERSION) << 32 | u64::from(places);
            door.words().store(layout::VERSION as u64 * WORD_BYTES, version).unwrap();
            door.file.as_ref().unwrap().set_len(4096).unwrap();
            assert!(matches!(open(), Err(DoorError::Damaged { .. })), "{places} places in one page");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(DoorFile::open_in(dir.path(), file.path()), Err(DoorError::Data { .. })));
        assert!(matches!(DoorFile::open_in(file.path(), data.path()), Err(DoorError::Door { .. })));
    }
}
