//! Tables that get more rows than they were made for.

use std::cell::Cell;
use std::sync::mpsc;
use std::time::Duration;

use farpool_fabric::TransportChoice;

use super::rig::{Rig, until};
use crate::{Client, Table, TableOptions, Tx, TxError};

/// For a test that waits as long: a slab grows after that while an older snapshot is open.
const PATIENCE: Duration = Duration::from_secs(3);
/// Rows for each transaction that inserts.
const AT_ONCE: u64 = 100;

fn insert(client: &Client, rows: &Table<u64, u64>, keys: std::ops::Range<u64>) -> Result<(), TxError> {
    for first in keys.clone().step_by(AT_ONCE as usize) {
        let some = first..keys.end.min(first + AT_ONCE);
        client.transact(async |tx| tx.insert_many(rows, some.clone().map(|key| (key, 3 * key))).await)?;
    }
    Ok(())
}

fn long_text(key: u64) -> String {
    char::from(b'a' + (key % 26) as u8).to_string().repeat(1_500)
}

/// Inserts a long row.
fn insert_long(client: &Client, texts: &Table<u64, String>, key: u64) {
    client.transact(async |tx| tx.insert(texts, key, long_text(key)).await).unwrap();
}

fn assert_all_there(client: &Client, rows: &Table<u64, u64>, keys: u64) {
    // Another client's last commit is seen once it is published.
    let last = || client.transact(async |tx| tx.get(rows, keys - 1).await).unwrap();
    until("the last row is published", || last().is_some());
    let found = client.transact(async |tx| tx.get_many(rows, 0..keys).await).unwrap();
    assert!(found.into_iter().eq((0..keys).map(|key| Some(3 * key))));
}

fn pieces(client: &Client) -> usize {
    client.tables().unwrap()[0].pieces
}

fn assert_grows(transport: TransportChoice) {
    let rig = Rig::new();
    let (one, other) = (rig.create(transport), rig.open(transport));
    let (one, other) = (one.client().unwrap(), other.client().unwrap());
    let rows: Table<u64, u64> = one.create_table("rows", &TableOptions::rows(10)).unwrap();
    let of_other: Table<u64, u64> = other.open_table("rows").unwrap();
    let before = pieces(&one);
    insert(&one, &rows, 0..3_000).unwrap();
    assert!(pieces(&one) > 4 * before, "{} pieces", pieces(&one));
    // `other` has opened the table before it grew: it meets keys and buckets in pieces that it does not know.
    assert_all_there(&other, &of_other, 3_000);
    insert(&other, &of_other, 3_000..6_000).unwrap();
    assert_all_there(&one, &rows, 6_000);
    let info = &one.tables().unwrap()[0];
    assert!(info.rows >= 6_000 && info.rows < 20_000, "{} rows", info.rows);
}

#[test]
fn a_table_grows_while_two_clients_use_it_over_shared_memory() {
    assert_grows(TransportChoice::Shm);
}

#[test]
fn a_table_grows_while_two_clients_use_it_over_tcp() {
    assert_grows(TransportChoice::Tcp);
}

#[test]
fn a_table_that_has_grown_gives_all_its_memory_back() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    // More than half of the memory.
    let make_large = || client.create_table::<u64, u64>("large", &TableOptions::rows(100_000)).is_ok();
    for _ in 0..3 {
        until("all memory is free", make_large);
        client.drop_table("large").unwrap();
        let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(10)).unwrap();
        let full = insert(&client, &rows, 0..1 << 40).unwrap_err();
        assert!(matches!(full, TxError::Full(_)), "{full}");
        // It has got the memory of the dropped table, too.
        assert!(client.tables().unwrap()[0].bytes > 10_000_000);
        client.drop_table("rows").unwrap();
    }
    until("all memory is free", make_large);
    assert!(client.tables().unwrap()[0].bytes > 10_000_000);
}

