//! What the files of a PostgreSQL server say of it: `global/pg_control` (`catalog/pg_control.h`), `pg_wal`,
//! and the heads of pages. The fields that are read here lie at the same places in PostgreSQL 13 to 18.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::far::PAGE_BYTES;

/// Where `pg_control` has its fields, in bytes.
mod field {
    use std::ops::Range;

    pub(super) const SYSTEM: Range<usize> = 0..8;
    pub(super) const VERSION: Range<usize> = 8..12;
    pub(super) const STATE: Range<usize> = 16..20;
    pub(super) const CHECKPOINT: Range<usize> = 32..40;
    pub(super) const TIMELINE: Range<usize> = 48..52;
    pub(super) const CHECKPOINT_TIME: Range<usize> = 104..112;
    pub(super) const MIN_RECOVERY: Range<usize> = 136..144;
    pub(super) const BLOCK_SIZE: Range<usize> = 216..220;
    pub(super) const LOG_PAGE_SIZE: Range<usize> = 224..228;
    pub(super) const SEGMENT_SIZE: Range<usize> = 228..232;
    pub(super) const CHECKSUMS: Range<usize> = 252..256;
}

/// `PG_CONTROL_VERSION` of PostgreSQL 13 to 17, and of 18.
const VERSIONS: [u32; 2] = [1300, 1800];
/// How often the file is read until two readings are equal: the server may write it meanwhile.
const READINGS: u32 = 16;

/// A page of the log, its header, and that of the first page of a segment (`SizeOfXLogLongPHD`).
const LOG_PAGE_BYTES: u64 = 8192;
const LOG_PAGE_HEADER_BYTES: u64 = 24;
const SEGMENT_HEADER_BYTES: u64 = 40;
/// Where a record has the position of the one before (`xl_prev`).
const PREVIOUS_RECORD: u64 = 8;
/// The record of a checkpoint: its own header, that of its data, and `CheckPoint`.
const CHECKPOINT_RECORD_BYTES: u64 = 24 + 2 + 88;
/// Records begin at multiples of this (`MAXALIGN`).
const RECORD_ALIGNMENT: u64 = 8;

/// What a server is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServerState {
    /// It has shut down as a primary: everything it has written is on the disk.
    ShutDown,
    /// It is a standby, or replays an archive of the log.
    Standby,
    /// It was a standby and has ended, or it starts and may become one.
    Starting,
    /// It is or was a primary, and has not shut down.
    Primary,
}

/// A checkpoint, or the restartpoint that a standby has made of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Checkpoint {
    /// Where its record begins in the log, in bytes.
    pub position: u64,
    /// Its timeline.
    pub timeline: u32,
    /// When it was made, in seconds since 1970.
    pub time: u64,
}

/// The part of `pg_control` that matters to a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlFile {
    /// Which database it is: the same number for a primary and its standbys.
    pub system: u64,
    /// What the server is doing, or did last.
    pub state: ServerState,
    /// Its last checkpoint, or restartpoint.
    pub checkpoint: Checkpoint,
    /// A standby writes no page with a later position in the log before it has raised this.
    pub min_recovery: u64,
    /// The version of the checksums of its pages; 0: they have none.
    pub checksums: u32,
    /// Bytes of a file of its log.
    pub segment_bytes: u64,
}

impl ControlFile {
    /// Reads the control file of the server with this data directory.
    ///
    /// # Errors
    /// If it cannot be read, changes all the time, or is that of another version of PostgreSQL than 13 to 18,
    /// or of a server whose pages have another size than 8 KiB.
    pub fn read(data: &Path) -> io::Result<ControlFile> {
        let path = data.join("global/pg_control");
        let mut last = std::fs::read(&path)?;
        for _ in 0..READINGS {
            let again = std::fs::read(&path)?;
            if again == last {
                let unknown =
                    || io::Error::other("it is not that of PostgreSQL 13 to 18 with pages of 8 KiB");
                return ControlFile::parse(&last).ok_or_else(unknown);
            }
            last = again;
        }
        Err(io::Error::other("the server writes it all the time"))
    }

