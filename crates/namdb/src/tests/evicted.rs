//! The first request of an evicted compute server fails with that reason, for each kind of request.

use farpool_fabric::{TransportChoice, block_on};

use super::rig::Rig;
use crate::{Client, Database, Ended, Environment, Table, TableOptions, TxError};

/// Fences all grants of a member, as a recoverer does. Does not recover its seat.
fn evict(by: &Database, of: &Database) {
    let process = by.core.environment();
    for grant in of.core.grants().iter() {
        block_on(&process.endpoint(), process.fence_grant(grant.region, grant.epoch)).unwrap();
    }
}

type Rows = Table<u64, u64>;
type Operation = (&'static str, fn(&Database, &Client, &Rows) -> Option<String>);

/// The operations of a program, each with the error text that it returns.
const OPERATIONS: [Operation; 9] = [
    ("create a table", |_, client, _| words(client.create_table::<u64, u64>("new", &TableOptions::rows(4)))),
    ("drop a table", |_, client, _| words(client.drop_table("rows"))),
    ("open a table", |_, client, _| words(client.open_table::<u64, u64>("rows"))),
    ("list the tables", |_, client, _| words(client.tables())),
    ("read", |_, client, rows| words(client.transact(async |tx| tx.get(rows, 1).await))),
    ("write", |_, client, rows| words(client.transact(async |tx| tx.update(rows, 1, 2).await))),
    ("another session", |_, client, rows| {
        let mut session = client.session();
        words(client.block_on(session.transact(async |tx| tx.get(rows, 1).await)))
    }),
    ("another client", |database, _, _| words(database.client().map(drop))),
    ("look at the members", |database, _, _| words(database.members())),
];

fn words<T, E: std::error::Error>(done: Result<T, E>) -> Option<String> {
    done.err().map(|error| error.to_string())
}

/// Each operation is the first one of an evicted compute server.
fn assert_all_are_refused(transport: TransportChoice) {
    let rig = Rig::new();
    let by = rig.create(transport);
    let client = by.client().unwrap();
    let rows: Rows = client.create_table("rows", &TableOptions::rows(4)).unwrap();
    client.transact(async |tx| tx.insert(&rows, 1, 1).await).unwrap();
    for (name, operation) in OPERATIONS {
        let of = rig.open(transport);
        let client = of.client().unwrap();
        let rows: Rows = client.open_table("rows").unwrap();
        evict(&by, &of);
        let said = operation(&of, &client, &rows);
        assert_eq!(said, Some(Ended::TakenForDead.to_string()), "{name}");
        assert_eq!(of.check(), Err(Ended::TakenForDead), "{name}");
        assert!(matches!(client.tables(), Err(TxError::Ended(Ended::TakenForDead))), "after: {name}");
    }
}

#[test]
fn the_first_request_of_an_evicted_compute_server_is_refused_as_evicted_over_shared_memory() {
    assert_all_are_refused(TransportChoice::Shm);
}

#[test]
fn the_first_request_of_an_evicted_compute_server_is_refused_as_evicted_over_tcp() {
    assert_all_are_refused(TransportChoice::Tcp);
}
