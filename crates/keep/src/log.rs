//! The log's file: a head, followed by records.
//!
//! ```text
//! 0    8   "FPKEEP\r\n"
//! 8    4   version of the format, of keys and values too
//! 16   8   id, in the name of the file of words beside the log
//! 24   36  boot id of the host
//! 64   8   CRC-64/NVME of all that
//! 72   8   end of the acknowledged records      (all little-endian)
//! 128      records
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix_futex_sync::Mutex;

use crate::change::{Change, checksum, decode, encode};
use crate::journal::Journal;
use crate::kept::Kept;

const MAGIC: &[u8; 8] = b"FPKEEP\r\n";
/// Version of the log, and of the keys and values that its users write.
pub(crate) const VERSION: u32 = 2;
pub(crate) const BOOT_ID_BYTES: usize = 36;
const HEAD_BYTES: usize = 128;
const SUMMED: usize = 64;
const SUM_AT: usize = 64;
const ACKNOWLEDGED_AT: u64 = 72;
/// A log is compacted when it is this many times as long as after its last compaction.
const GROWN: u64 = 4;
/// A log shorter than this is not compacted. It is as much as one second of creating names at full speed.
const LEAST_TO_COMPACT: u64 = 8 << 20;

/// The head of a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    pub(crate) id: u64,
    pub(crate) boot_id: [u8; BOOT_ID_BYTES],
}

/// What reading the bytes of a log yields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Read {
    State { head: Head, kept: Kept },
    Version(u32),
    Damaged(&'static str),
}

impl Head {
    fn encode(&self, acknowledged: u64) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[16..24].copy_from_slice(&self.id.to_le_bytes());
        head[24..24 + BOOT_ID_BYTES].copy_from_slice(&self.boot_id);
        let sum = checksum(&head[..SUMMED]);
        head[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
        let at = ACKNOWLEDGED_AT as usize;
        head[at..at + 8].copy_from_slice(&acknowledged.to_le_bytes());
        head
    }
}

/// Reads a log. It terminates on any input, and accepts only complete and undamaged logs.
pub(crate) fn read(bytes: &[u8]) -> Read {
    let Some((head, _)) = bytes.split_at_checked(HEAD_BYTES) else {
        return Read::Damaged("its log has no head");
    };
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    if head[..8] != MAGIC[..] {
        return Read::Damaged("its log was not written by Farpool");
    }
    let version = word(8) as u32;
    if version != VERSION {
        return Read::Version(version);
    }
    if word(SUM_AT) != checksum(&head[..SUMMED]) {
        return Read::Damaged("the head of its log has a wrong checksum");
    }
    let boot_id = head[24..24 + BOOT_ID_BYTES].try_into().expect("so many bytes");
    let head = Head { id: word(16), boot_id };
    let end = usize::try_from(word(ACKNOWLEDGED_AT as usize)).ok().filter(|end| *end >= HEAD_BYTES);
    let Some(mut rest) = end.and_then(|end| bytes.get(HEAD_BYTES..end)) else {
        return Read::Damaged("its log is shorter than its head says");
    };
    let mut kept = Kept::default();
    while !rest.is_empty() {
        match decode(rest) {
            Ok((changes, length)) => {
                kept.apply(changes);
                rest = &rest[length..];
            }
            Err(_) => return Read::Damaged("a record of its log is damaged"),
        }
    }
    Read::State { head, kept }
}

/// A log that is being written.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    head: Head,
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    file: File,
    end: u64,
    /// The log's length when it was last compacted, or when compacting it last failed.
    snapshot: u64,
}

impl Log {
    /// Writes a new log, which replaces any existing one.
    pub(crate) fn create(path: &Path, head: Head, kept: &Kept) -> io::Result<Log> {
        let open = write_anew(path, &head, kept)?;
        Ok(Log { path: path.to_owned(), head, open: Mutex::new(Some(open)) })
    }

    fn try_append(&self, open: &mut Open, changes: &[Change]) -> io::Result<()> {
        let record = encode(changes).ok_or(io::ErrorKind::InvalidInput)?;
        open.file.write_all_at(&record, open.end)?;
        let end = open.end + record.len() as u64;
        // The end is one word within one page, so a killed process leaves either the old end or the new one.
        open.file.write_all_at(&end.to_le_bytes(), ACKNOWLEDGED_AT)?;
        open.end = end;
        if end > LEAST_TO_COMPACT && end > GROWN * open.snapshot {
            match self.compacted() {
                Ok(compacted) => *open = compacted,
                // The old log is still complete. Compacting is tried again once the log has grown
                // `GROWN`-fold: there may be room then.
                Err(error) => {
                    tracing::warn!(
                        %error,
                        path = %self.path.display(),
                        "the log could not be compacted, and keeps growing"
                    );
                    open.snapshot = end;
                }
            }
        }
        Ok(())
    }

    fn compacted(&self) -> io::Result<Open> {
        let bytes = std::fs::read(&self.path)?;
        let Read::State { kept, .. } = read(&bytes) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        write_anew(&self.path, &self.head, &kept).inspect_err(|_| {
            let _ = std::fs::remove_file(self.path.with_extension("new")); // unused, but takes up space
        })
    }
}

