//! `farpool up`: a whole pool on this machine, as child processes.
//!
//! U1. Nothing is left running, however `up` ends: children die with their parent.
//! U2. A broker that ends is restarted at the same address and with the same store: leases stay valid
//!     meanwhile, and the nodes tell the new broker what they have lent.
//! U3. A node that ends is reported and not restarted. Its memory is lost, and the data in it; a new node in
//!     its place would hide that. When the last node has ended, `up` ends with an error.

mod certificates;
mod child;
mod detach;

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farpool_control::whereabouts::default_run_dir;
use farpool_control::{Located, Tls};
use farpool_fabric::MAX_SOCKET_PATH_BYTES;
use futures_util::future::{join_all, select_all};
use tokio::time::{Instant, sleep, timeout};

use self::child::Child;
use self::detach::Detached;
use crate::errors::{UsageError, describe};
use crate::notify;
use crate::output::{complain, say};
use crate::reach::{runtime, sums_of};
use crate::run_dir::RunDir;
use crate::shutdown::Shutdown;
use crate::size::{ByteSize, Reserve, parse_region_size, whole_regions};

/// Until a process is ready. Nodes lock and touch all their memory first: about a second per gigabyte, more
/// on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(100);
/// How often the broker is asked whether all nodes have registered.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Pause before a broker is restarted; doubles, up to the longest, as long as brokers do not stay up.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// After a broker has run for this long, the pause starts over.
const STEADY_AFTER: Duration = Duration::from_secs(60);
/// Upper bound on --nodes. All nodes share one machine's memory, so many nodes only serve experiments.
const NODES_MAX: u32 = 64;

/// Start a pool on this machine: a broker and some nodes
///
/// Runs in the foreground until Ctrl-C or SIGTERM (with --detach in the background), and leaves nothing
/// behind. All processes talk over loopback, with certificates made for this pool; `farpool mount` and
/// `farpool status` of the same user find the pool by themselves. A broker that dies is restarted. A node
/// that dies is only reported, since its memory is lost.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool up                                two nodes with 1 GiB each
  farpool up --nodes 4 --memory 256MiB
  farpool up --detach                       returns once the pool is ready; the pool keeps running
  farpool up --listen 127.0.0.1:0 --dir /run/farpool-test
  farpool mount /mnt/far                    use it, in another terminal")]
pub struct UpArgs {
    /// How many nodes lend memory
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    nodes: u32,

    /// Memory that each node lends
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: ByteSize,

    /// Size of a region, the unit in which memory is lent: a power of two
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_region_size)]
    region_size: ByteSize,

    /// Memory that each node leaves available to this machine: while less is available, it gives memory back,
    /// as `farpool node --help` explains
    #[arg(long, value_name = "SIZE|auto|0", default_value = "auto")]
    reserve: Reserve,

    /// Folder for addresses, certificates and sockets [default: $XDG_RUNTIME_DIR/farpool or /tmp/farpool-UID]
    #[arg(long, value_name = "RUNDIR")]
    dir: Option<PathBuf>,

    /// Where the broker listens: an IP address of this machine and a port; port 0 takes any free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7117")]
    listen: SocketAddr,

    /// Do not lock the nodes' memory. By default it is locked as far as the limit allows (ulimit -l). Memory
    /// that is not locked may be swapped out, and is then no faster than the disk
    #[arg(long)]
    no_lock: bool,

    /// Return once the pool is ready, and leave it running in the background; its standard error then goes to
    /// up.log in its folder
    #[arg(long)]
    detach: bool,

    #[command(flatten)]
    detached: Detached,
}

/// Runs the pool until asked to stop.
pub fn run(args: UpArgs) -> Result<()> {
    check_listen(args.listen)?;
    if args.detach {
        return detach::start();
    }
    args.detached.leave_terminal()?;
    let (memory, remark) = whole_regions(args.memory, args.region_size)?;
    check_memory(args.nodes, memory, args.region_size)?;
    let run_dir = RunDir::claim(&args.dir.clone().unwrap_or_else(default_run_dir))?;
    check_socket_path(&run_dir, args.nodes)?;
    if let Some(remark) = remark {
        complain(format!("farpool: {remark}"));
    }
    if !args.no_lock {
        complain_of_limit(memory, args.region_size);
    }
    certificates::make(&run_dir.tls_dir())?;
    let plan = Plan { args, memory, tls: Tls::load(&run_dir.tls_dir())?, run_dir };
    // One thread, the main one: children are tied to the thread that started them (prctl(2)).
    runtime()?.block_on(async {
        let mut shutdown = Shutdown::listen()?;
        let mut pool = Pool::default();
        let result = tokio::select! {
            result = plan.run(&mut pool) => result,
            () = shutdown.asked() => Ok(()),
        };
        pool.end().await;
        result
    })
}

