//! New-orders of ten lines, after TPC-C's transaction of that name: what it reads and writes, in rows of 64
//! bytes at most.

use std::cell::Cell;

use anyhow::{Result, ensure};
use farpool_namdb::{Client, Session, Table, TableOptions, Tx, TxError};
use futures_util::future::{join, join_all, join3, join4};

use super::run::row;
use crate::kv::{Chooser, KvMix, KvOptions};

/// Lines of an order.
const LINES: usize = 10;
const WAREHOUSES: u64 = 10;
const DISTRICTS: u64 = 10 * WAREHOUSES;
/// Goods in stock, if there are as many items.
const STOCK: u64 = 100_000;
/// Orders and lines that there is room for at first; these tables grow.
const ROOM: u64 = 10_000;
/// Rows that a transaction inserts before the measurement.
const AT_ONCE: u64 = 500;

/// The tables of orders, as a thread has opened them. Items and customers are the measurement's rows.
pub struct Orders {
    items: Table<u64, [u64; 8]>,
    warehouses: Table<u64, [u64; 8]>,
    /// The number of each district's next order.
    districts: Table<u64, u64>,
    stock: Table<u64, [u64; 8]>,
    orders: Table<(u64, u64), [u64; 4]>,
    new_orders: Table<(u64, u64), u64>,
    lines: Table<(u64, u64, u64), [u64; 4]>,
}

/// Creates and fills the tables, if the measurement is about orders.
pub fn create(client: &Client, options: &KvOptions) -> Result<()> {
    let rows = |rows: u64| TableOptions::rows(if options.mix == KvMix::NewOrder { rows } else { 1 });
    let warehouses: Table<u64, [u64; 8]> = client.create_table("warehouses", &rows(WAREHOUSES))?;
    let districts: Table<u64, u64> = client.create_table("districts", &rows(DISTRICTS).row_bytes(16))?;
    let stock: Table<u64, [u64; 8]> = client.create_table("stock", &rows(STOCK))?;
    client.create_table::<(u64, u64), [u64; 4]>("orders", &rows(ROOM).row_bytes(40))?;
    client.create_table::<(u64, u64), u64>("new-orders", &rows(ROOM).row_bytes(16))?;
    client.create_table::<(u64, u64, u64), [u64; 4]>("lines", &rows(ROOM).row_bytes(40))?;
    if options.mix != KvMix::NewOrder {
        return Ok(());
    }
    client.transact(async |tx| {
        tx.insert_many(&warehouses, (0..WAREHOUSES).map(|key| (key, row(key, 0)))).await?;
        tx.insert_many(&districts, (0..DISTRICTS).map(|key| (key, 0))).await
    })?;
    for first in (0..STOCK).step_by(AT_ONCE as usize) {
        let some = (first..first + AT_ONCE).map(|key| (key, row(key, 100)));
        client.transact(async |tx| tx.insert_many(&stock, some.clone()).await)?;
    }
    Ok(())
}

impl Orders {
    /// Opens the tables.
    pub fn open(client: &Client) -> Result<Orders> {
        Ok(Orders {
            items: client.open_table("rows")?,
            warehouses: client.open_table("warehouses")?,
            districts: client.open_table("districts")?,
            stock: client.open_table("stock")?,
            orders: client.open_table("orders")?,
            new_orders: client.open_table("new-orders")?,
            lines: client.open_table("lines")?,
        })
    }

    /// Places an order for items, of a customer, in a district.
    pub async fn place(
        &self,
        session: &mut Session<'_>,
        chooser: &mut Chooser,
        tries: &Cell<u64>,
    ) -> Result<()> {
        let [customer, items @ ..] = chooser.choose::<{ 1 + LINES }>();
        let district = chooser.random().below(DISTRICTS);
        let found = session.transact(async |tx| {
            tries.set(tries.get() + 1);
            self.try_to_place(tx, district, customer, items).await
        });
        ensure!(found.await?, "a row that an order needs is missing");
        Ok(())
    }

    /// False: a row is missing.
    async fn try_to_place(
        &self,
        tx: &mut Tx<'_>,
        district: u64,
        customer: u64,
        items: [u64; LINES],
    ) -> Result<bool, TxError> {
        let (warehouse, next, buyer, prices) = join4(
            tx.get(&self.warehouses, district % WAREHOUSES),
            tx.read_modify_write(&self.districts, district, |next| next + 1),
            tx.get(&self.items, customer),
            tx.get_many(&self.items, items),
        )
        .await;
        let (Some(_), Some(next), Some(_), prices) = (warehouse?, next?, buyer?, prices?) else {
            return Ok(false);
        };
        let order = (district, next - 1);
        let take = async |item: u64| {
            let less = |[good, amount, others @ ..]: [u64; 8]| {
                let left = if amount < 10 { amount + 91 } else { amount - 1 };
                let [a, b, c, d, e, f] = others;
                [good, left, a + 1, b, c, d, e, f]
            };
            tx.read_modify_write(&self.stock, item % STOCK, less).await
        };
        let lines =
            (0..).zip(items).map(|(line, item)| ((order.0, order.1, line), [item, 1, district, line]));
        let (stock, written) = join(join_all(items.map(take)), async {
            let (order, new, lines) = join3(
                tx.insert(&self.orders, order, [customer, LINES as u64, 0, 0]),
                tx.insert(&self.new_orders, order, 0),
                tx.insert_many(&self.lines, lines),
            )
            .await;
            order.and(new).and(lines)
        })
        .await;
        written?;
        let stock: Vec<_> = stock.into_iter().collect::<Result<_, _>>()?;
        Ok(prices.iter().chain(&stock).all(Option::is_some))
    }
}

/// Checks that there are so many orders, each with all of its lines.
pub fn check(client: &Client, committed: u64) -> Result<()> {
    let tables = Orders::open(client)?;
    let (count, missing) = client.transact(async |tx| {
        let (mut count, mut missing) = (0, None);
        for district in 0..DISTRICTS {
            let next = tx.get(&tables.districts, district).await?.unwrap_or_default();
            for order in 0..next {
                let lines = tx.get_many(&tables.lines, (0..LINES as u64).map(|line| (district, order, line)));
                let (lines, whole) = join(lines, tx.get(&tables.orders, (district, order))).await;
                if whole?.is_none() || lines?.iter().any(Option::is_none) {
                    missing = missing.or(Some((district, order)));
                }
            }
            count += next;
        }
        Ok::<_, TxError>((count, missing))
    })?;
    ensure!(missing.is_none(), "order {missing:?}, or one of its lines, is missing");
    ensure!(count == committed, "{committed} transactions left {count} orders");
    Ok(())
}
