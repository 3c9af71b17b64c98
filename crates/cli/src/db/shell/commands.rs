//! The commands of the shell, as they are typed.

use std::ops::Bound;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use farpool_namdb::dynamic::KeyRange;
use serde_json::Value;

/// What `help` prints.
pub const HELP: &str = "\
Commands:
  tables                                  tables and indexes, and what they take
  count TABLE                             how many rows it has
  get TABLE KEY                           the row of a key
  scan TABLE [FIRST [END]] [limit N]      rows from one key on, up to another: at most 100, or N
  put TABLE KEY ROW                       replaces the row of a key, or inserts it
  delete TABLE KEY                        deletes the row of a key
  rows TABLE TYPE                         says of which type the rows of a table are
  import TABLE FILE                       puts the rows of a file: NAME.jsonl or NAME.csv
  export TABLE FILE                       writes all rows to a file: NAME.jsonl or NAME.csv
  help, quit

Types of rows, as a Rust program has them:
  u8 … u128, i8 … i128, bool, f32, f64    numbers and truth values
  string, bytes                           text; bytes are strings of hexadecimal digits
  [TYPE], [TYPE; N], option<TYPE>         lists, arrays, and values that may be null
  (TYPE, TYPE), {NAME: TYPE, NAME: TYPE}  tuples and structures
  enum{NAME, NAME(TYPE)}                  choices
  raw                                     any bytes, as hexadecimal digits
";

/// A command.
#[derive(PartialEq, Debug)]
pub enum Command {
    Tables,
    Count { table: String },
    Get { table: String, key: Value },
    Scan { table: String, range: KeyRange, limit: Option<usize> },
    Put { table: String, key: Value, row: Value },
    Delete { table: String, key: Value },
    Rows { table: String, rows: String },
    Import { table: String, file: PathBuf },
    Export { table: String, file: PathBuf },
    Help,
    Quit,
}

impl Command {
    /// The command of a line. `None`: the line is empty, or a comment.
    pub fn parse(line: &str) -> Result<Option<Command>> {
        let (name, rest) = word(line)?;
        if name.is_empty() || name.starts_with('#') {
            return Ok(None);
        }
        let (table, rest) = word(rest)?;
        let usage = || format!("`{name}` is used as: {}", usage_of(&name));
        let has_table = !table.is_empty();
        let command = match name.as_str() {
            "tables" if !has_table => Command::Tables,
            "help" if !has_table => Command::Help,
            "quit" | "exit" if !has_table => Command::Quit,
            "tables" | "help" | "quit" | "exit" => bail!("`{name}` takes nothing, but there is {table:?}"),
            "count" | "get" | "scan" | "put" | "delete" | "rows" | "import" | "export" => {
                Command::of_table(&name, table, rest).with_context(usage)?
            }
            _ => bail!("there is no command {name:?}: `help` lists all"),
        };
        Ok(Some(command))
    }

    fn of_table(name: &str, table: String, rest: &str) -> Result<Command> {
        ensure!(!table.is_empty(), "a table is missing");
        if let "rows" | "import" | "export" = name {
            let rest = rest.trim();
            ensure!(!rest.is_empty(), "something is missing after the table");
            return Ok(match name {
                "rows" => Command::Rows { table, rows: rest.to_owned() },
                "import" => Command::Import { table, file: rest.into() },
                _ => Command::Export { table, file: rest.into() },
            });
        }
        let Values { values, limit } = Values::parse(rest)?;
        let mut values = values.into_iter();
        let mut next = |what: &str| values.next().with_context(|| format!("{what} is missing"));
        let command = match name {
            "count" => Command::Count { table },
            "get" => Command::Get { table, key: next("a key")? },
            "put" => Command::Put { table, key: next("a key")?, row: next("a row")? },
            "delete" => Command::Delete { table, key: next("a key")? },
            _ => {
                let range = KeyRange {
                    first: values.next().map_or(Bound::Unbounded, Bound::Included),
                    end: values.next().map_or(Bound::Unbounded, Bound::Excluded),
                };
                Command::Scan { table, range, limit }
            }
        };
        ensure!(limit.is_none() || name == "scan", "only `scan` has a limit");
        ensure!(values.next().is_none(), "there are too many values");
        Ok(command)
    }
}

