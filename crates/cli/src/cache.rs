//! `farpool cache`: a page cache in far memory for the files of a database.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use farpool_cache::{AttachedCache, CacheConfig, Door, DoorFile, DoorStatus, PAGE_BYTES};
use farpool_fabric::{TransportChoice, Transports};
use farpool_pool::{Pool, PoolConfig};
use serde::Serialize;

use crate::notify;
use crate::output::say;
use crate::rdma::{card_transport, check_choice};
use crate::reach::{BrokerAt, Wait, runtime};
use crate::shutdown::Shutdown;
use crate::size::ByteSize;

/// Cache the files of a database in far memory
///
/// The files stay where they are, on a local disk, which always has the current data. Programs that are
/// started with `farpool run --cache DIR` read the pages of files below DIR from far memory if they are
/// there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache attach /srv/data --memory 4GiB
  farpool cache status /srv/data")]
pub struct CacheArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attach(AttachArgs),
    Status(StatusArgs),
}

/// Attach a cache to the files of a directory, for as long as this command runs
///
/// Leases memory of the pool, and prints `ready` once the cache is attached; programs use it within a
/// fraction of a second. They may have been started before. On SIGTERM or Ctrl-C the cache is detached, and
/// programs read from the disk again. The cache begins empty.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache attach /srv/data --memory 4GiB
  farpool run --cache /srv/data sqlite3 /srv/data/bank.db  in another terminal")]
struct AttachArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// How much far memory to use. If the pool has less, the cache is smaller until it has more
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,

    /// How many files can be cached at a time. When they are too many, those that were not read for the
    /// longest time are dropped
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    files: u32,

    #[command(flatten)]
    broker: BrokerAt,

    #[command(flatten)]
    wait: Wait,

    /// How nodes are reached: shm (same host), verbs (RDMA), tcp, or auto for the best of them
    #[arg(long, default_value = "auto", env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: TransportChoice,
}

/// Show how the cache of a directory is used
///
/// Hits are blocks of 8 KiB that were found in the cache, misses are those that were read from the disk: by
/// all programs since the cache's door was made, which is the first use of the directory after the machine
/// started.
#[derive(Debug, clap::Args)]
struct StatusArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `status` prints. Fields are stable; new ones may be added.
#[derive(Serialize)]
struct Status {
    door: PathBuf,
    state: &'static str,
    hits: u64,
    misses: u64,
    hit_rate: Option<f64>,
    threads: u32,
}

/// Runs a subcommand.
pub fn run(args: CacheArgs) -> Result<()> {
    match args.command {
        Command::Attach(args) => attach(args),
        Command::Status(args) => status(&args),
    }
}

fn attach(args: AttachArgs) -> Result<()> {
    check_choice(args.transport)?;
    let slots = args.memory.0 / PAGE_BYTES as u64;
    let Some(slots) = u32::try_from(slots).ok().filter(|slots| *slots > 0) else {
        bail!("--memory: a cache has at least 8 KiB and at most 16 TiB");
    };
    let door = DoorFile::open(&args.dir)?;
    let broker = args.broker.require_within(args.wait)?;
    let pool = Pool::connect(PoolConfig {
        broker: broker.address.clone(),
        tls: broker.tls.clone(),
        transport: Transports { choice: args.transport, card: Some(card_transport) },
        limit_bytes: None,
    })?;
    let runtime = runtime()?;
    let mut shutdown = runtime.block_on(async { Shutdown::listen() })?;
    let data = door.data().to_owned();
    let attached = AttachedCache::new(door, pool, CacheConfig { slots, files: args.files })
        .with_context(|| format!("cannot cache the files in {}", data.display()))?;
    say(format!("ready  {}", data.display()));
    notify::ready();
    runtime.block_on(shutdown.asked());
    drop(attached);
    Ok(())
}

/// What a user may do about a state.
fn explain(state: &str, outsiders: u64) -> &'static str {
    match state {
        "closed" if outsiders > 0 => {
            ": a program changes a file without a place in the cache. If it was killed, stop all programs that use \
             the files, and remove the door"
        }
        "closed" => {
            ": a program changes files in a way that the cache cannot follow, or is stopped within a call"
        }
        "abandoned" => ": `farpool cache attach` was killed; start it again",
        _ => "",
    }
}

fn status(args: &StatusArgs) -> Result<()> {
    let file = DoorFile::open(&args.dir)?;
    let DoorStatus { door, hits, misses, places, outsiders, .. } = file.status();
    let has_daemon =
        file.has_daemon().with_context(|| format!("cannot ask for the lock of {}", file.path().display()))?;
    let state = match (door, has_daemon) {
        (Door::Open, true) => "open",
        (Door::Invalidating, true) => "opening",
        (Door::Closed, true) => "closed",
        (Door::Closed, false) => "detached",
        (Door::Open | Door::Invalidating, false) => "abandoned",
    };
    let reads = hits + misses;
    let hit_rate = (reads > 0).then(|| hits as f64 / reads as f64);
    let status = Status { door: file.path().to_owned(), state, hits, misses, hit_rate, threads: places };
    if args.json {
        say(serde_json::to_string(&status).context("cannot write JSON")?);
        return Ok(());
    }
    say(format!("door      {}", file.path().display()));
    say(format!("state     {state}{}", explain(state, outsiders)));
    say(format!("hits      {hits}"));
    say(format!("misses    {misses}"));
    if let Some(rate) = hit_rate {
        say(format!("hit rate  {:.1} %", 100.0 * rate));
    }
    say(format!("threads   {places}"));
    Ok(())
}
