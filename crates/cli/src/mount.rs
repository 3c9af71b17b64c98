//! `farpool mount`: far memory as a directory, in the foreground.

use std::path::PathBuf;
use std::sync::mpsc;

use anyhow::{Context, Result};
use farpool_control::Located;
use farpool_fabric::{TransportChoice, Transports, raise_limit};
use farpool_file::{FileStore, Redundancy};
use farpool_mount::{Acceleration, MAX_THREADS, MountConfig, start_watcher};
use farpool_pool::{OverflowConfig, Pool, PoolConfig};

use crate::notify;
use crate::output::{complain, say};
use crate::rdma::{card_transport, check_choice};
use crate::reach::{BrokerAt, Wait, runtime, sums_of};
use crate::size::ByteSize;
use crate::users;
use keep::Keeping;

mod keep;

/// Mount far memory as a directory
///
/// Files written there are stored in the memory of the pool's nodes, striped over them. They are temporary:
/// when the mount ends, all files are lost unless --keep is given; when a node dies, the data on it are lost
/// unless --redundancy protects them. Runs in the foreground, prints `ready` once mounted, and unmounts on
/// SIGTERM or Ctrl-C.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool mount /mnt/far                                 the pool of this user's `farpool up`
  farpool mount /mnt/far --broker db-17:7117 --tls-dir /etc/farpool/tls
  farpool mount /mnt/far --wait 60                       waits up to 60 s for the pool
  farpool mount /mnt/far --redundancy parity:4           files survive the loss of a node; needs five nodes
  farpool mount /mnt/far --keep /run/user/1000/far       files survive a restart of the daemon
  farpool mount /mnt/far --overflow /var/tmp             a full pool makes files slower instead of failing
  sudo farpool mount /mnt/far --allow-other --limit 8GiB  for a database of another user")]
pub struct MountArgs {
    /// An empty directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    #[command(flatten)]
    broker: BrokerAt,

    #[command(flatten)]
    wait: Wait,

    /// How nodes are reached: shm (same host), verbs (RDMA), tcp, or auto for the best of them
    #[arg(long, default_value = "auto", env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: TransportChoice,

    /// Let other users in; file permissions still apply. Needs root, or user_allow_other in /etc/fuse.conf
    #[arg(long)]
    allow_other: bool,

    /// Let processes that this user or root starts with `farpool run` read and write files directly, without
    /// the kernel. Other processes then write more slowly: the kernel passes on each of their writes at once,
    /// in place of collecting them
    #[arg(long)]
    accelerate: bool,

    /// Like --accelerate, also for processes of this user. They are trusted with all files of the mount, as
    /// are root and the user who mounts. May be given several times
    #[arg(long, value_name = "USER", value_parser = users::id_of)]
    accelerate_for: Vec<u32>,

    /// Threads that serve the kernel's requests [default: one per processor, at least 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_THREADS as i64))]
    threads: Option<u16>,

    /// How files survive the loss of a node; a file consists of extents of 256 KiB. stripe: they do not, and
    /// a file's extents lie on all nodes in turn. none: they do not, but a file lies on one node as long as
    /// that has room, so that the loss of others does not affect it. mirror: each extent lies on two nodes.
    /// parity:K: K extents and their parity lie on K + 1 nodes; parity alone is parity:4. To choose another
    /// kind for an empty file, or for new files in a directory: setfattr -n user.farpool.redundancy -v
    /// parity:4 DIR
    #[arg(long, value_name = "KIND", default_value = "stripe")]
    redundancy: Redundancy,

    /// Most bytes per second that the rebuild of a lost node's data may write
    #[arg(long, value_name = "SIZE", default_value = "200MiB")]
    rebuild_rate: ByteSize,

    /// Keep the mount's state in this directory, preferably on a tmpfs. A mount that is killed or ends, and
    /// is started again with this directory within seconds, finds its files again. Only this user may have
    /// access to the directory, and only one mount at a time may use it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["accelerate", "accelerate_for"])]
    keep: Option<PathBuf>,

    /// Put what the pool has no room for into this directory on a local disk (ext4 or xfs), and back into
    /// the pool once there is room. A full pool then makes files slower, and writes fail only when the
    /// directory is full, too. The mount does not fill the last tenth of that file system. The data there
    /// are not encrypted. They are gone once the mount has ended. If it is killed, programs of `farpool
    /// run` that have used them may keep their storage until they next use the mount, or end. With --keep
    /// they stay in a folder of that directory, and the next mount with the same --keep finds them; once
    /// that state is gone, the next mount with the same --overflow removes them
    #[arg(long, value_name = "DIR")]
    overflow: Option<PathBuf>,

