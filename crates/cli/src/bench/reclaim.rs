//! `farpool bench reclaim`: how fast a node gives memory back to its machine.

use std::io::stdin;

use anyhow::{Context, Result};
use farpool_bench::{ReclaimOptions, StopFlag, run_reclaim, serve_demand};

use super::{check_memory, own_file, tell_report};
use crate::errors::UsageError;
use crate::output::tell;
use crate::size::ByteSize;

/// Measure how fast a node gives memory back when its machine needs it, and what clients see of that
///
/// Puts a node and a process that demands memory into one control group with a memory limit, which stands in
/// for the machine. The node has lent its memory to a mount; a client reads or writes a file there meanwhile,
/// and checks what it reads. The time runs from the demand until the process has its memory and the node has
/// given back as much, up to half a region. Each run has a new pool and takes about ten seconds. Needs root,
/// for the control group.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench reclaim --json
  farpool bench reclaim --runs 3 --demand 64MiB")]
pub struct ReclaimArgs {
    /// How often to demand memory
    #[arg(long, value_name = "N", default_value_t = 20)]
    runs: u32,

    /// How much memory is demanded at once; a run takes thirteen times as much, and 512 MiB
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    demand: ByteSize,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// A process that demands memory.
#[derive(Debug, clap::Args)]
pub struct DemandArgs {
    /// How much
    #[arg(long)]
    bytes: usize,
    /// How much is to be available again then
    #[arg(long)]
    reserve: u64,
}

/// Measures and prints.
pub fn run(args: ReclaimArgs) -> Result<()> {
    let options = ReclaimOptions { runs: args.runs, demand_bytes: args.demand.0 };
    options.check().map_err(UsageError)?;
    check_memory(options.needed_bytes(), "this needs", "lower --demand")?;
    let (farpool, stop) = (own_file()?, StopFlag::on_signals()?);
    let report = run_reclaim(&options, &farpool, stop.flag()).context("the measurement failed")?;
    tell_report(&report, args.json)
}

/// Takes memory when asked.
pub fn serve(args: &DemandArgs) -> Result<()> {
    serve_demand(args.bytes, args.reserve, farpool_node::available_memory, stdin().lock(), tell)
}
