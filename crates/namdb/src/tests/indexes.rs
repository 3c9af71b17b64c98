//! Secondary indexes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use farpool_fabric::TransportChoice;

use super::rig::{Rig, until};
use crate::{Client, Index, Table, TableOptions, TxError};

/// People: their last names and their years of birth, if these are known.
type People = Table<u32, (String, Option<u16>)>;
type Row = (String, Option<u16>);

const NAMES: [&str; 5] = ["Byron", "Hopper", "Hopper\0", "Lovelace", "Turing"];

fn person(number: u32) -> Row {
    let year = (!number.is_multiple_of(3)).then_some(1_800 + (number % 100) as u16);
    (NAMES[number as usize % NAMES.len()].to_owned(), year)
}

/// A table, and its indexes as a client has declared them.
struct Opened {
    people: People,
    by_name: Index<Row, String>,
    by_year: Index<Row, u16>,
}

impl Opened {
    fn of(people: People) -> Opened {
        let by_name = people.declare("by_name", |row: &Row| Some(row.0.clone())).key_bytes(16);
        let by_year = people.declare("by_year", |row: &Row| row.1);
        Opened { people, by_name, by_year }
    }

    fn create(client: &Client, rows: u64) -> Opened {
        Opened::of(client.create_table("people", &TableOptions::rows(rows)).unwrap())
    }

    fn open(client: &Client) -> Opened {
        Opened::of(client.open_table("people").unwrap())
    }

    fn index(&self, client: &Client) {
        client.create_index(&self.people, &self.by_name, |_, _| ()).unwrap();
        client.create_index(&self.people, &self.by_year, |_, _| ()).unwrap();
    }

    fn insert(&self, client: &Client, numbers: impl Iterator<Item = u32>) {
        let numbers: Vec<u32> = numbers.collect();
        for some in numbers.chunks(50) {
            let rows = || some.iter().map(|&number| (number, person(number)));
            client.transact(async |tx| tx.insert_many(&self.people, rows()).await).unwrap();
        }
    }

    fn named(&self, client: &Client, name: &str) -> Vec<u32> {
        let found = client.transact(async |tx| tx.get_by(&self.people, &self.by_name, name).await);
        let mut numbers: Vec<u32> = found.unwrap().into_iter().map(|(number, _)| number).collect();
        numbers.sort_unstable();
        numbers
    }

    fn assert_whole(&self, client: &Client, rows: u64) {
        let verified = client.verify(&self.people, |_, _| ()).unwrap();
        assert_eq!((verified.rows, verified.fault), (rows, None));
    }
}

fn assert_found(transport: TransportChoice) {
    let rig = Rig::new();
    let (one, other) = (rig.create(transport), rig.open(transport));
    let (client, of_other) = (one.client().unwrap(), other.client().unwrap());
    let here = Opened::create(&client, 100);
    here.insert(&client, 0..500);
    here.index(&client);
    let there = Opened::open(&of_other);
    // The table and its indexes grow several times.
    there.insert(&of_other, (500..1_000).rev());
    until("all rows are published", || here.named(&client, "Turing").len() == 200);
    assert!(here.named(&client, "Hopper").into_iter().eq((0..1_000).filter(|number| number % 5 == 1)));
    assert_eq!(here.named(&client, "Nobody"), [0; 0]);

    let scan =
        || client.transact(async |tx| tx.scan_by(&here.people, &here.by_year, 1_810..1_812).collect().await);
    let found = scan().unwrap();
    let mut wanted: Vec<_> = (0..1_000)
        .map(|number| (number, person(number)))
        .filter_map(|(number, row)| Some((row.1?, number, row)))
        .filter(|(year, ..)| (1_810..1_812).contains(year))
        .collect();
    assert!(found.is_sorted_by_key(|(year, ..)| *year));
    let mut sorted = found.clone();
    sorted.sort();
    wanted.sort();
    assert_eq!(sorted, wanted);
    let reverse =
        client.transact(async |tx| tx.scan_by_rev(&here.people, &here.by_year, 1_810..1_812).collect().await);
    assert!(reverse.unwrap().into_iter().rev().eq(found));
    here.assert_whole(&client, 1_000);
    there.assert_whole(&of_other, 1_000);
}

