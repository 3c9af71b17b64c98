//! What many operations, large transactions and long rows run into.

use farpool_fabric::TransportChoice;
use futures_util::future::{join_all, try_join_all};

use super::rig::Rig;
use crate::{DatabaseError, Table, TableOptions, TxError};

#[test]
fn sessions_of_one_thread_wait_for_each_other_s_buffers() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Tcp);
    let client = database.client().unwrap();
    let rows: Table<u64, Vec<u8>> =
        client.create_table("rows", &TableOptions::rows(16).row_bytes(30_000)).unwrap();
    for key in 0..16 {
        client.transact(async |tx| tx.insert(&rows, key, vec![7; 29_000]).await).unwrap();
    }
    let mut sessions: Vec<_> = (0..40).map(|_| client.session()).collect();
    // Each of them has 16 READs of 30,000 bytes under way, and the thread has buffers for 128 in all.
    let read =
        sessions.iter_mut().map(|session| session.transact(async |tx| tx.get_many(&rows, 0..16).await));
    for found in client.block_on(try_join_all(read)).unwrap() {
        assert!(found.iter().flatten().all(|row| *row == vec![7; 29_000]));
    }
}

#[test]
fn a_transaction_that_the_buffers_do_not_hold_is_too_large_and_says_so() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let options = TableOptions::rows(4_000).row_bytes(1_000);
    let rows: Table<u64, Vec<u8>> = client.create_table("rows", &options).unwrap();
    let insert = |count: u64| {
        client.transact(async |tx| tx.insert_many(&rows, (0..count).map(|key| (key, vec![1; 900]))).await)
    };
    // They take 116,000 bytes of the log, which is possible.
    let refused = insert(2_900).unwrap_err();
    assert!(matches!(refused, TxError::TooLarge(_)), "{refused}");
    assert!(refused.to_string().contains("buffers, and may take"), "{refused}");
    insert(2_000).unwrap();
}

#[test]
fn a_row_that_is_read_for_update_again_and_again_takes_one_block() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let options = TableOptions::rows(4).longest(20_000).row_bytes(40);
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    client.transact(async |tx| tx.insert(&texts, 1, "x".repeat(20_000 - 8)).await).unwrap();
    let read = client.transact(async |tx| {
        for _ in 0..100 {
            tx.get_for_update(&texts, 1).await?;
        }
        let all = join_all((0..100).map(|_| tx.get_for_update(&texts, 1))).await;
        all.into_iter().last().expect("there are a hundred")
    });
    assert_eq!(read.unwrap().map(|text| text.len()), Some(20_000 - 8));
}

#[test]
fn logs_and_rows_that_do_not_go_together_are_refused() {
    let rig = Rig::new();
    let refused = rig.try_create_logging(8 << 10).err().expect("no change of the catalog fits there");
    assert!(matches!(refused, DatabaseError::SmallLog(8_192)), "{refused}");
    let database = rig.create_logging(64 << 10);
    let client = database.client().unwrap();
    let made = client.create_table::<u64, Vec<u8>>("rows", &TableOptions::rows(4).row_bytes(40_000));
    let refused = made.err().expect("a row of it could be inserted, but not replaced");
    assert!(refused.to_string().contains("--log-size"), "{refused}");
    let options = TableOptions::rows(4).row_bytes(40).longest(40_000);
    client.create_table::<u64, Vec<u8>>("rows", &options).unwrap();
}

#[test]
fn tables_that_were_dropped_together_are_cleared_with_the_smallest_log() {
    let rig = Rig::new();
    let database = rig.create_logging(64 << 10);
    let client = database.client().unwrap();
    let name = |number: u32| format!("table-{number}");
    for round in 0..3 {
        for number in 0..20 {
            let made = client.create_table::<u64, u64>(&name(number), &TableOptions::rows(1));
            made.unwrap_or_else(|error| panic!("round {round}, table {number}: {error}"));
        }
        (0..20).for_each(|number| client.drop_table(&name(number)).unwrap());
    }
}
