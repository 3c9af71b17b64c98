//! `farpool bench kv`: transactions on numbered records.

use std::time::Duration;

use anyhow::Result;
use farpool_bench::{IoTransport, KvIndex, KvMix, KvOptions, StopFlag, run_kv};

use super::{check_memory, own_file, parse_seconds, tell_report};
use crate::errors::UsageError;
use crate::rdma::card_transport;

/// Measure the throughput of small transactions on records in far memory, and what each costs
///
/// Threads run transactions with snapshot isolation on numbered records of 64 bytes; each thread has its own
/// slot of the timestamp vector. Transactions that conflict are retried. Starts a broker and nodes of its
/// own. In the end it reads all records: each must be whole, and with rmw every acknowledged increment must
/// be there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench kv --mix read --seconds 5
  farpool bench kv --mix rmw --records 10000000 --in-flight 8 --seconds 5
  farpool bench kv --announce --mix rmw --seconds 5
  farpool bench kv --index hash --mix read --seconds 5
  farpool bench kv --index hash --mix new-order --transport tcp --seconds 5
  farpool bench kv --index btree --mix scan --seconds 5
  farpool bench kv --mix update --skew 0.99 --threads 2 --seconds 5
  farpool bench kv --mix rmw --transport tcp --in-flight 16 --seconds 5 --json")]
pub struct KvArgs {
    /// What each transaction does: read (4 records), update (writes 2), rmw (reads and writes 2); by key
    /// only: new-order (places an order of ten lines), insert (2 rows with new keys); with an ordered index:
    /// scan (reads the rows of 100 consecutive keys)
    #[arg(long)]
    mix: KvMix,

    /// Find records by key, through the interface of a database, instead of by number: hash, or btree (by
    /// hash, and the keys are kept in order, too)
    #[arg(long)]
    index: Option<KvIndex>,

    /// How many records there are
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    records: u64,

    /// Exponent of Zipf's law by which records are chosen; with 0 all records are equally likely
    #[arg(long, value_name = "ZIPF", default_value_t = 0.0)]
    skew: f64,

    /// Threads that run transactions
    #[arg(long, value_name = "T", default_value_t = 1)]
    threads: usize,

    /// Transactions that each thread has in flight
    #[arg(long, value_name = "K", default_value_t = 1)]
    in_flight: usize,

    /// Nodes over which the records are spread; with one, both copies of a log are on it
    #[arg(long, value_name = "N", default_value_t = 2)]
    nodes: usize,

    /// Let threads announce which snapshots they still read, as in a database. A version that one of them
    /// needs is then not overwritten; otherwise a transaction that misses one begins again
    #[arg(long)]
    announce: bool,

    /// How far memory is reached: shm, tcp or verbs (RDMA)
    #[arg(long, default_value = "shm")]
    transport: IoTransport,

    /// How long to measure after the warm-up, in seconds
    #[arg(long, value_name = "S", default_value = "5", value_parser = parse_seconds)]
    seconds: Duration,

    /// How long to run transactions before that, in seconds
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
        index: args.index,
        records: args.records,
        skew: args.skew,
        threads: args.threads,
        in_flight: args.in_flight,
        nodes: args.nodes,
        announce: args.announce,
        transport: args.transport,
        duration: args.seconds,
        warm_up: args.warm_up,
    };
    options.check().map_err(UsageError)?;
    check_memory(options.far_bytes()?, "this needs", "lower --records or --threads")?;
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let report = run_kv(&options, Some(card_transport), &farpool, stop.flag())?;
    tell_report(&report, args.json)
}