/// Writes a new log beside the old one, then renames it into the old one's place.
fn write_anew(path: &Path, head: &Head, kept: &Kept) -> io::Result<Open> {
    let fresh = path.with_extension("new");
    let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    let mut end = HEAD_BYTES as u64;
    for record in kept.snapshot() {
        file.write_all_at(&record, end)?;
        end += record.len() as u64;
    }
    file.write_all_at(&head.encode(end), 0)?;
    std::fs::rename(&fresh, path)?;
    Ok(Open { file, end, snapshot: end })
}

impl Journal for Log {
    fn append(&self, changes: &[Change]) {
        let mut log = self.open.lock();
        let Some(open) = &mut *log else { return };
        let Err(error) = self.try_append(open, changes) else { return };
        tracing::error!(
            %error,
            log = %self.path.display(),
            "the log cannot be written: the mount continues, but its state will not survive the process"
        );
        *log = None;
        if let Err(error) = std::fs::remove_file(&self.path) {
            // A later daemon must not use an outdated log. At this moment it is not outdated yet, since the
            // changes are not acknowledged. So the process ends now.
            tracing::error!(
                %error,
                "the log cannot be removed either: aborting, so that no later daemon finds an outdated log"
            );
            std::process::abort();
        }
    }

    fn is_whole(&self) -> bool {
        self.open.lock().is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::change::tests::any_change;

    const HEAD: Head = Head { id: 7, boot_id: [b'a'; BOOT_ID_BYTES] };

    fn state(path: &Path) -> Read {
        read(&std::fs::read(path).unwrap())
    }

    fn is_state(bytes: &[u8]) -> bool {
        matches!(read(bytes), Read::State { .. })
    }

    fn kept_of(batches: &[Vec<Change>]) -> Kept {
        let mut kept = Kept::default();
        kept.apply(batches.iter().flatten().cloned());
        kept
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn appended_changes_are_found_again_and_a_half_written_record_is_ignored(
            first in vec(any_change(), 0..10), batches in vec(vec(any_change(), 0..5), 0..8),
            torn in vec(any::<u8>(), 0..40),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("log");
            let log = Log::create(&path, HEAD, &kept_of(std::slice::from_ref(&first))).unwrap();
            batches.iter().for_each(|batch| log.append(batch));
            let mut all = vec![first];
            all.extend(batches);
            let mut bytes = std::fs::read(&path).unwrap();
            let found = Read::State { head: HEAD, kept: kept_of(&all) };
            prop_assert_eq!(read(&bytes), found.clone());
            bytes.extend(torn);
            prop_assert_eq!(read(&bytes), found);
        }

        #[test]
        fn a_log_that_lacks_or_changes_a_byte_that_was_acknowledged_is_refused(
            batches in vec(vec(any_change(), 1..5), 1..8), at: prop::sample::Index, flip in 1..=255u8,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("log");
            let log = Log::create(&path, HEAD, &Kept::default()).unwrap();
            batches.iter().for_each(|batch| log.append(batch));
            let mut bytes = std::fs::read(&path).unwrap();
            let at = at.index(bytes.len());
            prop_assert!(!is_state(&bytes[..at]));
            bytes[at] ^= flip;
            let in_padding = (80..HEAD_BYTES).contains(&at);
            prop_assert!(in_padding || !is_state(&bytes));
        }

        #[test]
        fn garbage_is_refused_without_a_panic(garbage in vec(any::<u8>(), 0..400), head: bool, end: u64) {
            let mut bytes = if head { HEAD.encode(end).to_vec() } else { Vec::new() };
            bytes.extend(garbage);
            let empty = end == HEAD_BYTES as u64;
            prop_assert!(empty || !is_state(&bytes));
        }
    }

    #[test]
    fn more_changes_than_fit_in_one_record_are_written_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::create(&path, HEAD, &Kept::default()).unwrap();
        let key = |number: usize| [&number.to_le_bytes()[..], &[b'k'; 500]].concat();
        let many: Vec<_> = (0..10_000).map(|number| Change::Remove { key: key(number) }).collect();
        assert_eq!(encode(&many), None, "one record is too small for them");
        log.append_in_parts(&many);
        assert!(log.is_whole() && is_state(&std::fs::read(&path).unwrap()));
    }

    #[test]
    fn a_log_of_another_version_says_which() {
        let mut bytes = HEAD.encode(HEAD_BYTES as u64);
        bytes[8] = 9;
        assert_eq!(read(&bytes), Read::Version(9));
    }

    #[test]
    fn a_log_that_has_grown_is_compacted_to_the_same_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::create(&path, HEAD, &Kept::default()).unwrap();
        let put = |round: u8| [Change::Put { key: vec![round % 3], value: vec![round; 100 << 10] }];
        (0..=120).for_each(|round| log.append(&put(round)));
        assert!(std::fs::metadata(&path).unwrap().len() < LEAST_TO_COMPACT, "it held twelve MB of changes");
        let last: Vec<_> = (118..=120).map(|round| put(round).to_vec()).collect();
        assert_eq!(state(&path), Read::State { head: HEAD, kept: kept_of(&last) });
    }

    #[test]
    fn a_change_that_cannot_be_written_leaves_no_outdated_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::create(&path, HEAD, &Kept::default()).unwrap();
        log.append(&[Change::Remove { key: vec![0; 4096] }]);
        assert!(!path.exists() && !log.is_whole());
        log.append(&[Change::Remove { key: vec![0] }]);
        assert!(!path.exists());
    }
}
