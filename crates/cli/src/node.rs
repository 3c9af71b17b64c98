//! `farpool node`: lends this machine's memory, in the foreground; and changes how much a running node lends.

mod resize;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farpool_control::Tls;
use farpool_node::{Locking, NodeConfig, NodeError, Ready};

use crate::errors::UsageError;
use crate::notify;
use crate::output::{complain, say};
use crate::rdma::RdmaListen;
use crate::reach::{LONGEST_WAIT_S, parse_address, parse_host, runtime};
use crate::shutdown::Shutdown;
use crate::size::{ByteSize, Memory, Reserve, parse_region_size, whole_regions};
use crate::tether::{self, Tether};

/// Why the amount of memory is unknown.
const NO_MEMINFO: &str = "cannot read how much memory there is";

/// Lend this machine's memory to a pool
///
/// Reserves the memory, locks it so that it is never swapped out, registers with the broker and serves the
/// memory until SIGTERM. Prints `ready` once it has registered. From then on it also runs without the broker.
/// If the machine runs short of memory, the node gives some back, and lends it again later. `farpool node
/// shrink` and `farpool node grow` change how much it lends by hand.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "\
Examples:
  farpool node --broker 127.0.0.1:7117 --memory 2GiB --shm-socket /run/farpool/node.sock
  farpool node --broker db-17:7117 --wait 60 --tls-dir /etc/farpool/tls --memory auto \\
      --listen 10.0.0.8:7118 --data-listen 10.0.0.8:7119 --listen-rdma 10.0.0.8:7119 --state /var/lib/farpool
  farpool node shrink 4GiB --node db-17"
)]
pub struct NodeArgs {
    #[command(subcommand)]
    resize: Option<resize::Resize>,

    #[command(flatten)]
    lend: LendArgs,
}

/// How a node is set up.
#[derive(Debug, clap::Args)]
struct LendArgs {
    /// Where the broker listens
    #[arg(long, value_name = "HOST:PORT", env = "FARPOOL_BROKER", hide_env_values = true, required = true, value_parser = parse_address)]
    broker: Option<String>, // none with a subcommand only

    /// Memory to lend; auto is what is idle now, less a tenth of it, 512 MiB or twice the --reserve,
    /// whichever is most. Memory that a process has claimed but does not use yet is not idle. With
    /// --shm-socket the node takes one region more than it lends. It needs that region to fence a client on
    /// this machine, that is, to end its access: the data move to the spare region, out of the client's reach
    #[arg(long, value_name = "SIZE|auto", default_value = "auto")]
    memory: Memory,

    /// Memory to leave available to this machine, or within the limit of the memory cgroup in which the node
    /// runs. While less is available, the node gives memory back; once enough is available again, it slowly
    /// lends more. auto is 2 % of the machine's memory or of that limit, at least 256 MiB and at most 2 GiB,
    /// but never more than an eighth. With 0 the node gives back no memory by itself
    #[arg(long, value_name = "SIZE|auto|0", default_value = "auto")]
    reserve: Reserve,

    /// Size of a region, the unit in which memory is lent: a power of two, the same for all nodes of a pool
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_region_size)]
    region_size: ByteSize,

    /// How long to wait for the broker, in seconds, so that broker and nodes can be started in any order
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=LONGEST_WAIT_S))]
    wait: u64,

    /// Where to receive lease renewals; clients on other machines must reach it. Port 0 takes any free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    listen: SocketAddr,

    /// Where to serve the memory over TCP
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    data_listen: SocketAddr,

    /// Name or address by which other machines reach --listen and --data-listen, if it differs from the one
    /// given there: behind address translation (NAT), or where those are 0.0.0.0
    #[arg(long, value_name = "HOST", value_parser = parse_host)]
    advertise: Option<String>,

    /// Socket through which processes of this machine get access to the memory; without it they use TCP. No
    /// other user may be able to change its folder
    #[arg(long, value_name = "PATH")]
    shm_socket: Option<PathBuf>,

    /// Serve the memory by RDMA as well: an address of the network card, or auto for the first card's. Port 0
    /// takes any free one
    #[arg(long, value_name = "ADDR|auto")]
    listen_rdma: Option<RdmaListen>,

    /// Let the network card, not the node's processor, execute compare-and-swap and fetch-and-add on the
    /// memory. Correct only if every client that uses them connects by RDMA, which nothing checks: for other
    /// clients a processor executes them, and a card's and a processor's are not atomic with respect to each
    /// other
    #[arg(long, requires = "listen_rdma")]
    card_atomics: bool,

    /// Folder that keeps the node's identity across restarts; without it each start makes a new node. No
    /// other user may be able to change the folder
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,

    /// Folder with ca.pem, cert.pem and key.pem of the pool
    #[arg(long, value_name = "DIR", env = "FARPOOL_TLS_DIR", hide_env_values = true)]
    tls_dir: Option<PathBuf>,

    /// Which memory to lock. Memory that is not locked may be swapped out, and is then no faster than the
    /// disk
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = Lock::All)]
    lock: Lock,

    /// The same as --lock none
    #[arg(long, conflicts_with = "lock")]
    no_lock: bool,

    #[command(flatten)]
    tether: Tether,
}

