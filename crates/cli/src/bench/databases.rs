//! `farpool bench databases`: unmodified databases in far memory and on the local disk, and a program of our
//! own that runs among them, `farpool bench columns`.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use farpool_bench::databases::{Access, BenchOptions, Database, GroundOptions, columns, node_mib, run_bench};
use farpool_bench::{DEFAULT_WORK_DIR, StopFlag, Transport};

use super::own_file;
use crate::output::tell;
use crate::size::ByteSize;

/// Compare databases in far memory with databases on the local disk
///
/// Runs PostgreSQL, DuckDB, SQLite and a program that maps its files, unmodified, in a mount and in a folder
/// on the disk in turn, and prints medians. A result that differs is an error. Needs what `scripts/setup
/// databases` installs. The page cache is not limited: while it holds the local files, the disk is hardly
/// used.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench databases                                    everything at scale factor 1: an hour
  farpool bench databases --only duckdb --scale 0.3 --rounds 1
  farpool bench databases --only postgres --wrapper 'env LD_PRELOAD=/usr/lib/libexample.so'")]
pub struct DatabasesArgs {
    /// Scale factor of TPC-H and TPC-DS; other data grow with it
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    scale: f64,

    /// How often to measure everything
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Only these: postgres, duckdb, sqlite, columns
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<Database>,

    /// How far memory is reached: shm or tcp
    #[arg(long, default_value_t, env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: Transport,

    /// Command that starts the databases: a program and its first arguments
    #[arg(long, value_name = "COMMAND", default_value = "")]
    wrapper: String,

    /// Where the local folder is; on a real disk
    #[arg(long, value_name = "DIR", default_value = DEFAULT_WORK_DIR)]
    work_dir: PathBuf,
}

/// Measures and prints the table.
pub fn run_databases(args: DatabasesArgs) -> Result<()> {
    let farpool = own_file()?;
    let options = BenchOptions {
        ground: GroundOptions {
            farpool: &farpool,
            work_dir: &args.work_dir,
            memory_per_node_mib: node_mib(args.scale),
            transport: args.transport,
            access: Access::Kernel,
            wrapper: args.wrapper.split_whitespace().map(OsString::from).collect(),
        },
        scale: args.scale,
        rounds: args.rounds,
        databases: if args.only.is_empty() { Database::ALL.to_vec() } else { args.only },
    };
    run_bench(&options, &StopFlag::on_signals()?, tell)
}

/// Compute with mapped files, as MonetDB does; one of the programs that `farpool bench databases` runs
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool bench columns /mnt/far/columns")]
pub struct ColumnsArgs {
    /// An empty directory, or with --sum a file
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// How many columns
    #[arg(long, value_name = "N", default_value_t = 4)]
    columns: usize,

    /// Size of each column
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    column_size: ByteSize,

    /// Sum up a file instead
    #[arg(long)]
    sum: bool,
}

/// Works on columns, or sums a file that another process works on.
pub fn run_columns(args: ColumnsArgs) -> Result<()> {
    if args.sum {
        return tell(columns::sum_file(&args.path)?);
    }
    let farpool = own_file()?;
    let column_bytes = usize::try_from(args.column_size.0)?;
    let size = columns::Size { columns: args.columns, column_bytes };
    let mut said = Ok(());
    columns::work(
        &args.path,
        size,
        |file| columns::sum_elsewhere(&farpool, file),
        |line| {
            said = std::mem::replace(&mut said, Ok(())).and_then(|()| tell(line));
        },
    )?;
    said
}
