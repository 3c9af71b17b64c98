//! Every command of `farpool` that a page or a help text prints is one that this program understands. (What
//! they do is tested elsewhere.)

use std::fs;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use crate::Cli;

/// Fewer would mean that the search below finds nothing any more.
const AT_LEAST: usize = 50;

const FOLDERS: [&str; 4] = ["docs/src", "docs/src/how-to", "docs/src/decisions", "docs/bench"];
const OTHER_PAGES: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "testbed/README.md"];

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = FOLDERS.map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let files = folders.into_iter().flatten().map(|entry| entry.unwrap().path());
    let pages = files.filter(|file| file.extension().is_some_and(|extension| extension == "md"));
    pages.chain(OTHER_PAGES.map(|page| root.join(page))).collect()
}

/// The commands in a page's blocks of shell, each on one line.
fn commands_of_page(text: &str) -> Vec<Vec<String>> {
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or(rest));
    blocks.flat_map(commands_in).collect()
}

/// The commands in the examples of a subcommand's help, and of those below it.
fn commands_of_help(cli: &clap::Command) -> Vec<Vec<String>> {
    let helps = [cli.get_after_help(), cli.get_after_long_help()].into_iter().flatten();
    let own = helps.flat_map(|help| commands_in(&help.to_string()));
    own.chain(cli.get_subcommands().flat_map(commands_of_help)).collect()
}

/// The commands in a text. A line that ends with a backslash goes on in the next one.
fn commands_in(text: &str) -> Vec<Vec<String>> {
    let lines: Vec<&str> = text.split("\\\n").map(str::trim_start).collect();
    lines.join("").lines().filter_map(command).collect()
}

/// The words of the command of `farpool` with which a line begins, also behind `sudo` and variables.
fn command(line: &str) -> Option<Vec<String>> {
    let words = words(line.trim_start().trim_start_matches("$ "));
    let prefixes = words.iter().take_while(|word| *word == "sudo" || is_assignment(word)).count();
    let command = words[prefixes..].to_vec();
    command.first().is_some_and(|program| program == "farpool").then_some(command)
}

/// Whether a word sets a variable of the environment: `NAME=value`.
fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| name.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_'))
}

/// The words of a line's first command, as a shell splits them: what is between quotes is one word. A command
/// ends at an operator of the shell, at a comment, and where a remark begins after two spaces.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut quote, mut last) = (vec![String::new()], None, ' ');
    for letter in line.chars() {
        match (letter, quote) {
            ('\'' | '"', None) => quote = Some(letter),
            (_, Some(open)) if letter == open => quote = None,
            (';' | '|', None) => break,
            ('#' | '&' | '>' | '<' | '\u{2026}', None) if last == ' ' => break,
            (' ', None) if last == ' ' && words.len() > 1 => break,
            (' ', None) => words.push(String::new()),
            _ => words.last_mut().expect("begins with one").push(letter),
        }
        last = letter;
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn every_printed_command_is_one_that_this_program_understands() {
    let of_pages = pages().into_iter().flat_map(|page| {
        let commands = commands_of_page(&fs::read_to_string(&page).unwrap());
        commands.into_iter().map(move |command| (page.display().to_string(), command))
    });
    let of_help = commands_of_help(&Cli::command()).into_iter().map(|command| ("--help".to_owned(), command));
    let mut count = 0;
    for (place, command) in of_pages.chain(of_help) {
        count += 1;
        let parsed = Cli::try_parse_from(&command);
        // `--help` and `--version` end as errors that are none.
        let wrong = parsed.err().filter(|error| error.use_stderr());
        assert!(wrong.is_none(), "{place}: {}: {}", command.join(" "), wrong.unwrap());
    }
    assert!(count >= AT_LEAST, "only {count} commands were found");
}
