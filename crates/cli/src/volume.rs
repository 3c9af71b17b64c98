//! `farpool volume`: redundancy, losses, rebuilds and scrubs of a mount. The mount's daemon answers through
//! extended attributes of the mount's root, so the command needs no connection to broker or nodes.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::output::{tell, tell_json};
use crate::size::ByteSize;

/// Attributes: the state as JSON, and those that start work (`crates/mount/src/fs/volume.rs`).
const STATE: &str = "user.farpool.volume";
const REBUILD: &str = "user.farpool.rebuild";
const SCRUB: &str = "user.farpool.scrub";
/// Far more than the state needs.
const MAX_STATE_BYTES: usize = 4 << 10;
/// Longest wait for an answer of the mount's daemon, which answers from memory.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How often to ask the mount for progress.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a rebuild may make no progress: the mount's thread may have to finish another rebuild or scrub
/// first.
const NO_NEWS_PATIENCE: Duration = Duration::from_secs(60);

/// Inspect and repair a mount: state, redundancy, rebuild, scrub
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool volume status /mnt/far                    redundancy, and what is missing
  farpool volume status /mnt/far --json | jq .missing_extents
  farpool volume rebuild /mnt/far                   wait until lost data are rebuilt on other nodes
  farpool volume scrub /mnt/far                     read every block, and repair wrong ones")]
