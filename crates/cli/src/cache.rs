//! `farpool cache`: a page cache in far memory for the files of a database.

mod advise;
mod attach;
mod changes;
mod handover;
mod pinning;
mod relations;
mod status;
mod top;
mod verify;

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use farpool_cache::{CacheClient, CacheSession, DoorFile, PAGE_BYTES, Replacements};

use crate::errors::describe;
use crate::output::complain;
use crate::size::ByteSize;

pub(crate) use status::explain;

/// Cache the files of a database in far memory
///
/// The files stay where they are, on a local disk, which always has the current data. Programs that are
/// started with `farpool run --cache DIR` read the pages of files below DIR from far memory if they are
/// there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache attach /srv/data --memory 4GiB
  farpool cache status /srv/data
  farpool cache resize /srv/data 2GiB
  farpool cache pin /srv/data base/5/16384
  farpool cache detach /srv/data")]
pub struct CacheArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attach(attach::AttachArgs),
    Status(status::StatusArgs),
    Resize(changes::ResizeArgs),
    Pin(pinning::PinArgs),
    Unpin(pinning::UnpinArgs),
    Drop(changes::DropArgs),
    Top(top::TopArgs),
    Verify(verify::VerifyArgs),
    Advise(advise::AdviseArgs),
    Handover(handover::HandoverArgs),
    Detach(changes::DetachArgs),
}

/// Runs a subcommand.
pub fn run(args: CacheArgs) -> Result<()> {
    match args.command {
        Command::Attach(args) => attach::attach(args),
        Command::Status(args) => status::status(&args),
        Command::Resize(args) => changes::resize(&args),
        Command::Pin(args) => pinning::pin(&args),
        Command::Unpin(args) => pinning::unpin(&args),
        Command::Drop(args) => changes::drop_pages(&args),
        Command::Top(args) => top::top(&args),
        Command::Verify(args) => verify::verify(&args),
        Command::Advise(args) => advise::advise(&args),
        Command::Handover(args) => handover::handover(&args),
        Command::Detach(args) => changes::detach(&args),
    }
}

/// The door of a directory with an attached cache.
fn attached_door(dir: &Path) -> Result<DoorFile> {
    if let Some(door) = DoorFile::find(dir)?
        && is_attached(&door)?
    {
        return Ok(door);
    }
    bail!("no cache is attached to {}: start `farpool cache attach`", dir.display());
}

/// Whether a cache is attached to the directory of a door.
fn is_attached(door: &DoorFile) -> Result<bool> {
    door.is_locked().with_context(|| format!("cannot ask for the lock of {}", door.path().display()))
}

/// Opens a file to pin it or to drop its pages. Opening a FIFO would wait for a writer.
fn open_regular(path: &Path) -> Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let found = file.metadata().with_context(|| format!("cannot look at {}", path.display()))?;
    if !found.is_file() {
        bail!("{} is not a regular file: only those are cached", path.display());
    }
    Ok(file)
}

/// Works on all files, also if it fails for some of them.
fn for_each_file(paths: Vec<PathBuf>, mut work: impl FnMut(&Path) -> Result<()>) -> Result<()> {
    let failures: Vec<_> = paths.iter().filter_map(|path| work(path).err()).collect();
    match failures.len() {
        0 => Ok(()),
        1 => Err(failures.into_iter().next().expect("there is one")),
        failed => {
            failures.iter().for_each(|error| complain(format!("farpool: {}", describe(error))));
            bail!("{failed} of {} files failed", paths.len());
        }
    }
}

/// Refuses a file of which no page is ever cached, with the reason.
fn check_cacheable(session: &mut CacheSession, door: &DoorFile, file: &File, path: &Path) -> Result<()> {
    let cached = match session.is_cacheable(file.as_fd()) {
        Some(true) => return Ok(()),
        None => bail!("cannot find out which file {} is: try again", path.display()),
        Some(false) if door.is_postgres() => {
            "of a PostgreSQL server, only tables and indexes are: files below base/ whose names begin with a digit and do \
             not end in _fsm"
        }
        Some(false) => {
            "only files below the directory are, without journals and logs of databases, on a file system that \
             records when files were made"
        }
    };
    bail!("{} is never cached: {cached}", path.display());
}

/// Where a page lies in its file.
fn bytes_of_page(page: u64) -> Range<u64> {
    page * PAGE_BYTES as u64..(page + 1) * PAGE_BYTES as u64
}

/// A session of a command, whose reads do not count.
fn session(door: Arc<DoorFile>) -> Result<CacheSession> {
    /// Never counted up: no other thread closes descriptors of this process.
    static REPLACEMENTS: Replacements = Replacements::new();
    static IS_ENABLED: AtomicBool = AtomicBool::new(true);
    let session = CacheSession::new(&CacheClient::new(door), &REPLACEMENTS, &IS_ENABLED);
    let mut session = session.context(
        "no place in the cache: stop some of the programs that use it, or run this command outside of a container",
    )?;
    session.count_no_reads();
    Ok(session)
}

/// A file, by its path from the door's directory, and the further segments of a table of PostgreSQL.
fn with_segments(door: &DoorFile, path: &Path) -> impl Iterator<Item = PathBuf> {
    let (first, is_postgres) = (door.data().join(path), door.is_postgres());
    let numbered = first.clone();
    let segments = (1..).map(move |number| {
        let mut segment = numbered.clone().into_os_string();
        segment.push(format!(".{number}"));
        PathBuf::from(segment)
    });
    std::iter::once(first).chain(segments.take_while(move |segment| is_postgres && segment.exists()))
}

/// How many pages fit into so many bytes. `what` names the option.
fn slots_in(what: &str, size: ByteSize) -> Result<u32> {
    match u32::try_from(size.0 / PAGE_BYTES as u64) {
        Ok(slots @ 1..) => Ok(slots),
        _ => bail!("{what}: a cache has at least 8 KiB and at most 16 TiB"),
    }
}

/// The size of so many pages.
fn size_of_pages(pages: impl Into<u64>) -> ByteSize {
    ByteSize(pages.into() * PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_or_a_directory_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        for path in [&fifo, dir.path()] {
            assert!(open_regular(path).unwrap_err().to_string().contains("is not a regular file"));
        }
    }

    #[test]
    fn a_table_has_all_its_segments() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().canonicalize().unwrap().join(name);
        ["16384", "16384.1", "16384.3"].iter().for_each(|name| drop(File::create(of(name)).unwrap()));
        let all = || {
            let door = DoorFile::open(dir.path()).unwrap();
            door.remove().unwrap();
            with_segments(&door, Path::new("16384")).collect::<Vec<_>>()
        };
        assert_eq!(all(), [of("16384")]);
        File::create(of("PG_VERSION")).unwrap();
        assert_eq!(all(), [of("16384"), of("16384.1")]);
    }
}
