//! `farpool db verify`: whether the rows of tables, and what says where they are, agree.

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::DatabaseAt;
use crate::output::tell;

/// Check that the rows of all tables are whole, and that their keys lead to them
///
/// Reads each table in one snapshot, while others may use it: each row has to be whole, to be found by its
/// key, and to be found in the order of keys, if the table has one. It takes as long as to read the table a
/// few times. Exits with an error if something is wrong.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db verify bank.far
  farpool db verify bank.far --table accounts")]
pub struct VerifyArgs {
    #[command(flatten)]
    at: DatabaseAt,

    /// Check this table alone; may be given several times
    #[arg(long, value_name = "NAME")]
    table: Vec<String>,
}

/// Checks, and prints a line for each table.
pub fn run(args: VerifyArgs) -> Result<()> {
    let database = args.at.open()?;
    let client = database.client()?;
    let names = match args.table.is_empty() {
        true => client.tables()?.into_iter().map(|table| table.name).collect(),
        false => args.table,
    };
    let mut faults = 0;
    for name in names {
        let bar = bar(&name);
        let verified = client.verify_table(&name, |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        let verified = verified?;
        let rows = verified.rows;
        match (verified.fault, verified.is_ordered) {
            (Some(fault), _) => {
                tell(format!("{name}: WRONG: {fault}"))?;
                faults += 1;
            }
            (None, true) => tell(format!("{name}: {rows} rows, found by their keys and in order"))?,
            (None, false) => tell(format!("{name}: {rows} rows, found by their keys"))?,
        }
    }
    if faults > 0 {
        bail!(
            "the database is damaged ({faults} tables): restore it from a copy, or from where its rows came from"
        );
    }
    Ok(())
}

fn bar(table: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} places, {eta} left");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style).with_prefix(table.to_owned())
}
