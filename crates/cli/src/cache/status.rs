//! `farpool cache status`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::DirEntry;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use farpool_cache::{CacheClient, Contents, DoorFile, DoorStatus, entries_below, state};
use serde::Serialize;

use super::{is_attached, relations, size_of_pages};
use crate::output::{tell, tell_json};
use crate::size::ByteSize;

/// Show how the cache of a directory is used
///
/// Hits are blocks of 8 KiB that were found in the cache, misses are those that were read from the disk: by
/// all programs since the cache's door was made, which is the first use of the directory after the machine
/// started.
///
/// A line `admits` says that only a part of the blocks is admitted, because hardly any page is read again
/// before it is evicted.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache status /srv/data
  farpool cache status --relations /var/lib/postgresql/15/main")]
pub struct StatusArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// How many files to list: those with most pages in the cache. The segments of a table of PostgreSQL
    /// count as one file
    #[arg(long, value_name = "N", default_value_t = 10)]
    files: usize,

    /// Show to which relations of a PostgreSQL server the files belong: asks the server, which must be
    /// running, as PGUSER, or else as the owner of the files
    #[arg(long)]
    relations: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `status` prints. Fields are stable; new ones may be added.
#[derive(Serialize)]
struct Status {
    /// `None`: no program has used a cache of this directory since the machine started.
    door: Option<PathBuf>,
    state: &'static str,
    hits: u64,
    misses: u64,
    hit_rate: Option<f64>,
    threads: u32,
    /// How often the door's state has changed: each time it is closed, all pages are lost.
    turns: u64,
    /// `None`: it cannot be seen, since no cache is attached, or none answers.
    cache: Option<Cache>,
}

#[derive(Serialize)]
struct Cache {
    wanted_bytes: u64,
    memory_bytes: u64,
    used_bytes: u64,
    max_bytes: u64,
    index_bytes: u64,
    /// One block in so many is admitted: 1 unless hardly any read is a hit.
    admits_one_in: u64,
    files: Vec<CachedFile>,
}

#[derive(Serialize)]
struct CachedFile {
    /// Below the directory; bytes that are not UTF-8 are replaced. `None`: all files that have no name there
    /// any more, together.
    path: Option<String>,
    /// The relation, as `DATABASE.SCHEMA.RELATION`, with `--relations`.
    #[serde(skip_serializing_if = "Option::is_none")]
    relation: Option<String>,
    bytes: u64,
    pinned: bool,
}

/// What a user may do about a state.
pub(crate) fn explain(state: &str, outsiders: u64) -> &'static str {
    match state {
        "closed" if outsiders > 0 => {
            ": a program changes a file without a place in the cache. If it was killed, stop all programs that use \
             the files, and remove the door"
        }
        "closed" => {
            ": a program changes files in a way that the cache cannot follow, or is stopped within a call"
        }
        "abandoned" => ": `farpool cache attach` was killed; start it again",
        "silent" => {
            ": `farpool cache attach` does not answer; if it was stopped, continue it by SIGCONT. Pages are found until \
             its leases end"
        }
        "detached" => ": no cache is attached",
        _ => "",
    }
}

/// Prints the status.
pub fn status(args: &StatusArgs) -> Result<()> {
    let door = DoorFile::find(&args.dir)?.map(Arc::new);
    let is_attached = door.as_deref().map_or(Ok(false), is_attached)?;
    let look = || door.as_ref().map(|door| door.status()).unwrap_or_default();
    let before = look();
    let mut cache = door.as_ref().filter(|_| is_attached).and_then(|door| cache_behind(door, args.files));
    let DoorStatus { door: found, turns, hits, misses, places, outsiders } = look();
    let state = state(found, is_attached, cache.is_some() || turns != before.turns);
    let files = cache.as_mut().map(|cache| &mut cache.files).filter(|files| !files.is_empty());
    let named = files.filter(|_| args.relations).map_or(Ok(()), |files| add_relations(&args.dir, files));
    let reads = hits.saturating_add(misses);
    let hit_rate = (reads > 0).then(|| hits as f64 / reads as f64);
    let path = door.as_ref().map(|door| door.path().to_owned());
    let status = Status { door: path, state, hits, misses, hit_rate, threads: places, turns, cache };
    if args.json { tell_json(&status) } else { tell(lines(&status, outsiders).join("\n")) }?;
    named.context("no names of relations")
}

fn lines(status: &Status, outsiders: u64) -> Vec<String> {
    let mut lines: Vec<_> = status.door.iter().map(|door| format!("door      {}", door.display())).collect();
    lines.extend([
        format!("state     {}{}", status.state, explain(status.state, outsiders)),
        format!("hits      {}", status.hits),
        format!("misses    {}", status.misses),
    ]);
    lines.extend(status.hit_rate.map(|rate| format!("hit rate  {:.1} %", 100.0 * rate)));
    lines.push(format!("threads   {}", status.threads));
    let Some(cache) = &status.cache else { return lines };
    let [wanted, memory, used, index] =
        [cache.wanted_bytes, cache.memory_bytes, cache.used_bytes, cache.index_bytes].map(ByteSize);
    let shortfall = if memory < wanted { format!(", {wanted} wanted") } else { String::new() };
    lines.push(format!("memory    {memory}{shortfall}; pages take {used}"));
    lines.push(format!("index     {index} of shared memory"));
    if cache.admits_one_in > 1 {
        lines.push(format!(
            "admits    one block in {}: hardly any page is read again before it is evicted. `farpool cache advise` says \
             which size would help",
            cache.admits_one_in
        ));
    }
    lines.extend(cache.files.iter().map(shown));
    lines
}

