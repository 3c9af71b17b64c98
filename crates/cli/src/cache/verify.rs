//! `farpool cache verify`: are pages in the cache as on the disk?

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farpool_cache::{
    CacheClient, CacheSession, DoorFile, PAGE_BYTES, collect_into, is_visibility_map, position_of_page,
};

use super::{attached_door, bytes_of_page, open_regular, session, status::paths_below};
use crate::output::{complain, say};

/// How often a page is compared that differs: while a program writes it, disk and cache may be read before
/// and after a write. The pauses between add up to more than a second.
const TRIES: u32 = 16;
/// The pause after the first try; each later one is longer by as much.
const PAUSE: Duration = Duration::from_millis(10);

/// Compare pages in the cache with the disk, while programs use them
///
/// Reads some pages of cached files from the cache, and from the disk. A page that differs is compared again
/// for a second, since a program may be writing it. Fails if a page still differs, and names it. The pages
/// that are compared count as hits, and as used lately.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache verify /srv/data                 one page in a thousand
  farpool cache verify /srv/data --sample 1/1    all pages")]
pub struct VerifyArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Which part of the pages to compare
    #[arg(long, value_name = "1/N", default_value = "1/1000")]
    sample: Sample,

    /// Also fail for pages of a PostgreSQL server that differ only in what is not in its log, such as hint
    /// bits. There are such pages after a handover
    #[arg(long)]
    exact: bool,
}

/// One page in so many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sample(u32);

impl FromStr for Sample {
    type Err = String;

    fn from_str(text: &str) -> Result<Sample, String> {
        let pages = text.strip_prefix("1/").and_then(|pages| pages.parse().ok()).filter(|pages| *pages > 0);
        pages.map(Sample).ok_or_else(|| "write a part such as 1/1000".to_owned())
    }
}

/// What was found so far.
#[derive(Default)]
struct Findings {
    compared: u64,
    differing: u64,
    /// Pages that differ, but have the same position in PostgreSQL's log.
    of_same_position: u64,
    /// Pages of files that were counted, whether in the sample or not.
    passed: u64,
}

/// Compares a sample of the pages in the cache with the disk.
pub fn verify(args: &VerifyArgs) -> Result<()> {
    let door = Arc::new(attached_door(&args.dir)?);
    let data = door.data().display();
    let contents = CacheClient::new(door.clone()).contents().with_context(|| {
        format!("the cache of {data} is closed or does not answer: see `farpool cache status {data}`")
    })?;
    let paths = paths_below(door.data());
    let mut session = session(door.clone())?;
    // Other pages each time.
    let passed = RandomState::new().hash_one(()) % u64::from(args.sample.0);
    let mut findings = Findings { passed, ..Findings::default() };
    for cached in &contents.files {
        // A file that was removed since has no path. Only programs that still have it open can read it.
        if let Some(path) = paths.get(&(cached.id.device, cached.id.inode)) {
            verify_file(&door, &mut session, path, args, &mut findings)?;
        }
    }
    let Findings { compared, differing, of_same_position, .. } = findings;
    if differing > 0 {
        bail!(
            "{differing} of {compared} pages in the cache of {data} differ from the disk: a program may have changed the \
             files without the cache. `farpool cache drop {data}` empties it"
        );
    }
    let hints = match of_same_position {
        0 => String::new(),
        pages => format!("; {pages} of them except for what is not in the server's log, such as hint bits"),
    };
    say(match compared {
        0 => format!("nothing compared  {data}  no page of the sample is in the cache: try --sample 1/1"),
        _ => format!("verified  {data}  {compared} pages in the cache are as on the disk{hints}"),
    });
    Ok(())
}

fn verify_file(
    door: &DoorFile,
    session: &mut CacheSession,
    path: &Path,
    args: &VerifyArgs,
    findings: &mut Findings,
) -> Result<()> {
    let whole = door.data().join(path);
    let file = match open_regular(&whole) {
        Ok(file) => file,
        // It was removed a moment ago.
        Err(_) if !whole.exists() => return Ok(()),
        Err(error) => return Err(error),
    };
    let size = file.metadata().with_context(|| format!("cannot look at {}", whole.display()))?.len();
    // Visibility maps change without a new position in the log.
    let is_exact = args.exact || !door.is_postgres() || is_visibility_map(path);
    for block in 0..size / PAGE_BYTES as u64 {
        findings.passed += 1;
        if !findings.passed.is_multiple_of(args.sample.0.into()) {
            continue;
        }
        match compare(session, &file, block, is_exact)
            .with_context(|| format!("cannot read {}", whole.display()))?
        {
            None => {}
            Some(Compared::Equal) => findings.compared += 1,
            Some(Compared::EqualButForHints) => {
                findings.compared += 1;
                findings.of_same_position += 1;
            }
            Some(Compared::Different) => {
                findings.compared += 1;
                findings.differing += 1;
                complain(format!("farpool: page {block} of {} differs from the disk", whole.display()));
            }
        }
    }
    Ok(())
}

