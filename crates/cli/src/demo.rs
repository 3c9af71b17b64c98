//! `farpool demo`: runs a query that spills on a real PostgreSQL, with its temporary files in several places.

use std::path::PathBuf;

use anyhow::{Context, Result};
use farpool_bench::{DEFAULT_WORK_DIR, DemoOptions, StopFlag, Transport, run_demo};

use crate::output::tell;

/// Compare far memory with the local disk under a real PostgreSQL
///
/// Loads TPC-H and runs a join and a sort that spill (Hash+Sort of Li et al., SIGMOD 2016). Their temporary
/// files lie on a tmpfs, in far memory with and without the interposer, partly in an overflow directory, on
/// the local disk and, as root, on a throttled volume. Prints at the start how long it will take, and at the
/// end seconds and whether the rows agree. Needs an installed PostgreSQL, FUSE and, at scale factor 1, some
/// 16 GiB of memory and 11 GiB of disk.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool demo --scale 1 --rounds 5         measures as for the README
  farpool demo --scale 0.05                 a minute; too small for a claim on speed
  farpool demo --transport tcp --out-dir /tmp/demo")]
pub struct DemoArgs {
    /// TPC-H's scale factor: 1 is 6 million line items
    #[arg(long, value_name = "FACTOR", default_value_t = 0.5, env = "DEMO_SCALE", hide_env_values = true)]
    scale: f64,

    /// How far memory is reached: shm or tcp [default: both, one after the other]
    #[arg(long, env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: Option<Transport>,

    /// How often each place is measured; far memory without the interposer at most three times
    #[arg(long, value_name = "N", default_value_t = 1, env = "DEMO_ROUNDS", hide_env_values = true, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Where report.json and the logs go
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    out_dir: PathBuf,

    /// Where the database and the throttled volume are stored meanwhile; on a real disk
    #[arg(long, value_name = "DIR", default_value = DEFAULT_WORK_DIR)]
    work_dir: PathBuf,

    /// Keep the database's files for a closer look
    #[arg(long)]
    keep_data: bool,
}

/// Runs the demo; an error if the rows differ.
pub fn run(args: DemoArgs) -> Result<()> {
    let farpool = std::env::current_exe().context("cannot find this program's own file")?;
    let stop = StopFlag::on_signals()?;
    let options = DemoOptions {
        scale: args.scale,
        transport: args.transport,
        out_dir: args.out_dir,
        work_dir: args.work_dir,
        rounds: args.rounds,
        farpool,
        keep_data: args.keep_data,
    };
    run_demo(&options, &stop, tell).map(drop)
}
