//! `farpool bench`: measures the fabric, and files and databases on it.

mod databases;
mod kv;
mod oracle;
mod paper;
mod reclaim;
mod txn_table;

use std::fmt::Display;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;
use farpool_bench::{
    FloorPages, IoOp, IoOptions, IoTransport, Pattern, Source, StopFlag, TableOptions, check_room, run_io,
    run_table, serve_ping_pong, serve_tcp,
};
use farpool_control::Tls;
use serde::Serialize;

use crate::errors::UsageError;
use crate::output::{say, tell, tell_json};
use crate::rdma::card_transport;
use crate::reach::parse_address;
use crate::size::ByteSize;
use crate::tether::{self, Tether};

/// Measure how fast far memory is
///
/// Figures are meaningful only on an idle machine and from a release build.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench io --transport shm --op read --pattern random --seconds 5 --floor
  farpool bench io --transport tcp --op read --depth 32 --seconds 5 --floor --json
  farpool bench oracle --clients 2 --seconds 5
  farpool bench kv --mix rmw --in-flight 8 --seconds 5
  farpool bench reclaim --json
  farpool bench paper files --figure damon3 --out docs/bench")]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Io(IoArgs),
    IoTable(IoTableArgs),
    Oracle(oracle::OracleArgs),
    Kv(kv::KvArgs),
    TxnTable(txn_table::TxnTableArgs),
    Paper(paper::PaperArgs),
    Databases(databases::DatabasesArgs),
    Reclaim(reclaim::ReclaimArgs),
    #[command(hide = true)]
    Columns(databases::ColumnsArgs),
    #[command(hide = true)]
    Demand(reclaim::DemandArgs),
    #[command(hide = true)]
    Floor(FloorArgs),
    #[command(hide = true)]
    FileClient(paper::FileClientArgs),
}

/// Measure one operation of the fabric, beside its floor: the least that it could cost on this machine
///
/// Starts a broker and a node of its own unless --broker names a pool, leases the footprint, fills it, and
/// then measures in short slices. With --floor each slice is followed by one of bare accesses: for shm,
/// memcpy, loads or locked instructions at similar addresses; for tcp, a bare request and response between
/// two polling processes. Checked are every compare-and-swap, the sum of all additions, and some reads and
/// writes.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench io --transport shm --op read --pattern random --block 64 --batch 16 --seconds 5 --floor
  farpool bench io --transport tcp --op read --pattern sequential --block 512KiB --depth 4 --seconds 5
  farpool bench io --transport shm --op call --seconds 5 --floor --json
  farpool bench io --transport tcp --op read --seconds 5 --broker db-17:7117 --tls-dir /etc/farpool/tls")]
struct IoArgs {
    /// How far memory is reached: shm, tcp or verbs (RDMA)
    #[arg(long)]
    transport: IoTransport,

    /// The operation: read, write, cas, faa or call
    #[arg(long)]
    op: IoOp,

    /// Where the next operation goes: random or sequential
    #[arg(long, default_value_t)]
    pattern: Pattern,

    /// Bytes per operation [default: 8KiB; 64 for call, 8 for cas and faa]
    #[arg(long, value_name = "SIZE")]
    block: Option<ByteSize>,

    /// How many operations, or batches of them, each thread starts before it waits for the first to end
    #[arg(long, value_name = "N", default_value_t = 1)]
    depth: usize,

    /// How many operations a thread hands to the transport at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,

    /// Threads, each with an endpoint of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// Far memory over which the operations are spread
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    footprint: ByteSize,

    /// How long to measure operations, in seconds; floors and warm-up take more time
    #[arg(long, value_name = "N", value_parser = parse_seconds)]
    seconds: Duration,

    /// Measure the floor as well, alternating with the operation
    #[arg(long)]
    floor: bool,

    /// Use the pool of this broker instead of starting one
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    broker: Option<String>,

    /// Folder with ca.pem, cert.pem and key.pem of that pool
    #[arg(long, value_name = "DIR", requires = "broker")]
    tls_dir: Option<PathBuf>,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// Measure the fabric's operations beside their floors and peers, and write a report
///
/// What `make bench-io` runs. Each line of the report is one run of `farpool bench io`; nbdkit, memcached and
/// redis are started on free ports of loopback, and ended afterwards. Needs about six times the footprint of
/// memory and, with five rounds, about six minutes.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench io-table --out docs/bench
  farpool bench io-table --out /tmp/bench --rounds 1 --seconds 0.5 --footprint 64MiB")]
struct IoTableArgs {
    /// Folder for io.md and io.svg
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// How often to measure everything; the report has medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// How long to measure each time, in seconds
    #[arg(long, value_name = "N", default_value = "0.7", value_parser = parse_seconds)]
    seconds: Duration,

