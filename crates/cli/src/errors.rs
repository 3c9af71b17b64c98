//! Error messages: one or two lines, which end with the fix.

use std::fmt;
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::output::{complain, unless_unwanted};

/// Exit status of an error of the system, a peer or the machine.
const FAILURE: u8 = 1;
/// Exit status of an error of the command line.
const USAGE: u8 = 2;

/// An error of the command line that the parser does not find, such as options that contradict each other.
/// Exit status 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Prints an error, and returns the exit status for it.
pub fn report(error: &anyhow::Error) -> ExitCode {
    complain(format!("farpool: {}", describe(error)));
    ExitCode::from(if error.is::<UsageError>() { USAGE } else { FAILURE })
}

/// An error with its causes, except those that its text already quotes.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Prints the requested help, or the parser's error. `subcommands` are those on the command line, from the
/// outermost one inwards.
pub fn report_usage(error: &clap::Error, subcommands: &[String]) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match unless_unwanted(error.print()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => report(&error),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print(); // to standard error; the exit status says the same
            ExitCode::from(USAGE)
        }
        _ => {
            complain(in_two_lines(&error.render().to_string(), subcommands));
            ExitCode::from(USAGE)
        }
    }
}

/// Shortens the parser's message of several paragraphs: the error and its tips become the first line, the
/// command for help the second.
fn in_two_lines(rendered: &str, subcommands: &[String]) -> String {
    let mut paragraphs = rendered.split("\n\n").map(one_line);
    let what = paragraphs.next().unwrap_or_default();
    let tips: String =
        paragraphs.filter(|text| text.starts_with("tip: ")).map(|tip| format!("; {tip}")).collect();
    let what = what.strip_prefix("error: ").unwrap_or(&what).to_owned();
    let what = PLAINER.iter().fold(what, |what, (said, plainer)| what.replace(*said, plainer));
    let command = subcommands.iter().fold("farpool".to_owned(), |command, name| format!("{command} {name}"));
    format!("farpool: {what}{tips}\nsee: {command} --help")
}

/// What the standard library and the parser say about values, and what is printed instead.
const PLAINER: [(&str, &str); 6] = [
    ("invalid digit found in string", "write a whole number, not below zero"),
    ("cannot parse integer from empty string", "write a whole number"),
    ("number too large to fit in target type", "the number is too large"),
    ("invalid float literal", "write a number, for instance 0.5"),
    ("invalid socket address syntax", "write an IP address and a port, for instance 127.0.0.1:7117"),
    ("is not in 1..18446744073709551615", "is too small: write at least 1"),
];

fn one_line(paragraph: &str) -> String {
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once() {
        let cause = std::io::Error::other("no such port");
        let quoting = anyhow::Error::new(cause).context("cannot listen: no such port; choose another");
        assert_eq!(describe(&quoting), "cannot listen: no such port; choose another");
        let silent = anyhow::Error::new(std::io::Error::other("disk full")).context("cannot write the store");
        assert_eq!(describe(&silent), "cannot write the store: disk full");
    }

    #[test]
    fn parser_messages_become_two_lines_with_the_tip() {
        let rendered = "error: unexpected argument '--node' found\n\n  tip: a similar argument exists: '--nodes'\n\n\
                        Usage: farpool up --nodes <N>\n\nFor more information, try '--help'.\n";
        let expected = "farpool: unexpected argument '--node' found; tip: a similar argument exists: '--nodes'\n\
                        see: farpool up --help";
        assert_eq!(in_two_lines(rendered, &["up".to_owned()]), expected);
    }

    #[test]
    fn hint_names_the_inner_subcommand_and_messages_of_the_standard_library_name_the_fix() {
        let rendered = "error: invalid value 'foo' for '--listen <ADDR>': invalid socket address syntax\n";
        let text = in_two_lines(rendered, &["db".to_owned(), "bank".to_owned()]);
        assert!(text.ends_with("for instance 127.0.0.1:7117\nsee: farpool db bank --help"), "{text}");
        let address = "foo".parse::<std::net::SocketAddr>().unwrap_err().to_string();
        let number = "-1".parse::<u64>().unwrap_err().to_string();
        for said in [address, number] {
            assert!(PLAINER.iter().any(|(known, _)| *known == said), "{said}");
        }
    }

    #[test]
    fn lists_of_missing_arguments_stay_in_one_line() {
        let rendered = "error: the following required arguments were not provided:\n  <DIR>\n\n\
                        Usage: farpool mount <DIR>\n";
        assert!(
            in_two_lines(rendered, &[])
                .starts_with("farpool: the following required arguments were not provided: <DIR>\n")
        );
    }
}
