//! Checks of the house that cargo does not do: `cargo xtask tidy`, and `cargo xtask ci`, which is all of CI's
//! linting.
//!
//! `ci` runs clippy, the formatter, cargo-deny and `tidy`, each without stopping at the first that fails, so
//! that one run shows everything there is to fix.

mod files;
mod layering;
mod pages;
mod rules;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage: cargo xtask tidy | ci\n\
    tidy  the layering of the workspace, and the rules of the house that can be read off the text\n\
    ci    exactly what CI's lint runs: clippy, fmt, cargo-deny, tidy";

/// Everything CI's lint runs besides `tidy`.
const LINTS: [&[&str]; 3] = [
    &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
    &["fmt", "--all", "--check"],
    &["deny", "--locked", "check", "bans", "licenses", "sources"],
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["tidy"] => tidy(),
        ["ci"] => ci(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn ci() -> Result<()> {
    let mut failed = Vec::new();
    for lint in LINTS {
        eprintln!("xtask: cargo {}", lint.join(" "));
        let mut command = Command::new(cargo());
        command.args(lint).current_dir(root());
        // What cargo told this program of its own package: build scripts that look at it would run again at
        // the next build.
        for (name, _) in std::env::vars()
            .filter(|(name, _)| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
        {
            command.env_remove(name);
        }
        let status = command.status().context("cannot run cargo")?;
        if !status.success() {
            failed.push(format!("cargo {}", lint[0]));
        }
    }
    if let Err(error) = tidy() {
        eprintln!("{error:#}");
        failed.push("cargo xtask tidy".into());
    }
    if !failed.is_empty() {
        bail!("failed: {} (`make lint` installs cargo-deny where it is missing)", failed.join(", "));
    }
    Ok(())
}

fn tidy() -> Result<()> {
    let mut complaints = layering::check(&metadata()?)?;
    complaints.extend(rules::check(&root())?);
    complaints.extend(pages::check(&root())?);
    if !complaints.is_empty() {
        bail!("{} rule(s) of the house broken:\n  {}", complaints.len(), complaints.join("\n  "));
    }
    Ok(())
}

fn metadata() -> Result<String> {
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--locked"];
    let output = Command::new(cargo())
        .args(arguments)
        .current_dir(root())
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("cargo metadata printed something that is not UTF-8")
}

/// The cargo that started us, so that both use one toolchain.
fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

/// The workspace's folder: the parent of ours.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
