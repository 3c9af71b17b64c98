//! A directory with the state of one daemon: the lock, the log, and the memory beside it.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;

use crate::error::KeepError;
use crate::journal::Journal;
use crate::kept::Kept;
use crate::log::{BOOT_ID_BYTES, Head, Log, Read, VERSION, read};

/// How long to wait for the lock. A daemon that was just killed takes a while to end, since the kernel unmaps
/// its memory first.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(3);
const LOCK_POLL: Duration = Duration::from_millis(20);
const LOCK: &str = "lock";
const LOG: &str = "log";
const WORDS: &str = "words-";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The directory. It belongs to this process until the value is dropped.
#[derive(Debug)]
pub struct KeepDir {
    log: Arc<Log>,
    words: OwnedFd,
    // Kept open for its lock.
    _lock: File,
}

/// State that an earlier daemon has left.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// State of this boot: the far memory that it refers to may still be there.
    State(Kept),
    /// State of an earlier boot of the host. What it referred to is gone, and so is the state.
    EarlierBoot,
}

impl KeepDir {
    /// Opens a directory, and creates it if it does not exist. State of this boot is kept; if there is none,
    /// the directory starts empty. `words_bytes` is the size of the memory beside the log, which is all zeros
    /// at first.
    ///
    /// # Errors
    /// When another process uses the directory, other users can open it, or its state is damaged or of
    /// another version. The state is left unchanged then.
    pub fn open(path: &Path, words_bytes: u64) -> Result<(KeepDir, Found), KeepError> {
        let unusable = |source| KeepError::Unusable { path: path.to_owned(), source };
        check_private(path)?;
        let lock = File::options().create(true).truncate(false).write(true).mode(0o600).open(path.join(LOCK));
        let lock = lock.map_err(unusable)?;
        take_lock(&lock, path)?;
        let boot_id = boot_id().map_err(unusable)?;
        let left = match std::fs::read(path.join(LOG)) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(unusable(error)),
        };
        let (head, found) = match left.as_deref().map(read) {
            None => (None, Found::Nothing),
            Some(Read::State { head, .. }) if head.boot_id != boot_id => (None, Found::EarlierBoot),
            Some(Read::State { head, kept }) => (Some(head), Found::State(kept)),
            Some(Read::Version(found)) => {
                return Err(KeepError::Version { path: path.to_owned(), found, known: VERSION });
            }
            Some(Read::Damaged(what)) => return Err(KeepError::Damaged { path: path.to_owned(), what }),
        };
        let words = |head: &Head| path.join(format!("{WORDS}{:016x}", head.id));
        let (log, words) = match (head, &found) {
            (Some(head), Found::State(kept)) => {
                let words = open_words(&words(&head), words_bytes).map_err(unusable)?;
                let words = words.ok_or(KeepError::Damaged {
                    path: path.to_owned(),
                    what: "the words of its blocks are missing or cut off",
                })?;
                (Log::create(&path.join(LOG), head, kept).map_err(unusable)?, words)
            }
            _ => {
                clear(path).map_err(unusable)?;
                let id = getrandom::u64().map_err(|error| unusable(io::Error::other(error)))?;
                let head = Head { id, boot_id };
                let words = create_words(&words(&head), words_bytes).map_err(unusable)?;
                (Log::create(&path.join(LOG), head, &Kept::default()).map_err(unusable)?, words)
            }
        };
        Ok((KeepDir { log: Arc::new(log), words, _lock: lock }, found))
    }

    /// The journal, which takes changes.
    pub fn journal(&self) -> Arc<dyn Journal> {
        self.log.clone()
    }

    /// The memory beside the log.
    pub fn words(&self) -> &OwnedFd {
        &self.words
    }
}

fn check_private(path: &Path) -> Result<(), KeepError> {
    let unusable = |source| KeepError::Unusable { path: path.to_owned(), source };
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(unusable(error)),
    }
    let metadata = std::fs::metadata(path).map_err(unusable)?;
    if !metadata.is_dir() {
        return Err(unusable(Errno::NOTDIR.into()));
    }
    let is_private = metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o077 == 0;
    if is_private {
        return Ok(());
    }
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    // An empty directory may have been created for this daemon: its mode is corrected. One with the sticky
    // bit is shared by all users, such as `/dev/shm`.
    let is_shared = metadata.mode() & Mode::SVTX.bits() != 0;
    let is_empty = std::fs::read_dir(path).map_err(unusable)?.next().is_none();
    if is_ours && is_empty && !is_shared {
        return std::fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(unusable);
    }
    Err(KeepError::NotPrivate { path: path.to_owned() })
}

fn take_lock(lock: &File, path: &Path) -> Result<(), KeepError> {
    match lock_exclusive(lock, LOCK_PATIENCE) {
        Ok(true) => Ok(()),
        Ok(false) => Err(KeepError::InUse { path: path.to_owned() }),
        Err(source) => Err(KeepError::Unusable { path: path.to_owned(), source }),
    }
}

