//! `farpool cache resize`, `drop` and `detach`.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use farpool_cache::{CacheClient, at_once, change_outside, daemon_process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::{
    attached_door, check_cacheable, for_each_file, open_regular, session, size_of_pages, slots_in,
    with_segments,
};
use crate::errors::UsageError;
use crate::output::say;
use crate::size::ByteSize;

/// How long a command waits for the daemon.
const DAEMON_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two looks at the daemon.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Change the size of an attached cache
///
/// A smaller cache gives memory back to the pool, and loses the pages there. A larger one leases memory, up
/// to --max-memory of `farpool cache attach`. If that takes longer than 30 seconds, this command fails and
/// says how much the cache has so far, and the cache goes on.
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
    let wanted = slots.next_multiple_of(farpool_cache::SLOTS_PER_EXTENT);
    let (give_up_at, mut is_asked) = (Instant::now() + DAEMON_PATIENCE, false);
    loop {
        // `None`: the door may be closed for a moment, or the daemon busy.
        let found = client.slots();
        if let Some((now, most)) = found {
            if slots > most {
                bail!(UsageError(format!(
                    "the index of this cache has room for {}: attach it again with a larger --max-memory",
                    size_of_pages(most)
                )));
            }
            if !std::mem::replace(&mut is_asked, true) {
                door.want_slots(slots);
            }
            if now == wanted {
                say(format!("resized  {data}  {}", size_of_pages(now)));
                return Ok(());
            }
        }
        if Instant::now() >= give_up_at {
            let status = format!("see `farpool cache status {data}`");
            let wanted_size = size_of_pages(wanted);
            match found.map(|(now, _)| (now, size_of_pages(now))) {
                None if is_asked => {
                    bail!("the cache does not answer; it takes the size {wanted_size} later: {status}")
                }
                None => bail!("the cache of {data} is closed or does not answer: {status}"),
                Some((now, size)) if now < wanted => {
                    bail!(
                        "the cache has {size} so far, and will have {wanted_size} when the pool has room: {status}"
                    )
                }
                Some((_, size)) => {
                    bail!("the cache still has {size}, and has not given memory back yet: {status}")
                }
            }
        }
        std::thread::sleep(LOOK_EVERY);
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
    let mut session = session(door.clone())?;
    let paths = args.files.iter().flat_map(|path| with_segments(&door, path)).collect();
    for_each_file(paths, |path| {
        let file = open_regular(path)?;
        check_cacheable(&mut session, &door, &file, path)?;
        let done = if session.drop_pages(file.as_fd()) { "dropped" } else { "not in the cache" };
        say(format!("{done}  {}", path.display()));
        Ok(())
    })
}

/// Ends the daemon, and waits for its end.
pub fn detach(args: &DetachArgs) -> Result<()> {
    let door = attached_door(&args.dir)?;
    let data = door.data().display();
    let process = daemon_process(&door).with_context(|| {
        format!("`farpool cache attach` of {data} does not answer: end it by its process id")
    })?;
    pidfd_send_signal(&process, Signal::TERM)
        .context("cannot end `farpool cache attach`: run this command as its user or as root")?;
    let patience = Timespec { tv_sec: DAEMON_PATIENCE.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience))? == 0 {
        bail!(
            "`farpool cache attach` of {data} has not ended within {} s: continue it by SIGCONT, or end it by SIGKILL",
            DAEMON_PATIENCE.as_secs()
        );
    }
    say(format!("detached  {data}"));
    Ok(())
}
