//! A table that needs most of a pool's memory: 7 GiB, and some minutes. `make test-growth` calls this.

use std::time::{Duration, Instant};

use farpool_fabric::TransportChoice;
use farpool_namdb::{Client, CreateOptions, Database, Table, TableOptions};
use farpool_testpool::Rig;

const REGION_BYTES: u64 = 128 << 20;
/// Regions of each node, and of the new database.
const REGIONS_EACH: u64 = 10;
const FIRST_REGIONS: u64 = 3;
/// Nodes that there are at first, and nodes that join.
const NODES: u32 = 3;
const JOINING: u32 = 2;
const TABLE_BYTES: u64 = 4 << 30;
/// Bytes of a row's contents.
const ROW_BYTES: usize = 8_000;
/// Rows between two looks at the table's size, and between two of those that are checked.
const ROWS_BETWEEN: u64 = 4_096;
const CHECKED_EACH: u64 = 509;
/// Until all the memory is back: it is cleared first.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
const SOON: Duration = Duration::from_secs(120);

type Rows = Table<u64, String>;

fn row(key: u64) -> String {
    char::from(b'a' + (key % 26) as u8).to_string().repeat(ROW_BYTES) + &key.to_string()
}

/// Inserts rows one after another until the table has so many bytes, and returns how many there are.
fn insert_until(client: &Client, rows: &Rows, mut key: u64, bytes: u64) -> u64 {
    while client.tables().unwrap()[0].bytes < bytes {
        for key in key..key + ROWS_BETWEEN {
            client.transact(async |tx| tx.insert(rows, key, row(key)).await).unwrap();
        }
        key += ROWS_BETWEEN;
    }
    key
}

/// How many regions each node of the pool has lent.
fn regions_lent(rig: &Rig) -> Vec<u64> {
    rig.nodes_known().iter().map(|node| u64::from(node.regions_lent)).collect()
}

#[test]
fn a_table_of_4_gib_grows_row_by_row_while_nodes_join_and_gives_all_its_memory_back() {
    let mut rig = Rig::with_regions_of(REGION_BYTES, NODES, REGIONS_EACH);
    let directory = tempfile::tempdir().unwrap();
    let options =
        CreateOptions { bytes: FIRST_REGIONS * REGION_BYTES, servers: 4, ..CreateOptions::default() };
    let pool = rig.config(TransportChoice::Shm);
    let database = Database::create(&pool, &directory.path().join("large.far"), &options).unwrap();
    let client = database.client().unwrap();
    let rows: Rows =
        client.create_table("rows", &TableOptions::rows(1_000).row_bytes(ROW_BYTES + 24)).unwrap();
    let keys = insert_until(&client, &rows, 0, TABLE_BYTES / 2);
    rig.add_nodes(JOINING, REGIONS_EACH);
    let keys = insert_until(&client, &rows, keys, TABLE_BYTES);
    let lent = regions_lent(&rig);
    assert!(lent.len() as u32 == NODES + JOINING && lent.iter().all(|&lent| lent > 0), "{lent:?}");
    for key in (0..keys).step_by(CHECKED_EACH as usize) {
        let found = client.transact(async |tx| tx.get(&rows, key).await).unwrap();
        assert!(found == Some(row(key)), "row {key}");
    }
    drop(rows);
    client.drop_table("rows").unwrap();
    let give_up_at = Instant::now() + SOON;
    while regions_lent(&rig).iter().sum::<u64>() > FIRST_REGIONS {
        assert!(Instant::now() < give_up_at, "the pool does not have its memory again");
        std::thread::sleep(BETWEEN_LOOKS);
    }
    database.check().unwrap();
}
