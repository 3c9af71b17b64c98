//! A table with a secondary index, which is created and dropped while others write to the table. What a
//! search of the index finds is what the same transaction finds key by key.

use std::time::Duration;

use farpool_fabric::sim::Random;
use farpool_namdb::{Index, Table, TableOptions, Tx, TxError};
use farpool_txn::SessionState;

use super::Run;
use super::broken::Engine;
use super::client::Client;
use super::tables::{ignore_expected, is_short, is_waiting_for_snapshots};

const NAME: &str = "indexed";
/// Its keys, and the keys of the index.
const KEYS: u64 = 5;
const RESTS: u64 = 3;
/// Rows whose value is a multiple of this are not in the index.
const LEFT_OUT: u64 = 4;
/// Thousandths of the rounds that create or drop the index.
const CHANGES_PERMILLE: u32 = 200;
/// The longest pause before a round, and in the middle of a transaction.
const MOST_PAUSE_NS: u64 = 150_000;

fn rest(value: &u64) -> Option<u8> {
    (!value.is_multiple_of(LEFT_OUT)).then_some((value % RESTS) as u8)
}

/// The table, as one client has opened it.
struct Indexed {
    table: Table<u64, u64>,
    by_rest: Index<u64, u8>,
}

/// Writes to the table and searches it, and creates and drops its index.
pub(super) async fn live(run: &Run, client: &Client, rounds: u64) -> Result<(), TxError> {
    let (mut random, mut session) = (run.ledger.notes.random(), SessionState::new());
    let options = TableOptions::rows(KEYS).row_bytes(16);
    let table: Table<u64, u64> = match client.open_or_create_table(&mut session, NAME, &options).await {
        Err(error) if is_short(run, &error) => return Ok(()),
        opened => opened?,
    };
    let by_rest = table.declare("by_rest", rest);
    let indexed = Indexed { table, by_rest };
    for _ in 0..rounds {
        run.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
        if client.member().has_ended() {
            break;
        }
        let done = match random.chance(CHANGES_PERMILLE) {
            true => change(client, &mut session, &indexed, &mut random).await,
            false => look_and_write(run, client, &mut session, &indexed, &mut random).await,
        };
        ignore_expected(done, |error| {
            matches!(
                error,
                TxError::Conflict
                    | TxError::CatalogBusy
                    | TxError::OldTransactions(_)
                    | TxError::NoSuchIndex(_)
                    | TxError::IndexExists(_)
            ) || is_waiting_for_snapshots(error)
                || is_short(run, error)
                || matches!(error, TxError::NoSpace(what) if what.contains("in its life"))
        })?;
    }
    Ok(())
}

async fn change(
    client: &Client,
    session: &mut SessionState,
    Indexed { table, by_rest }: &Indexed,
    random: &mut Random,
) -> Result<(), TxError> {
    match random.chance(700) {
        true => client.create_index(session, table, by_rest, |_, _| ()).await,
        false => client.drop_index(table, by_rest.name()).await,
    }
}

/// A transaction that searches, waits, and writes a row.
async fn look_and_write(
    run: &Run,
    client: &Client,
    session: &mut SessionState,
    Indexed { table, by_rest }: &Indexed,
    random: &mut Random,
) -> Result<(), TxError> {
    let (key, value) = (random.below(KEYS), random.below(100));
    let (lingers, writes) = (Duration::from_nanos(random.below(MOST_PAUSE_NS)), random.chance(700));
    let body = async |tx: &mut Tx<'_, Engine>| {
        if writes {
            match value {
                0..10 if tx.get(table, key).await?.is_some() => tx.delete(table, key).await?,
                _ => tx.upsert(table, key, value).await?,
            }
        }
        run.world.sleep(lingers).await;
        let found = match tx.scan_by(table, by_rest, ..).collect().await {
            Err(TxError::NoSuchIndex(_) | TxError::IndexNotReady(_)) => return Ok(None),
            found => found?,
        };
        let mut wanted = Vec::new();
        for key in 0..KEYS {
            let row = tx.get(table, key).await?;
            wanted.extend(row.and_then(|value| Some((rest(&value)?, key, value))));
        }
        Ok(Some((found, wanted)))
    };
    let seen = client.transact(session, &body).await;
    if let Err(error @ (TxError::Damaged(_) | TxError::WrongType(_))) = &seen {
        run.ledger.notes.complain(format!("the table with an index: {error}"));
    }
    if let Some((mut found, mut wanted)) = seen? {
        found.sort_unstable();
        wanted.sort_unstable();
        if found != wanted {
            run.ledger.notes.complain(format!("the index leads to {found:?} instead of {wanted:?}"));
        }
    }
    Ok(())
}
