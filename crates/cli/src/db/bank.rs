//! `farpool db bank`: moves money between accounts, and checks that the sum stays the same.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farpool_namdb::{Client, Database, Index, Table, TableOptions, Tx, TxError};
use serde::{Deserialize, Serialize};

use super::{Beginning, DatabaseAt};
use crate::output::{say, tell};

/// Each account's cents at first.
const OPENING: i64 = 1_000;
/// Accounts that one transaction opens.
const AT_ONCE: u64 = 100;
/// Pause between lines of progress. For each line all money is counted.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Move money between accounts, and check the sum meanwhile
///
/// Opens accounts if there are none, moves random amounts between random accounts, and once a second sums up
/// all accounts in a snapshot: the sum must never change. Several processes can do this on one database at
/// the same time; kill some of them to test recovery. If the accounts have an index by balance, all of them
/// must be found there, too, with the same sum.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool db bank bank.far
  farpool db bank bank.far --accounts 10000 --threads 2 --seconds 30
  farpool db bank bank.far --by-balance")]
pub struct BankArgs {
    #[command(flatten)]
    at: DatabaseAt,

    #[command(flatten)]
    beginning: Beginning,

    /// Number of accounts to open, if there are none yet
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(2..=10_000_000))]
    accounts: u64,

    /// Threads that move money
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=63))]
    threads: u8,

    /// Create a secondary index of the accounts by their balance, unless they have it: every transfer changes
    /// two entries of it
    #[arg(long)]
    by_balance: bool,

    /// How long to run, in seconds
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u64,
}

/// What an account holds.
#[derive(Clone, Serialize, Deserialize)]
struct Account {
    cents: i64,
}

/// How many accounts there are, in a table of one row.
#[derive(Serialize, Deserialize)]
struct Bank {
    accounts: u64,
}

/// Accounts by their numbers, and by their cents if there is such an index.
struct Accounts {
    table: Table<u64, Account>,
    by_balance: Index<Account, i64>,
}

impl Accounts {
    fn open(client: &Client) -> Result<Accounts, TxError> {
        let table: Table<u64, Account> = client.open_table("accounts")?;
        let by_balance = table.declare("by_balance", |account: &Account| Some(account.cents));
        Ok(Accounts { table, by_balance })
    }

