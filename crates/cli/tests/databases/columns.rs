//! `farpool bench columns`, which maps its files.

use farpool_bench::databases::Place;
use farpool_bench::databases::columns::{Size, expected, run};

use crate::support::ground;

const MEMORY_MIB: u64 = 256;
/// 176 MiB of files for 58 MiB of memory.
const SIZE: Size = Size { columns: 6, column_bytes: 16 << 20 };

#[test]
fn intermediates_mapped_by_several_processes_give_the_sums_that_memory_gives() {
    let ground = ground(MEMORY_MIB);
    let expected = expected(SIZE).unwrap();
    for place in Place::BOTH {
        let ran = run(&ground, place, SIZE).unwrap();
        println!("{place:?}: {:.2} s with {:?} MiB", ran.seconds, ran.memory_mib);
        assert_eq!(ran.lines, expected, "{place:?}");
    }
    ground.tear_down().unwrap();
}
