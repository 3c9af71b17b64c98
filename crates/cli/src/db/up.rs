//! `farpool db up`: creates a database, or joins it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use farpool_control::Located;
use farpool_fabric::raise_limit;
use farpool_namdb::{CreateOptions, Database, DatabaseError};
use farpool_pool::{JointError, PoolConfig};
use tokio::time::Instant;

use super::DatabaseAt;
use crate::notify;
use crate::output::say;
use crate::rdma::check_choice;
use crate::reach::{Wait, runtime};
use crate::shutdown::Shutdown;
use crate::size::ByteSize;

/// How often to check whether the database still exists.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Create a database, or join one
///
/// If FILE does not exist, leases memory of the pool, creates an empty database in it, and writes FILE, which
/// other processes need to open the database. A user that can read FILE has full access to the database.
/// Then runs in the foreground as one of its compute servers, which are the processes that have opened it:
/// prints `ready`, recovers compute servers that crash, and leaves on SIGTERM or Ctrl-C. The database is lost
/// ten seconds after its last compute server exits.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db up bank.far                       a database in the pool of this user's `farpool up`
  farpool db up bank.far --memory 2GiB --servers 32
  farpool db up bank.far &                     on another machine, with a copy of FILE: a second server")]
pub struct UpArgs {
    #[command(flatten)]
    at: DatabaseAt,

    #[command(flatten)]
    wait: Wait,

    /// Memory of a new database, rounded up to whole regions of the pool
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: ByteSize,

    /// Compute servers that a new database can have at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=63))]
    servers: u16,

    /// Parts of a new database's timestamp oracle, spread over the nodes: at most 16, and at most one more
    /// than --servers. Choose more than one only if a single node's network card is the limit and there are
    /// many clients: with two parts a commit is published up to half a millisecond later, and a quarter of a
    /// millisecond more for each further one
    #[arg(long, value_name = "P", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    partitions: u16,

    /// Size of each compute server's log in a new database. A log holds the rows that commits have replaced
    /// while an open transaction may still read them; if it is full, commits wait for old transactions to
    /// end. Each log has two copies. At least 64KiB [default: together a quarter of the memory, each from
    /// 128KiB to 64MiB and at most a quarter of a region]
    #[arg(long, value_name = "SIZE")]
    log_size: Option<ByteSize>,

    /// Seconds without a heartbeat after which a new database's compute servers declare one of them dead
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = parse_patience)]
    patience: f64,
}

/// With a shorter patience, a server whose threads wait for a processor would be declared dead; with a longer
/// one, the locks of a dead server would be held for too long.
fn parse_patience(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds".to_owned())?;
    if (0.2..=10.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.2 to 10 seconds".to_owned()) }
}

/// Runs until it is asked to stop, or the database is gone.
pub fn run(args: UpArgs) -> Result<()> {
    let is_new = !args.at.file.try_exists().context("cannot look for the database's file")?;
    let deadline = args.wait.deadline();
    if is_new {
        args.at.broker.require_within(args.wait)?; // a signal ends the process
    }
    let runtime = runtime()?;
    let mut shutdown = {
        let _inside = runtime.enter();
        Shutdown::listen()?
    };
    let database = loop {
        match if is_new { create(&args) } else { args.at.open() } {
            // More nodes may still join.
            Err(error) if is_new && lacks_space(&error) && Instant::now() < deadline => {}
            database => break database?,
        }
        if runtime.block_on(asked_within(&mut shutdown, LOOK_EVERY)) {
            return Ok(());
        }
    };
    let made = if is_new { "made" } else { "joined" };
    say(format!("ready: {made} {}", args.at.file.display()));
    notify::ready();
    let ended = runtime.block_on(async {
        loop {
            if let Err(ended) = database.check() {
                return Some(ended);
            }
            if asked_within(&mut shutdown, LOOK_EVERY).await {
                return None;
            }
        }
    });
    match ended {
        Some(ended) => {
            let file = args.at.file.display();
            bail!("{ended}; start it again with `farpool db up {file}`")
        }
        None => Ok(()),
    }
}

/// Whether the process is asked to stop within `time`.
async fn asked_within(shutdown: &mut Shutdown, time: Duration) -> bool {
    tokio::time::timeout(time, shutdown.asked()).await.is_ok()
}

fn lacks_space(error: &anyhow::Error) -> bool {
    let lacking = error.downcast_ref();
    matches!(lacking, Some(DatabaseError::Leases(JointError::NoSpace { .. } | JointError::NoNode { .. })))
}

fn create(args: &UpArgs) -> Result<Database> {
    raise_limit();
    check_choice(args.at.transport)?;
    let Located { address, tls } = args.at.broker.require()?;
    let pool = PoolConfig { broker: address, tls, transport: args.at.transports(), limit_bytes: None };
    let options = CreateOptions {
        bytes: args.memory.0,
        servers: args.servers,
        partitions: args.partitions,
        log_bytes: args.log_size.map(|size| size.0),
        patience: Duration::from_secs_f64(args.patience),
    };
    Ok(Database::create(&pool, &args.at.file, &options)?)
}
