//! `farpool db status`: the compute servers and tables of a database.

use anyhow::Result;
use farpool_namdb::{Client, IndexInfo};
use serde::Serialize;

use super::DatabaseAt;
use crate::output::{tell, tell_json};
use crate::size::ByteSize;

/// Show which compute servers and tables a database has
///
/// Compute servers are the processes that have opened the database. This command joins them for a moment, and
/// leaves itself out of the list.
///
/// BEATS counts the heartbeats of a server: a number that does not grow means that the server hangs or has
/// died. STATE says which one publishes the commits of all, and which ones are dead and being recovered. ROWS
/// is the number of rows that a table has room for before it grows, ROW the most bytes of a row, and PIECES
/// the number of parts in which the table lies in far memory. The indexes of a table follow it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db status bank.far
  farpool db status bank.far --json | jq '.tables[].name'")]
pub struct StatusArgs {
    #[command(flatten)]
    at: DatabaseAt,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Facts about a database. Names and meanings of the fields are stable; fields may be added.
#[derive(Serialize)]
struct Status {
    servers: Vec<Server>,
    tables: Vec<Table>,
}

#[derive(Serialize)]
struct Server {
    slot: u16,
    beats: u64,
    publishes: bool,
    is_being_recovered: bool,
}

/// Facts about a table.
#[derive(Serialize)]
pub struct Table {
    name: String,
    rows_before_growth: u64,
    row_bytes: u32,
    key_type: String,
    key_bytes: u32,
    pieces: usize,
    bytes: u64,
    is_ordered: bool,
    indexes: Vec<Index>,
}

#[derive(Serialize)]
struct Index {
    name: String,
    key_type: String,
    key_bytes: u32,
    is_unique: bool,
    is_ready: bool,
    bytes: u64,
}

impl Index {
    fn of(info: IndexInfo) -> Index {
        let IndexInfo { name, key_type, key_bytes, is_ready, is_unique, bytes } = info;
        Index { name, key_type, key_bytes, is_unique, is_ready, bytes }
    }

    /// What is special about it.
    fn notes(&self) -> &'static str {
        match (self.is_unique, self.is_ready) {
            (false, true) => "",
            (true, true) => " (unique)",
            (false, false) => " (being created)",
            (true, false) => " (unique, being created)",
        }
    }
}

/// Asks and prints.
pub fn run(args: StatusArgs) -> Result<()> {
    let database = args.at.open()?;
    let members = database.members()?.into_iter().filter(|member| !member.is_self);
    let servers = members.map(|member| Server {
        slot: member.slot,
        beats: member.beats,
        publishes: member.publishes,
        is_being_recovered: member.is_being_recovered,
    });
    let status = Status { servers: servers.collect(), tables: tables_of(&database.client()?)? };
    if args.json {
        return tell_json(&status);
    }
    tell(format!("{:<8}{:>12}  STATE", "SERVER", "BEATS"))?;
    for server in &status.servers {
        let state = match (server.is_being_recovered, server.publishes) {
            (true, _) => "dead; another server recovers it",
            (false, true) => "publishes commits",
            (false, false) => "",
        };
        tell(format!("{:<8}{:>12}  {state}", server.slot, server.beats).trim_end())?;
    }
    tell("")?;
    tell_tables(&status.tables)
}

/// The tables of a database.
pub fn tables_of(client: &Client) -> Result<Vec<Table>> {
    let tables = client.tables()?.into_iter().map(|table| Table {
        name: table.name,
        rows_before_growth: table.rows,
        row_bytes: table.row_bytes,
        key_type: table.key_type,
        key_bytes: table.key_bytes,
        pieces: table.pieces,
        bytes: table.bytes,
        is_ordered: table.is_ordered,
        indexes: table.indexes.into_iter().map(Index::of).collect(),
    });
    Ok(tables.collect())
}

/// Prints a line for each table, and for each of its indexes.
pub fn tell_tables(tables: &[Table]) -> Result<()> {
    tell(format!("{:<24}{:>12}{:>10}{:>16}{:>8}{:>12}", "TABLE", "ROWS", "ROW", "KEY", "PIECES", "MEMORY"))?;
    for table in tables {
        let Table { name, rows_before_growth, row_bytes, key_type, pieces, bytes, .. } = table;
        let memory = ByteSize(*bytes).to_string();
        tell(format!(
            "{name:<24}{rows_before_growth:>12}{:>10}{key_type:>16}{pieces:>8}{memory:>12}",
            format!("{row_bytes} B")
        ))?;
        for index in &table.indexes {
            let (what, memory) =
                (format!("  index {}{}", index.name, index.notes()), ByteSize(index.bytes).to_string());
            tell(format!("{what:<46}{:>16}{:>8}{memory:>12}", index.key_type, ""))?;
        }
    }
    Ok(())
}
