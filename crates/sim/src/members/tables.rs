//! Tables of a run. The table of judged records is created once. *Scratch* tables are created and dropped all
//! the time, and their memory is reused for one another, so each value in them names its table.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use farpool_namdb::{Table, TableOptions, Tx, TxError};
use farpool_txn::SessionState;

use super::broken::Engine;
use super::client::{Client, TaskGuard, join};
use super::member::Member;
use super::{Run, bank};

/// The table of judged records: its name, how many records of each piece transactions touch, and the bytes of
/// a record.
const ROWS: &str = "rows";
const RECORDS_EACH: u64 = 3;
const ROW_BYTES: usize = crate::transacting::DATA_WORDS * size_of::<u64>();

pub(super) const SCRATCH: [&str; 2] = ["scratch-0", "scratch-1"];
/// Keys of a scratch table.
const KEYS: u64 = 3;
/// The slab of a scratch table in a run in which memory is short.
const LARGE_SLAB_BYTES: u64 = 320 << 10;
/// Keys of some scratch tables: more than there is room for at first, so such a table grows.
const MANY_KEYS: u64 = KEYS + 72;
/// Thousandths of the scratch tables that get so many, and how many of these a transaction inserts.
const GROWING_PERMILLE: u32 = 250;
const AT_ONCE: u64 = 12;
/// Changes of the catalog that a member makes, and the longest pause before each.
const CHANGES: u64 = 3;
const MOST_PAUSE_NS: u64 = 300_000;
/// The auditor's tries to drop a table, and the pause between two. A try fails while snapshots still have
/// tables that were dropped before.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_micros(500);
/// The longest pause of a transaction that looks twice at a scratch table.
const MOST_LINGERING_NS: u64 = 150_000;

/// A table whose values name the table: all words of a row are its first record. Rows with odd keys are so
/// long that they lie in the slab.
type Scratch = Table<u64, Vec<u64>>;

/// Words of a long row.
const LONG: usize = 40;

fn value(table: &Scratch, key: u64) -> Vec<u64> {
    vec![table.first_record(); if key % 2 == 1 { LONG } else { 1 }]
}

/// The table of judged records.
pub(super) async fn open_rows(run: &Run, client: &Client) -> Result<Table<u64, ()>, TxError> {
    let options = TableOptions::rows(1).row_bytes(ROW_BYTES);
    let rows: Table<u64, ()> = client.open_or_create_table(&mut SessionState::new(), ROWS, &options).await?;
    run.observer.lock().watch_table(&rows.records());
    Ok(rows)
}

/// The numbers of the judged records: few enough that transactions conflict.
pub(super) fn numbers(records: &farpool_txn::Table) -> impl Iterator<Item = u64> + use<> {
    let (all, each) = (records.records(), records.layout().records());
    (0..all).filter(move |number| number % each < RECORDS_EACH)
}

/// Starts a member's changes of the catalog.
pub(super) fn start_changing(member: &Rc<Member>) {
    let (here, busy, part) = (member.clone(), TaskGuard(member.clone()), member.add_client());
    member.run.tasks.spawn(part, async move {
        let done = async {
            let mut client = join(&here, part).await?;
            let done = change_now_and_then(&here.run, &client).await;
            client.leave().await;
            done
        };
        if let Err(why) = done.await {
            here.run.cannot_go_on(&here, &why);
        }
        drop(busy);
    });
}

async fn change_now_and_then(run: &Run, client: &Client) -> Result<(), TxError> {
    let mut random = run.ledger.notes.random();
    for _ in 0..CHANGES {
        run.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
        if client.member().has_ended() {
            break;
        }
        let keys = if random.chance(GROWING_PERMILLE) { MANY_KEYS } else { KEYS };
        change(run, client, SCRATCH[random.index(SCRATCH.len())], keys).await?;
    }
    Ok(())
}

/// Creates a scratch table and fills it, or drops it if it exists.
async fn change(run: &Run, client: &Client, name: &str, keys: u64) -> Result<(), TxError> {
    let done = match create(run, client, name, keys).await {
        Err(TxError::TableExists(_)) => client.drop_table(name).await,
        created => created,
    };
    // Errors that occur if another client drops the table meanwhile, or is slow.
    ignore_expected(done, |error| {
        matches!(error, TxError::NoSuchTable(_) | TxError::Dropped(_) | TxError::CatalogBusy)
            || is_waiting_for_snapshots(error)
            || is_short(run, error)
    })
}

/// Creates a scratch table with so many keys.
async fn create(run: &Run, client: &Client, name: &str, keys: u64) -> Result<(), TxError> {
    let mut session = SessionState::new();
    let mut options = TableOptions::rows(KEYS).row_bytes(24).longest(LONG * 10);
    if run.is_tight {
        options = options.slab_bytes(LARGE_SLAB_BYTES);
    }
    let table: Scratch = client.create_table(&mut session, name, &options).await?;
    fill(run, client, &mut session, &table, 0..KEYS).await?;
    let before = table.records().records();
    for first in (KEYS..keys).step_by(AT_ONCE as usize) {
        fill(run, client, &mut session, &table, first..first + AT_ONCE).await?;
    }
    if keys > before && table.records().records() <= before {
        run.ledger.notes.complain(format!("table {name} has more rows than room, and has not grown"));
    }
    Ok(())
}

/// Whether there was no memory, in a run in which it is short: the pool lends only a few regions more.
pub(super) fn is_short(run: &Run, error: &TxError) -> bool {
    run.is_tight && matches!(error, TxError::NoSpace(_) | TxError::Full(_))
}

