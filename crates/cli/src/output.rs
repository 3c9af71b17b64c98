//! Output for people and programs. A stream that is closed or full never ends the process half-way: the lines
//! are lost, and only lost results are an error.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints a progress line on standard output, such as `ready`. A failed write is ignored.
pub fn say(line: impl AsRef<str>) {
    let _ = write_line(std::io::stdout().lock(), line.as_ref());
}

/// Prints an error or a warning on standard error. A failed write is ignored.
pub fn complain(line: impl AsRef<str>) {
    let _ = write_line(std::io::stderr().lock(), line.as_ref());
}

/// Prints a result of the command. A reader that has closed the pipe (`farpool status | head -1`) has read
/// what it wanted; any other failure to write is an error.
pub fn tell(line: impl AsRef<str>) -> Result<()> {
    tell_next(line).map(drop)
}

/// Prints one of many results. Returns whether somebody still reads them.
pub fn tell_next(line: impl AsRef<str>) -> Result<bool> {
    match write_line(std::io::stdout().lock(), line.as_ref()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => unless_unwanted(written).map(|()| true),
    }
}

/// Prints a result for programs.
pub fn tell_json(facts: &impl Serialize) -> Result<()> {
    tell(serde_json::to_string_pretty(facts).context("cannot write JSON")?)
}

/// The outcome of printing a result: a closed pipe is no error.
pub fn unless_unwanted(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
}

fn write_line(mut stream: impl Write, line: &str) -> io::Result<()> {
    // In one piece, because several processes may write to the stream at the same time.
    stream.write_all(format!("{line}\n").as_bytes())?;
    stream.flush()
}
