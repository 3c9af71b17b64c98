//! `farpool db shell`: looks into a database, and changes rows by hand.

mod commands;
mod files;
mod opened;

use std::collections::HashMap;
use std::io::{BufRead, IsTerminal};

use anyhow::{Context, Result, anyhow};
use farpool_namdb::Client;
use farpool_namdb::dynamic::{KeyRange, RowShape};
use indicatif::{ProgressBar, ProgressStyle};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::Value;

use self::commands::{Command, HELP};
use self::opened::Opened;
use super::DatabaseAt;
use super::status::{tables_of, tell_tables};
use crate::output::{complain, say, tell, tell_next};

/// Rows that `scan` prints, unless it is told another number.
const MOST_ROWS: usize = 100;
const PROMPT: &str = "farpool> ";

/// Look into a database, and change rows by hand
///
/// Runs commands: those of --command, or else those that it reads from the terminal or from standard input.
/// Each is a transaction of its own. Keys and rows are JSON. `tables` shows which type the keys of a table
/// have. The type of its rows is not stored in the database: give it with --rows or with the command `rows`.
/// Until then, rows are strings of hexadecimal digits.
///
/// If the commands do not come from a terminal, the first one that fails ends the shell with an error.
#[derive(Debug, clap::Args)]
#[command(after_long_help = format!("{HELP}\n{EXAMPLES}"))]
pub struct ShellArgs {
    #[command(flatten)]
    at: DatabaseAt,

    /// Run this command instead of reading commands; may be given several times
    #[arg(long, short, value_name = "COMMAND")]
    command: Vec<String>,

    /// The type of a table's rows, as for the command `rows`; may be given several times
    #[arg(long, value_name = "TABLE=TYPE")]
    rows: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  farpool db shell bank.far
  farpool db shell bank.far -c tables -c 'count accounts'
  farpool db shell bank.far --rows 'accounts={cents: i64}' -c 'scan accounts limit 5'
  farpool db shell bank.far --rows 'accounts={cents: i64}' -c 'export accounts accounts.csv'";

/// Runs all commands.
pub fn run(args: ShellArgs) -> Result<()> {
    let mut types = HashMap::new();
    for given in &args.rows {
        let (table, rows) = given.split_once('=').ok_or_else(|| {
            anyhow!("--rows {given}: give a table and a type, such as --rows 'accounts={{cents: i64}}'")
        })?;
        types.insert(table.to_owned(), RowShape::parse(rows)?);
    }
    let database = args.at.open()?;
    let mut shell = Shell { client: database.client()?, types };
    if !args.command.is_empty() {
        return args.command.iter().try_for_each(|line| shell.run_line(line).map(drop));
    }
    match std::io::stdin().is_terminal() {
        true => shell.run_terminal(),
        false => shell.run_script(std::io::stdin().lock()),
    }
}

/// Whether the shell goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    GoOn,
    End,
}

struct Shell {
    client: Client,
    /// The types of the rows of tables, by the names of these.
    types: HashMap<String, RowShape>,
}

impl Shell {
    fn run_terminal(&mut self) -> Result<()> {
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        say("`help` lists the commands, and `quit` ends the shell.");
        loop {
            let line = match editor.readline(PROMPT) {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error).context("cannot read from the terminal"),
            };
            let _ = editor.add_history_entry(&line);
            match self.run_line(&line) {
                Ok(Then::End) => return Ok(()),
                Ok(Then::GoOn) => {}
                Err(error) => complain(format!("{error:#}")),
            }
        }
    }

    fn run_script(&mut self, script: impl BufRead) -> Result<()> {
        for (line, number) in script.lines().zip(1..) {
            let line = line.context("cannot read standard input")?;
            if self.run_line(&line).with_context(|| format!("line {number}"))? == Then::End {
                break;
            }
        }
        Ok(())
    }

    fn run_line(&mut self, line: &str) -> Result<Then> {
        match Command::parse(line)? {
            None => {}
            Some(Command::Quit) => return Ok(Then::End),
            Some(command) => self.run_command(command)?,
        }
        Ok(Then::GoOn)
    }

    fn run_command(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Tables => tell_tables(&tables_of(&self.client)?),
            Command::Count { table } => self.count(&table),
            Command::Get { table, key } => self.get(&table, &key),
            Command::Scan { table, range, limit } => self.scan(&table, &range, limit.unwrap_or(MOST_ROWS)),
            Command::Put { table, key, row } => self.put(&table, &key, &row),
            Command::Delete { table, key } => {
                let opened = self.open(&table)?;
                Ok(self.client.transact(async |tx| tx.delete_any(opened.table(), &key).await)?)
            }
            Command::Rows { table, rows } => {
                self.types.insert(table, RowShape::parse(&rows)?);
                Ok(())
            }
            Command::Import { table, file } => files::import(&self.client, &self.open(&table)?, &file),
            Command::Export { table, file } => files::export(&self.client, &self.open(&table)?, &file),
            Command::Help => tell(HELP),
            Command::Quit => Ok(()),
        }
    }

    fn open(&self, table: &str) -> Result<Opened> {
        let rows = self.types.get(table).cloned().unwrap_or(RowShape::raw());
        Ok(Opened::new(table, self.client.open_any(table)?, rows))
    }

    fn count(&self, table: &str) -> Result<()> {
        let (opened, bar) = (self.open(table)?, counter());
        let count = self.client.transact(async |tx| {
            let (mut count, mut next) = (0, Some(opened.table().scan(&KeyRange::all())?));
            while let Some(scan) = next {
                let some = tx.scan_any(opened.table(), scan).await?;
                count += some.rows.len() as u64;
                bar.set_position(count);
                next = some.next;
            }
            Ok(count)
        });
        bar.finish_and_clear();
        tell(format!("{}", count?))
    }

    fn get(&self, table: &str, key: &Value) -> Result<()> {
        let opened = self.open(table)?;
        let row = self.client.transact(async |tx| tx.get_any(opened.table(), key).await)?;
        let row = row.ok_or_else(|| anyhow!("table {table} has no row with the key {key}"))?;
        tell(opened.row(&row)?.to_string())
    }

    fn put(&self, table: &str, key: &Value, row: &Value) -> Result<()> {
        let opened = self.open(table)?;
        let row = opened.rows().encode(row)?;
        Ok(self.client.transact(async |tx| tx.put_any(opened.table(), key, row.clone()).await)?)
    }

    fn scan(&self, table: &str, range: &KeyRange, limit: usize) -> Result<()> {
        let opened = self.open(table)?;
        let rows = self.client.transact(async |tx| {
            let (mut rows, mut next) = (Vec::new(), Some(opened.table().scan(range)?));
            while let Some(scan) = next.filter(|_| rows.len() <= limit) {
                let some = tx.scan_any(opened.table(), scan).await?;
                rows.extend(some.rows);
                next = some.next;
            }
            Ok(rows)
        })?;
        for (key, row) in rows.iter().take(limit) {
            if !tell_next(opened.line(key, row)?)? {
                return Ok(());
            }
        }
        match rows.get(limit) {
            Some((key, _)) if opened.table().is_ordered() => {
                complain(format!("more rows follow: the next one has the key {key}"));
            }
            Some(_) => complain("there are more rows: `export` writes all of them to a file"),
            None => {}
        }
        Ok(())
    }
}

/// Shows how many rows were read.
fn counter() -> ProgressBar {
    let style = ProgressStyle::with_template("{human_pos} rows, {per_sec}");
    ProgressBar::no_length().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
}
