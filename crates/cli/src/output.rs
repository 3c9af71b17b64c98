//! What is written for people and programs. A stream that is closed or full never ends the process half-way:
//! what it would have said is lost, and only results that are lost are an error.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints news on standard output, such as `ready`; the work goes on without readers.
pub fn say(line: impl AsRef<str>) {
    let _ = write_line(std::io::stdout().lock(), line.as_ref());
}

/// Prints a complaint or a remark on standard error.
pub fn complain(line: impl AsRef<str>) {
    let _ = write_line(std::io::stderr().lock(), line.as_ref());
}

/// Prints results: what the command was run for. A reader that has gone away (`farpool status | head -1`) has
/// read what it wanted; that they cannot be written is an error.
pub fn tell(line: impl AsRef<str>) -> Result<()> {
    unless_unwanted(write_line(std::io::stdout().lock(), line.as_ref()))
}

/// Prints results for programs.
pub fn tell_json(facts: &impl Serialize) -> Result<()> {
    tell(serde_json::to_string_pretty(facts).context("cannot write JSON")?)
}

/// The outcome of printing results.
pub fn unless_unwanted(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
}

fn write_line(mut stream: impl Write, line: &str) -> io::Result<()> {
    // In one piece: a line may be written by several processes at the same time.
    stream.write_all(format!("{line}\n").as_bytes())?;
    stream.flush()
}
