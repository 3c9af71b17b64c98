//! `farpool bench txn-table`: the published figures on the speed of transactions.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use farpool_bench::{StopFlag, TxnTableOptions, run_txn_table};

use super::{own_file, parse_seconds};
use crate::output::tell;

/// Measure transactions beside the floors of the machine, and write a report
///
/// What `make bench-txn` runs. Each line of the report is one run of `farpool bench oracle`, `kv` or `io`.
/// With ten million records it needs 2 GiB of memory, and with five rounds about ten minutes.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench txn-table --out docs/bench
  farpool bench txn-table --out /tmp/bench --rounds 1 --seconds 0.5 --records 10000")]
pub struct TxnTableArgs {
    /// Folder for txn.md
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// How often to measure everything; the report has medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// How long to measure each time, in seconds
    #[arg(long, value_name = "N", default_value = "2", value_parser = parse_seconds)]
    seconds: Duration,

    /// How many records the tables have
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(4..=1 << 31))]
    records: u64,
}

/// Measures, writes and prints.
pub fn run(args: TxnTableArgs) -> Result<()> {
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let options = TxnTableOptions {
        out_dir: args.out,
        rounds: usize::from(args.rounds),
        seconds: args.seconds.as_secs_f64(),
        records: args.records,
    };
    tell(run_txn_table(&options, &farpool, stop.flag())?)
}
