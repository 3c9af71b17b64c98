//! `farpool cache attach`: the daemon of a page cache.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use farpool_cache::{AttachedCache, CacheConfig, DoorFile};
use farpool_fabric::{TransportChoice, Transports};
use farpool_pool::{Pool, PoolConfig};

use super::slots_in;
use crate::notify;
use crate::output::say;
use crate::rdma::{card_transport, check_choice};
use crate::reach::{BrokerAt, Wait, runtime};
use crate::shutdown::Shutdown;
use crate::size::ByteSize;
use crate::tether::{self, Tether};

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
pub struct AttachArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// How much far memory to use. If the pool has less, the cache is smaller until it has more
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,

    /// The most memory that `farpool cache resize` can give the cache; --memory unless told otherwise. The
    /// index takes memory of this machine: about 48 bytes for each 8 KiB of this, and 72 bytes for each of
    /// --files
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<ByteSize>,

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

    #[command(flatten)]
    tether: Tether,
}

/// Runs until it is asked to end.
pub fn attach(args: AttachArgs) -> Result<()> {
    tether::fasten(&args.tether)?;
    check_choice(args.transport)?;
    let slots = slots_in("--memory", args.memory)?;
    let max_slots = args.max_memory.map_or(Ok(slots), |size| slots_in("--max-memory", size))?;
    if max_slots < slots {
        bail!("--max-memory is less than --memory: raise it, or leave it out");
    }
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
    let attached = AttachedCache::new(door, pool, CacheConfig { slots, max_slots, files: args.files })
        .with_context(|| format!("cannot cache the files in {}", data.display()))?;
    say(format!("ready  {}", data.display()));
    notify::ready();
    runtime.block_on(shutdown.asked());
    drop(attached);
    Ok(())
}