#[test]
fn rows_are_found_by_other_keys_than_their_own_over_shared_memory() {
    assert_found(TransportChoice::Shm);
}

#[test]
fn rows_are_found_by_other_keys_than_their_own_over_tcp() {
    assert_found(TransportChoice::Tcp);
}

#[test]
fn a_search_sees_its_snapshot_and_what_its_transaction_has_written() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let (client, other) = (database.client().unwrap(), database.client().unwrap());
    let (here, there) = (Opened::create(&client, 100), Opened::open(&other));
    here.index(&client);
    here.insert(&client, 0..10);
    let named = |name: &str| here.named(&client, name);
    let ada = || ("Lovelace".to_owned(), Some(1_815));
    let seen = client.transact(async |tx| {
        tx.update(&here.people, 0, ada()).await?;
        tx.upsert(&here.people, 90, ada()).await?;
        tx.delete(&here.people, 3).await?;
        tx.read_modify_write(&here.people, 8, |row| ("Turing".to_owned(), row.1)).await?;
        // Another transaction, which this one does not see.
        other.transact(async |tx| tx.upsert(&there.people, 7, ada()).await)?;
        let found = tx.get_by(&here.people, &here.by_name, "Lovelace").await?;
        // Rows with the same key are in no order.
        Ok(found.into_iter().map(|(number, _)| number).collect::<BTreeSet<_>>())
    });
    assert_eq!(seen.unwrap(), BTreeSet::from([0, 90]));
    until("both are published", || named("Lovelace") == [0, 7, 90]);
    assert_eq!((named("Byron"), named("Turing"), named("Hopper\0")), (vec![5], vec![4, 8, 9], vec![2]));
    let failed = client.transact(async |tx| {
        tx.update(&here.people, 5, ada()).await?;
        Err::<(), _>(TxError::roll_back("no"))
    });
    assert!(failed.is_err() && named("Lovelace") == [0, 7, 90] && named("Byron") == [5]);
    here.assert_whole(&client, 10);
}

#[test]
fn entries_that_nobody_needs_are_removed() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let here = Opened::create(&client, 100);
    here.index(&client);
    here.insert(&client, 0..100);
    let bytes = || -> u64 { client.tables().unwrap()[0].indexes.iter().map(|index| index.bytes).sum() };
    let before = bytes();
    let stale = || {
        // Each commit lets the horizon move on.
        client.transact(async |tx| tx.upsert(&here.people, 0, person(0)).await).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        here.people.core().keyed().stale_entries()
    };
    for round in 1..200 {
        let change = async |tx: &mut crate::Tx<'_>| {
            for number in 0..100 {
                tx.update(&here.people, number, person(number + round)).await?;
            }
            Ok(())
        };
        client.transact(change).unwrap();
        // However busy the machine is: not too many at a time.
        until("most are removed", || stale() <= 200);
    }
    // The last commits are a little ahead of the horizon.
    until("almost all are removed", || stale() <= 2);
    here.assert_whole(&client, 100);
    // 20,000 changes took no more room than some of them need.
    assert!(bytes() <= 8 * before, "{} bytes instead of {before}", bytes());
}

