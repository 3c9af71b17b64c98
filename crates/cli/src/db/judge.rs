//! `farpool db judge`: whether what processes wrote down was snapshot isolation.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use farpool_namdb::work::{Counted, History};

use crate::output::tell;

/// Say whether what `farpool db work` wrote down was snapshot isolation
///
/// Takes what all processes wrote that worked on the database since its table was made: what is missing would
/// look like something that nobody wrote. Looks at the cuts and versions that they saw, and at nothing else.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db judge a.jsonl b.jsonl")]
pub struct JudgeArgs {
    /// What the processes wrote down
    #[arg(value_name = "HISTORY", required = true)]
    histories: Vec<PathBuf>,
}

/// Judges, and says what was found.
pub fn run(args: JudgeArgs) -> Result<()> {
    let mut history = History::default();
    for file in &args.histories {
        let about = || file.display().to_string();
        let open = File::open(file).with_context(about)?;
        history.add(BufReader::new(open)).with_context(about)?;
    }
    let Counted { committed, aborted, unknown } = history.counted();
    if let Err(violation) = history.judge() {
        bail!("this is not snapshot isolation: {violation}");
    }
    tell(format!(
        "snapshot isolation: {committed} transactions committed, {aborted} wrote nothing or gave way to others, {unknown} of which \
         nobody was told what became of them"
    ))
}
