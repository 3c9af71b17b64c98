//! A whole tablespace of PostgreSQL.

use farpool_bench::databases::postgres_tables::{Size, Tables};
use farpool_bench::databases::{Access, Ground, Place, postgres_inserts};

use crate::support::ground_with;

const MEMORY_MIB: u64 = 512;
/// 300,000 accounts, 45 MB, and twice as much while they are rewritten.
const SIZE: Size = Size { scale: 3, transactions: 1000 };
/// For the second run, with the interposer.
const SIZE_AGAIN: Size = Size { scale: 1, transactions: 500 };

/// Least bytes that such a run reads and writes without the kernel: the tables once.
const DIRECT_BYTES: u64 = 15 << 20;

#[track_caller]
fn assert_steps_agree(ground: &Ground, size: Size) {
    let [local, far] = Place::BOTH.map(|place| {
        let mut tables = Tables::prepare(ground, place).unwrap();
        tables.run(ground, size).unwrap()
    });
    for (local, far) in local.iter().zip(&far) {
        println!("{}: local {:.2} s, far {:.2} s", far.name, local.seconds, far.seconds);
        assert_eq!(local.tables, far.tables, "{}", far.name);
    }
}

#[track_caller]
fn assert_shutdowns_are_survived(ground: &Ground, size: Size) {
    let mut tables = Tables::prepare(ground, Place::Far).unwrap();
    tables.fill(ground, size).unwrap();
    for _ in 0..2 {
        tables.crash(ground).unwrap();
    }
}

#[test]
fn tables_in_far_memory_hold_what_local_ones_hold_after_every_step() {
    let ground = ground_with(MEMORY_MIB, Access::Kernel);
    assert_steps_agree(&ground, SIZE);
    ground.tear_down().unwrap();
}

#[test]
fn tables_in_far_memory_accessed_without_the_kernel_hold_what_local_ones_hold_after_every_step() {
    let ground = ground_with(MEMORY_MIB, Access::Direct);
    let work = || Ok(assert_steps_agree(&ground, SIZE_AGAIN));
    let ((), direct) = ground.direct_bytes_during(work).unwrap();
    println!("{direct:?}");
    assert!(direct.read > DIRECT_BYTES && direct.written > DIRECT_BYTES, "{direct:?}");
    ground.tear_down().unwrap();
}

#[test]
fn tables_in_far_memory_survive_a_shutdown_in_the_middle_of_transactions() {
    let ground = ground_with(MEMORY_MIB, Access::Kernel);
    assert_shutdowns_are_survived(&ground, SIZE);
    ground.tear_down().unwrap();
}

#[test]
fn tables_in_far_memory_accessed_without_the_kernel_survive_a_shutdown_in_the_middle_of_transactions() {
    let ground = ground_with(MEMORY_MIB, Access::Direct);
    let work = || Ok(assert_shutdowns_are_survived(&ground, SIZE_AGAIN));
    let ((), direct) = ground.direct_bytes_during(work).unwrap();
    println!("{direct:?}");
    assert!(direct.written > DIRECT_BYTES / 2, "{direct:?}");
    ground.tear_down().unwrap();
}

/// 72,000 rows, 18 MB with their index: some seconds, in which clients mostly query the lengths of files.
/// Ten times as many transactions take a minute.
const INSERTS: postgres_inserts::Size = postgres_inserts::Size { clients: 6, transactions: 24 };
const TRANSACTIONS: &str = "FARPOOL_TEST_INSERTS";

#[test]
fn clients_that_insert_into_one_table_at_once_with_the_interposer_get_no_error() {
    let ground = ground_with(MEMORY_MIB, Access::Direct);
    let transactions =
        std::env::var(TRANSACTIONS).map_or(INSERTS.transactions, |count| count.parse().unwrap());
    let size = postgres_inserts::Size { transactions, ..INSERTS };
    let work = || postgres_inserts::insert_at_once(&ground, Place::Far, size);
    let (rows, direct) = ground.direct_bytes_during(work).unwrap();
    println!("{direct:?}");
    assert_eq!(rows, size.rows());
    assert!(direct.written > 0, "{direct:?}");
    ground.tear_down().unwrap();
}