pub struct VolumeArgs {
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, clap::Subcommand)]
enum VolumeCommand {
    /// Show redundancy, what is missing, rebuild and scrub, and the traffic that bypasses the kernel
    Status {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,

        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Wait until the data of lost nodes are rebuilt on other nodes; a rebuild starts by itself
    Rebuild {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,
    },
    /// Read every block and every parity block, and repair those that are wrong
    Scrub {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,
    },
}

/// Facts about a mount. Names and meanings of the fields are stable; fields may be added.
#[derive(Debug, Serialize, Deserialize)]
struct Volume {
    /// Of files for which no other redundancy was chosen.
    redundancy: String,
    files: u64,
    redundant_files: u64,
    /// Of redundant files.
    extents: u64,
    missing_extents: u64,
    /// Of all files: they are missing, and their data cannot be rebuilt.
    lost_extents: u64,
    to_rebuild: bool,
    wrong_blocks: u64,
    // The field's stable name; elsewhere the term is "repaired".
    #[serde(rename = "mended_blocks")]
    repaired_blocks: u64,
    lost_blocks: u64,
    hedged_reads: u64,
    rebuild: Rebuild,
    scrub: Scrub,
    /// What direct clients have read and written, without the kernel.
    direct_read_bytes: u64,
    direct_written_bytes: u64,
    /// In the directory of --overflow; `None`: the mount has none.
    overflow_bytes: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Work {
    running: bool,
    blocks_total: u64,
    blocks_done: u64,
    /// How many runs completed.
    finished: u64,
    /// How many runs ended, completed or not.
    attempts: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Rebuild {
    #[serde(flatten)]
    work: Work,
    /// Why the last run did not complete; it is retried.
    waits_for: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Scrub {
    #[serde(flatten)]
    work: Work,
    /// Of the blocks done.
    blocks_unread: u64,
}

impl Work {
    /// The progress, unless the work waits for something.
    fn state(&self) -> String {
        match self.running {
            true => format!("{} of {} blocks", self.blocks_done, self.blocks_total),
            false if self.finished > 0 => "done".to_owned(),
            false => "none so far".to_owned(),
        }
    }
}

/// Prints the mount's state, or starts work and waits for it.
pub fn run(args: VolumeArgs) -> Result<()> {
    match args.command {
        VolumeCommand::Status { mountpoint, json } => {
            let volume = ask(&mountpoint)?;
            if json { tell_json(&volume) } else { volume.lines().into_iter().try_for_each(tell) }
        }
        VolumeCommand::Rebuild { mountpoint } => rebuild(&mountpoint),
        VolumeCommand::Scrub { mountpoint } => scrub(&mountpoint),
    }
}

impl Volume {
    fn lines(&self) -> Vec<String> {
        let missing = match self.missing_extents {
            0 if self.to_rebuild => "nothing known; being checked".to_owned(),
            0 => "nothing".to_owned(),
            missing if self.lost_extents > 0 => format!("{missing} of {} extents", self.extents),
            missing => {
                format!("{missing} of {} extents, reconstructed from the others meanwhile", self.extents)
            }
        };
        let lost = match self.lost_extents {
            0 => "nothing".to_owned(),
            lost => format!("{lost} extents: their data are lost for good, reading them is an error"),
        };
        let rebuild = match &self.rebuild.waits_for {
            Some(reason) if self.rebuild.work.blocks_done == 0 => format!("waiting: {reason}"),
            _ if !self.rebuild.work.running && self.missing_extents > 0 => "about to start".to_owned(),
            _ => self.rebuild.work.state(),
        };
        let scrub = match self.scrub.blocks_unread {
            0 => self.scrub.work.state(),
            unread => format!("{}; {unread} blocks could not be read", self.scrub.work.state()),
        };
        let mut lines = vec![
            format!("redundancy  {}, unless chosen for a file or directory", self.redundancy),
            format!(
                "files       {}, of which {} survive the loss of a node",
                self.files, self.redundant_files
            ),
            format!("missing     {missing}"),
            format!("lost        {lost}"),
            format!("rebuild     {rebuild}"),
            format!("scrub       {scrub}"),
            format!(
                "blocks      {} wrong, {} repaired, {} lost",
                self.wrong_blocks, self.repaired_blocks, self.lost_blocks
            ),
            format!("slow nodes  {} reads done without them", self.hedged_reads),
            format!(
                "directly    {} read, {} written by programs with the interposer",
                ByteSize(self.direct_read_bytes),
                ByteSize(self.direct_written_bytes)
            ),
        ];
        if let Some(bytes) = self.overflow_bytes {
            lines.push(format!("overflow    {} in the directory of --overflow", ByteSize(bytes)));
        }
        lines
    }
}

fn ask(mountpoint: &Path) -> Result<Volume> {
    let state = within_deadline(mountpoint, |mountpoint| {
        let mut state = vec![0; MAX_STATE_BYTES];
        let bytes = getxattr(mountpoint, STATE, &mut state[..])?;
        state.truncate(bytes);
        Ok(state)
    })?;
    serde_json::from_slice(&state).context("the mount runs another version of farpool: mount it again")
}

fn command(mountpoint: &Path, name: &'static str) -> Result<()> {
    within_deadline(mountpoint, move |mountpoint| setxattr(mountpoint, name, b"1", XattrFlags::empty()))
}

/// Makes a system call on a mount, whose daemon may be stopped. A thread that still waits for it ends with
/// this process.
fn within_deadline<T: Send + 'static>(
    mountpoint: &Path,
    call: impl FnOnce(&Path) -> rustix::io::Result<T> + Send + 'static,
) -> Result<T> {
    let (done, answer) = mpsc::channel();
    let place = mountpoint.to_owned();
    std::thread::Builder::new()
        .name("ask-mount".into())
        .spawn(move || drop(done.send(call(&place)))) // fails once the receiver has given up
        .context("cannot start a thread: raise the limits (ulimit -u, ulimit -v)")?;
    match answer.recv_timeout(ANSWER_DEADLINE) {
        Ok(answer) => answer.map_err(|error| complaint(error, mountpoint)),
        Err(_) => bail!(
            "the daemon of the mount at {} does not answer within {} s: it may be stopped (kill -CONT), or must be \
             ended and started again with `farpool mount`",
            mountpoint.display(),
            ANSWER_DEADLINE.as_secs()
        ),
    }
}

fn complaint(error: Errno, mountpoint: &Path) -> anyhow::Error {
    let place = mountpoint.display();
    match error {
        Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS => anyhow::anyhow!(
            "{place} is not the root of a Farpool mount, or this kernel is older than 5.12: name the directory that was \
             given to `farpool mount`"
        ),
        Errno::NOTCONN => anyhow::anyhow!(
            "the daemon of the mount at {place} has died: mount it again with `farpool mount`, or unmount it with \
             `umount {place}`"
        ),
        error => anyhow::Error::new(error).context(format!("cannot ask the mount at {place}")),
    }
}

fn rebuild(mountpoint: &Path) -> Result<()> {
    let before = ask(mountpoint)?;
    command(mountpoint, REBUILD)?;
    let bar = bar("rebuilding");
    // A rebuild that was already running may have looked for missing extents too early.
    let mut attempts = before.rebuild.work.attempts + u64::from(before.rebuild.work.running);
    let mut news = News::default();
    loop {
        let volume = ask(mountpoint)?;
        let Rebuild { work, waits_for } = &volume.rebuild;
        show(&bar, work);
        if volume.missing_extents == 0 && !volume.to_rebuild && !work.running {
            bar.finish_and_clear();
            return rebuilt(volume.lost_blocks.saturating_sub(before.lost_blocks));
        }
        if work.attempts > attempts && !work.running {
            if let Some(reason) = waits_for
                && work.blocks_done == 0
            {
                bar.finish_and_clear();
                bail!("cannot rebuild: {reason}; {}", volume.still_missing());
            }
            attempts = work.attempts; // it rebuilt something, and so may the next one
        }
        if !news.note(work) {
            bar.finish_and_clear();
            bail!(
                "the rebuild has made no progress for {} s; {}",
                NO_NEWS_PATIENCE.as_secs(),
                volume.still_missing()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// When work last made progress.
#[derive(Default)]
struct News {
    last: Option<(Instant, [u64; 3])>,
}

impl News {
    /// Takes note of how far the work is. Returns whether it has made progress within [`NO_NEWS_PATIENCE`].
    fn note(&mut self, work: &Work) -> bool {
        let state = [work.attempts, work.finished, work.blocks_done];
        match self.last {
            Some((since, last)) if last == state => since.elapsed() <= NO_NEWS_PATIENCE,
            _ => {
                self.last = Some((Instant::now(), state));
                true
            }
        }
    }
}

/// The result once nothing is missing any more. `lost` blocks could not be rebuilt.
fn rebuilt(lost: u64) -> Result<()> {
    if lost > 0 {
        bail!(
            "nothing is missing any more, but {lost} blocks were lost: reading them is an error until they are written again"
        );
    }
    tell("nothing is missing")
}

impl Volume {
    /// What is missing, and what to do about a rebuild that makes no progress.
    fn still_missing(&self) -> String {
        let lost = match self.lost_extents {
            0 => String::new(),
            lost => format!(", and {lost} are lost"),
        };
        format!(
            "{} of {} extents are still missing{lost}; start another node with `farpool node`, and the mount goes on by itself",
            self.missing_extents, self.extents
        )
    }
}

fn scrub(mountpoint: &Path) -> Result<()> {
    let before = ask(mountpoint)?;
    command(mountpoint, SCRUB)?;
    let bar = bar("scrubbing");
    // A scrub that was already running does not count.
    let wanted = before.scrub.work.finished + 1 + u64::from(before.scrub.work.running);
    let mut news = News::default();
    loop {
        let volume = ask(mountpoint)?;
        show(&bar, &volume.scrub.work);
        if volume.scrub.work.finished >= wanted {
            bar.finish_and_clear();
            let found = volume.wrong_blocks.saturating_sub(before.wrong_blocks);
            let repaired = volume.repaired_blocks.saturating_sub(before.repaired_blocks);
            let lost = volume.lost_blocks.saturating_sub(before.lost_blocks);
            let (done, unread) = (volume.scrub.work.blocks_done, volume.scrub.blocks_unread);
            let read = match unread {
                0 => format!("{done} blocks read"),
                unread => {
                    format!("{} of {done} blocks read, {unread} unreadable", done.saturating_sub(unread))
                }
            };
            return tell(format!("{read}: {found} wrong, {repaired} repaired, {lost} lost"));
        }
        if !news.note(&volume.scrub.work) {
            bar.finish_and_clear();
            bail!(
                "the scrub has made no progress for {} s: `farpool volume status` shows which nodes do not answer",
                NO_NEWS_PATIENCE.as_secs()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn bar(name: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} blocks");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style).with_prefix(name)
}

fn show(bar: &ProgressBar, work: &Work) {
    bar.set_length(work.blocks_total);
    bar.set_position(work.blocks_done);
}