/// The nodes and the other subcommands connect to this address, so it must name one interface.
fn check_listen(listen: SocketAddr) -> Result<()> {
    if listen.ip().to_canonical().is_unspecified() {
        let text = format!(
            "{} is not the address of one interface: give --listen an address of this machine, such as \
             127.0.0.1:7117",
            listen.ip()
        );
        return Err(UsageError(text).into());
    }
    Ok(())
}

fn check_memory(nodes: u32, memory: ByteSize, spare: ByteSize) -> Result<()> {
    let room = ByteSize(farpool_node::available_memory().context("cannot read how much memory there is")?);
    if memory.0.saturating_add(spare.0).saturating_mul(u64::from(nodes)) > room.0 {
        let text = format!(
            "{nodes} nodes with {memory} each, and a spare region of {spare} each, need more than the {room} \
             available: lower --memory or --nodes"
        );
        return Err(UsageError(text).into());
    }
    Ok(())
}

fn check_socket_path(run_dir: &RunDir, nodes: u32) -> Result<()> {
    let longest = run_dir.node_socket(nodes);
    if longest.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
        let text = format!("{} is too long for a socket: choose a shorter --dir", longest.display());
        return Err(UsageError(text).into());
    }
    Ok(())
}

/// What to start.
struct Plan {
    args: UpArgs,
    memory: ByteSize,
    tls: Tls,
    run_dir: RunDir,
}

/// Warns if the limit keeps nodes from locking all of their memory, and says what follows from that.
fn complain_of_limit(memory: ByteSize, region: ByteSize) {
    let needed = ByteSize(memory.0 + region.0); // with the spare region
    if let Some(limit) = farpool_node::lockable_memory().map(ByteSize)
        && limit < needed
    {
        complain(format!(
            "farpool: a node can lock {limit} of its {needed}: the rest may be swapped out if the machine runs \
             out of memory, and is then no faster than the disk;\n\
             raise the limit (ulimit -l), or pass --no-lock to lock nothing"
        ));
    }
}

/// The running processes.
#[derive(Default)]
struct Pool {
    broker: Option<Child>,
    nodes: Vec<Child>,
}

impl Plan {
    /// Starts the pool and supervises it; returns only with an error.
    async fn run(&self, pool: &mut Pool) -> Result<()> {
        let broker = pool.broker.insert(self.start_broker(self.args.listen)?);
        let said = broker.ready(START_DEADLINE).await?;
        let address: SocketAddr =
            said.parse().with_context(|| format!("the broker printed `{said}` in place of its address"))?;
        say(format!("broker {address}"));
        for number in 1..=self.args.nodes {
            pool.nodes.push(self.start_node(number, address)?);
        }
        let ready = join_all(pool.nodes.iter_mut().map(|node| node.ready(START_DEADLINE))).await;
        ready.into_iter().collect::<Result<Vec<_>>>()?;
        self.await_registration(address, pool).await?;
        self.run_dir.publish(&address.to_string())?;
        self.greet(address);
        self.args.detached.leave_parent(&self.run_dir.log())?;
        notify::ready();
        tokio::select! {
            never = self.keep_broker(&mut pool.broker, address) => match never {},
            result = watch_nodes(&mut pool.nodes) => result,
        }
    }

    fn start_broker(&self, listen: SocketAddr) -> Result<Child> {
        let args = ["broker".into(), "--listen".into(), listen.to_string().into()];
        let store = ["--store".into(), self.run_dir.store().into()];
        Child::start("the broker", [args.as_slice(), &store, &self.tls_args()].concat())
    }

