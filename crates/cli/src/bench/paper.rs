//! `farpool bench paper`: the papers' figures, measured on Farpool.

use std::io::stdin;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use farpool_bench::{
    DEFAULT_WORK_DIR, Document, Figure, Opening, PaperEffort, PaperOptions, StopFlag, is_about_files_alone,
    run_paper, run_paper_cache, serve_file_client, serve_fuse_floor,
};

use super::{check_memory, own_file, parse_seconds};
use crate::errors::UsageError;
use crate::output::tell;
use crate::size::ByteSize;

/// Measure what the papers' figures show, and write a report
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench paper files --figure all --out docs/bench
  farpool bench paper files --figure damon3 --out /tmp/bench --rounds 3 --footprint 64MiB")]
pub struct PaperArgs {
    #[command(subcommand)]
    what: Paper,
}

#[derive(Debug, Subcommand)]
enum Paper {
    Files(FilesArgs),
    Cache(CacheArgs),
}

/// Measure files in far memory, through mounts, beside floors, peers and disks
///
/// What `make bench-files` runs. Each figure replaces its section of files.md and its drawing in the folder.
/// Volumes that are compared exist at the same time, and are measured in turn. The throttled disk needs root
/// and control groups; without them its rows are missing, and the document says so. Needs up to 23 times the
/// footprint of memory. The interposer's library must be beside this program: cargo build -p farpool-preload.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench paper files --figure all --out docs/bench
  farpool bench paper files --figure damon2,damon3 --out /tmp/bench --rounds 3 --seconds 0.2")]
struct FilesArgs {
    /// all, or some of damon2, damon3, damon-table1, damon4, damon5, sigmod3, sigmod4, sigmod5, sigmod6,
    /// range-scan, sigmod13, sigmod14, interposer, small-transactions, checksum
    #[arg(long, value_name = "NAME", value_delimiter = ',', required = true)]
    figure: Vec<Wanted>,

    /// Folder for files.md and its drawings
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// How often to measure everything; the report has medians
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// How long to measure each time, in seconds
    #[arg(long, value_name = "N", default_value = "0.25", value_parser = parse_seconds)]
    seconds: Duration,

    /// Size of each file
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    footprint: ByteSize,

    /// How often to measure the figures with a database
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    database_rounds: u16,

    /// TPC-H's scale factor for the figures with a database: 1 is 6 million line items
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_scale)]
    scale: f64,

    /// Leave out the peers that scripts/setup bench installs
    #[arg(long)]
    without_peers: bool,

    /// Folder on the machine's disk, for the files on it and for the image of the throttled disk
    #[arg(long, value_name = "DIR", default_value = DEFAULT_WORK_DIR)]
    work_dir: PathBuf,
}

/// Measure the page cache: databases behind it, a switchover, a single hit, and which pages stay in it
///
/// What `make bench-cache` runs. Each figure replaces its section of cache.md and its drawing in the folder.
/// cached-page needs the interposer's library beside this program (cargo build -p farpool-preload), and
/// cached-hits measures no times. All others need root and control groups, PostgreSQL, and the module beside
/// this program (make postgres-module); sigmod18 and sigmod20 also need DuckDB (scripts/setup databases),
/// and cached-scan needs nbdkit and nbdfuse (scripts/setup bench).
///
/// At scale 1, cached-scan needs 22 GB of memory and 50 GB of disk, sigmod18 and sigmod20 7 GB of memory
/// and 10 GB of disk, sigmod24 5 GB of memory and 8 GB of disk, sigmod12, sigmod16 and sigmod25 4 GB of
/// memory and 8 GB of disk, and cached-page 3 GB of memory and 2 GB of disk. cached-hits needs little of
/// both.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench paper cache --figure all --out docs/bench
  farpool bench paper cache --figure cached-scan --out /tmp/bench --scale 0.6 --rounds 1
  farpool bench paper cache --figure cached-page,cached-hits --out /tmp/bench --scale 0.1")]
struct CacheArgs {
    /// all, or some of cached-scan, sigmod12, sigmod16, sigmod18, sigmod20, sigmod24, sigmod25,
    /// cached-page, cached-hits
    #[arg(long, value_name = "NAME", value_delimiter = ',', required = true)]
    figure: Vec<Wanted>,

    /// Folder for cache.md and its drawings
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// How often to measure everything; the report has medians. sigmod18 and sigmod20 have at most three
    /// rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// How long to measure a database each time, in seconds: whole ones, at least one. A single hit is
    /// measured for a twelfth of it, and a server after its promotion for twenty times this
    #[arg(long, value_name = "N", default_value = "3", value_parser = parse_seconds)]
    seconds: Duration,

    /// The size of the data. At 1 it is 3.1 GB for cached-scan, 1.2 GB for sigmod12, sigmod16 and sigmod24,
    /// 500 MB for sigmod18 and sigmod20, 300 MB for each server of sigmod25, 512 MB for cached-page, and
    /// 400 MB for cached-hits
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_scale)]
    scale: f64,

    /// Folder on the machine's disk, for the databases and for the image of the throttled disk
    #[arg(long, value_name = "DIR", default_value = DEFAULT_WORK_DIR)]
    work_dir: PathBuf,
}

