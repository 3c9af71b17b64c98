//! `farpool volume`: what of a mount bears the loss of a node, what was lost, what is made anew. The mount's
//! daemon answers by attributes of the mount's root, so nothing but the mount has to be reached.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::output::{tell, tell_json};
use crate::size::ByteSize;

/// The state as JSON, and what has work begun (`crates/mount/src/fs/volume.rs`).
const STATE: &str = "user.farpool.volume";
const REBUILD: &str = "user.farpool.rebuild";
const SCRUB: &str = "user.farpool.scrub";
/// Far more than the state takes.
const MAX_STATE_BYTES: usize = 4 << 10;
/// How often progress is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long the mount may take to begin with what it was asked for: another rebuild or scrub of its thread
/// has to end first.
const NO_NEWS_PATIENCE: Duration = Duration::from_secs(60);

/// Look after a mount: state, redundancy, rebuild, scrub
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool volume status /mnt/far                    what bears the loss of a node, and what is missing
  farpool volume status /mnt/far --json | jq .missing_extents
  farpool volume rebuild /mnt/far                   wait until what was lost lies elsewhere again
  farpool volume scrub /mnt/far                     read every block, mend what is wrong")]
pub struct VolumeArgs {
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, clap::Subcommand)]
enum VolumeCommand {
    /// Say what bears the loss of a node, what is missing, what is under way, and what goes past the kernel
    Status {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,

        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
    /// Wait until what lay on lost nodes lies elsewhere again; it begins by itself when a node is lost
    Rebuild {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,
    },
    /// Read every block and parity, and mend what is not what was written there
    Scrub {
        /// Where the file system is mounted
        #[arg(value_name = "MOUNTPOINT")]
        mountpoint: PathBuf,
    },
}

/// Facts about a mount. Names and meanings of the fields are stable; new ones may join.
#[derive(Debug, Serialize, Deserialize)]
struct Volume {
    /// Of files for which nothing else was chosen.
    redundancy: String,
    files: u64,
    redundant_files: u64,
    /// Of redundant files.
    extents: u64,
    missing_extents: u64,
    /// Of all files: they lie nowhere, and nothing else has what they hold.
    lost_extents: u64,
    to_rebuild: bool,
    wrong_blocks: u64,
    mended_blocks: u64,
    lost_blocks: u64,
    hedged_reads: u64,
    rebuild: Rebuild,
    scrub: Scrub,
    /// What processes have read and written by themselves, without the kernel.
    direct_read_bytes: u64,
    direct_written_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Work {
    running: bool,
    blocks_total: u64,
    blocks_done: u64,
    /// How often it was done to its end.
    finished: u64,
    /// How often it has ended, done or not.
    attempts: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Rebuild {
    #[serde(flatten)]
    work: Work,
    /// Why the last one was not done to its end; it is tried again.
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
    /// How it stands, if it does not wait for something.
    fn state(&self) -> String {
        match self.running {
            true => format!("{} of {} blocks", self.blocks_done, self.blocks_total),
            false if self.finished > 0 => "done".to_owned(),
            false => "none so far".to_owned(),
        }
    }
}

/// Asks the mount, or has it work.
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
            0 if self.to_rebuild => "nothing; being looked at".to_owned(),
            0 => "nothing".to_owned(),
            missing if self.lost_extents > 0 => format!("{missing} of {} extents", self.extents),
            missing => format!("{missing} of {} extents, made from the others meanwhile", self.extents),
        };
        let lost = match self.lost_extents {
            0 => "nothing".to_owned(),
            lost => format!("{lost} extents: nothing else has what they held, reading it is an error"),
        };
        let rebuild = match &self.rebuild.waits_for {
            Some(reason) if self.rebuild.work.blocks_done == 0 => format!("waiting: {reason}"),
            _ if !self.rebuild.work.running && self.missing_extents > 0 => "about to begin".to_owned(),
            _ => self.rebuild.work.state(),
        };
        let scrub = match self.scrub.blocks_unread {
            0 => self.scrub.work.state(),
            unread => format!("{}; {unread} blocks could not be read", self.scrub.work.state()),
        };
        vec![
            format!("redundancy  {}, unless chosen for a file or directory", self.redundancy),
            format!("files       {}, of which {} bear the loss of a node", self.files, self.redundant_files),
            format!("missing     {missing}"),
            format!("lost        {lost}"),
            format!("rebuild     {rebuild}"),
            format!("scrub       {scrub}"),
            format!(
                "blocks      {} wrong, {} mended, {} lost",
                self.wrong_blocks, self.mended_blocks, self.lost_blocks
            ),
            format!("slow nodes  {} reads done without them", self.hedged_reads),
            format!(
                "directly    {} read, {} written by programs with the interposer",
                ByteSize(self.direct_read_bytes),
                ByteSize(self.direct_written_bytes)
            ),
        ]
    }
}