#[test]
fn an_index_is_created_while_others_write_to_its_table() {
    let rig = Rig::new();
    let (one, other) = (rig.create(TransportChoice::Shm), rig.open(TransportChoice::Shm));
    let client = one.client().unwrap();
    let here = Opened::create(&client, 2_000);
    here.insert(&client, 0..2_000);
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = other.client().unwrap();
            let there = Opened::open(&client);
            let mut number = 0;
            while !has_ended.load(Ordering::Relaxed) {
                let (old, new) = (number % 2_000, 2_000 + number % 1_000);
                let change = async |tx: &mut crate::Tx<'_>| {
                    tx.update(&there.people, old, person(old + number)).await?;
                    tx.upsert(&there.people, new, person(number)).await
                };
                client.transact(change).unwrap();
                number += 1;
            }
        });
        let progress = std::cell::RefCell::new(Vec::new());
        let tell = |done, all| progress.borrow_mut().push((done, all));
        client.create_index(&here.people, &here.by_name, tell).unwrap();
        client.create_index(&here.people, &here.by_year, |_, _| ()).unwrap();
        has_ended.store(true, Ordering::Relaxed);
        let progress = progress.into_inner();
        assert!(
            progress.is_sorted() && progress.last().is_some_and(|(done, all)| done == all && *all >= 2_000)
        );
    });
    let count = client.verify(&here.people, |_, _| ()).unwrap();
    assert_eq!(count.fault, None);
    assert!(count.rows >= 2_000);
    let again = client.create_index(&here.people, &here.by_name, |_, _| ());
    assert!(matches!(again, Err(TxError::IndexExists(_))), "{again:?}");
    client.open_or_create_index(&here.people, &here.by_name).unwrap();
}

#[test]
fn an_index_has_what_transactions_write_that_began_before_it() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let (client, database_of_other) = (database.client().unwrap(), &database);
    let here = Opened::create(&client, 100);
    let (begun, wait_until_begun) = mpsc::channel();
    let (go_on, wait) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let client = database_of_other.client().unwrap();
            let people: People = client.open_table("people").unwrap();
            let insert = async |tx: &mut crate::Tx<'_>| {
                tx.insert(&people, 1, person(1)).await?;
                let _ = begun.send(());
                let _ = wait.recv();
                Ok(())
            };
            client.transact(insert).unwrap();
        });
        wait_until_begun.recv().unwrap();
        let creating = scope.spawn(move || {
            let client = database_of_other.client().unwrap();
            let here = Opened::open(&client);
            client.create_index(&here.people, &here.by_name, |_, _| ()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!creating.is_finished(), "a transaction is open that does not have the index");
        let early = client.transact(async |tx| tx.get_by(&here.people, &here.by_name, "Hopper").await);
        assert!(matches!(early, Err(TxError::IndexNotReady(_))), "{early:?}");
        drop(go_on);
        creating.join().unwrap();
    });
    until("it is published", || here.named(&client, "Hopper") == [1]);
}

#[test]
fn writers_have_to_declare_the_indexes_of_a_table() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let (client, other) = (database.client().unwrap(), database.client().unwrap());
    let people: People = other.create_table("people", &TableOptions::rows(100)).unwrap();
    let here = Opened::open(&client);
    here.insert(&client, 0..10);
    let searched = client.transact(async |tx| tx.get_by(&here.people, &here.by_year, &1_801_u16).await);
    assert!(matches!(searched, Err(TxError::NoSuchIndex(_))), "{searched:?}");
    here.index(&client);
    until("the index is published", || other.tables().unwrap()[0].indexes.len() == 2);
    let written = other.transact(async |tx| tx.upsert(&people, 3, person(4)).await);
    let error = written.unwrap_err().to_string();
    assert!(error.contains("index by_name") && error.contains("declare it"), "{error}");
    assert!(other.transact(async |tx| tx.get(&people, 3).await).unwrap().is_some(), "reading is no harm");
    let there = Opened::of(people);
    other.transact(async |tx| tx.upsert(&there.people, 3, person(4)).await).unwrap();
    until("it is published", || here.named(&client, "Turing") == [3, 4, 9]);

    let long = || ("x".repeat(16), None);
    let failed = client.transact(async |tx| tx.upsert(&here.people, 3, long()).await);
    assert!(matches!(failed, Err(TxError::IndexKeyTooLong { most: 16, .. })), "{failed:?}");
    let failed = client.transact(async |tx| tx.get_by(&here.people, &here.by_name, &*"x".repeat(16)).await);
    assert!(matches!(failed, Err(TxError::IndexKeyTooLong { most: 16, .. })), "{failed:?}");
    let of_another_type = here.people.declare("by_year", |row: &Row| row.1.map(u64::from));
    let failed = client.transact(async |tx| tx.get_by(&here.people, &of_another_type, &1_801_u64).await);
    assert!(matches!(failed, Err(TxError::OtherShape { .. })), "{failed:?}");
}