    fn start_node(&self, number: u32, broker: SocketAddr) -> Result<Child> {
        let mut args: Vec<OsString> = vec!["node".into(), "--broker".into(), broker.to_string().into()];
        args.extend(["--memory".into(), self.memory.0.to_string().into()]);
        args.extend(["--region-size".into(), self.args.region_size.0.to_string().into()]);
        args.extend(["--reserve".into(), self.args.reserve.to_string().into()]);
        args.extend(["--shm-socket".into(), self.run_dir.node_socket(number).into()]);
        args.extend(["--state".into(), self.run_dir.node_state(number).into()]);
        args.extend(self.tls_args());
        args.extend(["--lock".into(), if self.args.no_lock { "none" } else { "allowed" }.into()]);
        Child::start(format!("node {number}"), args)
    }

    fn tls_args(&self) -> [OsString; 2] {
        ["--tls-dir".into(), self.run_dir.tls_dir().into()]
    }

    async fn await_registration(&self, address: SocketAddr, pool: &mut Pool) -> Result<()> {
        let broker = Located { address: address.to_string(), tls: Some(self.tls.clone()) };
        let all_alive = async {
            loop {
                if sums_of(&broker).await?.nodes_alive >= self.args.nodes {
                    return Ok(());
                }
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            result = timeout(START_DEADLINE, all_alive) => result.unwrap_or_else(|_| {
                let seconds = START_DEADLINE.as_secs();
                bail!("not all nodes registered within {seconds} s: try fewer nodes, or FARPOOL_LOG=info to see why")
            }),
            (name, how) = first_end(&mut pool.nodes) => bail!("{name} ended as soon as it was ready ({how})"),
        }
    }

    fn greet(&self, broker: SocketAddr) {
        let nodes = self.args.nodes;
        let all = ByteSize(self.memory.0 * u64::from(nodes));
        let named = if self.run_dir.is_default() {
            String::new()
        } else {
            format!(" --broker {broker} --tls-dir {}", self.run_dir.tls_dir().display())
        };
        say(format!("ready  {nodes} node{} lending {all}", if nodes == 1 { "" } else { "s" }));
        say(format!("mount it: farpool mount DIR{named}"));
        say(format!("end it:   {}", self.args.detached.how_to_end()));
    }

    /// Restarts the broker whenever it ends (U2).
    async fn keep_broker(&self, broker: &mut Option<Child>, address: SocketAddr) -> Infallible {
        let mut pause = FIRST_PAUSE;
        loop {
            let started = Instant::now();
            if let Some(running) = broker {
                let how = running.ended().await;
                complain(format!(
                    "farpool: the broker has ended ({how}): files stay usable but cannot grow; restarting it"
                ));
            }
            if started.elapsed() > STEADY_AFTER {
                pause = FIRST_PAUSE;
            }
            sleep(pause).await;
            pause = LONGEST_PAUSE.min(pause * 2);
            *broker = self
                .start_broker(address)
                .inspect_err(|error| complain(format!("farpool: {}", describe(error))))
                .ok();
            if let Some(starting) = broker {
                match starting.ready(START_DEADLINE).await {
                    Ok(_) => complain(format!("farpool: the broker is back at {address}")),
                    Err(error) => complain(format!("farpool: {}", describe(&error))),
                }
            }
        }
    }
}

impl Pool {
    /// Ends all processes at the same time. Bounded: each child ends, or is killed at its deadline.
    async fn end(&mut self) {
        join_all(self.nodes.iter_mut().chain(&mut self.broker).map(Child::end)).await;
    }
}

/// Reports nodes that end. Returns an error when none is left (U3).
async fn watch_nodes(nodes: &mut Vec<Child>) -> Result<()> {
    while !nodes.is_empty() {
        let (name, how) = first_end(nodes).await;
        nodes.retain(|node| node.name() != name);
        let left = nodes.len();
        complain(format!(
            "farpool: {name} has ended ({how}): its data are lost, {left} left; restart `farpool up` for a whole \
             pool"
        ));
    }
    bail!("the last node has ended: start a new pool with `farpool up`")
}

/// Waits until one of several children has ended. Returns its name and how it ended.
async fn first_end(nodes: &mut [Child]) -> (String, String) {
    let ends = nodes.iter_mut().map(|node| Box::pin(async { (node.name().to_owned(), node.ended().await) }));
    select_all(ends).await.0
}
