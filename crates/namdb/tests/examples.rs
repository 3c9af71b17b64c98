//! The examples of `docs/src/namdb.md`: the page prints parts of this file.

use std::path::{Path, PathBuf};

use farpool_fabric::TransportChoice;
use farpool_namdb::{
    Client, ClientHandle, CreateOptions, Credentials, Database, DatabaseError, Index, Reach, Table,
    TableOptions, Tx, TxError,
};
use farpool_testpool::Rig;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Account {
    cents: i64,
}

type Accounts = Table<u64, Account>;

fn open(file: &Path, reach: &Reach) -> Result<Database, DatabaseError> {
    Database::open(file, reach) // `Reach::default()`, unless the program chooses certificates itself
}

fn deposit(database: &Database, number: u64, cents: i64) -> Result<(), TxError> {
    let client = database.client()?; // one for each thread
    let accounts: Accounts = client.open_or_create_table("accounts", &TableOptions::rows(1_000))?;
    client.transact(async |tx| {
        let mut account = tx.get(&accounts, number).await?.unwrap_or(Account { cents: 0 });
        account.cents += cents;
        tx.upsert(&accounts, number, account).await
    })
}

/// Reads both accounts together, and writes both together.
async fn transfer(tx: &Tx<'_>, accounts: &Accounts, [from, to]: [u64; 2], cents: i64) -> Result<(), TxError> {
    let mut rows = tx.get_many(accounts, [from, to]).await?;
    let [Some(giver), Some(taker)] = &mut rows[..] else { return Err(TxError::roll_back("no such account")) };
    giver.cents -= cents;
    taker.cents += cents;
    tx.update_many(accounts, [(from, giver), (to, taker)]).await
}

/// What orders cost, by the number of the customer and of the order. The table was created with
/// `TableOptions::rows(1_000).ordered()`.
type Orders = Table<(u64, u64), i64>;

/// What the latest orders of a customer cost, and what all of them cost together.
async fn bill(tx: &Tx<'_>, orders: &Orders, customer: u64) -> Result<(Vec<i64>, i64), TxError> {
    let all = (customer, 0)..=(customer, u64::MAX);
    let mut sum = 0;
    let mut rows = tx.scan(orders, all.clone());
    while let Some((_, cents)) = rows.next().await? {
        sum += cents;
    }
    let mut latest = Vec::new();
    let mut rows = tx.scan_rev(orders, all);
    while latest.len() < 2
        && let Some((_, cents)) = rows.next().await?
    {
        latest.push(cents);
    }
    Ok((latest, sum))
}

#[derive(Serialize, Deserialize)]
struct Customer {
    last_name: String,
    email: Option<String>,
}

/// Customers by their numbers, and by the keys of two indexes.
struct Customers {
    table: Table<u64, Customer>,
    by_name: Index<Customer, String>,
    by_email: Index<Customer, String>,
}

fn open_customers(client: &Client) -> Result<Customers, TxError> {
    let table: Table<u64, Customer> = client.open_or_create_table("customers", &TableOptions::rows(1_000))?;
    // Each program that writes to the table says how the keys of its indexes are made.
    let by_name = table.declare("by_name", |row: &Customer| Some(row.last_name.clone()));
    let by_email = table.declare("by_email", |row: &Customer| row.email.clone()).unique();
    client.open_or_create_index(&table, &by_name)?;
    client.open_or_create_index(&table, &by_email)?;
    Ok(Customers { table, by_name, by_email })
}

/// The numbers of all customers with this last name.
async fn named(tx: &Tx<'_>, customers: &Customers, last_name: &str) -> Result<Vec<u64>, TxError> {
    let found = tx.get_by(&customers.table, &customers.by_name, last_name).await?;
    Ok(found.into_iter().map(|(number, _)| number).collect())
}

/// The first last name from this one on, in the order of last names.
async fn name_from(tx: &Tx<'_>, customers: &Customers, first: &str) -> Result<Option<String>, TxError> {
    let mut rows = tx.scan_by(&customers.table, &customers.by_name, first.to_owned()..);
    Ok(rows.next().await?.map(|(last_name, _number, _row)| last_name))
}

async fn cents(bank: &ClientHandle<Accounts>, number: u64) -> Result<Option<i64>, TxError> {
    let found = bank.run(move |client, accounts| {
        client.transact(async |tx| Ok(tx.get(accounts, number).await?.map(|account| account.cents)))
    });
    found.await.map_err(TxError::Ended)?
}

fn start_bank(database: &Database) -> Result<ClientHandle<Accounts>, TxError> {
    database.start_client(|client| client.open_or_create_table("accounts", &TableOptions::rows(1_000)))
}

/// A pool, a new database in it, and its file.
struct Place {
    rig: Rig,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { rig: Rig::with_regions_of(4 << 20, 2, 4), directory: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("bank.far")
    }

