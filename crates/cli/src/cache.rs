//! `farpool cache`: a page cache in far memory for the files of a database.

mod attach;
mod changes;
mod status;

use anyhow::{Result, bail};
use clap::Subcommand;
use farpool_cache::PAGE_BYTES;

use crate::size::ByteSize;

/// Cache the files of a database in far memory
///
/// The files stay where they are, on a local disk, which always has the current data. Programs that are
/// started with `farpool run --cache DIR` read the pages of files below DIR from far memory if they are
/// there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache attach /srv/data --memory 4GiB
  farpool cache status /srv/data
  farpool cache resize /srv/data 2GiB
  farpool cache detach /srv/data")]
pub struct CacheArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attach(attach::AttachArgs),
    Status(status::StatusArgs),
    Resize(changes::ResizeArgs),
    Drop(changes::DropArgs),
    Detach(changes::DetachArgs),
}

/// Runs a subcommand.
pub fn run(args: CacheArgs) -> Result<()> {
    match args.command {
        Command::Attach(args) => attach::attach(args),
        Command::Status(args) => status::status(&args),
        Command::Resize(args) => changes::resize(&args),
        Command::Drop(args) => changes::drop_pages(&args),
        Command::Detach(args) => changes::detach(&args),
    }
}

/// How many pages fit into so many bytes. `what` names the option.
fn slots_in(what: &str, size: ByteSize) -> Result<u32> {
    match u32::try_from(size.0 / PAGE_BYTES as u64) {
        Ok(slots @ 1..) => Ok(slots),
        _ => bail!("{what}: a cache has at least 8 KiB and at most 16 TiB"),
    }
}

/// The size of so many pages.
fn size_of_pages(pages: impl Into<u64>) -> ByteSize {
    ByteSize(pages.into() * PAGE_BYTES as u64)
}
