//! Rows in files: as lines of JSON, or as comma-separated values.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use farpool_namdb::dynamic::KeyRange;
use farpool_namdb::{Client, TxError};
use futures_util::future::try_join_all;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::counter;
use super::opened::Opened;
use crate::output::tell;

/// Rows that one transaction puts.
const AT_ONCE: usize = 100;

#[derive(Clone, Copy)]
enum Format {
    JsonLines,
    Csv,
}

impl Format {
    fn of(file: &Path) -> Result<Format> {
        match file.extension().and_then(OsStr::to_str) {
            Some("jsonl") => Ok(Format::JsonLines),
            Some("csv") => Ok(Format::Csv),
            _ => bail!(
                "{}: name it NAME.jsonl (lines of JSON) or NAME.csv (comma-separated values)",
                file.display()
            ),
        }
    }
}

/// A key and the bytes of its row.
type Pair = (Value, Vec<u8>);

/// Puts all rows of a file, some of them at a time. After an error, those before it are in the table.
pub fn import(client: &Client, opened: &Opened, path: &Path) -> Result<()> {
    let (format, name) = (Format::of(path)?, path.display());
    let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
    let style = ProgressStyle::with_template("[{bar:40}] {bytes}/{total_bytes}, {eta} left");
    let bar = ProgressBar::new(file.metadata().map_or(0, |data| data.len()))
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let rows = match format {
        Format::JsonLines => lines(opened, bar.wrap_read(file)),
        Format::Csv => records(opened, bar.wrap_read(file)).with_context(|| name.to_string())?,
    };
    let (mut rows, mut count) = (rows.fuse(), 0);
    let imported = loop {
        let (mut some, mut failed) = (Vec::with_capacity(AT_ONCE), None);
        for row in rows.by_ref().take(AT_ONCE) {
            match row {
                Ok(pair) => some.push(pair),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Err(error) = put(client, opened, &some) {
            break Err(error.into());
        }
        count += some.len();
        match failed {
            Some(error) => break Err(error),
            None if some.len() < AT_ONCE => break Ok(()),
            None => {}
        }
    };
    bar.finish_and_clear();
    imported.with_context(|| format!("{name}: {count} rows were imported, and then"))?;
    tell(format!("{count} rows"))
}

fn put(client: &Client, opened: &Opened, rows: &[Pair]) -> Result<(), TxError> {
    client.transact(async |tx| {
        let puts = rows.iter().map(|(key, row)| tx.put_any(opened.table(), key, row.clone()));
        try_join_all(puts).await.map(drop)
    })
}

type Pairs<'a> = Box<dyn Iterator<Item = Result<Pair>> + 'a>;

fn lines<'a>(opened: &'a Opened, file: impl Read + 'a) -> Pairs<'a> {
    let lines = BufReader::new(file).lines().zip(1_u64..);
    let lines = lines.filter(|(line, _)| !line.as_ref().is_ok_and(|line| line.trim().is_empty()));
    Box::new(lines.map(|(line, number)| {
        let pair = line.map_err(Into::into).and_then(|line| opened.of_line(&line));
        pair.with_context(|| format!("line {number}"))
    }))
}

fn records<'a>(opened: &'a Opened, file: impl Read + 'a) -> Result<Pairs<'a>> {
    let mut reader = csv::Reader::from_reader(file);
    let (columns, found) = (opened.columns(), reader.headers()?.clone());
    let place = |column: &String| {
        let place = found.iter().position(|name| name == column);
        place.with_context(|| format!("there is no column {column}: the columns are {}", columns.join(",")))
    };
    let places: Vec<usize> = columns.iter().map(place).collect::<Result<_>>()?;
    ensure!(places.len() == found.len(), "there are other columns than {}", columns.join(","));
    Ok(Box::new(reader.into_records().map(move |record| {
        let record = record?;
        let cells: Vec<String> = places.iter().map(|&place| record[place].to_owned()).collect();
        let line = record.position().map_or(0, csv::Position::line);
        opened.of_cells(&cells).with_context(|| format!("line {line}"))
    })))
}

/// The file that an export writes before it is complete.
fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Writes all rows that a snapshot has to a file, which replaces one of the same name once it is complete.
pub fn export(client: &Client, opened: &Opened, path: &Path) -> Result<()> {
    let format = Format::of(path)?;
    let part = part_of(path);
    let bar = counter();
    // If the transaction is run again, the file begins again.
    let written = client.transact(async |tx| {
        let mut to = RowWriter::create(format, opened, &part).map_err(TxError::roll_back)?;
        let (mut count, mut next) = (0_u64, Some(opened.table().scan(&KeyRange::all())?));
        while let Some(scan) = next {
            let some = tx.scan_any(opened.table(), scan).await?;
            for (key, row) in &some.rows {
                to.write(opened, key, row).map_err(TxError::roll_back)?;
            }
            count += some.rows.len() as u64;
            bar.set_position(count);
            next = some.next;
        }
        to.finish().map_err(TxError::roll_back)?;
        Ok(count)
    });
    bar.finish_and_clear();
    let renamed = match written {
        Ok(count) => fs::rename(&part, path).map(|()| count).map_err(anyhow::Error::from),
        Err(error) => Err(error.into()),
    };
    if renamed.is_err() {
        let _ = fs::remove_file(&part); // perhaps it was never made
    }
    tell(format!("{} rows", renamed.with_context(|| format!("cannot export to {}", path.display()))?))
}

/// A file that is written row by row.
enum RowWriter {
    JsonLines(BufWriter<File>),
    Csv(Box<csv::Writer<File>>),
}

impl RowWriter {
    fn create(format: Format, opened: &Opened, path: &Path) -> Result<RowWriter> {
        let file = File::create(path)?;
        Ok(match format {
            Format::JsonLines => RowWriter::JsonLines(BufWriter::new(file)),
            Format::Csv => {
                let mut to = csv::Writer::from_writer(file);
                to.write_record(opened.columns())?;
                RowWriter::Csv(Box::new(to))
            }
        })
    }

    fn write(&mut self, opened: &Opened, key: &Value, row: &[u8]) -> Result<()> {
        match self {
            RowWriter::JsonLines(to) => writeln!(to, "{}", opened.line(key, row)?)?,
            RowWriter::Csv(to) => to.write_record(opened.cells(key, row)?)?,
        }
        Ok(())
    }

    /// Writes what is left, and to the disk.
    fn finish(self) -> Result<()> {
        let file = match self {
            RowWriter::JsonLines(to) => to.into_inner().map_err(|error| error.into_error())?,
            RowWriter::Csv(to) => to.into_inner().map_err(|error| error.into_error())?,
        };
        Ok(file.sync_all()?)
    }
}