    fn parse(file: &[u8]) -> Option<ControlFile> {
        let long = |field: Range<usize>| Some(u64::from_ne_bytes(file.get(field)?.try_into().ok()?));
        let short = |field: Range<usize>| Some(u32::from_ne_bytes(file.get(field)?.try_into().ok()?));
        let pages = [short(field::BLOCK_SIZE)?, short(field::LOG_PAGE_SIZE)?];
        if !VERSIONS.contains(&short(field::VERSION)?) || pages != [PAGE_BYTES as u32, LOG_PAGE_BYTES as u32]
        {
            return None;
        }
        let segment_bytes = short(field::SEGMENT_SIZE)?;
        if !segment_bytes.is_power_of_two() || u64::from(segment_bytes) < LOG_PAGE_BYTES {
            return None;
        }
        // `DBState` of `pg_control.h`.
        let state = match short(field::STATE)? {
            1 => ServerState::ShutDown,
            5 => ServerState::Standby,
            0 | 2 | 4 => ServerState::Starting,
            _ => ServerState::Primary,
        };
        Some(ControlFile {
            system: long(field::SYSTEM)?,
            state,
            checkpoint: Checkpoint {
                position: long(field::CHECKPOINT)?,
                timeline: short(field::TIMELINE)?,
                time: long(field::CHECKPOINT_TIME)?,
            },
            min_recovery: long(field::MIN_RECOVERY)?,
            checksums: short(field::CHECKSUMS)?,
            segment_bytes: segment_bytes.into(),
        })
    }
}

/// Where the record of a checkpoint ends in a log with files of so many bytes.
pub(crate) fn end_of_checkpoint(checkpoint: u64, segment_bytes: u64) -> u64 {
    let end = (checkpoint + CHECKPOINT_RECORD_BYTES).next_multiple_of(RECORD_ALIGNMENT);
    let next_page = (checkpoint / LOG_PAGE_BYTES + 1) * LOG_PAGE_BYTES;
    if checkpoint + CHECKPOINT_RECORD_BYTES <= next_page {
        return end;
    }
    // The rest follows the header of the next page.
    (checkpoint + CHECKPOINT_RECORD_BYTES + header_at(next_page, segment_bytes))
        .next_multiple_of(RECORD_ALIGNMENT)
}

/// Bytes of the header of the page that begins at this position of the log.
fn header_at(page: u64, segment_bytes: u64) -> u64 {
    if page.is_multiple_of(segment_bytes) { SEGMENT_HEADER_BYTES } else { LOG_PAGE_HEADER_BYTES }
}

/// Whether the log of a server has a record that follows this checkpoint. PostgreSQL reuses log files, so an
/// old record may lie there. Its `xl_prev` names another record.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn has_record_after(data: &Path, checkpoint: Checkpoint, segment_bytes: u64) -> io::Result<bool> {
    let mut next = end_of_checkpoint(checkpoint.position, segment_bytes);
    if next.is_multiple_of(LOG_PAGE_BYTES) {
        next += header_at(next, segment_bytes);
    }
    let segment = next / segment_bytes;
    let per_log = (1 << 32) / segment_bytes;
    let name = format!("{:08X}{:08X}{:08X}", checkpoint.timeline, segment / per_log, segment % per_log);
    let mut previous = [0; 8];
    let file = match File::open(data.join("pg_wal").join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    // The record may be split by the end of its page, though not within this word.
    let mut at = next % segment_bytes + PREVIOUS_RECORD;
    at += if at.is_multiple_of(LOG_PAGE_BYTES) { LOG_PAGE_HEADER_BYTES } else { 0 };
    match file.read_exact_at(&mut previous, at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| u64::from_ne_bytes(previous) == checkpoint.position),
    }
}

/// The first eight bytes of a page: its position in the log (`PageXLogRecPtr`), the upper half first.
pub fn position_of_page(head: [u8; 8]) -> u64 {
    let (upper, lower) = head.split_at(4);
    let half = |bytes: &[u8]| u64::from(u32::from_ne_bytes(bytes.try_into().expect("there are four")));
    half(upper) << 32 | half(lower)
}

/// A position in the log as PostgreSQL writes it.
pub(crate) fn lsn_text(position: u64) -> String {
    format!("{:X}/{:X}", position >> 32, position & 0xffff_ffff)
}