    fn create(&self) -> Database {
        let options = CreateOptions { bytes: 32 << 20, servers: 8, ..CreateOptions::default() };
        Database::create(&self.rig.config(TransportChoice::Shm), &self.file(), &options).unwrap()
    }
}

fn cents_of(client: &Client, accounts: &Accounts, number: u64) -> Option<i64> {
    client.transact(async |tx| Ok(tx.get(accounts, number).await?.map(|account| account.cents))).unwrap()
}

#[test]
fn accounts_of_another_process() {
    let place = Place::new();
    let database = place.create();
    let reach = Reach { credentials: Credentials::PlainText, ..Reach::default() };
    let other = open(&place.file(), &reach).unwrap();
    deposit(&other, 7, 100).unwrap();
    deposit(&other, 8, 5).unwrap();
    let client = other.client().unwrap();
    let accounts: Accounts = client.open_table("accounts").unwrap();
    client.transact(async |tx| transfer(tx, &accounts, [7, 8], 30).await).unwrap();
    assert_eq!([7, 8, 9].map(|number| cents_of(&client, &accounts, number)), [Some(70), Some(35), None]);
    let failed = client.transact(async |tx| transfer(tx, &accounts, [7, 9], 30).await).unwrap_err();
    assert!(failed.to_string().contains("no such account"), "{failed}");
    assert_eq!(cents_of(&client, &accounts, 7), Some(70));
    database.check().unwrap();
}

#[test]
fn orders_of_a_customer() {
    let place = Place::new();
    let database = place.create();
    let client = database.client().unwrap();
    let orders: Orders = client.create_table("orders", &TableOptions::rows(1_000).ordered()).unwrap();
    let rows = [((1, 4), 9), ((2, 1), 10), ((2, 2), 20), ((2, 7), 30), ((3, 1), 8)];
    client.transact(async |tx| tx.insert_many(&orders, rows).await).unwrap();
    let billed = client.transact(async |tx| bill(tx, &orders, 2).await).unwrap();
    assert_eq!(billed, (vec![30, 20], 60));
}

#[test]
fn customers_by_name_and_by_email() {
    let place = Place::new();
    let database = place.create();
    let client = database.client().unwrap();
    let customers = open_customers(&client).unwrap();
    let customer = |last_name: &str, email: Option<&str>| Customer {
        last_name: last_name.to_owned(),
        email: email.map(str::to_owned),
    };
    let rows = [
        (1, customer("Lovelace", Some("ada"))),
        (2, customer("Hopper", None)),
        (3, customer("Lovelace", None)),
    ];
    client
        .transact(async |tx| {
            tx.insert_many(&customers.table, rows.iter().map(|(key, row)| (*key, row))).await
        })
        .unwrap();
    let mut found = client.transact(async |tx| named(tx, &customers, "Lovelace").await).unwrap();
    found.sort_unstable();
    assert_eq!(found, [1, 3]);
    let first = client.transact(async |tx| name_from(tx, &customers, "I").await).unwrap();
    assert_eq!(first.as_deref(), Some("Lovelace"));
    let again = customer("Byron", Some("ada"));
    let refused = client.transact(async |tx| tx.insert(&customers.table, 4, &again).await).unwrap_err();
    assert_eq!(refused.to_string(), "duplicate key in index by_email of table customers");
    let found =
        client.transact(async |tx| tx.get_by(&customers.table, &customers.by_email, "ada").await).unwrap();
    assert_eq!(found.len(), 1);
}

#[test]
fn a_bank_for_tasks_of_tokio() {
    let place = Place::new();
    let database = place.create();
    deposit(&database, 7, 100).unwrap();
    let bank = start_bank(&database).unwrap();
    let found = place
        .rig
        .runtime
        .block_on(async { futures_util::future::join(cents(&bank, 7), cents(&bank, 8)).await });
    assert_eq!((found.0.unwrap(), found.1.unwrap()), (Some(100), None));
}

#[test]
fn the_page_prints_parts_of_this_file() {
    let (page, here) = (include_str!("../../../docs/src/namdb.md"), include_str!("examples.rs"));
    let (mut blocks, mut block) = (Vec::new(), None::<(usize, String)>);
    for line in page.lines() {
        block = match (block, line.trim_start()) {
            (None, "```rust,ignore") => Some((line.len() - line.trim_start().len(), String::new())),
            (None, _) => None,
            (Some((_, text)), "```") => {
                blocks.push(text);
                None
            }
            (Some((indent, text)), _) => Some((indent, text + line.get(indent..).unwrap_or_default() + "\n")),
        };
    }
    assert!(blocks.len() >= 5, "{}", blocks.len());
    for block in blocks {
        assert!(here.contains(&block), "the page prints what is not in this file:\n{block}");
    }
}