#[test]
fn a_table_that_cannot_grow_is_an_error_that_the_body_may_handle() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(10)).unwrap();
    let others: Table<u64, u64> = client.create_table("others", &TableOptions::rows(10)).unwrap();
    let full = insert(&client, &rows, 0..1 << 40).unwrap_err();
    assert!(matches!(full, TxError::Full(_)), "{full}");
    let changes = || client.transact(async |tx| Ok(tx.schema())).unwrap();
    let before = changes();
    for key in 0..20 {
        let insert = async |tx: &mut Tx<'_>| match tx.insert(&rows, (1 << 50) + key, 0).await {
            Err(TxError::Full(_)) => tx.insert(&others, key, 7).await,
            other => panic!("{other:?}"),
        };
        client.transact(insert).unwrap();
    }
    assert_eq!(changes(), before, "a client that cannot let a table grow does not change the catalog");
    let found = client.transact(async |tx| tx.get_many(&others, 0..20).await).unwrap();
    assert_eq!(found, [Some(7); 20]);
}

#[test]
fn long_rows_make_a_table_grow_too() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let options = TableOptions::rows(500).row_bytes(40).longest(2_000).slab_bytes(100_000);
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    let before = pieces(&client);
    for key in 0..500 {
        insert_long(&client, &texts, key);
    }
    assert!(pieces(&client) > before);
    for key in 0..500 {
        let found = client.transact(async |tx| tx.get(&texts, key).await).unwrap();
        assert!(found == Some(long_text(key)), "row {key}");
    }
}

#[test]
fn a_slab_whose_blocks_become_free_does_not_make_a_table_grow() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let options = TableOptions::rows(100).row_bytes(40).longest(2_000).slab_bytes(200_000);
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    (0..10).for_each(|key| insert_long(&client, &texts, key));
    let before = pieces(&client);
    for round in 0..1_000 {
        let write = async |tx: &mut Tx<'_>| tx.update(&texts, round % 10, long_text(round)).await;
        client.transact(write).unwrap();
    }
    assert_eq!(pieces(&client), before);
}

#[test]
fn a_thread_that_knows_fewer_pieces_uses_the_slab_as_the_others_do() {
    let rig = Rig::new();
    let database = rig.create_with(TransportChoice::Shm, PATIENCE);
    let options = TableOptions::rows(5_000).row_bytes(40).longest(2_000).slab_bytes(1 << 20);
    let client = database.client().unwrap();
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    client
        .transact(async |tx| tx.insert_many(&texts, (0..20).map(|key| (key, String::new()))).await)
        .unwrap();
    let before = pieces(&client);
    let (began, has_begun) = mpsc::channel();
    let (grown, has_grown) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let database = &database;
        scope.spawn(move || {
            let client = database.client().unwrap();
            let texts: Table<u64, String> = client.open_table("texts").unwrap();
            let tries = Cell::new(0);
            let body = async |tx: &mut Tx<'_>| {
                assert!(tx.get(&texts, 0).await?.is_some());
                if tries.replace(tries.get() + 1) == 0 {
                    began.send(()).unwrap();
                    has_grown.recv().unwrap();
                }
                for key in 0..20 {
                    tx.update(&texts, key, long_text(key)).await?;
                }
                Ok(())
            };
            client.transact(body).unwrap();
            assert_eq!(tries.get(), 1, "it did not have to learn of the new pieces");
        });
        has_begun.recv().unwrap();
        let mut key = 1_000;
        while pieces(&client) == before {
            insert_long(&client, &texts, key);
            key += 1;
        }
        // Rows whose records lie in the new pieces, too.
        (9_000..9_010).for_each(|key| insert_long(&client, &texts, key));
        grown.send(()).unwrap();
    });
    for key in (0..20).chain(9_000..9_010) {
        let found = || client.transact(async |tx| tx.get(&texts, key).await).unwrap();
        until(&format!("row {key} is there"), || found() == Some(long_text(key)));
    }
}