/// A larger scale would keep a machine busy for hours.
const SCALE_MAX: f64 = 100.0;

fn parse_scale(text: &str) -> Result<f64, String> {
    let scale = text.parse().ok().filter(|&scale| scale > 0.0 && scale <= SCALE_MAX);
    scale.ok_or_else(|| format!("give a number above 0, up to {SCALE_MAX}, for instance 0.05"))
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Wanted {
    All,
    One(Figure),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "all" {
            return Ok(Wanted::All);
        }
        name.parse().map(Wanted::One)
    }
}

/// A file that this process reads and writes at another process's request.
#[derive(Debug, clap::Args)]
pub struct FileClientArgs {
    /// The file; created if it does not exist
    file: PathBuf,
    /// How far it is filled
    #[arg(long)]
    bytes: u64,
    /// Open it without O_DIRECT
    #[arg(long)]
    buffered: bool,
}

/// A bare FUSE file.
#[derive(Debug, clap::Args)]
pub struct FuseFloorArgs {
    /// An empty directory
    dir: PathBuf,
    /// Size of the file
    #[arg(long)]
    bytes: usize,
    /// Threads that serve it
    #[arg(long)]
    threads: usize,
}

/// Measures and writes.
pub fn run(args: PaperArgs) -> Result<()> {
    let args = match args.what {
        Paper::Files(args) => args,
        Paper::Cache(args) => return run_cache(args),
    };
    let figures = wanted(&args.figure, Document::Files)?;
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    if figures.iter().any(|&figure| is_about_files_alone(figure)) {
        let wanted = args.footprint.0.saturating_mul(FILES_IN_MEMORY);
        check_memory(wanted, "this needs up to", "lower --footprint")?;
    }
    let options = PaperOptions {
        out_dir: args.out,
        rounds: usize::from(args.rounds),
        time: args.seconds,
        bytes: args.footprint.0,
        peers: !args.without_peers,
        database_rounds: usize::from(args.database_rounds),
        scale: args.scale,
        work_dir: args.work_dir,
    };
    tell(run_paper(&figures, &options, &farpool, &stop)?)
}

/// Memory that a figure of the page cache needs for each unit of the scale: caches, files on tmpfs, and what
/// the servers may use.
fn memory_per_scale(figure: Figure) -> f64 {
    match figure {
        Figure::CachedScan => 22e9,
        Figure::Sigmod18 | Figure::Sigmod20 => 7e9,
        Figure::Sigmod24 => 5e9,
        Figure::Sigmod12 | Figure::Sigmod16 | Figure::Sigmod25 => 4e9,
        Figure::CachedPage => 3e9,
        _ => 0.0,
    }
}

fn run_cache(args: CacheArgs) -> Result<()> {
    let figures = wanted(&args.figure, Document::Cache)?;
    let most = figures.iter().map(|&figure| memory_per_scale(figure)).fold(0.0, f64::max);
    check_memory((args.scale * most) as u64, "this needs about", "lower --scale")?;
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let effort = PaperEffort {
        rounds: usize::from(args.rounds),
        slice: args.seconds,
        scale: args.scale,
        work_dir: &args.work_dir,
        farpool: &farpool,
    };
    tell(run_paper_cache(&figures, &args.out, &effort, &stop)?)
}

/// The figures of a document that are wanted, in its order.
fn wanted(asked: &[Wanted], document: Document) -> Result<Vec<Figure>> {
    let elsewhere = asked.iter().find_map(|asked| match asked {
        Wanted::One(figure) if figure.document() != document => Some(figure),
        Wanted::One(_) | Wanted::All => None,
    });
    if let Some(figure) = elsewhere {
        let command = match figure.document() {
            Document::Files => "files",
            Document::Cache => "cache",
        };
        bail!(UsageError(format!("measure {figure} by `farpool bench paper {command} --figure {figure}`")));
    }
    let is_wanted = |figure: &Figure| asked.contains(&Wanted::All) || asked.contains(&Wanted::One(*figure));
    let of_document = Figure::ALL.into_iter().filter(|figure| figure.document() == document);
    Ok(of_document.filter(is_wanted).collect())
}

/// Most memory, in files: those that are in memory at the same time, and what their nodes hold in addition.
const FILES_IN_MEMORY: u64 = 23;

/// Reads and writes as standard input requests.
pub fn serve_client(args: &FileClientArgs) -> Result<()> {
    let opening = if args.buffered { Opening::Buffered } else { Opening::Direct };
    serve_file_client(&args.file, args.bytes, opening, stdin().lock(), tell)
}

/// Serves until asked to stop.
pub fn serve_floor(args: &FuseFloorArgs) -> Result<()> {
    let (asked, stop) = mpsc::sync_channel(1);
    ctrlc::set_handler(move || {
        let _ = asked.try_send(()); // full: a stop was requested before
    })
    .context("cannot install signal handlers")?;
    serve_fuse_floor(&args.dir, args.bytes, args.threads, || tell("ready"), &stop)
}
