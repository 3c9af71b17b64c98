//! `farpool cache attach`: the daemon of a page cache.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use farpool_cache::{AttachedCache, CacheConfig, DoorFile, HandoverList, Leases};
use farpool_fabric::{TransportChoice, Transports};
use farpool_pool::PoolConfig;

use super::handover::{read_list, say_what_was_taken_over};
use super::{is_attached, slots_in};
use crate::notify;
use crate::output::say;
use crate::rdma::{card_transport, check_choice};
use crate::reach::{BrokerAt, Wait, runtime};
use crate::shutdown::Shutdown;
use crate::size::ByteSize;
use crate::tether::{self, Tether};

/// How many files can be cached at a time, unless told otherwise.
const FILES: u32 = 16_384;

/// Attach a cache to the files of a directory, for as long as this command runs
///
/// Leases memory of the pool, and prints `ready` once the cache is attached; programs use it within a
/// fraction of a second. They may have been started before. On SIGTERM or Ctrl-C the cache is detached, and
/// programs read from the disk again. The cache begins empty, unless it takes over another one.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache attach /srv/data --memory 4GiB
  farpool run --cache /srv/data sqlite3 /srv/data/bank.db  in another terminal")]
pub struct AttachArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// How much far memory to use. If the pool has less, the cache is smaller until it has more
    #[arg(long, value_name = "SIZE", required_unless_present = "take_over")]
    memory: Option<ByteSize>,

    /// The most memory that `farpool cache resize` can give the cache. The index takes memory of this
    /// machine: about 48 bytes for each 8 KiB of this, and 72 bytes for each of --files [default: --memory;
    /// with
    /// --take-over at least the maximum of the old cache]
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<ByteSize>,

    /// How many files can be cached at a time. When they are too many, those that were not read for the
    /// longest time are dropped [default: 16384; with --take-over that of the old cache]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    files: Option<u32>,

    /// Take over the cache that `farpool cache handover` has handed over. LIST is the file with what it has
    /// printed, or - for the standard input. DIR is the data directory of the standby. Promote the standby
    /// only after this command has printed `ready`. Unless told otherwise, the cache has the size of the old
    /// one
    #[arg(long, value_name = "LIST")]
    take_over: Option<PathBuf>,

    #[command(flatten)]
    broker: BrokerAt,

    #[command(flatten)]
    wait: Wait,

    /// How nodes are reached: shm (same host), verbs (RDMA), tcp, or auto for the best of them
    #[arg(long, default_value = "auto", env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: TransportChoice,

    #[command(flatten)]
    tether: Tether,
}

/// Runs until it is asked to end.
pub fn attach(args: AttachArgs) -> Result<()> {
    tether::fasten(&args.tether)?;
    check_choice(args.transport)?;
    config_for(&args, None)?; // sizes that no cache can have are refused first
    let door = DoorFile::open(&args.dir)?;
    let broker = args.broker.require_within(args.wait)?;
    if args.take_over.is_some() && is_attached(&door)? {
        bail!("a cache is attached to {}: detach it first", door.data().display());
    }
    // As late as possible: the old cache is closed before its list arrives, so a failure from here on loses
    // its pages.
    let list = args.take_over.as_deref().map(read_list).transpose()?;
    let config = config_for(&args, list.as_ref())?;
    let pool = PoolConfig {
        broker: broker.address.clone(),
        tls: broker.tls.clone(),
        transport: Transports { choice: args.transport, card: Some(card_transport) },
        limit_bytes: None,
    };
    let leases = match list {
        Some(list) => Leases::take_over(pool, list),
        None => Leases::connect(pool),
    }?;
    let runtime = runtime()?;
    let mut shutdown = runtime.block_on(async { Shutdown::listen() })?;
    let data = door.data().to_owned();
    let attached = AttachedCache::new(door, leases, config)
        .with_context(|| format!("cannot cache the files in {}", data.display()))?;
    runtime.block_on(async {
        tokio::select! {
            () = attached.may_be_promoted() => {}
            () = shutdown.asked() => return,
        }
        say(format!("ready  {}", data.display()));
        notify::ready();
        let run = async {
            say_what_was_taken_over(&attached, &data).await;
            attached.handed_over().await;
            say(format!("handed over  {}", data.display()));
        };
        tokio::select! {
            () = run => {}
            () = shutdown.asked() => {}
        }
    });
    drop(attached);
    Ok(())
}

/// How large the cache is: as large as the old one, if nothing else is said.
fn config_for(args: &AttachArgs, list: Option<&HandoverList>) -> Result<CacheConfig> {
    let (wanted_before, slots_before) = list.map_or((0, 0), |list| (list.wanted_slots, list.slots));
    let slots = args.memory.map_or(Ok(wanted_before), |size| slots_in("--memory", size))?;
    let max_slots =
        args.max_memory.map_or(Ok(slots.max(slots_before)), |size| slots_in("--max-memory", size))?;
    if max_slots < slots {
        bail!("--max-memory is less than --memory: raise it, or leave it out");
    }
    let files = args.files.or(list.map(|list| list.max_files)).unwrap_or(FILES);
    Ok(CacheConfig { slots, max_slots, files })
}
