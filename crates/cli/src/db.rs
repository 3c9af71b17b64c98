//! `farpool db`: databases in far memory.

mod bank;
mod judge;
mod shell;
mod status;
mod up;
mod verify;
mod work;

use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Subcommand;
use farpool_fabric::{TransportChoice, Transports, raise_limit};
use farpool_namdb::{Credentials, Database, Reach};

use crate::rdma::{card_transport, check_choice};
use crate::reach::BrokerAt;

/// Create databases in far memory, inspect them, and test them
///
/// A database is stored in the memory of the pool's nodes. A process that has opened it is one of its compute
/// servers: it runs transactions with snapshot isolation by reading and writing far memory directly. The
/// compute servers recover each other after a crash. The database is lost ten seconds after its last compute
/// server exits.
#[derive(Debug, clap::Args)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    after_long_help = "\
Examples:
  farpool db up bank.far                      creates a database, or joins it, until Ctrl-C
  farpool db status bank.far                  its compute servers and tables
  farpool db shell bank.far                   looks at rows, and changes them by hand
  farpool db verify bank.far                  whether keys lead to all rows
  farpool db bank bank.far --seconds 10       moves money between accounts, and checks the sum
  farpool db work bank.far --history a.jsonl  random transactions that record what they saw
  farpool db judge a.jsonl b.jsonl            whether the records show snapshot isolation"
)]
pub struct DbArgs {
    #[command(subcommand)]
    command: DbCommand,
}

#[derive(Debug, Subcommand)]
enum DbCommand {
    Up(up::UpArgs),
    Status(status::StatusArgs),
    Shell(shell::ShellArgs),
    Verify(verify::VerifyArgs),
    Bank(bank::BankArgs),
    Work(work::WorkArgs),
    Judge(judge::JudgeArgs),
}

/// Runs a subcommand.
pub fn run(args: DbArgs) -> Result<()> {
    match args.command {
        DbCommand::Up(args) => up::run(args),
        DbCommand::Status(args) => status::run(args),
        DbCommand::Shell(args) => shell::run(args),
        DbCommand::Verify(args) => verify::run(args),
        DbCommand::Bank(args) => bank::run(args),
        DbCommand::Work(args) => work::run(args),
        DbCommand::Judge(args) => judge::run(args),
    }
}

/// Which database, and how to reach it.
#[derive(Debug, clap::Args)]
struct DatabaseAt {
    /// The database's file, written by `farpool db up`
    #[arg(value_name = "FILE")]
    file: PathBuf,

    #[command(flatten)]
    broker: BrokerAt,

    /// How nodes are reached: shm (same host), verbs (RDMA), tcp, or auto for the best of them
    #[arg(long, default_value = "auto", env = "FARPOOL_TRANSPORT", hide_env_values = true)]
    transport: TransportChoice,
}

/// How transactions begin.
#[derive(Debug, clap::Args)]
struct Beginning {
    /// Fetch published snapshots on a thread of its own, all the time, so that transactions begin without
    /// reading far memory
    #[arg(long)]
    fetch_thread: bool,
}

impl DatabaseAt {
    fn transports(&self) -> Transports {
        Transports { choice: self.transport, card: Some(card_transport) }
    }

    /// What the system says of these files does not name the fix.
    fn check_file(&self) -> Result<()> {
        let file = self.file.display();
        match self.file.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("there is no file {file}: create the database with `farpool db up {file}`")
            }
            Ok(found) if found.is_dir() => {
                bail!("{file} is a directory: name a file for the database, such as bank.far")
            }
            _ => Ok(()),
        }
    }

    fn open(&self) -> Result<Database> {
        self.open_to_begin(&Beginning { fetch_thread: false })
    }

    fn open_to_begin(&self, beginning: &Beginning) -> Result<Database> {
        self.check_file()?;
        raise_limit();
        check_choice(self.transport)?;
        let tls = self.broker.find()?.and_then(|broker| broker.tls);
        let credentials = tls.map_or(Credentials::PlainText, Credentials::Tls);
        let reach = Reach { transport: self.transports(), credentials, fetch_thread: beginning.fetch_thread };
        Ok(Database::open(&self.file, &reach)?)
    }
}
