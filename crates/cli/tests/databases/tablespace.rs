//! A whole tablespace of PostgreSQL.

use farpool_workload::databases::Place;
use farpool_workload::databases::postgres_tables::{Size, Tables};

use crate::support::ground;

const MEMORY_MIB: u64 = 512;
/// 300,000 accounts, 45 MB, and twice as much while they are rewritten.
const SIZE: Size = Size { scale: 3, transactions: 1000 };

#[test]
fn tables_in_far_memory_hold_what_local_ones_hold_after_every_step() {
    let ground = ground(MEMORY_MIB);
    let [local, far] = Place::BOTH.map(|place| {
        let mut tables = Tables::prepare(&ground, place).unwrap();
        tables.run(&ground, SIZE).unwrap()
    });
    for (local, far) in local.iter().zip(&far) {
        println!("{}: local {:.2} s, far {:.2} s", far.name, local.seconds, far.seconds);
        assert_eq!(local.tables, far.tables, "{}", far.name);
    }
    ground.tear_down().unwrap();
}

#[test]
fn tables_in_far_memory_survive_a_shutdown_in_the_middle_of_transactions() {
    let ground = ground(MEMORY_MIB);
    let mut tables = Tables::prepare(&ground, Place::Far).unwrap();
    tables.fill(&ground, SIZE).unwrap();
    for _ in 0..2 {
        tables.crash(&ground).unwrap();
    }
    drop(tables);
    ground.tear_down().unwrap();
}
