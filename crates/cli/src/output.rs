//! Standard output: lines that a reader may have stopped reading.

use std::io::Write;

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints a line. A reader that has gone away (`farpool status | head -1`) is no reason to fail.
pub fn say(line: impl AsRef<str>) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{}", line.as_ref()).and_then(|()| stdout.flush());
}

/// Prints facts for programs.
pub fn say_json(facts: &impl Serialize) -> Result<()> {
    say(serde_json::to_string_pretty(facts).context("cannot write JSON")?);
    Ok(())
}
