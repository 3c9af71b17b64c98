//! SQLite.

use farpool_bench::databases::sqlite::{Journal, Size, Sqlite};
use farpool_bench::databases::{Home, Place};

use crate::support::ground;

const MEMORY_MIB: u64 = 256;
const SIZE: Size = Size { sorted_rows: 200_000, writers: 4, transactions: 50 };
/// A sort of the rows writes about 17 MB. Polling may miss the peak, but not by that much.
const SPILLED_BYTES: u64 = 4 << 20;

#[test]
fn temporary_files_in_far_memory_give_the_rows_that_local_ones_give() {
    let ground = ground(MEMORY_MIB);
    let sqlite = Sqlite::find().unwrap();
    let local = sqlite.spill(&ground, Home::spilling_to(Place::Local), SIZE).unwrap();
    let far = sqlite.spill(&ground, Home::spilling_to(Place::Far), SIZE).unwrap();
    for (local, far) in local.iter().zip(&far) {
        println!(
            "{}: local {:.2} s, far {:.2} s, {} bytes",
            far.name, local.seconds, far.seconds, far.far_bytes
        );
        assert_eq!(local.rows, far.rows, "{}", far.name);
        assert!(far.far_bytes > SPILLED_BYTES, "{far:?}");
    }
    assert_eq!(local[0].rows.rows, u64::from(SIZE.sorted_rows));
    ground.tear_down().unwrap();
}

#[test]
fn processes_that_write_to_one_database_lose_nothing_with_any_journal() {
    let ground = ground(MEMORY_MIB);
    let sqlite = Sqlite::find().unwrap();
    for journal in Journal::ALL {
        let [(local, local_seconds), (far, far_seconds)] =
            Place::BOTH.map(|place| sqlite.write_at_once(&ground, place, journal, SIZE).unwrap());
        println!("{journal:?}: local {local_seconds:.2} s, far {far_seconds:.2} s");
        assert_eq!(local, far, "{journal:?}");
    }
    ground.tear_down().unwrap();
}

#[test]
fn killed_writers_leave_what_was_committed_with_any_journal() {
    let ground = ground(MEMORY_MIB);
    let sqlite = Sqlite::find().unwrap();
    for journal in Journal::ALL {
        let [local, far] = Place::BOTH.map(|place| sqlite.kill_writers(&ground, place, journal).unwrap());
        assert_eq!(local, far, "{journal:?}");
    }
    ground.tear_down().unwrap();
}
