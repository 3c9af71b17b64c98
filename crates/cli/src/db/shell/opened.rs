//! A table that the shell has opened, with the type of its rows.

use anyhow::{Context, Result, anyhow};
use farpool_namdb::dynamic::{AnyTable, RowShape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A table, and what its rows are.
pub struct Opened {
    name: String,
    table: AnyTable,
    rows: RowShape,
}

/// A row with its key, as a line of JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    key: Value,
    row: Value,
}

impl Opened {
    pub fn new(name: &str, table: AnyTable, rows: RowShape) -> Opened {
        Opened { name: name.to_owned(), table, rows }
    }

    pub fn table(&self) -> &AnyTable {
        &self.table
    }

    pub fn rows(&self) -> &RowShape {
        &self.rows
    }

    /// The row that the table has as these bytes.
    pub fn row(&self, bytes: &[u8]) -> Result<Value> {
        self.rows.decode(bytes).ok_or_else(|| {
            anyhow!("a row of table {} is not of type {}: use the command `rows`", self.name, self.rows)
        })
    }

    /// A row with its key, as a line of JSON.
    pub fn line(&self, key: &Value, bytes: &[u8]) -> Result<String> {
        let line = Line { key: key.clone(), row: self.row(bytes)? };
        serde_json::to_string(&line).context("cannot write JSON")
    }

    /// The key and the bytes of the row that a line of JSON has.
    pub fn of_line(&self, line: &str) -> Result<(Value, Vec<u8>)> {
        let Line { key, row } =
            serde_json::from_str(line).context("this is not {\"key\": …, \"row\": …} in one line")?;
        Ok((key, self.rows.encode(&row)?))
    }

    /// The names of the columns of keys and rows.
    pub fn columns(&self) -> Vec<String> {
        [self.table.keys().columns(), self.rows.columns()].concat()
    }

    /// A cell for each column.
    pub fn cells(&self, key: &Value, bytes: &[u8]) -> Result<Vec<String>> {
        let cells = (self.table.keys().to_cells(key), self.rows.to_cells(&self.row(bytes)?));
        let (Some(key), Some(row)) = cells else { unreachable!("both are of these types") };
        Ok([key, row].concat())
    }

    /// The key and the bytes of the row that these cells stand for.
    pub fn of_cells(&self, cells: &[String]) -> Result<(Value, Vec<u8>)> {
        let (key, row) =
            cells.split_at_checked(self.table.keys().columns().len()).context("cells are missing")?;
        let row = self.rows.from_cells(row)?;
        Ok((self.table.keys().from_cells(key)?, self.rows.encode(&row)?))
    }
}
