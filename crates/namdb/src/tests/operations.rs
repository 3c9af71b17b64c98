//! Operations on several rows, and on rows that a transaction relies on.

use std::cell::Cell;

use farpool_fabric::TransportChoice;
use futures_util::future::{join, join_all, try_join};

use super::rig::Rig;
use crate::{Client, Session, Table, TableOptions, Tx, TxError};

/// More than are under way at the same time.
const MANY: u64 = 100;

fn assert_many_are_read_and_written(transport: TransportChoice) {
    let rig = Rig::new();
    let database = rig.create(transport);
    let client = database.client().unwrap();
    let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(2 * MANY)).unwrap();
    let inserted = async |tx: &mut Tx<'_>| tx.insert_many(&rows, (0..MANY).map(|key| (key, key))).await;
    client.transact(inserted).unwrap();
    let found = client.transact(async |tx| {
        tx.update_many(&rows, [(1, 11), (MANY - 1, 99)]).await?;
        tx.delete(&rows, 2).await?;
        tx.upsert(&rows, 3, 33).await?;
        tx.upsert(&rows, MANY, 7).await?;
        assert_eq!(tx.read_modify_write(&rows, 4, |row| row + 40).await?, Some(44));
        assert_eq!(tx.read_modify_write(&rows, MANY + 1, |row| row).await?, None);
        tx.get_many(&rows, (0..=MANY + 1).rev()).await
    });
    let after = |key| match key {
        1 => Some(11),
        2 => None,
        3 => Some(33),
        4 => Some(44),
        key if key == MANY - 1 => Some(99),
        MANY => Some(7),
        key => (key < MANY).then_some(key),
    };
    let expected: Vec<Option<u64>> = (0..=MANY + 1).rev().map(after).collect();
    assert_eq!(found.unwrap(), expected);
    let found = client.transact(async |tx| tx.get_many(&rows, (0..=MANY + 1).rev()).await);
    assert_eq!(found.unwrap(), expected);
}

#[test]
fn many_rows_are_read_and_written_together_over_shared_memory() {
    assert_many_are_read_and_written(TransportChoice::Shm);
}

#[test]
fn many_rows_are_read_and_written_together_over_tcp() {
    assert_many_are_read_and_written(TransportChoice::Tcp);
}

#[test]
fn rows_of_any_length_are_read_and_written_together() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Tcp);
    let client = database.client().unwrap();
    let options = TableOptions::rows(40).longest(20_000).row_bytes(40);
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    let text = |key: u64| "x".repeat(key as usize * 500);
    client.transact(async |tx| tx.insert_many(&texts, (0..20).map(|key| (key, text(key)))).await).unwrap();
    client.transact(async |tx| tx.get_for_update(&texts, 19).await.map(drop)).unwrap();
    let found = client.transact(async |tx| tx.get_many(&texts, 0..20).await).unwrap();
    assert_eq!(found, (0..20).map(|key| Some(text(key))).collect::<Vec<_>>());
}

#[test]
fn a_row_that_is_read_for_update_while_it_is_updated_stays_updated() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let rig = Rig::new();
        let database = rig.create(transport);
        let client = database.client().unwrap();
        let options = TableOptions::rows(4).longest(20_000).row_bytes(40);
        let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
        let long = |letter: &str| letter.repeat(10_000);
        client.transact(async |tx| tx.insert(&texts, 1, long("a")).await).unwrap();
        let read = client.transact(async |tx| {
            let both = join(tx.get_for_update(&texts, 1), tx.update(&texts, 1, "b".to_owned())).await;
            both.1.and(both.0)
        });
        assert!([Some(long("a")), Some("b".to_owned())].contains(&read.unwrap()));
        let after = client.transact(async |tx| tx.get(&texts, 1).await).unwrap();
        assert_eq!(after.as_deref(), Some("b"));
    }
}

#[test]
fn a_key_is_inserted_once_even_by_inserts_that_are_under_way_together() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let rig = Rig::new();
        let database = rig.create(transport);
        let client = database.client().unwrap();
        let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(8)).unwrap();
        let inserted = client.transact(async |tx| tx.insert_many(&rows, [(5, 1), (5, 2)]).await);
        assert!(matches!(inserted, Err(TxError::Duplicate(_))), "{inserted:?}");
        let kept = client.transact(async |tx| {
            let both = join(tx.insert(&rows, 5, 1), tx.insert(&rows, 5, 2)).await;
            assert!(both.0.is_ok() != both.1.is_ok(), "{both:?}");
            Ok((both.0.is_ok(), tx.get(&rows, 5).await?))
        });
        assert!(matches!(kept, Ok((true, Some(1)) | (false, Some(2)))), "{kept:?}");
        let missing = client.transact(async |tx| tx.update_many(&rows, [(5, 3), (6, 3)]).await);
        assert!(matches!(missing, Err(TxError::NoSuchKey(_))), "{missing:?}");
        assert_eq!(client.transact(async |tx| tx.get(&rows, 6).await).unwrap(), None);
    }
}