/// Whether pages of a file may be handed over. Not those of unlogged tables and indexes, which a standby does
/// not have, nor those of visibility maps (and free space maps, which are not cached): a server changes them
/// without a new position in the log.
pub(crate) fn may_be_handed_over(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let relation = name.split(['.', '_']).next().unwrap_or_default();
    !is_visibility_map(path) && !path.with_file_name(format!("{relation}_init")).exists()
}

/// Whether a file is a visibility map, by its name.
pub fn is_visibility_map(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.split('.').next().is_some_and(|fork| fork.ends_with("_vm"))
}

/// Whether the server has begun a timeline after this one: it has then been promoted, or is being promoted.
///
/// # Errors
/// If its log's directory cannot be read.
pub(crate) fn has_later_timeline(data: &Path, timeline: u32) -> io::Result<bool> {
    for entry in std::fs::read_dir(data.join("pg_wal"))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_suffix(".history"));
        if number
            .and_then(|number| u32::from_str_radix(number, 16).ok())
            .is_some_and(|number| number > timeline)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A file of a relation in the default tablespace: `base/DATABASE/FILENODE`, with `_FORK` and the segment
/// (`.N`) behind it or without.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RelationFile {
    /// The database's oid.
    pub database: u32,
    /// As `pg_relation_filenode` gives it.
    pub filenode: u32,
    /// As in `vm`; `None` for the table or index itself.
    pub fork: Option<String>,
}

