//! `farpool db judge`: checks recorded histories for snapshot isolation.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use farpool_namdb::work::{Counted, History};

use crate::output::tell;

/// Check the histories that `farpool db work` has recorded for snapshot isolation
///
/// Needs the histories of all processes that have worked on the database since the table was created: a
/// version from a missing history looks as if no transaction had written it. Only what the histories record
/// is checked: the versions that transactions read and wrote, and their cuts. The cut of a transaction is its
/// snapshot: of each client, the commits that the transaction sees.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db judge a.jsonl b.jsonl")]
pub struct JudgeArgs {
    /// Histories of all the processes
    #[arg(value_name = "HISTORY", required = true)]
    histories: Vec<PathBuf>,
}

/// Checks the histories, and prints the result.
pub fn run(args: JudgeArgs) -> Result<()> {
    let mut history = History::default();
    for file in &args.histories {
        let about = || file.display().to_string();
        let open = File::open(file).with_context(about)?;
        history.add(BufReader::new(open)).with_context(about)?;
    }
    let Counted { committed, aborted, unknown } = history.counted();
    if committed + aborted + unknown == 0 {
        bail!(
            "there is no transaction in these files: name histories that `farpool db work --history` has written"
        );
    }
    if let Err(violation) = history.judge() {
        bail!("this is not snapshot isolation: {violation}");
    }
    tell(format!(
        "snapshot isolation: {committed} transactions committed, {aborted} wrote nothing or aborted, \
         {unknown} indeterminate"
    ))
}
