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

/// Prints the requested help, or the parser's error. `subcommand` is the one on the command line, if it
/// exists.
pub fn report_usage(error: &clap::Error, subcommand: Option<&str>) -> ExitCode {
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
            complain(in_two_lines(&error.render().to_string(), subcommand));
            ExitCode::from(USAGE)
        }
    }
}

/// Shortens the parser's message of several paragraphs: the error and its tips become the first line, the
/// command for help the second.
fn in_two_lines(rendered: &str, subcommand: Option<&str>) -> String {
    let mut paragraphs = rendered.split("\n\n").map(one_line);
    let what = paragraphs.next().unwrap_or_default();
    let tips: String =
        paragraphs.filter(|text| text.starts_with("tip: ")).map(|tip| format!("; {tip}")).collect();
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    let subcommand = subcommand.map(|name| format!(" {name}")).unwrap_or_default();
    format!("farpool: {what}{tips}\nsee: farpool{subcommand} --help")
}

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
        assert_eq!(in_two_lines(rendered, Some("up")), expected);
    }

    #[test]
    fn lists_of_missing_arguments_stay_in_one_line() {
        let rendered = "error: the following required arguments were not provided:\n  <DIR>\n\n\
                        Usage: farpool mount <DIR>\n";
        assert!(
            in_two_lines(rendered, None)
                .starts_with("farpool: the following required arguments were not provided: <DIR>\n")
        );
    }
}
