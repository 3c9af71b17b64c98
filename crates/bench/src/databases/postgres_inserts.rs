//! Clients of PostgreSQL insert into one table at the same time: the table's file grows while other clients
//! ask for its length.

use anyhow::{Context, Result};

use super::{Ground, Job, Place};
use crate::postgres::{Server, ServerOptions};

/// The tablespace's name.
const SPACE: &str = "grown";
/// One transaction: some 120 KB of rows.
const INSERT: &str = "INSERT INTO inserted SELECT n, repeat('x', 200) FROM generate_series(1, 500) AS n;";
const ROWS_OF_INSERT: u64 = 500;
/// PostgreSQL's default number of buffers: pages stay there, and the server mostly asks for the file's
/// length.
const SETTINGS: [(&str, &str); 2] = [("shared_buffers", "128MB"), ("autovacuum", "on")];

/// How much to insert.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Clients that work at the same time.
    pub clients: u32,
    /// Number of transactions of each client.
    pub transactions: u32,
}

impl Size {
    /// Rows of the table after all transactions.
    pub fn rows(self) -> u64 {
        u64::from(self.clients) * u64::from(self.transactions) * ROWS_OF_INSERT
    }
}

/// Inserts, and returns the number of rows in the table. An error of any client is an error.
pub fn insert_at_once(ground: &Ground, place: Place, size: Size) -> Result<u64> {
    let dir = ground.dir(Place::Local, &format!("inserts-{place:?}"))?;
    let log = ground.log(&format!("inserts-{place:?}.log"));
    let options =
        ServerOptions { wrapper: ground.wrapper(), settings: &SETTINGS, ..ServerOptions::new(&dir, &log) };
    let mut server = Server::start(&options, ground.stop())?;
    server.create_tablespace(SPACE, &ground.path(place, SPACE))?;
    let mut client = server.connect()?;
    client.batch_execute(&format!(
        "CREATE TABLE inserted (n integer, filler text) TABLESPACE {SPACE}; \
         CREATE INDEX ON inserted (n) TABLESPACE {SPACE}"
    ))?;
    let (program, mut args) = server.client_program("pgbench")?;
    let (clients, transactions) = (size.clients.to_string(), size.transactions.to_string());
    let own = ["-n", "-f", "-", "-c", &clients, "-j", &clients, "-t", &transactions, "postgres"];
    args.extend(own.map(Into::into));
    let job = Job { program, args, env: Vec::new(), script: INSERT.to_owned() };
    let mut running = job.start(&[], ground.stop())?;
    running.end_input();
    running.wait(ground.stop())?.check_status().context("pgbench")?;
    let rows: i64 = client.query_one("SELECT count(*) FROM inserted", &[])?.try_get(0)?;
    drop(client);
    server.stop()?;
    Ok(rows as u64)
}
