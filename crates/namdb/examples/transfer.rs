//! A bank transfer: `farpool up & farpool db up bank.far & cargo run -p farpool-namdb --example transfer
//! bank.far`

use farpool_namdb::{Client, Database, Reach, Table, TableOptions, TxError};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Account {
    owner: String,
    cents: i64,
}

fn transfer(
    client: &Client,
    accounts: &Table<u64, Account>,
    from: u64,
    to: u64,
    cents: i64,
) -> Result<(), TxError> {
    client.transact(async |tx| {
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
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args_os().nth(1).ok_or("name the file of a database")?;
    let database = Database::open(file.as_ref(), &Reach::default())?;
    let client = database.client()?;
    let accounts = client.create_table("transfers", &TableOptions::rows(1_000))?;
    for (number, owner) in [(1, "Ada"), (2, "Grace")] {
        let account = Account { owner: owner.into(), cents: 5_000 };
        client.transact(async |tx| tx.insert(&accounts, number, &account).await)?;
    }
    transfer(&client, &accounts, 1, 2, 1_200)?;
    let grace = client.transact(async |tx| tx.get(&accounts, 2).await)?.ok_or("she has no account")?;
    println!("{} has {} cents", grace.owner, grace.cents);
    Ok(())
}