/// The line of the help that is about a command.
fn usage_of(name: &str) -> &'static str {
    let line = HELP.lines().find(|line| line.trim_start().split(' ').next() == Some(name));
    line.map_or("", |line| line.trim_start().split("   ").next().unwrap_or_default())
}

/// The first word, and the rest. A word with blanks is a string of JSON.
fn word(text: &str) -> Result<(String, &str)> {
    let text = text.trim_start();
    if !text.starts_with('"') {
        let (word, rest) = text.split_at(text.find(char::is_whitespace).unwrap_or(text.len()));
        return Ok((word.to_owned(), rest));
    }
    match value(text)? {
        (Value::String(word), rest) => Ok((word, rest)),
        _ => bail!("{text} does not begin with a string"),
    }
}

/// The first value, and the rest.
fn value(text: &str) -> Result<(Value, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let first = values.next().context("a value is missing")?;
    let first = first.with_context(|| format!("{} is not JSON (text needs quotation marks)", text.trim()))?;
    Ok((first, &text[values.byte_offset()..]))
}

struct Values {
    values: Vec<Value>,
    limit: Option<usize>,
}

impl Values {
    /// Values of JSON, one after the other, and perhaps `limit N`.
    fn parse(mut text: &str) -> Result<Values> {
        let mut values = Vec::new();
        loop {
            text = text.trim();
            if text.is_empty() {
                return Ok(Values { values, limit: None });
            }
            if let Some(number) = text.strip_prefix("limit") {
                let limit = number.trim().parse().with_context(|| format!("{number:?} is no limit"))?;
                return Ok(Values { values, limit: Some(limit) });
            }
            let (first, rest) = value(text)?;
            values.push(first);
            text = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn range(first: Option<Value>, end: Option<Value>) -> KeyRange {
        let (first, end) = (first.map(Bound::Included), end.map(Bound::Excluded));
        KeyRange { first: first.unwrap_or(Bound::Unbounded), end: end.unwrap_or(Bound::Unbounded) }
    }

    #[test]
    fn commands_are_understood() {
        let table = || "t".to_owned();
        let scan = |range, limit| Command::Scan { table: table(), range, limit };
        let cases = [
            ("tables", Command::Tables),
            (" exit ", Command::Quit),
            ("get t [1, \"a b\"]", Command::Get { table: table(), key: json!([1, "a b"]) }),
            ("put t 1{\"a\":2}", Command::Put { table: table(), key: json!(1), row: json!({"a": 2}) }),
            ("count \"my table\"", Command::Count { table: "my table".to_owned() }),
            ("scan t", scan(range(None, None), None)),
            ("scan t 5 limit 3", scan(range(Some(json!(5)), None), Some(3))),
            ("scan t \"a\" \"limit\"", scan(range(Some(json!("a")), Some(json!("limit"))), None)),
            (
                "rows t {a: u8, b: [u8]}",
                Command::Rows { table: table(), rows: "{a: u8, b: [u8]}".to_owned() },
            ),
            ("export t my rows.csv", Command::Export { table: table(), file: "my rows.csv".into() }),
        ];
        for (line, command) in cases {
            assert_eq!(Command::parse(line).unwrap(), Some(command), "{line}");
        }
        assert_eq!(Command::parse("").unwrap(), None);
        assert_eq!(Command::parse("# get t 1").unwrap(), None);
    }

    #[test]
    fn errors_say_how_a_command_is_used() {
        let cases = [
            ("get t", "`get` is used as: get TABLE KEY: a key is missing"),
            ("get t ada", "ada is not JSON (text needs quotation marks)"),
            ("get t 1 2", "there are too many values"),
            ("scan t limit x", "`scan` is used as: scan TABLE [FIRST [END]] [limit N]: \" x\" is no limit"),
            ("get t 1 limit 3", "only `scan` has a limit"),
            ("import t", "something is missing after the table"),
            ("delete", "a table is missing"),
            ("select 1", "there is no command \"select\": `help` lists all"),
            ("quit now", "`quit` takes nothing, but there is \"now\""),
            ("count \"t", "is not JSON"),
        ];
        for (line, wanted) in cases {
            let error = format!("{:#}", Command::parse(line).unwrap_err());
            assert!(error.contains(wanted), "{line}: {error}");
        }
    }
}
