//! `farpool bench oracle`: timestamp transactions.

use std::time::Duration;

use anyhow::Result;
use farpool_bench::{IoTransport, OracleKind, OracleOptions, StopFlag, run_oracle};

use super::{own_file, parse_seconds, tell_report};
use crate::errors::UsageError;
use crate::rdma::card_transport;

/// Measure the throughput of the timestamp oracle, and how soon others see a commit
///
/// Clients run timestamp transactions, one after the other: each begins from a published snapshot, takes a
/// commit timestamp, and marks it as finished; there are no records. Starts a broker and nodes of its own. In
/// the end, as many commits must be published as were acknowledged.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench oracle --clients 2 --seconds 5
  farpool bench oracle --clients 2 --oracle naive --seconds 5
  farpool bench oracle --clients 2 --fetch-thread --compress --partitions 2 --seconds 5
  farpool bench oracle --clients 4 --transport tcp --seconds 5 --json")]
pub struct OracleArgs {
    /// Threads that run transactions
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,

    /// Which oracle: vector (a slot for each client, published cuts) or naive (one counter for all)
    #[arg(long, default_value_t)]
    oracle: OracleKind,

    /// Compute servers over which the clients are spread; all are in this process
    #[arg(long, value_name = "N", default_value_t = 1)]
    servers: usize,

    /// One thread of each server fetches published snapshots, and the server's clients begin from them
    #[arg(long)]
    fetch_thread: bool,

    /// The clients of a server share one slot, and advance its watermark for each other
    #[arg(long)]
    compress: bool,

    /// Number of nodes over which the vector is split
    #[arg(long, value_name = "P", default_value_t = 1)]
    partitions: usize,

    /// How far memory is reached: shm, tcp or verbs (RDMA)
    #[arg(long, default_value = "shm")]
    transport: IoTransport,

    /// How long to measure after the warm-up, in seconds
    #[arg(long, value_name = "N", default_value = "5", value_parser = parse_seconds)]
    seconds: Duration,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub fn run(args: &OracleArgs) -> Result<()> {
    let options = OracleOptions {
        oracle: args.oracle,
        transport: args.transport,
        clients: args.clients,
        servers: args.servers,
        fetch_thread: args.fetch_thread,
        compress: args.compress,
        partitions: args.partitions,
        duration: args.seconds,
    };
    options.check().map_err(UsageError)?;
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let report = run_oracle(&options, Some(card_transport), &farpool, stop.flag())?;
    tell_report(&report, args.json)
}