/// Takes an exclusive `flock` on a file or directory, which lasts until the file is closed. Waits up to
/// `patience`. `false`: another process still holds a lock.
pub fn lock_exclusive(file: &File, patience: Duration) -> io::Result<bool> {
    let began = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if began.elapsed() < patience => std::thread::sleep(LOCK_POLL),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes the files of an earlier state. The log is removed first: without it, there is no state.
fn clear(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path.join(LOG)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        // The words, and the new log of an interrupted compaction.
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(WORDS) || name.starts_with(LOG)) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn create_words(path: &PathBuf, bytes: u64) -> io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(bytes)?;
    Ok(file.into())
}

/// Opens a file of words. `None`: the file does not exist, or has another size.
fn open_words(path: &PathBuf, bytes: u64) -> io::Result<Option<OwnedFd>> {
    match File::options().read(true).write(true).open(path) {
        Ok(file) => Ok((file.metadata()?.len() == bytes).then(|| file.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The id of this boot of the host.
pub fn boot_id() -> io::Result<[u8; BOOT_ID_BYTES]> {
    let text = std::fs::read(BOOT_ID)?;
    let id = text.get(..BOOT_ID_BYTES).and_then(|id| id.try_into().ok());
    id.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Change;

    const WORDS_BYTES: u64 = 1 << 20;

    fn put(key: u8, value: u8) -> Change {
        Change::Put { key: vec![key], value: vec![value] }
    }

    fn words_of(path: &Path) -> PathBuf {
        let mut files = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        files.find(|file| file.file_name().unwrap().to_str().unwrap().starts_with(WORDS)).unwrap()
    }

    #[test]
    fn state_and_memory_are_found_again_and_only_the_owner_has_access() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("keep");
        let (dir, found) = KeepDir::open(&path, WORDS_BYTES).unwrap();
        assert_eq!(found, Found::Nothing);
        dir.journal().append(&[put(1, 1)]);
        rustix::io::pwrite(dir.words(), b"word", 8).unwrap();
        drop(dir);
        let (dir, found) = KeepDir::open(&path, WORDS_BYTES).unwrap();
        let Found::State(kept) = found else { panic!("{found:?}") };
        assert_eq!(kept.get(&[1]), Some(&[1][..]));
        let mut word = [0; 4];
        rustix::io::pread(dir.words(), &mut word, 8).unwrap();
        assert_eq!(&word, b"word");
        for file in [path.clone(), path.join(LOG), path.join(LOCK), words_of(&path)] {
            assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o077, 0, "{}", file.display());
        }
    }

    #[test]
    fn a_second_daemon_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("keep");
        let _first = KeepDir::open(&path, WORDS_BYTES).unwrap();
        let second = KeepDir::open(&path, WORDS_BYTES);
        assert!(matches!(second, Err(KeepError::InUse { .. })), "{second:?}");
    }

    #[test]
    fn state_of_an_earlier_boot_begins_empty() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("keep");
        let (dir, _) = KeepDir::open(&path, WORDS_BYTES).unwrap();
        drop(dir);
        let mut kept = Kept::default();
        kept.apply([put(1, 1)]);
        let old = words_of(&path);
        Log::create(&path.join(LOG), Head { id: 7, boot_id: [b'0'; BOOT_ID_BYTES] }, &kept).unwrap();
        let (_dir, found) = KeepDir::open(&path, WORDS_BYTES).unwrap();
        assert_eq!(found, Found::EarlierBoot);
        assert!(!old.exists());
    }

    #[test]
    fn damaged_state_is_refused_and_left_unchanged() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("keep");
        drop(KeepDir::open(&path, WORDS_BYTES).unwrap());
        let words = words_of(&path);
        File::options().write(true).open(&words).unwrap().set_len(WORDS_BYTES - 1).unwrap();
        let opened = KeepDir::open(&path, WORDS_BYTES);
        assert!(matches!(opened, Err(KeepError::Damaged { .. })), "{opened:?}");
        std::fs::write(path.join(LOG), "garbage").unwrap();
        let opened = KeepDir::open(&path, WORDS_BYTES);
        assert!(matches!(opened, Err(KeepError::Damaged { .. })), "{opened:?}");
        assert_eq!(std::fs::read_to_string(path.join(LOG)).unwrap(), "garbage");
    }

    #[test]
    fn an_empty_directory_that_all_users_share_is_refused_and_keeps_its_mode() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("shared");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o1777)).unwrap();
        let error = KeepDir::open(&path, WORDS_BYTES).unwrap_err().to_string();
        assert!(error.contains("a directory of your own") && !error.contains("chmod"), "{error}");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o1777);
    }

    #[test]
    fn a_directory_that_others_may_read_is_refused_unless_it_is_empty() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("keep");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        drop(KeepDir::open(&path, WORDS_BYTES).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let opened = KeepDir::open(&path, WORDS_BYTES);
        assert!(matches!(opened, Err(KeepError::NotPrivate { .. })), "{opened:?}");
    }
}
