//! `farpool cache pin` and `unpin`.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use farpool_cache::{CacheClient, CacheSession, Door, PAGE_BYTES};
use indicatif::ProgressBar;

use super::{
    attached_door, bytes_of_page, check_cacheable, for_each_file, open_regular, session, size_of_pages,
    with_segments,
};
use crate::output::say;

/// How long the daemon may take to know a file, or to make room for the next pages of it.
const LOAD_PATIENCE: Duration = Duration::from_secs(10);
/// Loading goes on for as long as the file's pages that are found get more by one in this many.
const PASSES: u64 = 100;
/// Pause between two attempts: some rounds of the keeper.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Keep the pages of some files in the cache
///
/// Loads all pages of the files, and keeps them: pages of other files are evicted first. If more than seven
/// eighths of all pages are pinned, pinned pages are evicted like others. Fails if not all pages of the files
/// are in the cache in the end; the files are pinned all the same.
///
/// A pin ends when the cache is detached or loses all pages, as by `farpool cache drop DIR` or a restart of a
/// PostgreSQL server, and when the file is replaced, as by TRUNCATE, VACUUM FULL, CLUSTER, REINDEX and
/// REFRESH MATERIALIZED VIEW. A new segment of a table is not pinned. Pin again after any of these. If a file
/// is truncated, as by VACUUM, or a node is lost, the pin stays, and pages come back as they are read.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache pin /srv/data bank.db
  farpool cache pin /var/lib/postgresql/15/main base/5/16384    what pg_relation_filepath('accounts') says")]
pub struct PinArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Files, by their paths from DIR. A table of a PostgreSQL server has all its segments
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// Let pages of pinned files be evicted like others
///
/// Without FILE, unpins all files. That includes those that were removed since they were pinned.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache unpin /srv/data bank.db
  farpool cache unpin /srv/data")]
pub struct UnpinArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Files, by their paths from DIR
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Pins files, and loads them.
pub fn pin(args: &PinArgs) -> Result<()> {
    let door = Arc::new(attached_door(&args.dir)?);
    let paths = args.files.iter().flat_map(|file| with_segments(&door, file)).collect();
    let mut session = session(door.clone())?;
    for_each_file(paths, |path| {
        let file = open_regular(path)?;
        check_cacheable(&mut session, &door, &file, path)?;
        let size = file.metadata().with_context(|| format!("cannot look at {}", path.display()))?.len();
        let pages = size / PAGE_BYTES as u64;
        await_pin(&mut session, &file, path)?;
        let loaded =
            load(&mut session, &file, pages).with_context(|| format!("cannot read {}", path.display()))?;
        let found = format!("{} of {} are in the cache", size_of_pages(loaded), size_of_pages(pages));
        if loaded < pages {
            bail!(
                "{} is pinned, but only {found}: `farpool cache status` says how much memory the cache has; pages that \
                 are read later come in if there is room",
                path.display()
            );
        }
        say(format!("pinned  {}  {found}", path.display()));
        Ok(())
    })
}

/// Pins a file. The cache knows it a moment after it was first read.
fn await_pin(session: &mut CacheSession, file: &File, path: &Path) -> Result<()> {
    let give_up_at = Instant::now() + LOAD_PATIENCE;
    loop {
        read_block(session, file, 0).with_context(|| format!("cannot read {}", path.display()))?;
        if session.set_pinned(file.as_fd(), true) {
            return Ok(());
        }
        if Instant::now() >= give_up_at {
            bail!(
                "the cache does not take {}: check that `farpool cache status` says `open`, and see --files of \
                 `farpool cache attach`",
                path.display()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Reads the file again and again until all pages are found, or hardly any further page was found for
/// [`LOAD_PATIENCE`]. Returns how many were.
fn load(session: &mut CacheSession, file: &File, pages: u64) -> std::io::Result<u64> {
    let (mut found_before, mut give_up_at) = (0, Instant::now() + LOAD_PATIENCE);
    // Hidden where standard error is no terminal.
    let bar = ProgressBar::new(pages);
    loop {
        let mut found = 0;
        for block in 0..pages {
            found += u64::from(read_block(session, file, block)?);
            bar.set_position(found.max(found_before));
        }
        if found == pages || Instant::now() >= give_up_at {
            bar.finish_and_clear();
            return Ok(found);
        }
        // Bounds the number of passes.
        if found > found_before + pages / PASSES {
            (found_before, give_up_at) = (found, Instant::now() + LOAD_PATIENCE);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Reads a block. Returns whether it was in the cache.
fn read_block(session: &mut CacheSession, file: &File, block: u64) -> std::io::Result<bool> {
    let (mut is_hit, mut failed) = (true, None);
    let pread = |to: &mut [u8], at| {
        is_hit = false;
        let read = file.read_at(to, at);
        read.map_err(|error| std::io::Error::from(failed.insert(error).kind()))
    };
    let read = session.read(file.as_fd(), bytes_of_page(block), pread, |_, _| ());
    failed.map_or(Ok(is_hit && read.is_some_and(|bytes| bytes > 0)), Err)
}

/// Unpins files.
pub fn unpin(args: &UnpinArgs) -> Result<()> {
    let door = Arc::new(attached_door(&args.dir)?);
    if args.files.is_empty() {
        // False: the door is closed, which ends all pins, or the daemon does not answer.
        if !CacheClient::new(door.clone()).unpin_all() && door.status().door != Door::Closed {
            bail!("the daemon does not answer: see `farpool cache status {}`", door.data().display());
        }
        say(format!("unpinned  all files of {}", door.data().display()));
        return Ok(());
    }
    let paths = args.files.iter().flat_map(|file| with_segments(&door, file)).collect();
    let mut session = session(door.clone())?;
    for_each_file(paths, |path| {
        let file = open_regular(path)?;
        check_cacheable(&mut session, &door, &file, path)?;
        // False: the file is not known, or the door is closed, which ends all pins.
        let done = if session.set_pinned(file.as_fd(), false) { "unpinned" } else { "not in the cache" };
        say(format!("{done}  {}", path.display()));
        Ok(())
    })
}
