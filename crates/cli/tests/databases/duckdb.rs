//! DuckDB.

use farpool_bench::databases::duckdb::{Benchmark, DATABASE, DuckDb, compare};
use farpool_bench::databases::{Ground, Home, Place};

use crate::support::ground;

const MEMORY_MIB: u64 = 512;
/// 1.8 million line items. Each query runs with the least memory that it needs, so larger joins and groupings
/// spill.
const TPC_H_SCALE: f64 = 0.3;
/// 600,000 sales in shops.
const TPC_DS_SCALE: f64 = 0.2;

/// Runs all queries and returns how many of them spilled.
#[track_caller]
fn spilled(ground: &Ground, benchmark: Benchmark, scale: f64) -> usize {
    let duckdb = DuckDb::find().unwrap();
    let database = ground.path(Place::Local, DATABASE);
    let queries = duckdb.generate(&ground.runner(Place::Local), benchmark, scale, &database).unwrap();
    let mut spilled = 0;
    compare(&duckdb, ground, Place::BOTH.map(Home::spilling_to), &queries, 1, |query, local, far| {
        let (mb, bytes) = (far.memory_mb, far.temp_bytes);
        println!(
            "{}: {mb} MB, local {:.2} s, far {:.2} s, {bytes} bytes",
            query.name, local.seconds, far.seconds
        );
        spilled += usize::from(bytes > 0);
        Ok(())
    })
    .unwrap();
    spilled
}

#[test]
fn tpc_h_with_temporary_files_in_far_memory_gives_the_rows_that_local_ones_give() {
    let ground = ground(MEMORY_MIB);
    let (spilled, far_bytes) =
        ground.far_bytes_during(|| Ok(spilled(&ground, Benchmark::TpcH, TPC_H_SCALE))).unwrap();
    println!("{spilled} queries spilled, {far_bytes} bytes at once on the mount");
    assert!(spilled >= 3 && far_bytes > 16 << 20, "{spilled} queries spilled, {far_bytes} bytes");
    ground.tear_down().unwrap();
}

#[test]
fn tpc_ds_with_temporary_files_in_far_memory_gives_the_rows_that_local_ones_give() {
    let ground = ground(MEMORY_MIB);
    let (spilled, far_bytes) =
        ground.far_bytes_during(|| Ok(spilled(&ground, Benchmark::TpcDs, TPC_DS_SCALE))).unwrap();
    println!("{spilled} queries spilled, {far_bytes} bytes at once on the mount");
    assert!(spilled >= 10 && far_bytes > 1 << 20, "{spilled} queries spilled, {far_bytes} bytes");
    ground.tear_down().unwrap();
}