#[test]
fn changes_of_one_row_that_are_under_way_together_take_effect_one_after_the_other() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let rig = Rig::new();
        let database = rig.create(transport);
        let client = database.client().unwrap();
        let options = TableOptions::rows(64).longest(20_000).row_bytes(40);
        let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
        // Short rows lie in their records, and long ones elsewhere: writing these takes longer.
        for (key, length) in [(1, 0), (2, 10_000)] {
            client.transact(async |tx| tx.insert(&texts, key, "x".repeat(length)).await).unwrap();
            let appended = client.transact(async |tx| {
                let append =
                    |letter: &'static str| tx.read_modify_write(&texts, key, move |text| text + letter);
                for done in join_all(["a", "b", "c", "d"].map(append)).await {
                    done?;
                }
                tx.get(&texts, key).await
            });
            let mut letters = appended.unwrap().unwrap().split_off(length).into_bytes();
            letters.sort_unstable();
            assert_eq!(letters, b"abcd");
            // If it is deleted first, there is nothing to update.
            let left = client.transact(async |tx| {
                let both = join(tx.update(&texts, key, "y".repeat(length)), tx.delete(&texts, key)).await;
                assert!(matches!(both, (Ok(()) | Err(TxError::NoSuchKey(_)), Ok(()))), "{both:?}");
                tx.get(&texts, key).await
            });
            assert_eq!(left.unwrap(), None);
        }
    }
}

#[test]
fn hundreds_of_reads_at_once_do_not_exhaust_the_buffers() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Tcp);
    let client = database.client().unwrap();
    let options = TableOptions::rows(8).row_bytes(30_000);
    let texts: Table<u64, String> = client.create_table("texts", &options).unwrap();
    client.transact(async |tx| tx.insert(&texts, 1, "x".repeat(29_000)).await).unwrap();
    // Each READ takes 30,000 bytes of the thread's buffers, which have four million.
    let found = client.transact(async |tx| Ok(join_all((0..400).map(|_| tx.get(&texts, 1))).await));
    assert!(found.unwrap().into_iter().all(|row| row.unwrap().unwrap().len() == 29_000));
}

#[test]
fn operations_on_a_key_inserted_after_the_snapshot_find_no_row_and_do_not_conflict() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let rows: Table<u64, u64> = client.create_table("rows", &TableOptions::rows(8)).unwrap();
    let (mut earlier, tries) = (client.session(), Cell::new(0));
    let looked = client.block_on(earlier.transact(async |tx| {
        tries.set(tries.get() + 1);
        client.session().transact(async |tx| tx.upsert(&rows, 1, 10).await).await?;
        assert!(matches!(tx.update(&rows, 1, 2).await, Err(TxError::NoSuchKey(_))));
        assert!(matches!(tx.delete(&rows, 1).await, Err(TxError::NoSuchKey(_))));
        assert_eq!(tx.get_for_update(&rows, 1).await?, None);
        assert_eq!(tx.read_modify_write(&rows, 1, |row| row).await?, None);
        tx.get(&rows, 1).await
    }));
    assert_eq!((looked.unwrap(), tries.get()), (None, 1));
}

/// Two doctors are on call, and each of two transactions takes one off call unless nobody else is. Returns
/// how many are left.
fn doctors_left(client: &Client, name: &str, is_for_update: bool) -> usize {
    let on_call: Table<u64, bool> = client.create_table(name, &TableOptions::rows(2)).unwrap();
    client.transact(async |tx| tx.insert_many(&on_call, [(0, true), (1, true)]).await).unwrap();
    let have_read = Cell::new(0);
    let leave = async |tx: &mut Tx<'_>, doctor| {
        let read = async |key| match is_for_update {
            true => tx.get_for_update(&on_call, key).await,
            false => tx.get(&on_call, key).await,
        };
        let (one, other) = try_join(read(0), read(1)).await?;
        have_read.set(have_read.get() + 1);
        // Both transactions have begun before either commits.
        while have_read.get() < 2 {
            client.core().endpoint().yield_now().await;
        }
        match one.zip(other) {
            Some((true, true)) => tx.update(&on_call, doctor, false).await,
            _ => Ok(()),
        }
    };
    let (mut first, mut second) = (client.session(), client.session());
    for session in [&mut first, &mut second] {
        // Other sessions see a commit a little later.
        while client.block_on(session.transact(async |tx| tx.get(&on_call, 1).await)).unwrap().is_none() {}
    }
    let both = client.block_on(try_join(
        first.transact(async |tx| leave(tx, 0).await),
        second.transact(async |tx| leave(tx, 1).await),
    ));
    both.unwrap();
    // Each session certainly sees its own commit.
    let is_left = |session: &mut Session<'_>, doctor: u64| {
        client.block_on(session.transact(async |tx| tx.get(&on_call, doctor).await)).unwrap() == Some(true)
    };
    usize::from(is_left(&mut first, 0)) + usize::from(is_left(&mut second, 1))
}

#[test]
fn rows_that_are_read_for_update_rule_out_write_skew() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    assert_eq!(doctors_left(&client, "read", false), 0, "a snapshot alone permits it");
    assert_eq!(doctors_left(&client, "for update", true), 1);
}
