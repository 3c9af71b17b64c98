//! `farpool cache handover`: the cache of a server that has shut down, for the server that takes its place.

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use farpool_cache::{AttachedCache, HandoverList, TakeOverResult, ask_for_handover};

use super::{attached_door, size_of_pages};
use crate::errors::UsageError;
use crate::output::{complain, say};

/// Hand the cache of a server over to the server that takes its place
///
/// For a planned switchover of a PostgreSQL server to its standby: run it after the server has shut down, and
/// before the standby is promoted. It closes the cache, and prints a list of its pages for `farpool cache
/// attach --take-over` on the standby's machine. The pages themselves stay in the pool. The list has keys to
/// this memory, so do not store it in a file that others can read.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache handover /srv/data | ssh standby farpool cache attach /srv/data --take-over -")]
pub struct HandoverArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Prints the list.
pub fn handover(args: &HandoverArgs) -> Result<()> {
    let mut output = std::io::stdout().lock();
    if output.is_terminal() {
        bail!(UsageError(
            "connect this command to `farpool cache attach --take-over -` by a pipe".to_owned()
        ));
    }
    let door = attached_door(&args.dir)?;
    let data = door.data().display();
    let list = ask_for_handover(&door).with_context(|| format!("the cache of {data} is not handed over"))?;
    output
        .write_all(&list)
        .and_then(|()| output.flush())
        .context("cannot pass the list on: this cache is closed, and the new one begins empty")?;
    let list = HandoverList::decode(&list)?;
    let (pages, files) = (list.pages(), list.files.len());
    complain(format!("handed over  {data}  {} of {files} files", size_of_pages(pages)));
    Ok(())
}

/// Reads the list that this command has printed. `-` is the standard input.
pub(super) fn read_list(from: &Path) -> Result<HandoverList> {
    let mut list = Vec::new();
    let read = match from.as_os_str() == "-" {
        true => std::io::stdin().lock().read_to_end(&mut list),
        false => std::fs::File::open(from).and_then(|mut file| file.read_to_end(&mut list)),
    };
    read.with_context(|| format!("cannot read the list from {}", from.display()))?;
    Ok(HandoverList::decode(&list)?)
}

/// Waits until the new cache has the pages of the old one, and says so.
pub(super) async fn say_what_was_taken_over(attached: &AttachedCache, data: &Path) {
    let Some(TakeOverResult { pages, listed, lost, refusal }) = attached.taken_over().await else { return };
    if let Some(why) = refusal {
        complain(format!("farpool: the cache of {} begins empty: {why}", data.display()));
        return;
    }
    let gone = if lost > 0 {
        format!("; {} lay in memory that is gone", size_of_pages(lost))
    } else {
        String::new()
    };
    say(format!(
        "taken over  {}  {} of {}{gone}",
        data.display(),
        size_of_pages(pages),
        size_of_pages(listed)
    ));
}