    /// How many there are in the index by balance, and their cents. `None`: there is no such index.
    async fn sum_by_balance(&self, tx: &Tx<'_>) -> Result<Option<(u64, i64)>, TxError> {
        let (mut rows, mut count, mut sum) = (tx.scan_by(&self.table, &self.by_balance, ..), 0, 0);
        loop {
            match rows.next().await {
                Ok(Some((cents, _number, _account))) => (count, sum) = (count + 1, sum + cents),
                Ok(None) => return Ok(Some((count, sum))),
                Err(TxError::NoSuchIndex(_) | TxError::IndexNotReady(_)) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Runs, and prints how many transfers were made.
pub fn run(args: BankArgs) -> Result<()> {
    let database = args.at.open_to_begin(&args.beginning)?;
    let client = database.client()?;
    let accounts = open_bank(&client, args.accounts)?;
    if args.by_balance {
        let Accounts { table, by_balance } = Accounts::open(&client)?;
        client.open_or_create_index(&table, &by_balance)?;
    }
    let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    let started = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads)
            .map(|seed| {
                let (database, stop, moved) = (&database, &stop, &moved);
                scope.spawn(move || move_money(database, accounts, u64::from(seed) + 1, stop, moved))
            })
            .collect();
        let counted =
            count_money(&client, accounts, started, Duration::from_secs(args.seconds), &moved, || {
                threads.iter().any(|thread| thread.is_finished())
            });
        stop.store(true, Ordering::Relaxed); // carries no data
        for thread in threads {
            thread.join().expect("a thread that moves money does not panic")?;
        }
        counted
    })?;
    let (seconds, transfers) = (started.elapsed().as_secs_f64(), moved.into_inner());
    tell(format!("{transfers} transfers in {seconds:.1} s: {:.0} per second", transfers as f64 / seconds))
}

/// The number of accounts; opens them if there are none.
fn open_bank(client: &Client, wanted: u64) -> Result<u64> {
    let bank: Table<u64, Bank> = match client.create_table("bank", &TableOptions::rows(1)) {
        Err(TxError::TableExists(_)) => client.open_table("bank")?,
        made => made?,
    };
    match client.create_table::<u64, Account>("accounts", &TableOptions::rows(wanted * 2).row_bytes(16)) {
        Ok(_) | Err(TxError::TableExists(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let accounts = Accounts::open(client)?.table;
    if let Some(found) = client.transact(async |tx| tx.get(&bank, 0).await)? {
        return Ok(found.accounts);
    }
    for first in (0..wanted).step_by(AT_ONCE as usize) {
        client.transact(async |tx| {
            for number in first..(first + AT_ONCE).min(wanted) {
                // Another process may be opening them as well.
                if tx.get(&accounts, number).await?.is_none() {
                    tx.insert(&accounts, number, Account { cents: OPENING }).await?;
                }
            }
            Ok(())
        })?;
    }
    client.transact(async |tx| match tx.get(&bank, 0).await? {
        Some(_) => Ok(()),
        None => tx.insert(&bank, 0, Bank { accounts: wanted }).await,
    })?;
    say(format!("opened {wanted} accounts"));
    let found = client.transact(async |tx| tx.get(&bank, 0).await)?;
    Ok(found.context("the number of accounts is missing in the database")?.accounts)
}

fn move_money(
    database: &Database,
    count: u64,
    seed: u64,
    stop: &AtomicBool,
    moved: &AtomicU64,
) -> Result<()> {
    let client = database.client()?;
    let accounts = Accounts::open(&client)?.table;
    let mut random = (u64::from(std::process::id()) << 8 | seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut below = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) % bound
    };
    // Relaxed, both: a stop flag and a counter; they guard no data.
    while !stop.load(Ordering::Relaxed) {
        let (from, to) = (below(count), below(count));
        let cents = below(100) as i64 + 1;
        if from == to {
            continue;
        }
        let done = client.transact(async |tx| transfer(tx, &accounts, from, to, cents).await);
        match done {
            Ok(()) => moved.fetch_add(1, Ordering::Relaxed),
            Err(TxError::RolledBack(_)) => continue, // not enough money in the account
            Err(error) => return Err(error.into()),
        };
    }
    Ok(())
}

async fn transfer(
    tx: &mut Tx<'_>,
    accounts: &Table<u64, Account>,
    from: u64,
    to: u64,
    cents: i64,
) -> Result<(), TxError> {
    let closed = || TxError::roll_back("there is no such account");
    let mut payer = tx.get(accounts, from).await?.ok_or_else(closed)?;
    let mut payee = tx.get(accounts, to).await?.ok_or_else(closed)?;
    if payer.cents < cents {
        return Err(TxError::roll_back("there is not enough money"));
    }
    payer.cents -= cents;
    payee.cents += cents;
    tx.update(accounts, from, payer).await?;
    tx.update(accounts, to, payee).await
}

/// Sums up all accounts in a snapshot, repeatedly, and checks the sum.
fn count_money(
    client: &Client,
    count: u64,
    started: Instant,
    long: Duration,
    moved: &AtomicU64,
    has_failed: impl Fn() -> bool,
) -> Result<()> {
    let accounts = Accounts::open(client)?;
    let mut before = 0;
    loop {
        let counted = client.transact(async |tx| {
            let mut sum = 0;
            for number in 0..count {
                sum += tx.get(&accounts.table, number).await?.map_or(0, |account| account.cents);
            }
            Ok((sum, accounts.sum_by_balance(tx).await?))
        });
        let (sum, by_balance) = counted?;
        let wanted = OPENING * count as i64;
        ensure!(sum == wanted, "the sum is {sum} cents instead of {wanted}: money was lost or created");
        if let Some((found, sum)) = by_balance {
            ensure!(
                (found, sum) == (count, wanted),
                "the index by balance has {found} accounts instead of {count}, and {sum} cents"
            );
        }
        let also = if by_balance.is_some() { ", also by balance" } else { "" };
        let now = moved.load(Ordering::Relaxed);
        say(format!(
            "{:>4.0} s  {:>8} transfers  {wanted} cents{also}",
            started.elapsed().as_secs_f64(),
            now - before
        ));
        before = now;
        if started.elapsed() >= long || has_failed() {
            return Ok(());
        }
        std::thread::sleep(REPORT_EVERY.min(long.saturating_sub(started.elapsed())));
    }
}