    /// Size of far memory, and of each peer's data
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    footprint: ByteSize,
}

/// The serving side of a floor, in a process of its own.
#[derive(Debug, clap::Args)]
struct FloorArgs {
    /// tcp or ping-pong
    #[command(subcommand)]
    kind: FloorKind,
}

#[derive(Debug, Subcommand)]
enum FloorKind {
    /// Answers requests over TCP
    Tcp(TcpFloorArgs),
    /// Answers pings on the memory that is its standard input
    PingPong(Tether),
    /// Serves a file of its own memory by FUSE
    Fuse(paper::FuseFloorArgs),
}

#[derive(Debug, clap::Args)]
struct TcpFloorArgs {
    /// Size of the memory that requests address
    #[arg(long)]
    bytes: usize,
    /// Which pages the memory consists of
    #[arg(long)]
    pages: FloorPages,
    #[command(flatten)]
    tether: Tether,
}

/// Longest measurement: a day.
const SECONDS_MAX: f64 = 86_400.0;

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=SECONDS_MAX).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("give from 0.01 to {SECONDS_MAX}, for instance 5"))
}

/// Measures and prints.
pub fn run(args: BenchArgs) -> Result<()> {
    match args.what {
        What::Io(args) => io(&args),
        What::IoTable(args) => io_table(args),
        What::Oracle(args) => oracle::run(&args),
        What::Kv(args) => kv::run(&args),
        What::TxnTable(args) => txn_table::run(args),
        What::Paper(args) => paper::run(args),
        What::FileClient(args) => paper::serve_client(&args),
        What::Floor(FloorArgs { kind: FloorKind::Fuse(floor) }) => paper::serve_floor(&floor),
        What::Databases(args) => databases::run_databases(args),
        What::Columns(args) => databases::run_columns(args),
        What::Reclaim(args) => reclaim::run(args),
        What::Demand(args) => reclaim::serve(&args),
        What::Floor(FloorArgs { kind: FloorKind::Tcp(floor) }) => {
            tether::fasten(&floor.tether)?;
            serve_tcp(floor.bytes, floor.pages, |address| say(format!("ready {address}")))
        }
        What::Floor(FloorArgs { kind: FloorKind::PingPong(tether) }) => {
            tether::fasten(&tether)?;
            let input = std::io::stdin().as_fd().try_clone_to_owned();
            let input = input.context("there is no standard input")?;
            serve_ping_pong(input, || say("ready"))
        }
    }
}

fn io(args: &IoArgs) -> Result<()> {
    let options = args.options().map_err(UsageError)?;
    check_room(&options).map_err(UsageError)?;
    if args.broker.is_none() {
        // The node reserves the footprint, and a floor of bare accesses needs as much again.
        let wanted = options.footprint_bytes.saturating_mul(1 + u64::from(options.floor));
        check_memory(wanted, "this needs", "lower --footprint")?;
    }
    let tls = args.tls_dir.as_deref().map(Tls::load).transpose()?;
    let source = args.broker.as_deref().map_or(Source::Own, |broker| Source::Broker(broker, tls));
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let report = run_io(&options, Some(card_transport), source, &farpool, stop.flag())?;
    tell_report(&report, args.json)
}

fn io_table(args: IoTableArgs) -> Result<()> {
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let options = TableOptions {
        out_dir: args.out,
        rounds: usize::from(args.rounds),
        seconds: args.seconds.as_secs_f64(),
        footprint_bytes: args.footprint.0,
    };
    tell(run_table(&options, &farpool, stop.flag())?)
}

impl IoArgs {
    fn options(&self) -> Result<IoOptions, String> {
        let default_block = IoOptions::default_block(self.op);
        let options = IoOptions {
            transport: self.transport,
            op: self.op,
            pattern: self.pattern,
            block_bytes: self
                .block
                .map_or(default_block, |size| usize::try_from(size.0).unwrap_or(usize::MAX)),
            depth: self.depth,
            batch: self.batch,
            threads: self.threads,
            footprint_bytes: self.footprint.0,
            duration: self.seconds,
            floor: self.floor,
        };
        options.check().map(|()| options)
    }
}

/// Refuses what needs more bytes than there are; `needs` is how the message begins, `fix` how it ends.
fn check_memory(wanted: u64, needs: &str, fix: &str) -> Result<()> {
    let room = farpool_node::available_memory().context("cannot read how much memory there is")?;
    if wanted > room {
        let (wanted, room) = (ByteSize(wanted), ByteSize(room));
        return Err(UsageError(format!("{needs} {wanted}, and {room} is available: {fix}")).into());
    }
    Ok(())
}

/// This program's own file, for child processes.
fn own_file() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own file")
}

/// Prints a report as JSON or as lines.
fn tell_report(report: &(impl Serialize + Display), json: bool) -> Result<()> {
    if json { tell_json(report) } else { tell(report.to_string()) }
}
