//! Databases that lease more memory while they are in use.

use std::ops::Range;
use std::time::Duration;

use farpool_fabric::{TransportChoice, block_on};
use farpool_pool::{ClientGrant, JointLeases};
use farpool_txn::Memory;

use super::rig::{REGION_BYTES, REGIONS, Rig, until};
use crate::{Client, Environment, Table, TableOptions, TxError};

/// Bytes of the memory that a database is created with.
const FIRST_BYTES: u64 = REGIONS as u64 * REGION_BYTES;
/// Rows for each transaction that inserts.
const AT_ONCE: u64 = 200;
/// A heartbeat timeout that a test waits for.
const PATIENCE: Duration = Duration::from_secs(1);

type Rows = Table<u64, u64>;

fn insert(client: &Client, rows: &Rows, keys: Range<u64>) {
    for first in keys.clone().step_by(AT_ONCE as usize) {
        let some = first..keys.end.min(first + AT_ONCE);
        client
            .transact(async |tx| tx.insert_many(rows, some.clone().map(|key| (key, 3 * key))).await)
            .unwrap();
    }
}

fn bytes(client: &Client) -> u64 {
    client.tables().unwrap().iter().map(|table| table.bytes).sum()
}

/// Inserts rows until the tables take more memory than the database was created with. Returns how many.
fn outgrow(client: &Client, rows: &Rows) -> u64 {
    let mut keys = 0;
    while bytes(client) <= FIRST_BYTES {
        insert(client, rows, keys..keys + 5_000);
        keys += 5_000;
    }
    keys
}

fn assert_all_there(client: &Client, rows: &Rows, keys: u64) {
    let last = || client.transact(async |tx| tx.get(rows, keys - 1).await).unwrap();
    until("the last row is published", || last().is_some());
    for first in (0..keys).step_by(1_000) {
        let some = first..keys.min(first + 1_000);
        let found = client.transact(async |tx| tx.get_many(rows, some.clone()).await).unwrap();
        assert!(found.into_iter().eq(some.map(|key| Some(3 * key))));
    }
}

/// Whether the pool can lend so many regions. It has them again afterwards.
fn lends(rig: &Rig, regions: u32) -> bool {
    JointLeases::acquire(&rig.pool(TransportChoice::Tcp), regions).map(JointLeases::release).is_ok()
}

fn assert_outgrows(transport: TransportChoice) {
    let rig = Rig::lending(3 * REGIONS, REGION_BYTES);
    let (one, other) = (rig.create(transport), rig.open(transport));
    let (client, of_other) = (one.client().unwrap(), other.client().unwrap());
    let rows: Rows = client.create_table("rows", &TableOptions::rows(1_000)).unwrap();
    let rows_of_other: Rows = of_other.open_table("rows").unwrap();
    let keys = outgrow(&client, &rows);
    assert_all_there(&of_other, &rows_of_other, keys);
    insert(&of_other, &rows_of_other, keys..keys + 1_000);
    // A client that begins now, and a process that joins now, know the new memory from the beginning.
    let late = one.client().unwrap();
    assert_all_there(&late, &late.open_table("rows").unwrap(), keys + 1_000);
    let joining = rig.open(transport);
    let late = joining.client().unwrap();
    assert_all_there(&late, &late.open_table("rows").unwrap(), keys + 1_000);
    // The other two compute servers hold the leases of the new memory.
    drop((client, rows, one));
    assert_all_there(&of_other, &rows_of_other, keys + 1_000);
}

#[test]
fn a_table_outgrows_its_database_over_shared_memory() {
    assert_outgrows(TransportChoice::Shm);
}

#[test]
fn a_table_outgrows_its_database_over_tcp() {
    assert_outgrows(TransportChoice::Tcp);
}

#[test]
fn a_table_may_be_larger_than_its_database_from_the_beginning() {
    let rig = Rig::lending(3 * REGIONS, REGION_BYTES);
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let rows: Rows = client.create_table("rows", &TableOptions::rows(250_000)).unwrap();
    assert!(bytes(&client) > FIRST_BYTES, "{} bytes", bytes(&client));
    insert(&client, &rows, 0..2_000);
    client.drop_table("rows").unwrap();
    let again = || client.create_table::<u64, u64>("rows", &TableOptions::rows(250_000)).is_ok();
    until("the memory of the dropped table is free", again);
}

#[test]
fn memory_that_is_not_enough_goes_back_to_the_pool() {
    let rig = Rig::lending(REGIONS + 4, REGION_BYTES);
    let database = rig.create(TransportChoice::Shm);
    let client = database.client().unwrap();
    let refused = client.create_table::<u64, u64>("rows", &TableOptions::rows(500_000)).err().unwrap();
    let why = refused.to_string();
    assert!(matches!(refused, TxError::NoSpace(_)) && why.contains("the pool lends 4 of"), "{why}");
    // The nodes overwrite regions before they lend them again.
    until("the pool has its memory again", || lends(&rig, 4));
}

#[test]
fn a_member_with_new_memory_is_evicted_there_too() {
    let rig = Rig::lending(3 * REGIONS, REGION_BYTES);
    let one = rig.create_with(TransportChoice::Shm, PATIENCE);
    let other = rig.open(TransportChoice::Shm);
    let client = one.client().unwrap();
    let rows: Rows = client.create_table("rows", &TableOptions::rows(1_000)).unwrap();
    let keys = outgrow(&client, &rows);
    assert!(one.core.regions().count() > REGIONS as usize);
    // It does not give its seat back while it has a client: the other one evicts it.
    let grants = one.core.grants();
    drop(one);
    until("the seat is free", || other.members().unwrap().iter().all(|member| member.is_self));
    let is_open = |grant: &ClientGrant| {
        let memory = Memory::new(other.core.environment().endpoint());
        let peer = other.core.environment().peer(grant.region).unwrap();
        let attached = memory.attach(&peer, grant.region, grant.epoch, grant.key);
        block_on(memory.endpoint(), attached).is_ok()
    };
    assert_eq!(grants.iter().filter(|grant| is_open(grant)).count(), 0, "all its grants are fenced");
    let of_other = other.client().unwrap();
    assert_all_there(&of_other, &of_other.open_table("rows").unwrap(), keys);
}

#[test]
fn regions_without_tables_go_back_to_the_pool() {
    let rig = Rig::lending(3 * REGIONS, REGION_BYTES);
    let (one, other) = (rig.create(TransportChoice::Shm), rig.open(TransportChoice::Tcp));
    let (client, of_other) = (one.client().unwrap(), other.client().unwrap());
    for _ in 0..3 {
        let rows: Rows = client.create_table("rows", &TableOptions::rows(1_000)).unwrap();
        let keys = outgrow(&client, &rows);
        assert!(!lends(&rig, 2 * REGIONS), "the database has some of them");
        assert_all_there(&of_other, &of_other.open_table("rows").unwrap(), keys);
        client.drop_table("rows").unwrap();
        until("the pool has all other regions again", || lends(&rig, 2 * REGIONS));
        assert_eq!(one.core.regions().count(), REGIONS as usize);
        one.check().unwrap();
        other.check().unwrap();
    }
}
