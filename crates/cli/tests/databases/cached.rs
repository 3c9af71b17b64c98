//! SQLite and DuckDB on a local disk, behind a page cache: `farpool run --cache`.

use farpool_bench::databases::duckdb::{Benchmark, DATABASE, DuckDb, Query, compare};
use farpool_bench::databases::sqlite::{Journal, Size, Sqlite};
use farpool_bench::databases::{Access, Digest, Ground, Home, Place};

use crate::support::ground_with;

const MEMORY_MIB: u64 = 64;
/// Less than the larger databases have, so pages are evicted.
const CACHE_MIB: u64 = 8;
/// 9 MB of rows, and more with their index.
const SIZE: Size = Size { sorted_rows: 100_000, writers: 4, transactions: 50 };
/// 600,000 line items.
const TPC_H_SCALE: f64 = 0.1;
const HOMES: [Home; 2] = [Home::in_one(Place::Local), Home::in_one(Place::Far)];

/// A folder whose files are cached, and one whose files are not.
#[track_caller]
fn cached_ground() -> Ground {
    ground_with(MEMORY_MIB, Access::Cached { memory_mib: CACHE_MIB })
}

/// Does work, in which pages must have been found in the cache, and compares all pages there with the disk.
/// Pages of a new file come in after a tenth of a second or so: short work alone may find none.
#[track_caller]
fn work_with_cache(ground: &Ground, work: impl FnOnce()) {
    let ((), used) = ground.cache_use_during(|| Ok(work())).unwrap();
    let pages = ground.verify_cache().unwrap();
    println!("{used:?}, {pages} pages in the cache are as on the disk");
    assert!(used.hits > 0 && pages > 0, "{used:?}, {pages} pages in the cache");
    assert_eq!(used.turns, 0, "the cache was switched off");
}

#[test]
fn sorts_of_a_cached_sqlite_database_give_the_rows_that_the_disk_gives() {
    let (ground, sqlite) = (cached_ground(), Sqlite::find().unwrap());
    work_with_cache(&ground, || {
        let [disk, cached] = HOMES.map(|home| sqlite.spill(&ground, home, SIZE).unwrap());
        for (disk, cached) in disk.iter().zip(&cached) {
            println!("{}: disk {:.2} s, cached {:.2} s", disk.name, disk.seconds, cached.seconds);
            assert_eq!(disk.rows, cached.rows, "{}", disk.name);
        }
    });
    ground.tear_down().unwrap();
}

#[test]
fn processes_that_write_to_one_cached_sqlite_database_lose_nothing_with_any_journal() {
    let (ground, sqlite) = (cached_ground(), Sqlite::find().unwrap());
    let longer = Size { transactions: 4 * SIZE.transactions, ..SIZE };
    work_with_cache(&ground, || {
        for journal in Journal::ALL {
            let [(disk, disk_seconds), (cached, cached_seconds)] =
                Place::BOTH.map(|place| sqlite.write_at_once(&ground, place, journal, longer).unwrap());
            println!("{journal:?}: disk {disk_seconds:.2} s, cached {cached_seconds:.2} s");
            assert_eq!(disk, cached, "{journal:?}");
        }
    });
    ground.tear_down().unwrap();
}

#[test]
fn killed_writers_of_a_cached_sqlite_database_leave_what_was_committed_with_any_journal() {
    let (ground, sqlite) = (cached_ground(), Sqlite::find().unwrap());
    work_with_cache(&ground, || {
        for journal in Journal::ALL {
            let [disk, cached] =
                Place::BOTH.map(|place| sqlite.kill_writers(&ground, place, journal).unwrap());
            assert_eq!(disk, cached, "{journal:?}");
        }
    });
    ground.tear_down().unwrap();
}

#[test]
fn tpc_h_on_a_cached_duckdb_database_gives_the_rows_that_the_disk_gives_before_and_after_changes() {
    let (ground, duckdb) = (cached_ground(), DuckDb::find().unwrap());
    work_with_cache(&ground, || {
        let databases = Place::BOTH.map(|place| (ground.runner(place), ground.path(place, DATABASE)));
        let [queries, _] = databases
            .each_ref()
            .map(|(how, file)| duckdb.generate(how, Benchmark::TpcH, TPC_H_SCALE, file).unwrap());
        let before = rows(&ground, &duckdb, &queries);
        for (how, file) in &databases {
            duckdb.change(how, file).unwrap();
        }
        let after = rows(&ground, &duckdb, &queries);
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        assert!(changed > queries.len() / 2, "only {changed} queries give other rows");
    });
    ground.tear_down().unwrap();
}

/// The rows of all queries, which are the same in both places.
#[track_caller]
fn rows(ground: &Ground, duckdb: &DuckDb, queries: &[Query]) -> Vec<Digest> {
    let mut rows = Vec::new();
    compare(duckdb, ground, HOMES, queries, 1, |query, disk, cached| {
        println!("{}: disk {:.2} s, cached {:.2} s", query.name, disk.seconds, cached.seconds);
        rows.push(cached.rows);
        Ok(())
    })
    .unwrap();
    rows
}
