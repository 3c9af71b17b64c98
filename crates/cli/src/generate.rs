//! `farpool generate`: manual pages, shell completions and the reference page, from the definitions with
//! which the command line is parsed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Command, ValueEnum};
use clap_complete::Shell;

use crate::output::say;

/// Write the manual pages, the shell completions and the reference page into a folder
///
/// `make install` puts them where man and the shells look. The folder gets man1/farpool.1, a page for each
/// subcommand, completions for bash, zsh, fish, elvish and PowerShell, and cli.md with the help of all
/// subcommands.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool generate /tmp/farpool && man /tmp/farpool/man1/farpool-mount.1
  farpool generate /tmp/farpool && . /tmp/farpool/completions/farpool.bash")]
pub struct GenerateArgs {
    /// Where to write; created if it does not exist
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
    let page = args.dir.join("cli.md");
    fs::write(&page, reference(cli.clone())).with_context(|| format!("cannot write {}", page.display()))?;
    clap_mangen::generate_to(cli, &pages)
        .with_context(|| format!("cannot write manual pages to {}", pages.display()))?;
    say(format!("wrote {}, {} and {}", pages.display(), completions.display(), page.display()));
    Ok(())
}

fn write_completions(cli: &mut Command, dir: &Path) -> Result<()> {
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, cli, "farpool", dir)
            .with_context(|| format!("cannot write completions to {}", dir.display()))?;
    }
    Ok(())
}

const REFERENCE_HEAD: &str = "\
# The command line

<!-- Written by `make cli-reference`; do not edit. -->

What `farpool COMMAND --help` prints, for every command.
";
/// Columns of the help on the reference page.
const REFERENCE_WIDTH: usize = 100;

/// The reference page: the help of all subcommands.
fn reference(cli: Command) -> String {
    let mut cli = cli.term_width(REFERENCE_WIDTH);
    cli.build();
    let mut page = REFERENCE_HEAD.to_owned();
    add_help(&mut cli, &mut page);
    page
}

fn add_help(command: &mut Command, page: &mut String) {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    *page += &format!("\n## {name}\n\n```text\n{}\n```\n", lines.join("\n"));
    for subcommand in command.get_subcommands_mut().filter(|subcommand| !subcommand.is_hide_set()) {
        add_help(subcommand, page);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_reference_page_is_up_to_date() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/cli.md");
        let expected = reference(crate::Cli::command().disable_help_subcommand(true));
        let found = fs::read_to_string(page).unwrap();
        assert!(found == expected, "docs/src/cli.md is not what --help prints: run `make cli-reference`");
    }
}
