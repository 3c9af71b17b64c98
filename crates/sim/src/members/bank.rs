//! A bank: transactions by key, as programs write them, which a client tries again after conflicts. The sum
//! of the money never changes, and each acknowledged transfer happened once.

use std::cell::Cell;
use std::time::Duration;

use farpool_namdb::{Table, TableOptions, Tx, TxError};
use farpool_txn::SessionState;

use super::Run;
use super::broken::Engine;
use super::client::Client;
use super::tables::ignore_expected;

const ACCOUNTS: u64 = 4;
/// The row that counts transfers.
const COUNTER: u64 = ACCOUNTS;
const OPENING_BALANCE: u64 = 100;
/// The longest pause before a transaction.
const MOST_PAUSE_NS: u64 = 100_000;

/// What sessions were told of their transfers.
#[derive(Default)]
pub(super) struct Bank {
    /// Transfers that have been started and may have happened.
    begun: Cell<u64>,
    acknowledged: Cell<u64>,
}

/// Whether all tries of a client failed because of conflicts, or for lack of room for versions: then nothing
/// was committed.
pub(super) fn gave_up(error: &TxError) -> bool {
    matches!(error, TxError::Conflict | TxError::NoRoomForVersions)
}

/// A session of the bank.
pub(super) struct Banker<'a> {
    run: &'a Run,
    client: &'a Client,
    accounts: Table<u64, u64>,
    session: SessionState,
}

impl<'a> Banker<'a> {
    /// Opens the bank's table. Creates the table and fills it if necessary.
    pub(super) async fn open(run: &'a Run, client: &'a Client) -> Result<Self, TxError> {
        let options = TableOptions::rows(ACCOUNTS + 1).row_bytes(16);
        let mut session = SessionState::new();
        let accounts: Table<u64, u64> = client.open_or_create_table(&mut session, "bank", &options).await?;
        run.observer.lock().watch_table(&accounts.records());
        let found = async |tx: &mut Tx<'_, Engine>| {
            if tx.get(&accounts, COUNTER).await?.is_none() {
                for account in 0..ACCOUNTS {
                    tx.insert(&accounts, account, OPENING_BALANCE).await?;
                }
                tx.insert(&accounts, COUNTER, 0).await?;
            }
            Ok(())
        };
        loop {
            match client.transact(&mut session, &found).await {
                Err(error) if gave_up(&error) => {}
                founded => break founded?,
            }
        }
        Ok(Banker { run, client, accounts, session })
    }

    /// Runs rounds, each with a transfer or a look at all accounts.
    pub(super) async fn live(mut self, rounds: u64) -> Result<(), TxError> {
        let mut random = self.run.ledger.notes.random();
        for _ in 0..rounds {
            self.run.world.sleep(Duration::from_nanos(random.below(MOST_PAUSE_NS))).await;
            if self.client.member().has_ended() {
                break;
            }
            let done = if random.chance(300) {
                self.look().await.map(drop)
            } else {
                let from = random.below(ACCOUNTS);
                self.transfer(from, (from + 1 + random.below(ACCOUNTS - 1)) % ACCOUNTS, random.below(20))
                    .await
            };
            ignore_expected(done, gave_up)?;
        }
        Ok(())
    }

    /// Moves an amount, or the whole balance if that is less.
    async fn transfer(&mut self, from: u64, to: u64, amount: u64) -> Result<(), TxError> {
        let Banker { run, client, accounts, session } = self;
        let body = async |tx: &mut Tx<'_, Engine>| {
            let mut read = [0; 3];
            for (value, key) in read.iter_mut().zip([from, to, COUNTER]) {
                *value = tx.get(accounts, key).await?.ok_or_else(|| TxError::roll_back("no such account"))?;
            }
            let [paid, received, count] = read;
            let amount = amount.min(paid);
            tx.update(accounts, from, paid - amount).await?;
            tx.update(accounts, to, received + amount).await?;
            tx.update(accounts, COUNTER, count + 1).await
        };
        // Counted before it can happen, because the client may die in the middle of it.
        run.bank.begun.set(run.bank.begun.get() + 1);
        let done = client.transact(session, &body).await;
        match &done {
            Ok(()) => run.bank.acknowledged.set(run.bank.acknowledged.get() + 1),
            Err(error) if gave_up(error) => run.bank.begun.set(run.bank.begun.get() - 1),
            Err(TxError::RolledBack(why)) => run.ledger.notes.complain(format!("a transfer finds {why}")),
            Err(_) => {}
        }
        done
    }

    /// Checks the sum of all accounts in one snapshot. Returns how many transfers the snapshot has.
    async fn look(&mut self) -> Result<u64, TxError> {
        let accounts = &self.accounts;
        let body = async |tx: &mut Tx<'_, Engine>| {
            let (mut sum, mut count) = (0, 0);
            for key in 0..=COUNTER {
                let value = tx.get(accounts, key).await?.unwrap_or_default();
                if key == COUNTER { count = value } else { sum += value }
            }
            Ok((sum, count))
        };
        let (sum, count) = self.client.transact(&mut self.session, &body).await?;
        if sum != ACCOUNTS * OPENING_BALANCE {
            self.run.ledger.notes.complain(format!("the accounts add up to {sum}"));
        }
        Ok(count)
    }

    /// The auditor's check, after all transfers.
    pub(super) async fn audit(&mut self) -> Result<(), TxError> {
        let count = self.look().await?;
        let (acknowledged, begun) = (self.run.bank.acknowledged.get(), self.run.bank.begun.get());
        if !(acknowledged..=begun).contains(&count) {
            let what = format!("{count} transfers happened; {begun} were begun, {acknowledged} acknowledged");
            self.run.ledger.notes.complain(what);
        }
        Ok(())
    }
}
