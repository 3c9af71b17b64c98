//! `farpool generate`: manual pages and shell completions, from the very definitions that the command line is
//! parsed by.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Command, ValueEnum};
use clap_complete::Shell;

use crate::output::say;

/// Write the manual pages and the shell completions into a folder
///
/// `make install` puts them where man and the shells look. The folder gets man1/farpool.1, a page for each
/// subcommand, and completions for bash, zsh, fish, elvish and PowerShell.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool generate /tmp/farpool && man /tmp/farpool/man1/farpool-mount.1
  farpool generate /tmp/farpool && . /tmp/farpool/completions/farpool.bash")]
pub struct GenerateArgs {
    /// Where to write; made if it is not there
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes all files.
pub fn run(args: &GenerateArgs, cli: Command) -> Result<()> {
    let (pages, completions) = (args.dir.join("man1"), args.dir.join("completions"));
    for dir in [&pages, &completions] {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut cli = cli.disable_help_subcommand(true);
    write_completions(&mut cli, &completions)?;
    clap_mangen::generate_to(cli, &pages)
        .with_context(|| format!("cannot write manual pages to {}", pages.display()))?;
    say(format!("wrote {} and {}", pages.display(), completions.display()));
    Ok(())
}

fn write_completions(cli: &mut Command, dir: &Path) -> Result<()> {
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, cli, "farpool", dir)
            .with_context(|| format!("cannot write completions to {}", dir.display()))?;
    }
    Ok(())
}