/// How a page in the cache compares with that on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compared {
    Equal,
    /// It has the same position in PostgreSQL's log.
    EqualButForHints,
    Different,
}

/// Compares a page in the cache with the disk. `None`: it is not in the cache, or no more. If this
/// `is_exact`, a difference in hint bits counts as [`Compared::Different`].
fn compare(
    session: &mut CacheSession,
    file: &File,
    block: u64,
    is_exact: bool,
) -> io::Result<Option<Compared>> {
    for tries in 1..=TRIES {
        let Some(cached) = cached_page(session, file, block) else { return Ok(None) };
        let mut page = vec![0; PAGE_BYTES];
        match file.read_exact_at(&mut page, bytes_of_page(block).start) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None), // truncated since
            read => read?,
        }
        match compare_pages(&page, &cached) {
            Compared::EqualButForHints if !is_exact => return Ok(Some(Compared::EqualButForHints)),
            Compared::Equal => return Ok(Some(Compared::Equal)),
            Compared::EqualButForHints | Compared::Different => std::thread::sleep(PAUSE * tries),
        }
    }
    Ok(Some(Compared::Different))
}

/// How two pages compare. Where pages have the same position in PostgreSQL's log and the same rows in the
/// same places, the rest are hints. A page that was never logged has no position.
fn compare_pages(one: &[u8], other: &[u8]) -> Compared {
    let position = |page: &[u8]| position_of_page(*page.first_chunk().expect("a page is longer"));
    if one == other {
        Compared::Equal
    } else if position(one) > 0 && position(one) == position(other) && places(one) == places(other) {
        Compared::EqualButForHints
    } else {
        Compared::Different
    }
}

/// Where a page of PostgreSQL has its rows: the part of its head that has bounds and version (`pd_lower` to
/// `pd_pagesize_version`), and its line pointers without their flags. `None`: it has no valid head.
fn places(page: &[u8]) -> Option<(&[u8], Vec<u32>)> {
    const HEAD_BYTES: usize = 24;
    const FLAGS: u32 = 0b11 << 15;
    let bounds = page.get(12..20)?;
    let lower = usize::from(u16::from_le_bytes([bounds[0], bounds[1]]));
    let pointers = page.get(HEAD_BYTES..lower)?.chunks_exact(4);
    let pointers = pointers.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]) & !FLAGS);
    Some((bounds, pointers.collect()))
}

/// A page as it is in the cache, if it is there. Admits nothing.
fn cached_page(session: &mut CacheSession, file: &File, block: u64) -> Option<Vec<u8>> {
    let mut found = Vec::new();
    let not_there = |_: &mut [u8], _| Err(io::ErrorKind::NotFound.into());
    let read = session.read(file.as_fd(), bytes_of_page(block), not_there, collect_into(&mut found));
    (read == Some(PAGE_BYTES as u64)).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_same_position_and_places_differ_in_hints_only() {
        let page = |position: u8, pointer: u32, rest: u8| {
            let mut page = [0; 64];
            page[4] = position;
            page[12..14].copy_from_slice(&28_u16.to_le_bytes());
            page[24..28].copy_from_slice(&pointer.to_le_bytes());
            page[40] = rest;
            page
        };
        let one = page(1, 0x0100_0020, 2);
        assert_eq!(compare_pages(&one, &one), Compared::Equal);
        assert_eq!(compare_pages(&one, &page(1, 0x0100_0020, 3)), Compared::EqualButForHints);
        assert_eq!(compare_pages(&one, &page(1, 0x0101_8020, 2)), Compared::EqualButForHints, "a dead row");
        assert_eq!(compare_pages(&one, &page(1, 0x0100_0024, 2)), Compared::Different, "another place");
        assert_eq!(compare_pages(&one, &page(2, 0x0100_0020, 2)), Compared::Different);
        assert_eq!(compare_pages(&page(0, 0, 2), &page(0, 0, 3)), Compared::Different);
        let mut other = one;
        other[12] = 32;
        assert_eq!(compare_pages(&one, &other), Compared::Different, "one row more");
        other[13] = 0xff;
        assert_eq!((places(&other), compare_pages(&one, &other)), (None, Compared::Different));
    }

    #[test]
    fn a_sample_is_one_in_so_many() {
        assert_eq!(["1/1000", "1/1"].map(str::parse), [Ok(Sample(1000)), Ok(Sample(1))]);
        for text in ["", "1", "1/0", "2/3", "1/-1", "1/x"] {
            assert!(text.parse::<Sample>().is_err(), "{text}");
        }
    }
}