impl RelationFile {
    /// Of a path from the data directory. `None`: it is something else.
    pub fn parse(path: &Path) -> Option<RelationFile> {
        let (database, name) = path.strip_prefix("base").ok()?.to_str()?.split_once('/')?;
        let name = name.split_once('.').map_or(name, |(name, _)| name);
        let (filenode, fork) = match name.split_once('_') {
            Some((filenode, fork)) => (filenode, Some(fork.to_owned())),
            None => (name, None),
        };
        Some(RelationFile { database: database.parse().ok()?, filenode: filenode.parse().ok()?, fork })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control() -> Vec<u8> {
        let mut file = vec![0; 8192];
        let mut put = |at: Range<usize>, bytes: &[u8]| file[at].copy_from_slice(bytes);
        put(field::SYSTEM, &77_u64.to_ne_bytes());
        put(field::VERSION, &1800_u32.to_ne_bytes());
        put(field::STATE, &5_u32.to_ne_bytes());
        put(field::CHECKPOINT, &0x1_0000_0028_u64.to_ne_bytes());
        put(field::TIMELINE, &3_u32.to_ne_bytes());
        put(field::CHECKPOINT_TIME, &1_700_000_000_u64.to_ne_bytes());
        put(field::MIN_RECOVERY, &0x1_0000_00a0_u64.to_ne_bytes());
        put(field::BLOCK_SIZE, &8192_u32.to_ne_bytes());
        put(field::LOG_PAGE_SIZE, &8192_u32.to_ne_bytes());
        put(field::SEGMENT_SIZE, &(SEGMENT as u32).to_ne_bytes());
        put(field::CHECKSUMS, &1_u32.to_ne_bytes());
        file
    }

    const SEGMENT: u64 = 16 << 20;

    #[test]
    fn a_control_file_is_read_and_one_of_another_version_or_a_short_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("global")).unwrap();
        let path = dir.path().join("global/pg_control");
        std::fs::write(&path, control()).unwrap();
        let expected = ControlFile {
            system: 77,
            state: ServerState::Standby,
            checkpoint: Checkpoint { position: 0x1_0000_0028, timeline: 3, time: 1_700_000_000 },
            min_recovery: 0x1_0000_00a0,
            checksums: 1,
            segment_bytes: SEGMENT,
        };
        assert_eq!(ControlFile::read(dir.path()).unwrap(), expected);
        std::fs::write(&path, &control()[..field::CHECKSUMS.end - 1]).unwrap();
        assert!(ControlFile::read(dir.path()).is_err());
        for (field, wrong) in [
            (field::VERSION, 1201_u32),
            (field::BLOCK_SIZE, 16384),
            (field::LOG_PAGE_SIZE, 0),
            (field::SEGMENT_SIZE, 3),
        ] {
            let mut other = control();
            other[field].copy_from_slice(&wrong.to_ne_bytes());
            assert_eq!(ControlFile::parse(&other), None, "{wrong}");
        }
    }

    #[test]
    fn a_checkpoint_ends_behind_its_record_and_behind_the_header_of_a_page_that_it_crosses() {
        let end = |checkpoint| end_of_checkpoint(checkpoint, SEGMENT);
        assert_eq!(end(0x28), 0x28 + 120);
        // Its last byte is the last of the page.
        assert_eq!(end(8192 - 120), 8192);
        assert_eq!(end(8192 - 112), 8192 - 112 + 24 + 120);
        assert_eq!(end(SEGMENT - 112), SEGMENT - 112 + 40 + 120);
    }

    #[test]
    fn a_record_after_a_checkpoint_is_known_by_the_position_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pg_wal")).unwrap();
        let has_record = |position| {
            has_record_after(dir.path(), Checkpoint { position, timeline: 2, time: 0 }, SEGMENT).unwrap()
        };
        // Segment 0x1_03: positions from 0x1_0300_0000.
        let file = File::create(dir.path().join("pg_wal/000000020000000100000003")).unwrap();
        file.set_len(SEGMENT).unwrap();
        let write = |previous: u64, at: u64| file.write_all_at(&previous.to_ne_bytes(), at + 8).unwrap();
        let first = 0x1_0300_0028;
        assert!(!has_record(first));
        write(first, 0x28 + 120);
        assert!(has_record(first) && !has_record(first + 8));
        // The next record begins behind the header of the next page.
        let at_the_end = 0x1_0300_2000 - 120;
        write(at_the_end, 0x2000 + 24);
        assert!(has_record(at_the_end));
        // Of this one, the first eight bytes lie on one page, and the rest on the next.
        write(0x1_0300_6000 - 128, 0x6000 + 24 - 8);
        assert!(has_record(0x1_0300_6000 - 128));
        // And behind that of the next file, which this checkpoint does not have.
        assert!(!has_record(0x1_0400_0000 - 120));
        write(0x1_0300_0000 - 120, 40);
        assert!(has_record(0x1_0300_0000 - 120));
    }

    #[test]
    fn the_upper_half_of_a_position_comes_first() {
        let mut head = [0; 8];
        head[..4].copy_from_slice(&7_u32.to_ne_bytes());
        head[4..].copy_from_slice(&0x89_u32.to_ne_bytes());
        assert_eq!(position_of_page(head), 0x7_0000_0089);
    }

    #[test]
    fn all_files_of_an_unlogged_table_and_visibility_maps_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("16384_init"), "").unwrap();
        let may_be = |name: &str| may_be_handed_over(&dir.path().join(name));
        assert!(
            !["16384", "16384.1", "16384_vm", "16384_init", "16385_vm", "16385_vm.1"].into_iter().any(may_be)
        );
        assert!(["16385", "1638", "163840.1"].into_iter().all(may_be));
    }

    #[test]
    fn a_later_timeline_is_seen_by_its_history() {
        let dir = tempfile::tempdir().unwrap();
        assert!(has_later_timeline(dir.path(), 1).is_err(), "no log");
        std::fs::create_dir(dir.path().join("pg_wal")).unwrap();
        let write = |name: &str| std::fs::write(dir.path().join("pg_wal").join(name), "").unwrap();
        ["00000002.history", "000000010000000000000001", "0000000F.partial"]
            .iter()
            .for_each(|name| write(name));
        assert!(!has_later_timeline(dir.path(), 2).unwrap());
        assert!(has_later_timeline(dir.path(), 1).unwrap());
    }

    #[test]
    fn a_path_names_database_filenode_and_fork() {
        let file = |fork: Option<&str>| {
            Some(RelationFile { database: 5, filenode: 16400, fork: fork.map(str::to_owned) })
        };
        assert_eq!(RelationFile::parse(Path::new("base/5/16400")), file(None));
        assert_eq!(RelationFile::parse(Path::new("base/5/16400.2")), file(None));
        assert_eq!(RelationFile::parse(Path::new("base/5/16400_vm")), file(Some("vm")));
        for other in ["base/5/pg_filenode.map", "global/1262", "base/16400", "base/5/x/7"] {
            assert_eq!(RelationFile::parse(Path::new(other)), None, "{other}");
        }
    }
}