#[test]
fn a_dropped_index_is_not_kept_any_more_and_can_be_created_again() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let here = Opened::create(&client, 100);
    here.insert(&client, 0..50);
    for _ in 0..3 {
        here.index(&client);
        client.drop_index(&here.people, "by_name").unwrap();
        let gone = client.transact(async |tx| tx.get_by(&here.people, &here.by_name, "Byron").await);
        assert!(matches!(gone, Err(TxError::NoSuchIndex(_))), "{gone:?}");
        client.transact(async |tx| tx.upsert(&here.people, 0, person(1)).await).unwrap();
        client.drop_index(&here.people, "by_year").unwrap();
    }
    assert!(matches!(client.drop_index(&here.people, "by_name"), Err(TxError::NoSuchIndex(_))));
    here.index(&client);
    assert_eq!(here.named(&client, "Hopper").len(), 11);
    here.assert_whole(&client, 50);
    client.drop_table("people").unwrap();
    let again = Opened::create(&client, 10);
    again.insert(&client, 0..5);
    assert!(client.tables().unwrap()[0].indexes.is_empty());
}

#[test]
fn no_two_rows_have_the_same_key_in_a_unique_index() {
    let rig = Rig::new();
    let (one, other) = (rig.create(TransportChoice::Shm), rig.open(TransportChoice::Shm));
    let client = one.client().unwrap();
    let numbers: Table<u32, u32> = client.create_table("numbers", &TableOptions::rows(1_000)).unwrap();
    let by_rest =
        |numbers: &Table<u32, u32>| numbers.declare("by_rest", |row: &u32| Some(row % 100)).unique();
    let here = by_rest(&numbers);
    client.transact(async |tx| tx.insert_many(&numbers, [(1, 7), (2, 107)]).await).unwrap();
    let failed = client.create_index(&numbers, &here, |_, _| ());
    assert!(matches!(&failed, Err(TxError::DuplicateIn { index, .. }) if index == "by_rest"), "{failed:?}");
    client.transact(async |tx| tx.update(&numbers, 2, 8).await).unwrap();
    client.create_index(&numbers, &here, |_, _| ()).unwrap();
    let insert = |key, row| client.transact(async |tx| tx.insert(&numbers, key, row).await);
    assert!(matches!(insert(3, 207), Err(TxError::DuplicateIn { .. })));
    let twice = client.transact(async |tx| {
        let (one, other) =
            futures_util::future::join(tx.insert(&numbers, 3, 9), tx.insert(&numbers, 4, 109)).await;
        one.and(other)
    });
    assert!(matches!(twice, Err(TxError::DuplicateIn { .. })), "{twice:?}");
    // Two rows exchange their keys.
    let exchanged = client.transact(async |tx| {
        tx.delete(&numbers, 1).await?;
        tx.update(&numbers, 2, 7).await?;
        tx.insert(&numbers, 1, 8).await
    });
    exchanged.unwrap();

    // Threads of two processes take keys at the same time: each key goes to one row.
    let take = |database: &'_ crate::Database, thread: u32| {
        let client = database.client().unwrap();
        let numbers: Table<u32, u32> = client.open_table("numbers").unwrap();
        let _index = by_rest(&numbers);
        let mut taken = 0;
        for rest in 10..100 {
            let key = 1_000 * thread + rest;
            match client.transact(async |tx| tx.insert(&numbers, key, rest + 100 * thread).await) {
                Ok(()) => taken += 1,
                Err(TxError::DuplicateIn { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        taken
    };
    let taken = std::thread::scope(|scope| {
        let take = &take;
        let threads: Vec<_> = [(&one, 1), (&other, 2), (&one, 3)]
            .map(|(database, thread)| scope.spawn(move || take(database, thread)))
            .into();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>()
    });
    assert_eq!(taken, 90);
    until("all are published", || client.verify(&numbers, |_, _| ()).unwrap().rows == 92);
    assert_eq!(client.verify(&numbers, |_, _| ()).unwrap().fault, None);
    let all = client.transact(async |tx| tx.scan_by(&numbers, &here, ..).collect().await).unwrap();
    assert!(all.is_sorted_by(|(one, ..), (other, ..)| one < other));
}

#[test]
fn a_client_that_commits_rarely_removes_entries_too() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let here = Opened::create(&client, 10);
    here.index(&client);
    here.insert(&client, 0..10);
    let stale = || here.people.core().keyed().stale_entries();
    std::thread::sleep(Duration::from_millis(250));
    client.transact(async |tx| tx.update(&here.people, 1, person(2)).await).unwrap();
    assert_eq!(stale(), 0);
    // Those of transactions that were rolled back are noted, too.
    let given_up = client.transact(async |tx| {
        tx.update(&here.people, 1, ("Nobody".to_owned(), None)).await?;
        Err::<(), _>(TxError::roll_back("no"))
    });
    assert!(given_up.is_err() && stale() > 0);
    until("all are removed", || {
        client.transact(async |tx| tx.upsert(&here.people, 2, person(2)).await).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        stale() == 0
    });
    here.assert_whole(&client, 10);
}

/// Rows of two numbers, each of which no other row has.
type Pairs = Table<u32, (u32, u32)>;

#[test]
fn a_write_that_is_refused_leaves_a_row_the_keys_that_it_has() {
    let rig = Rig::new();
    let database = rig.create(TransportChoice::Shm);
    let (client, other) = (database.client().unwrap(), database.client().unwrap());
    let declare = |pairs: &Pairs| {
        let first = pairs.declare("first", |row: &(u32, u32)| Some(row.0)).unique();
        (first, pairs.declare("second", |row: &(u32, u32)| Some(row.1)).unique())
    };
    let here: Pairs = client.create_table("pairs", &TableOptions::rows(100)).unwrap();
    let (first, second) = declare(&here);
    client.create_index(&here, &first, |_, _| ()).unwrap();
    client.create_index(&here, &second, |_, _| ()).unwrap();
    let there: Pairs = other.open_table("pairs").unwrap();
    let _indexes = declare(&there);
    let is_refused = |done: Result<(), TxError>, index: &str| matches!(done, Err(TxError::DuplicateIn { index: found, .. }) if found == index);
    client.transact(async |tx| tx.insert(&here, 0, (0, 0)).await).unwrap();

    // A refused insert does not keep its other key from another row.
    let inserted = client.transact(async |tx| {
        assert!(is_refused(tx.insert(&here, 1, (1, 0)).await, "second"));
        tx.insert(&here, 2, (1, 2)).await
    });
    inserted.unwrap();
    // After a refused update, the row still has the key that it got before: nobody else gets it meanwhile.
    let tries = Cell::new(0);
    let inserted = client.transact(async |tx| {
        tx.insert(&here, 3, (3, 3)).await?;
        assert!(is_refused(tx.update(&here, 3, (4, 0)).await, "second"));
        if tries.replace(tries.get() + 1) == 0 {
            other.transact(async |tx| tx.insert(&there, 5, (3, 5)).await)?;
        }
        Ok(())
    });
    assert!(is_refused(inserted, "first"), "tried {} times", tries.get());
    // After a refused update, other rows may have the same keys as before it.
    let moved = client.transact(async |tx| {
        assert!(is_refused(tx.update(&here, 2, (6, 0)).await, "second"));
        assert!(is_refused(tx.insert(&here, 7, (1, 7)).await, "first"));
        tx.update(&here, 2, (2, 2)).await?;
        tx.insert(&here, 7, (1, 7)).await?;
        tx.insert(&here, 8, (6, 8)).await
    });
    moved.unwrap();
    until("all are published", || client.verify(&here, |_, _| ()).unwrap().rows == 5);
    assert_eq!(client.verify(&here, |_, _| ()).unwrap().fault, None);
    let found = client.transact(async |tx| tx.scan_by(&here, &first, ..).collect().await).unwrap();
    assert!(found.into_iter().map(|(first, number, _)| (first, number)).eq([
        (0, 0),
        (1, 7),
        (2, 2),
        (3, 5),
        (6, 8)
    ]));
}
