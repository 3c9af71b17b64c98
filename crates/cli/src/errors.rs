//! What people see when something is wrong: one or two lines, of which the last words name the fix.

use std::fmt;
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::output::{complain, unless_unwanted};

/// The system, a peer or the machine is at fault.
const FAILURE: u8 = 1;
/// The command line is at fault.
const USAGE: u8 = 2;

/// A fault of the command line that shows only once options are looked at together. Exit status 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Says what went wrong; the exit status tells whose fault it is.
pub fn report(error: &anyhow::Error) -> ExitCode {
    complain(format!("farpool: {}", describe(error)));
    ExitCode::from(if error.is::<UsageError>() { USAGE } else { FAILURE })
}

/// An error with its causes, except those that it has quoted itself.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Prints the help that was asked for, or what the parser did not understand. `subcommand` is the one that
/// was named, if there is one of that name.
pub fn report_usage(error: &clap::Error, subcommand: Option<&str>) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match unless_unwanted(error.print()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => report(&error),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print(); // to standard error, and the exit status says it as well
            ExitCode::from(USAGE)
        }
        _ => {
            complain(in_two_lines(&error.render().to_string(), subcommand));
            ExitCode::from(USAGE)
        }
    }
}

/// The parser's message has several paragraphs; what is wrong and a tip make the first line, the way to the
/// help the second.
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
    fn causes_are_told_once() {
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
