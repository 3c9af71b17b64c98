//! `farpool cache top`: how a cache is used, line by line.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use farpool_cache::{CacheClient, DoorFile, DoorStatus, state};

use super::{is_attached, size_of_pages};
use crate::output::tell_next;
use crate::size::ByteSize;

/// Lines between two headings.
const HEADING_EVERY: u64 = 20;
const HEADING: &str = "    hits/s   misses/s  hit rate      memory  threads  state";

/// Show how the cache of a directory is used, with a line each second
///
/// Each line has the hits and misses since the line before, and the memory of the cache. Ends with Ctrl-C, or
/// after --count lines.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache top /srv/data
  farpool cache top /srv/data --interval 10 --count 6    one minute")]
pub struct TopArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Seconds between two lines
    #[arg(long, value_name = "SECONDS", default_value = "1")]
    interval: NonZeroU64,

    /// How many lines to print; without end unless told otherwise
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

/// Prints the lines.
pub fn top(args: &TopArgs) -> Result<()> {
    let mut cache = Shown::find(&args.dir)?;
    let mut before = (Instant::now(), cache.door.status());
    for line in 0..args.count.unwrap_or(u64::MAX) {
        std::thread::sleep(Duration::from_secs(args.interval.get()));
        if !cache.door.is_there() {
            cache = Shown::find(&args.dir)?; // counts begin anew
            before.1 = DoorStatus::default();
        }
        let size = cache.client.slots();
        let now = (Instant::now(), cache.door.status());
        let answers = size.is_some() || now.1.turns != before.1.turns;
        let state = state(now.1.door, is_attached(&cache.door)?, answers);
        let memory = size.map(|(slots, _)| size_of_pages(slots));
        let shown = shown(&before.1, &now.1, now.0 - before.0, memory, state);
        let heading = if line.is_multiple_of(HEADING_EVERY) { format!("{HEADING}\n") } else { String::new() };
        if !tell_next(heading + &shown)? {
            break; // nobody reads on
        }
        before = now;
    }
    Ok(())
}

/// The door of the cache that is shown.
struct Shown {
    door: Arc<DoorFile>,
    client: Arc<CacheClient>,
}

impl Shown {
    fn find(dir: &Path) -> Result<Shown> {
        let Some(door) = DoorFile::find(dir)?.map(Arc::new) else {
            bail!("no program has used a cache of {}: start `farpool cache attach`", dir.display());
        };
        Ok(Shown { client: CacheClient::new(door.clone()), door })
    }
}

/// A line, from what was counted before and now.
fn shown(
    before: &DoorStatus,
    now: &DoorStatus,
    elapsed: Duration,
    memory: Option<ByteSize>,
    state: &str,
) -> String {
    let (hits, misses) = (now.hits.wrapping_sub(before.hits), now.misses.wrapping_sub(before.misses));
    let per_second = |count: u64| count as f64 / elapsed.as_secs_f64();
    let rate = match hits.saturating_add(misses) {
        0 => "-".to_owned(),
        reads => format!("{:.1} %", 100.0 * hits as f64 / reads as f64),
    };
    let memory = memory.map_or("-".to_owned(), |size| size.to_string());
    format!(
        "{:>10.0} {:>10.0} {rate:>9} {memory:>11} {:>8}  {state}",
        per_second(hits),
        per_second(misses),
        now.places
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_what_happened_since_the_line_before() {
        let before = DoorStatus { hits: 1_000, misses: 50, ..DoorStatus::default() };
        let now = DoorStatus { hits: 7_000, misses: 2_050, places: 12, ..before };
        let line = |now| shown(&before, now, Duration::from_secs(2), Some(ByteSize(1 << 30)), "open");
        assert_eq!(line(&now), "      3000       1000    75.0 %       1 GiB       12  open");
        assert_eq!(line(&before), "         0          0         -       1 GiB        0  open");
        assert_eq!(HEADING.len() - "state".len(), line(&now).len() - "open".len());
    }
}
