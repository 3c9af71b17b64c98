//! `farpool`: parses the command line, runs one subcommand, and reports an error in one or two lines.
//!
//! Exit status: 0 on success, 2 for an error of the command line, 1 for every other error.

// They panic when the stream is closed or full; see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod broker;
mod cache;
mod db;
mod demo;
mod doctor;
mod errors;
mod generate;
mod leases;
mod mount;
mod node;
mod nodes;
mod notify;
mod output;
#[cfg(test)]
mod printed;
mod rdma;
mod reach;
mod run;
mod run_dir;
mod shutdown;
mod sim;
mod size;
mod status;
mod tether;
mod up;
mod users;
mod volume;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::errors::UsageError;

/// The variable with the log filter, for instance `debug` or `farpool_node=debug,warn`.
const LOG_VARIABLE: &str = "FARPOOL_LOG";

/// Lends the idle memory of other machines to databases that are short of it.
#[derive(Debug, Parser)]
#[command(name = "farpool", version, max_term_width = 100, after_long_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  farpool doctor              what this machine lacks, and how to fix it
  farpool up                  a pool on this machine: a broker and two nodes (--detach: in the background)
  farpool mount /mnt/far      far memory as a directory, in another terminal
  farpool run COMMAND         a program that works on files of that directory directly
  farpool cache attach DIR --memory 4GiB   a page cache in far memory for the files of a database
  farpool status              which nodes lend memory, and which clients hold it
  farpool db up bank.far      a database in far memory, for programs with transactions
  farpool volume status /mnt/far   redundancy of a mount's files, and what has been lost

Environment:
  FARPOOL_BROKER, FARPOOL_TLS_DIR, FARPOOL_TRANSPORT   default values of these options
  FARPOOL_LOG                 log to standard error: error, warn (default), info, debug, trace";

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::UpArgs),
    Broker(broker::BrokerArgs),
    Node(Box<node::NodeArgs>),
    Mount(mount::MountArgs),
    Run(run::RunArgs),
    Cache(cache::CacheArgs),
    Status(status::StatusArgs),
    Leases(leases::LeasesArgs),
    Volume(volume::VolumeArgs),
    Db(db::DbArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
    Bench(bench::BenchArgs),
    Sim(sim::SimArgs),
    Generate(generate::GenerateArgs),
}

impl Command {
    fn run(self) -> Result<()> {
        match self {
            Command::Up(args) => up::run(args),
            Command::Broker(args) => broker::run(args),
            Command::Node(args) => node::run(*args),
            Command::Mount(args) => mount::run(args),
            Command::Run(args) => run::run(args),
            Command::Cache(args) => cache::run(args),
            Command::Status(args) => status::run(args),
            Command::Leases(args) => leases::run(args),
            Command::Volume(args) => volume::run(args),
            Command::Db(args) => db::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Demo(args) => demo::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Sim(args) => sim::run(args),
            Command::Generate(args) => generate::run(&args, Cli::command()),
        }
    }

    /// The log filter if [`LOG_VARIABLE`] sets none. A simulation causes losses on purpose, so it logs
    /// nothing.
    fn usual_log(&self) -> &'static str {
        if matches!(self, Command::Sim(_)) { "off" } else { "warn" }
    }
}

fn main() -> ExitCode {
    let parsed = command_line().try_get_matches().and_then(|found| Cli::from_arg_matches(&found));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return errors::report_usage(&error, &named_subcommands(std::env::args_os().skip(1))),
    };
    // A write beyond the limit on file sizes then fails with an error, instead of killing the process.
    ignore_file_size_signal();
    match start_log(cli.command.usual_log()).and_then(|()| cli.command.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::report(&error),
    }
}

fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal installs no handler, and no other thread runs yet.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// The command line. Options take negative numbers as their values, so that the error is that of the option:
/// the parser would otherwise take `-1` for an option.
fn command_line() -> clap::Command {
    take_negative_numbers(Cli::command())
}

fn take_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let is_option = !arg.is_positional() && arg.get_action().takes_values();
        if is_option { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(take_negative_numbers)
}

/// The subcommands on the command line, from the outermost one inwards, for errors of the parser.
fn named_subcommands(args: impl Iterator<Item = OsString>) -> Vec<String> {
    let cli = Cli::command();
    let (mut command, mut names) = (&cli, Vec::new());
    for arg in args {
        let Some(found) = command.find_subcommand(&arg) else { break };
        names.push(found.get_name().to_owned());
        command = found;
    }
    names
}

fn start_log(usual: &str) -> Result<()> {
    let wanted = std::env::var(LOG_VARIABLE).unwrap_or_default();
    let wanted = if wanted.is_empty() { usual } else { &wanted };
    let filter = EnvFilter::try_new(wanted).map_err(|error| {
        UsageError(format!(
            "{LOG_VARIABLE}={wanted} is not a log filter ({error}): try error, warn, info, debug or trace"
        ))
    })?;
    let ansi = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    // Otherwise it reports that standard error is closed or full on standard error, and panics.
    log.log_internal_errors(false).init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn negative_number_is_a_wrong_value_and_no_unknown_option() {
        let nodes = ["farpool", "up", "--nodes", "-1"];
        let memory = ["farpool", "up", "--memory", "-5"];
        for args in [nodes, memory] {
            let error = command_line().try_get_matches_from(args).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::ValueValidation, "{error}");
        }
    }

    #[test]
    fn subcommands_are_named_from_the_outermost_inwards() {
        let named = |line: &str| named_subcommands(line.split(' ').map(OsString::from)).join(" ");
        assert_eq!(named("db bank bank.far --acounts 2"), "db bank");
        assert_eq!(named("up --node 2"), "up");
        assert_eq!(named("lend"), "");
    }

    #[test]
    fn every_subcommand_ends_its_long_help_with_examples() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands_mut().filter(|command| command.get_name() != "help") {
            let help = command.render_long_help().to_string();
            assert!(help.contains("\nExamples:\n"), "{help}");
        }
    }
}