/// Whether there was no tombstone because snapshots still have tables that were dropped.
pub(super) fn is_waiting_for_snapshots(error: &TxError) -> bool {
    matches!(error, TxError::NoSpace(what) if what.contains("open snapshots"))
}

/// Drops each scratch table if it exists, creates it, and drops it again. All of that must succeed, because
/// no other client changes the catalog.
pub(super) async fn audit(run: &Run, client: &Client) -> Result<(), TxError> {
    for name in SCRATCH {
        if let Err(error) = drop_at_last(run, client, name).await
            && !matches!(error, TxError::NoSuchTable(_))
        {
            return Err(error);
        }
        // One of the two grows.
        match create(run, client, name, if name == SCRATCH[0] { MANY_KEYS } else { KEYS }).await {
            Err(error) if is_short(run, &error) => continue,
            created => created?,
        }
        drop_at_last(run, client, name).await?;
    }
    Ok(())
}

/// Drops a table; waits until there is a tombstone for it.
async fn drop_at_last(run: &Run, client: &Client, name: &str) -> Result<(), TxError> {
    for _ in 1..TRIES {
        match client.drop_table(name).await {
            Err(error) if is_waiting_for_snapshots(&error) => run.world.sleep(PAUSE).await,
            done => return done,
        }
    }
    client.drop_table(name).await
}

/// Inserts a value for each of these keys. No key may have one yet, since the memory was cleared.
async fn fill(
    run: &Run,
    client: &Client,
    session: &mut SessionState,
    table: &Scratch,
    keys: Range<u64>,
) -> Result<(), TxError> {
    let insert_all = async |tx: &mut Tx<'_, Engine>| {
        for key in keys.clone() {
            tx.insert(table, key, value(table, key)).await?;
        }
        Ok(())
    };
    let filled = client.transact(session, &insert_all).await;
    if let Err(error @ (TxError::Duplicate(_) | TxError::Full(_))) = &filled
        && !is_short(run, error)
    {
        run.ledger.notes.complain(format!("in a table that was just created: {error}"));
    }
    filled
}

/// Looks at scratch tables now and then, and writes to them.
pub(super) async fn look_on(run: &Run, client: &Client, rounds: u64) -> Result<(), TxError> {
    let (mut random, mut session) = (run.ledger.notes.random(), SessionState::new());
    let mut known: [Option<Scratch>; SCRATCH.len()] = [None, None];
    for _ in 0..rounds {
        run.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
        if client.member().has_ended() {
            break;
        }
        let number = random.index(SCRATCH.len());
        let table = match known[number].take() {
            Some(table) => table,
            None => match client.open_table(&mut session, SCRATCH[number]).await {
                Ok(table) => table,
                Err(TxError::NoSuchTable(_)) => continue,
                Err(error) => return Err(error),
            },
        };
        let lingers = Duration::from_nanos(random.below(MOST_LINGERING_NS));
        let look = Look { keys: (0..KEYS).chain([KEYS + random.below(MANY_KEYS - KEYS)]).collect(), lingers };
        let touched = touch(run, client, &mut session, &table, look).await;
        let is_gone = matches!(touched, Err(TxError::Dropped(_)));
        ignore_expected(touched, |error| matches!(error, TxError::Dropped(_) | TxError::Conflict))?;
        if !is_gone {
            known[number] = Some(table);
        }
    }
    Ok(())
}

/// A transaction that reads these keys of a scratch table twice, with a pause in between.
struct Look {
    keys: Vec<u64>,
    lingers: Duration,
}

/// Looks at a scratch table, and writes two of its rows. Checks that all values name this table, and that the
/// snapshot does not change.
async fn touch(
    run: &Run,
    client: &Client,
    session: &mut SessionState,
    table: &Scratch,
    Look { keys, lingers }: Look,
) -> Result<(), TxError> {
    let own = table.first_record();
    let look = async |tx: &mut Tx<'_, Engine>| {
        let mut found = Vec::new();
        for &key in &keys {
            found.push(tx.get(table, key).await?);
        }
        let is_foreign = |(key, found): (&u64, &Option<Vec<u64>>)| {
            found.as_ref().is_some_and(|found| *found != value(table, *key))
        };
        if keys.iter().zip(&found).any(is_foreign) {
            run.ledger.notes.complain(format!("table {own} has values of other tables: {found:?}"));
        }
        Ok::<_, TxError>(found)
    };
    let body = async |tx: &mut Tx<'_, Engine>| {
        let before = look(tx).await?;
        run.world.sleep(lingers).await;
        let after = look(tx).await?;
        if before != after {
            run.ledger.notes.complain(format!("a snapshot of table {own} changes: {before:?}, {after:?}"));
        }
        for (&key, found) in keys.iter().zip(before).take(2) {
            if found.is_some() {
                tx.update(table, key, value(table, key)).await?;
            }
        }
        Ok(())
    };
    let done = client.transact(session, &body).await;
    if let Err(error @ (TxError::Damaged(_) | TxError::WrongType(_) | TxError::NoSuchKey(_))) = &done {
        run.ledger.notes.complain(format!("table {own}: {error}"));
    }
    done
}

/// Turns errors that are allowed at any time into success.
pub(super) fn ignore_expected(
    done: Result<(), TxError>,
    may_come: impl Fn(&TxError) -> bool,
) -> Result<(), TxError> {
    match done {
        Err(error) if may_come(&error) || bank::gave_up(&error) => Ok(()),
        done => done,
    }
}