fn ask(mountpoint: &Path) -> Result<Volume> {
    let mut state = vec![0; MAX_STATE_BYTES];
    let bytes = getxattr(mountpoint, STATE, &mut state[..]).map_err(|error| complaint(error, mountpoint))?;
    serde_json::from_slice(&state[..bytes])
        .context("the mount is of another version of farpool: mount it anew")
}

fn command(mountpoint: &Path, name: &str) -> Result<()> {
    setxattr(mountpoint, name, b"1", XattrFlags::empty()).map_err(|error| complaint(error, mountpoint))
}

fn complaint(error: Errno, mountpoint: &Path) -> anyhow::Error {
    let place = mountpoint.display();
    match error {
        Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS => anyhow::anyhow!(
            "{place} is not the root of a Farpool mount, or this kernel is older than 5.12: name the directory that was \
             given to `farpool mount`"
        ),
        error => anyhow::Error::new(error).context(format!("cannot ask the mount at {place}")),
    }
}

fn rebuild(mountpoint: &Path) -> Result<()> {
    let before = ask(mountpoint)?;
    command(mountpoint, REBUILD)?;
    let bar = bar("rebuilding");
    // One that was under way when this was asked for may have looked before.
    let mut attempts = before.rebuild.work.attempts + u64::from(before.rebuild.work.running);
    let mut last_news = (Instant::now(), None);
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
            attempts = work.attempts; // it brought something: so may the next
        }
        let news = Some((work.attempts, work.blocks_done));
        if news != last_news.1 {
            last_news = (Instant::now(), news);
        } else if last_news.0.elapsed() > NO_NEWS_PATIENCE {
            bar.finish_and_clear();
            bail!(
                "the mount has not begun to rebuild for {} s; {}",
                NO_NEWS_PATIENCE.as_secs(),
                volume.still_missing()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Nothing is missing any more; `lost`: blocks that could not be made anew.
fn rebuilt(lost: u64) -> Result<()> {
    if lost > 0 {
        bail!(
            "nothing is missing any more, but {lost} blocks were lost: reading them is an error until they are written anew"
        );
    }
    tell("nothing is missing")
}

impl Volume {
    /// What is to be done about a rebuild that does not get on.
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
    // One that was under way when this was asked for does not count.
    let wanted = before.scrub.work.finished + 1 + u64::from(before.scrub.work.running);
    loop {
        let volume = ask(mountpoint)?;
        show(&bar, &volume.scrub.work);
        if volume.scrub.work.finished >= wanted {
            bar.finish_and_clear();
            let found = volume.wrong_blocks.saturating_sub(before.wrong_blocks);
            let mended = volume.mended_blocks.saturating_sub(before.mended_blocks);
            let lost = volume.lost_blocks.saturating_sub(before.lost_blocks);
            let (done, unread) = (volume.scrub.work.blocks_done, volume.scrub.blocks_unread);
            let read = match unread {
                0 => format!("{done} blocks read"),
                unread => {
                    format!("{} of {done} blocks read, {unread} could not be", done.saturating_sub(unread))
                }
            };
            return tell(format!("{read}: {found} wrong, {mended} mended, {lost} lost"));
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