/// Which memory a node locks.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Lock {
    /// All; the node does not start if the limit is too low for that (ulimit -l)
    All,
    /// As many regions as the limit allows (ulimit -l)
    Allowed,
    /// None
    None,
}

impl From<Lock> for Locking {
    fn from(lock: Lock) -> Self {
        match lock {
            Lock::All => Locking::Required,
            Lock::Allowed => Locking::AsAllowed,
            Lock::None => Locking::None,
        }
    }
}

/// Lends memory until asked to stop, or changes how much a running node lends.
pub fn run(args: NodeArgs) -> Result<()> {
    match args.resize {
        Some(resize) => resize::run(resize),
        None => lend_memory(args.lend),
    }
}

fn lend_memory(args: LendArgs) -> Result<()> {
    tether::fasten(&args.tether)?;
    let spare = if args.shm_socket.is_some() { args.region_size } else { ByteSize(0) };
    let reserve_bytes = match args.reserve {
        Reserve::Auto => farpool_node::default_reserve().context(NO_MEMINFO)?,
        Reserve::Bytes(bytes) => bytes,
    };
    let memory = memory_to_lend(args.memory, args.region_size, spare, reserve_bytes)?;
    let config = NodeConfig {
        broker: args.broker.expect("clap requires it"),
        control_listen: args.listen,
        data_listen: args.data_listen,
        advertise: args.advertise,
        register_within: Duration::from_secs(args.wait),
        shm_socket: args.shm_socket,
        card: args.listen_rdma.map(|listen| listen.service(args.card_atomics)),
        memory_bytes: memory.0,
        reserve_bytes,
        region_bytes: args.region_size.0,
        locking: if args.no_lock { Locking::None } else { args.lock.into() },
        state_dir: args.state,
        tls: args.tls_dir.as_deref().map(Tls::load).transpose()?,
    };
    let runtime = runtime()?;
    let ended = runtime.block_on(async {
        let mut shutdown = Shutdown::listen()?;
        let greet = |ready: &Ready| {
            say(format!("ready {} lending {memory}", ready.node));
            notify::ready();
        };
        farpool_node::run(config, greet, shutdown.asked()).await.map_err(explain)
    });
    // A thread may still be reserving memory, which can take minutes: it ends with the process.
    runtime.shutdown_background();
    ended
}

/// How much to lend if the node takes `spare` in addition and leaves a reserve to the machine.
fn memory_to_lend(memory: Memory, region: ByteSize, spare: ByteSize, reserve_bytes: u64) -> Result<ByteSize> {
    let Memory::Bytes(asked) = memory else {
        let room = farpool_node::memory_to_lend(reserve_bytes).context(NO_MEMINFO)?;
        let lent = room.saturating_sub(spare.0);
        if lent < region.0 {
            let room = ByteSize(room);
            bail!(
                "only {room} can be lent; the rest is in use, claimed by processes (Committed_AS in \
                 /proc/meminfo) or the reserve: give --memory, a smaller --reserve or a smaller --region-size"
            );
        }
        return Ok(ByteSize(lent - lent % region.0));
    };
    let (rounded, remark) = whole_regions(asked, region)?;
    if let Some(remark) = remark {
        complain(format!("farpool: {remark}"));
    }
    Ok(rounded)
}

/// Impossible sizes and addresses are errors of the command line.
fn explain(error: NodeError) -> anyhow::Error {
    match error {
        NodeError::NoRegion { .. }
        | NodeError::RegionSize { .. }
        | NodeError::NotAvailable { .. }
        | NodeError::NotReachable { .. } => UsageError(error.to_string()).into(),
        other => other.into(),
    }
}
