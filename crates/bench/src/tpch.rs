//! TPC-H's `orders` and `lineitem`: their definition, the generation of rows, and the loading into the
//! database.
//!
//! The `tpchgen` crate generates the same bytes as the official generator. Rows stream straight into `COPY`,
//! without a file in between. Table and rows are created in one transaction, so that PostgreSQL (with
//! `wal_level=minimal`) logs nothing, and rows are frozen, so that no later scan rewrites pages.

use std::fmt::Display;
use std::io::Write;

use anyhow::{Context, Result, bail};
use postgres::{Client, Transaction};
use tpchgen::generators::{LineItemGenerator, OrderGenerator};

use crate::stop::StopFlag;

/// Rows are buffered up to this size before they are sent to the server as one message.
const CHUNK_BYTES: usize = 1 << 20;
/// An order has one to seven line items (TPC-H, clause 4.2.3), four on average.
const LINES_PER_ORDER: u64 = 4;

const ORDERS: &str = "CREATE TABLE orders (
    o_orderkey bigint NOT NULL, o_custkey bigint NOT NULL, o_orderstatus char(1) NOT NULL,
    o_totalprice numeric(15,2) NOT NULL, o_orderdate date NOT NULL, o_orderpriority char(15) NOT NULL,
    o_clerk char(15) NOT NULL, o_shippriority integer NOT NULL, o_comment varchar(79) NOT NULL)";

const LINEITEM: &str = "CREATE TABLE lineitem (
    l_orderkey bigint NOT NULL, l_partkey bigint NOT NULL, l_suppkey bigint NOT NULL,
    l_linenumber integer NOT NULL, l_quantity numeric(15,2) NOT NULL, l_extendedprice numeric(15,2) NOT NULL,
    l_discount numeric(15,2) NOT NULL, l_tax numeric(15,2) NOT NULL, l_returnflag char(1) NOT NULL,
    l_linestatus char(1) NOT NULL, l_shipdate date NOT NULL, l_commitdate date NOT NULL,
    l_receiptdate date NOT NULL, l_shipinstruct char(25) NOT NULL, l_shipmode char(10) NOT NULL,
    l_comment varchar(44) NOT NULL)";

/// How many rows were loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Rows of `orders`.
    pub orders: u64,
    /// Rows of `lineitem`.
    pub lineitem: u64,
}

/// Creates and fills both tables at `scale` (1.0: 1.2 GiB). `progress` gets the number of rows done and,
/// roughly, of all rows.
pub fn load(
    client: &mut Client,
    scale: f64,
    stop: &StopFlag,
    mut progress: impl FnMut(u64, u64),
) -> Result<Loaded> {
    let orders = u64::try_from(OrderGenerator::calculate_row_count(scale, 1, 1)).unwrap_or(0);
    let all = orders * (1 + LINES_PER_ORDER);
    let mut fill = Fill { stop, all, before: 0, progress: &mut progress };
    let mut transaction = client.transaction()?;
    let orders = fill.table(&mut transaction, "orders", ORDERS, OrderGenerator::new(scale, 1, 1).iter())?;
    fill.before = orders;
    let lines = LineItemGenerator::new(scale, 1, 1).iter();
    let lineitem = fill.table(&mut transaction, "lineitem", LINEITEM, lines)?;
    transaction.commit()?;
    client.batch_execute("ANALYZE orders; ANALYZE lineitem")?;
    Ok(Loaded { orders, lineitem })
}

struct Fill<'a> {
    stop: &'a StopFlag,
    all: u64,
    before: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Fill<'_> {
    fn table(
        &mut self,
        transaction: &mut Transaction<'_>,
        name: &str,
        definition: &str,
        rows: impl Iterator<Item = impl Display>,
    ) -> Result<u64> {
        transaction.batch_execute(definition)?;
        let copy = format!("COPY {name} FROM STDIN (DELIMITER '|', FREEZE)");
        let mut writer = transaction.copy_in(&copy).with_context(|| format!("cannot load {name}"))?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES + CHUNK_BYTES / 8);
        let mut sent = 0;
        for row in rows {
            append(&mut chunk, &row)?;
            sent += 1;
            if chunk.len() >= CHUNK_BYTES {
                self.stop.check()?;
                writer.write_all(&chunk)?;
                chunk.clear();
                (self.progress)(self.before + sent, self.all);
            }
        }
        writer.write_all(&chunk)?;
        let loaded = writer.finish().with_context(|| format!("cannot load {name}"))?;
        if loaded != sent {
            bail!("{name}: {sent} rows were generated and {loaded} loaded");
        }
        Ok(loaded)
    }
}

/// Appends a row as a line. The generator ends each field with `|`; `COPY` expects it only between fields.
fn append(chunk: &mut Vec<u8>, row: &impl Display) -> Result<()> {
    write!(chunk, "{row}")?;
    if chunk.last() == Some(&b'|') {
        chunk.pop();
    }
    chunk.push(b'\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_delimiter_of_a_generated_row_is_dropped() {
        let mut chunk = Vec::new();
        append(&mut chunk, &"1|two|").unwrap();
        append(&mut chunk, &"3|four").unwrap();
        assert_eq!(chunk, b"1|two\n3|four\n");
    }

    #[test]
    fn generated_rows_have_the_columns_of_their_tables_and_nothing_that_copy_would_read_as_an_escape() {
        let orders = OrderGenerator::new(0.001, 1, 1).iter().map(|row| row.to_string());
        let lines = LineItemGenerator::new(0.001, 1, 1).iter().map(|row| row.to_string());
        for (definition, row) in orders.map(|row| (ORDERS, row)).chain(lines.map(|row| (LINEITEM, row))) {
            assert_eq!(row.matches('|').count(), definition.matches("NOT NULL").count(), "{row}");
            assert!(!row.contains('\\'), "{row}");
        }
    }
}
