//! Tables whose keys are in order.

use farpool_fabric::TransportChoice;

use super::rig::{Rig, until};
use crate::{Client, Table, TableOptions, Tx, TxError};

type Orders = Table<(String, u32), u64>;

fn key(number: u32) -> (String, u32) {
    (["ann", "bob", "bob\0", "eve"][number as usize % 4].to_owned(), number / 4)
}

fn fill(client: &Client, orders: &Orders, numbers: impl Iterator<Item = u32>) {
    let numbers: Vec<u32> = numbers.collect();
    for some in numbers.chunks(50) {
        let insert = async |tx: &mut Tx<'_>| {
            tx.insert_many(orders, some.iter().map(|&number| (key(number), u64::from(number)))).await
        };
        client.transact(insert).unwrap();
    }
}

fn assert_scans(transport: TransportChoice) {
    let rig = Rig::new();
    let (one, other) = (rig.create(transport), rig.open(transport));
    let (client, of_other) = (one.client().unwrap(), other.client().unwrap());
    // It grows several times.
    let options = TableOptions::rows(100).key_bytes(16).ordered();
    let orders: Orders = client.create_table("orders", &options).unwrap();
    let orders_of_other: Orders = of_other.open_table("orders").unwrap();
    fill(&client, &orders, (0..2_000).step_by(2));
    fill(&of_other, &orders_of_other, (1..2_000).step_by(2).rev());
    let mut all: Vec<_> = (0..2_000).map(|number| (key(number), u64::from(number))).collect();
    all.sort();
    let scan = || client.transact(async |tx| tx.scan(&orders, ..).collect().await).unwrap();
    until("all rows are published", || scan().len() == all.len());
    assert!(scan() == all);
    let reverse = of_other.transact(async |tx| tx.scan_rev(&orders_of_other, ..).collect().await).unwrap();
    assert!(reverse.into_iter().eq(all.iter().rev().cloned()));
    let bob = ("bob".to_owned(), 100)..("bob".to_owned(), 103);
    let found = client.transact(async |tx| tx.scan(&orders, bob.clone()).collect().await).unwrap();
    assert_eq!(found, [401, 405, 409].map(|number| (key(number), u64::from(number))));
    let last = client.transact(async |tx| tx.scan_rev(&orders, ..=("bob".to_owned(), u32::MAX)).next().await);
    assert_eq!(last.unwrap(), Some((key(1_997), 1_997)));
    let none = ("carl".to_owned(), 0)..("dora".to_owned(), 0);
    assert_eq!(client.transact(async |tx| tx.scan(&orders, none.clone()).next().await).unwrap(), None);
}

#[test]
fn ranges_are_scanned_in_both_directions_over_shared_memory() {
    assert_scans(TransportChoice::Shm);
}

#[test]
fn ranges_are_scanned_in_both_directions_over_tcp() {
    assert_scans(TransportChoice::Tcp);
}

#[test]
fn a_scan_sees_its_snapshot_and_what_its_transaction_has_written() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let (client, other) = (database.client().unwrap(), database.client().unwrap());
    let numbers: Table<u32, u32> =
        client.create_table("numbers", &TableOptions::rows(100).ordered()).unwrap();
    let of_other: Table<u32, u32> = other.open_table("numbers").unwrap();
    client.transact(async |tx| tx.insert_many(&numbers, (0..10).map(|key| (key, 0))).await).unwrap();
    let body = async |tx: &mut Tx<'_>| {
        tx.delete(&numbers, 3).await?;
        tx.update(&numbers, 4, 1).await?;
        tx.insert(&numbers, 20, 2).await?;
        let seen = tx.scan(&numbers, ..).collect().await?;
        // Another transaction inserts into the range meanwhile, and deletes something there.
        let insert = async |tx: &mut Tx<'_>| {
            tx.upsert(&of_other, 15, 9).await?;
            tx.upsert(&of_other, 5, 9).await
        };
        other.transact(insert)?;
        assert_eq!(tx.scan(&numbers, ..).collect().await?, seen);
        Ok(seen)
    };
    let seen = client.transact(body).unwrap();
    let wanted = [0, 1, 2, 4, 5, 6, 7, 8, 9, 20].map(|key| {
        (
            key,
            match key {
                4 => 1,
                20 => 2,
                _ => 0,
            },
        )
    });
    assert_eq!(seen, wanted);
    let keys = || client.transact(async |tx| tx.scan(&numbers, 5..).collect().await).unwrap();
    until("both commits are published", || keys().iter().map(|row| row.0).eq([5, 6, 7, 8, 9, 15, 20]));
    client.transact(async |tx| tx.upsert(&numbers, 3, 7).await).unwrap();
    let again = client.transact(async |tx| tx.scan(&numbers, 2..=4).collect().await).unwrap();
    assert_eq!(again, [(2, 0), (3, 7), (4, 1)]);
}

#[test]
fn a_table_without_an_order_is_not_scanned() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let rows: Table<u32, u32> = client.create_table("rows", &TableOptions::rows(100)).unwrap();
    let refused = client.transact(async |tx| tx.scan(&rows, ..).next().await).unwrap_err();
    assert!(matches!(refused, TxError::Unordered(_)), "{refused}");
}