    /// Most to put into the directory of --overflow [default: no limit but the tenth that stays free]
    #[arg(long, value_name = "SIZE", requires = "overflow")]
    overflow_limit: Option<ByteSize>,

    /// Most memory to take from the pool [default: all of it]. Names and attributes of files take memory of
    /// this process in addition: at most an eighth of the limit, and at most 2 GiB. Each user that
    /// --allow-other lets in can use a quarter of that memory for names and attributes
    #[arg(long, value_name = "SIZE")]
    limit: Option<ByteSize>,
}

/// While some threads wait for far memory, others can serve further requests.
const THREADS_MIN: usize = 4;

/// Serves until asked to stop.
pub fn run(args: MountArgs) -> Result<()> {
    // Nothing is created before the wait, so a signal may simply end the process.
    check_choice(args.transport)?;
    let broker = args.broker.require_within(args.wait)?;
    let config = MountConfig {
        mountpoint: args.dir,
        threads: args.threads.map_or_else(default_threads, usize::from),
        allow_other: args.allow_other,
        acceleration: (args.accelerate || !args.accelerate_for.is_empty())
            .then_some(Acceleration { trusted_uids: args.accelerate_for }),
        redundancy: args.redundancy,
        limit_bytes: args.limit.map(|limit| limit.0),
    };
    config.check()?;
    // It forks: the process must have a single thread, and no far memory yet.
    let watcher = start_watcher(&config.mountpoint)?;
    let (asked, stop) = mpsc::sync_channel(1);
    ctrlc::set_handler(move || {
        notify::stopping();
        let _ = asked.try_send(()); // full: a stop was requested before
    })
    .context("cannot install signal handlers")?;
    raise_limit(); // each file that is open to direct clients takes a descriptor
    let mut keeping = args.keep.as_deref().map(Keeping::open).transpose()?;
    let pool = PoolConfig {
        broker: broker.address.clone(),
        tls: broker.tls.clone(),
        transport: Transports { choice: args.transport, card: Some(card_transport) },
        limit_bytes: args.limit.map(|limit| limit.0),
    };
    let overflow = args
        .overflow
        .map(|dir| OverflowConfig { dir, limit_bytes: args.overflow_limit.map(|limit| limit.0) });
    let (store, kept) = match &mut keeping {
        Some(keeping) => {
            let (store, kept) = keeping.store(pool, overflow.as_ref())?;
            (store, Some(kept))
        }
        None => {
            let pool = Pool::connect_with_overflow(pool, overflow.as_ref())?;
            (FileStore::new(pool).context("cannot start the file store")?, None)
        }
    };
    if let Some(overflow) = &overflow {
        complain(format!(
            "farpool: what the pool has no room for will be stored in {}, not encrypted",
            overflow.dir.display()
        ));
    }
    if let Err(error) = warn_of_missing_nodes(&broker, args.redundancy) {
        complain(format!("farpool: cannot find out how many nodes the pool has: {error:#}"));
    }
    store.limit_rebuild(args.rebuild_rate.0);
    farpool_mount::run(
        store,
        &config,
        kept,
        watcher,
        || {
            say(format!("ready  {}", config.mountpoint.display()));
            notify::ready();
        },
        stop,
    )?;
    if let Some(keeping) = &keeping {
        keeping.say_goodbye();
    }
    Ok(())
}

/// Only a warning: nodes may still join.
fn warn_of_missing_nodes(broker: &Located, redundancy: Redundancy) -> Result<()> {
    if redundancy.nodes() > 1 {
        let alive = u64::from(runtime()?.block_on(sums_of(broker))?.nodes_alive);
        if alive < redundancy.nodes() {
            complain(format!(
                "farpool: {redundancy} needs {} nodes and the pool has {alive}: until more are started (`farpool node`), \
                 only the smallest files fit",
                redundancy.nodes()
            ));
        }
    }
    Ok(())
}

fn default_threads() -> usize {
    std::thread::available_parallelism()
        .map_or(THREADS_MIN, |processors| processors.get().clamp(THREADS_MIN, MAX_THREADS))
}
