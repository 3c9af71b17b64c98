//! `farpool cache resize`, `drop` and `detach`.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use farpool_cache::{CacheClient, Contents, at_once, change_outside, daemon_process, forget_file};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::{attached_door, size_of_pages, slots_in, with_segments};
use crate::errors::UsageError;
use crate::output::{complain, say};
use crate::size::ByteSize;

/// How long a command waits for the daemon.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two looks at the daemon.
const LOOK: Duration = Duration::from_millis(100);

/// Change the size of an attached cache
///
/// The cache gives memory back to the pool, and loses the pages that are there, or leases more. It can become
/// as large as --memory of `farpool cache attach`, or --max-memory if that was given.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache resize /srv/data 2GiB")]
pub struct ResizeArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// How much far memory to use
    #[arg(value_name = "SIZE")]
    memory: ByteSize,
}

/// Let a cache lose pages: those of some files, or all
///
/// Programs read them from the disk again.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache drop /srv/data
  farpool cache drop /srv/data base/5/16384    one table of a PostgreSQL server, by its path")]
pub struct DropArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Files, by their paths from DIR. A table of a PostgreSQL server has all its segments
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// End `farpool cache attach`
///
/// Programs read from the disk again. Returns when the daemon has ended.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache detach /srv/data")]
pub struct DetachArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Changes the size, and waits until the cache has it.
pub fn resize(args: &ResizeArgs) -> Result<()> {
    let slots = slots_in("SIZE", args.memory)?;
    let door = Arc::new(attached_door(&args.dir)?);
    let client = CacheClient::new(door.clone());
    let data = door.data().display();
    let contents = || client.contents().with_context(|| format!("the cache of {data} does not answer"));
    let has = |contents: &Contents| contents.slots - contents.absent;
    let before = contents()?;
    if slots > before.slots {
        bail!(UsageError(format!(
            "the index of this cache has room for {}: attach it again with a larger --max-memory",
            size_of_pages(before.slots)
        )));
    }
    door.want_slots(slots);
    let (wanted, give_up_at) =
        (slots.next_multiple_of(farpool_cache::SLOTS_PER_EXTENT), Instant::now() + PATIENCE);
    loop {
        let now = has(&contents()?);
        if now == wanted {
            say(format!("resized  {data}  {}", size_of_pages(now)));
            return Ok(());
        }
        if Instant::now() >= give_up_at {
            complain(format!(
                "the cache has {} so far: it goes on towards {} while the pool has room",
                size_of_pages(now),
                size_of_pages(wanted)
            ));
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

/// Drops the pages of files, or all.
pub fn drop_pages(args: &DropArgs) -> Result<()> {
    let door = Arc::new(attached_door(&args.dir)?);
    if args.files.is_empty() {
        at_once(change_outside(&*door, async || ()));
        say(format!("dropped  all pages of {}", door.data().display()));
        return Ok(());
    }
    let client = CacheClient::new(door.clone());
    for path in &args.files {
        for path in with_segments(&door, path) {
            let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            if !forget_file(&client, file.as_fd()) {
                bail!("{}: all places of the cache are taken; try again", path.display());
            }
            say(format!("dropped  {}", path.display()));
        }
    }
    Ok(())
}

/// Ends the daemon, and waits for its end.
pub fn detach(args: &DetachArgs) -> Result<()> {
    let door = attached_door(&args.dir)?;
    let data = door.data().display();
    let process = daemon_process(&door).with_context(|| {
        format!("`farpool cache attach` of {data} does not answer: end it by its process id")
    })?;
    pidfd_send_signal(&process, Signal::TERM).context("cannot end `farpool cache attach`")?;
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience))? == 0 {
        bail!(
            "`farpool cache attach` of {data} has not ended within {} s: is it stopped?",
            PATIENCE.as_secs()
        );
    }
    say(format!("detached  {data}"));
    Ok(())
}
