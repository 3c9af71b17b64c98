//! `farpool bench kv`: transactions on records that are known by their numbers.

use std::time::Duration;

use anyhow::{Context, Result};
use farpool_bench::{IoTransport, KvMix, KvOptions, run_kv};

use super::{parse_seconds, stop_on_signals};
use crate::errors::UsageError;
use crate::output::{tell, tell_json};
use crate::rdma::card_transport;
use crate::size::ByteSize;

/// Measure how many small transactions run on records in far memory, and what each costs
///
/// Threads run transactions with snapshot isolation on records of 64 bytes that are known by their numbers;
/// each thread has a slot of the timestamp vector to itself. What conflicts is tried again. Starts a broker
/// and nodes of its own. In the end all records are read: each has to be whole, and with rmw every increment
/// that was acknowledged has to be there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench kv --mix read --seconds 5
  farpool bench kv --mix rmw --records 10000000 --in-flight 8 --seconds 5
  farpool bench kv --announce --mix rmw --seconds 5
  farpool bench kv --mix update --skew 0.99 --threads 2 --seconds 5
  farpool bench kv --mix rmw --transport tcp --in-flight 16 --seconds 5 --json")]
pub struct KvArgs {
    /// What each transaction does: read (4 records), update (writes 2) or rmw (reads and writes 2)
    #[arg(long)]
    mix: KvMix,

    /// How many records there are
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    records: u64,

    /// How often some records are chosen: exponent of Zipf's law; with 0 all are chosen as often
    #[arg(long, value_name = "ZIPF", default_value_t = 0.0)]
    skew: f64,

    /// Old versions that are kept of each record; fewer take less memory, and make old snapshots begin again
    #[arg(long, value_name = "N", default_value_t = 4)]
    old_versions: usize,

    /// Threads that run transactions
    #[arg(long, value_name = "T", default_value_t = 1)]
    threads: usize,

    /// Transactions that each thread has in flight
    #[arg(long, value_name = "K", default_value_t = 1)]
    in_flight: usize,

    /// Nodes over which the records are spread; with one, both copies of a log are on it
    #[arg(long, value_name = "N", default_value_t = 2)]
    nodes: usize,

    /// Threads announce which snapshots they have, as in a database, and no snapshot loses its versions
    #[arg(long)]
    announce: bool,

    /// How far memory is reached: shm, tcp or verbs (RDMA)
    #[arg(long, default_value = "shm")]
    transport: IoTransport,

    /// How long is measured; the warm-up comes on top
    #[arg(long, value_name = "S", default_value = "5", value_parser = parse_seconds)]
    seconds: Duration,

    /// How long transactions run before that
    #[arg(long, value_name = "S", default_value = "0.5", value_parser = parse_seconds)]
    warm_up: Duration,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: &KvArgs) -> Result<()> {
    let options = KvOptions {
        mix: args.mix,
        records: args.records,
        skew: args.skew,
        old_versions: args.old_versions,
        threads: args.threads,
        in_flight: args.in_flight,
        nodes: args.nodes,
        announce: args.announce,
        transport: args.transport,
        duration: args.seconds,
        warm_up: args.warm_up,
    };
    options.check().map_err(UsageError)?;
    let room = farpool_node::available_memory().context("cannot read how much memory there is")?;
    let wanted = options.far_bytes()?;
    if wanted > room {
        let (wanted, room) = (ByteSize(wanted), ByteSize(room));
        let text = format!("this takes {wanted} and {room} are available: lower --records or --old-versions");
        return Err(UsageError(text).into());
    }
    let farpool = std::env::current_exe().context("cannot find this program's own file")?;
    let stop = stop_on_signals()?;
    let report = run_kv(&options, Some(card_transport), &farpool, &stop)?;
    if args.json {
        return tell_json(&report);
    }
    tell(report.lines()?)
}