fn shown(file: &CachedFile) -> String {
    let name = file.path.as_ref().map_or("(removed)".into(), |path| path.escape_debug().to_string());
    let relation = file.relation.iter().map(|relation| format!("  {}", relation.escape_debug()));
    let name = std::iter::once(name).chain(relation).collect::<String>();
    let pinned = if file.pinned { "  pinned" } else { "" };
    format!("{:>12}  {name}{pinned}", ByteSize(file.bytes).to_string())
}

/// Adds the names of relations to files of a PostgreSQL server.
fn add_relations(data: &Path, files: &mut [CachedFile]) -> Result<()> {
    let paths = files.iter().filter_map(|file| file.path.as_deref().map(PathBuf::from)).collect();
    let mut names = relations::names_in_time(data, paths)?;
    for file in files {
        file.relation = file.path.as_ref().and_then(|path| names.remove(Path::new(path)));
    }
    Ok(())
}

fn cache_behind(door: &Arc<DoorFile>, most_files: usize) -> Option<Cache> {
    let wanted = door.wanted_slots();
    let (data, is_postgres) = (door.data().to_owned(), door.is_postgres());
    let contents = CacheClient::new(door.clone()).contents()?;
    Some(Cache {
        wanted_bytes: size_of_pages(wanted).0,
        memory_bytes: size_of_pages(contents.slots - contents.absent).0,
        used_bytes: size_of_pages(contents.pages()).0,
        max_bytes: size_of_pages(contents.slots).0,
        index_bytes: contents.index_bytes,
        admits_one_in: contents.admits_one_in,
        files: files(&data, is_postgres, &contents, most_files),
    })
}

/// The files with most pages. The segments of a table are one of them, pinned if one of them is.
fn files(data: &Path, is_postgres: bool, contents: &Contents, most: usize) -> Vec<CachedFile> {
    let mut named = paths_below(data);
    let mut files: BTreeMap<Option<PathBuf>, CachedFile> = BTreeMap::new();
    for found in &contents.files {
        let path = named.remove(&(found.id.device, found.id.inode));
        let path = path.map(|path| if is_postgres { without_segment(path) } else { path });
        let name = path.as_ref().map(|path| path.to_string_lossy().into_owned());
        let file =
            files.entry(path).or_insert(CachedFile { path: name, relation: None, bytes: 0, pinned: false });
        file.bytes += size_of_pages(found.pages).0;
        file.pinned |= found.is_pinned;
    }
    let mut files: Vec<CachedFile> = files.into_values().collect();
    // Files of one size stay in the order of their paths.
    files.sort_by_key(|file| Reverse(file.bytes));
    files.truncate(most);
    files
}

/// PostgreSQL divides a table into files of 1 GiB: `16384`, `16384.1`, and so on.
fn without_segment(path: PathBuf) -> PathBuf {
    match path.extension() {
        Some(segment) if segment.as_encoded_bytes().iter().all(u8::is_ascii_digit) => path.with_extension(""),
        _ => path,
    }
}

/// All files below a directory: device and inode, and the path from there. What cannot be read is left out.
pub(super) fn paths_below(data: &Path) -> HashMap<(u64, u64), PathBuf> {
    let below = |entry: DirEntry| {
        let metadata = entry.metadata().ok().filter(|found| !found.is_dir())?;
        let path = entry.path();
        Some(((metadata.dev(), metadata.ino()), path.strip_prefix(data).unwrap_or(&path).to_owned()))
    };
    entries_below(data).filter_map(below).collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use farpool_cache::{FileId, FilePages};

    use super::*;

    #[test]
    fn a_cache_that_admits_a_part_of_the_blocks_says_so() {
        let shown = |admits_one_in| {
            let (wanted_bytes, memory_bytes, used_bytes, max_bytes, index_bytes) = Default::default();
            let files = Vec::new();
            let cache = Cache {
                wanted_bytes,
                memory_bytes,
                used_bytes,
                max_bytes,
                index_bytes,
                admits_one_in,
                files,
            };
            let (door, hit_rate, cache) = (None, None, Some(cache));
            let status =
                Status { door, state: "open", hits: 0, misses: 0, hit_rate, threads: 1, turns: 0, cache };
            lines(&status, 0).join("\n")
        };
        assert!(shown(16).contains("admits    one block in 16") && !shown(1).contains("admits"));
    }

    #[test]
    fn a_name_of_any_bytes_is_shown_on_one_line_and_is_json() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(OsStr::from_bytes(b"a\n\xff"));
        std::fs::write(&file, "").unwrap();
        let found = file.metadata().unwrap();
        let id = FileId { device: found.dev(), inode: found.ino(), generation: 0 };
        let pages = vec![FilePages { id, pages: 1, is_pinned: false }];
        let files = files(dir.path(), false, &Contents { files: pages, ..Contents::default() }, 1);
        assert_eq!(serde_json::to_value(&files).unwrap()[0]["path"], "a\n\u{fffd}");
        assert_eq!(shown(&files[0]), "       8 KiB  a\\n\u{fffd}");
    }

    #[test]
    fn segments_of_a_table_are_one_file() {
        for (path, whole) in [("base/5/16384.12", "base/5/16384"), ("base/5/16384_vm", "base/5/16384_vm")] {
            assert_eq!(without_segment(path.into()), Path::new(whole));
        }
    }
}
