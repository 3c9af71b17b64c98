//! Programs that use a database on threads and on tokio.

use farpool_fabric::TransportChoice;

use super::rig::{Rig, open};
use crate::{Client, Table, TableOptions, TxError};

#[test]
fn a_program_on_tokio_opens_a_database_and_awaits_transactions() {
    let rig = Rig::new();
    let _maker = rig.create(TransportChoice::Tcp);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let database = open(&rig.file(), TransportChoice::Tcp);
        let options = TableOptions::rows(8);
        let prepare = move |client: &Client| client.open_or_create_table::<str, u64>("visits", &options);
        let visits = database.start_client(prepare).unwrap();
        let visit = |name: &'static str| {
            visits.run(move |client, table: &mut Table<str, u64>| {
                client.transact(async |tx| {
                    let count = tx.get(table, name).await?.unwrap_or_default() + 1;
                    match count {
                        1 => tx.insert(table, name, count).await?,
                        count => tx.update(table, name, count).await?,
                    }
                    Ok(count)
                })
            })
        };
        assert_eq!(visit("Ada").await.unwrap().unwrap(), 1);
        let both = futures_util::future::join(visit("Ada"), visit("Grace")).await;
        assert_eq!((both.0.unwrap().unwrap(), both.1.unwrap().unwrap()), (2, 1));
        let panicked = visits.run(|_, _| panic!("on purpose")).await;
        assert!(panicked.unwrap_err().to_string().contains("panicked"));
        assert!(visit("Ada").await.is_err(), "the client is gone");
        drop(visits);
        database.check().unwrap();
    });
}

/// Tasks of tokio may poll its own primitives a limited number of times before they return.
#[test]
fn a_client_that_blocks_inside_a_runtime_goes_on_for_ever() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Tcp);
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let client = database.client().unwrap();
        let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(4)).unwrap();
        for value in 0..300 {
            client.transact(async |tx| tx.upsert(&rows, 1, value).await).unwrap();
        }
    });
}

#[test]
fn a_table_opens_only_with_the_type_of_its_keys() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let options = TableOptions::rows(4).key_bytes(6);
    client.create_table::<u64, u64>("numbers", &options).unwrap();
    let refused = client.open_table::<i64, u64>("numbers").err().unwrap().to_string();
    assert!(refused.contains("keys of type u64, not i64"), "{refused}");
    client.open_or_create_table::<u64, u64>("numbers", &options).unwrap();
    let names: Table<str, u64> = client.open_or_create_table("names", &options).unwrap();
    let again: Table<String, u64> = client.open_table("names").unwrap();
    client.transact(async |tx| tx.insert(&names, "Grace", 1).await).unwrap();
    let found = client.transact(async |tx| tx.get(&again, "Grace".to_owned()).await).unwrap();
    assert_eq!(found, Some(1));
    let longer = client.transact(async |tx| tx.insert(&names, "Barbara", 1).await);
    assert!(matches!(longer, Err(TxError::KeyTooLong { most: 6, .. })), "{longer:?}");
    let types: Vec<String> = client.tables().unwrap().into_iter().map(|table| table.key_type).collect();
    assert_eq!(types, ["string", "u64"]);
}
