//! A member whose connections break goes on, and does nothing twice.

use std::sync::mpsc;

use farpool_fabric::TransportChoice;

use super::proxy::Proxy;
use super::rig::{Onlooker, Rig, open};
use crate::{Table, TableOptions};

/// Transactions, during each of which the connections break.
const TRANSACTIONS: u64 = 60;
const ROWS: u64 = 4;

#[test]
fn a_member_whose_connections_break_again_and_again_commits_each_transaction_once() {
    let rig = Rig::new();
    let maker = rig.create(TransportChoice::Tcp);
    let onlooker = Onlooker::of(&rig.file(), TransportChoice::Tcp);
    let proxies = onlooker.nodes().map(|node| {
        let address = onlooker.address(node);
        (address.node, Proxy::before(address.tcp.parse().unwrap()))
    });
    let file = rig.file_with(|address| {
        let proxy = proxies.iter().find(|(node, _)| *node == address.node);
        address.tcp = proxy.expect("there is one for each").1.address().to_string();
    });
    let of = open(&file, TransportChoice::Tcp);
    // From here on that member has all roles.
    drop(maker);
    let client = of.client().unwrap();
    let options = TableOptions::rows(ROWS);
    let rows: Table<u64, u64> = client.create_table("rows", &options).unwrap();
    let insert_all = async |tx: &mut crate::Tx<'_>| {
        for row in 0..ROWS {
            tx.insert(&rows, row, 0).await?;
        }
        Ok(())
    };
    client.transact(insert_all).unwrap();
    let (begins, begun) = mpsc::channel();
    let broken = std::thread::scope(|scope| {
        // The connections break at any point of a transaction.
        let proxies = &proxies;
        let breaking = scope.spawn(move || {
            let breaks = |()| proxies.iter().map(|(_, proxy)| proxy.break_all()).sum::<usize>();
            begun.iter().map(breaks).sum::<usize>()
        });
        for _ in 0..TRANSACTIONS {
            begins.send(()).unwrap();
            let add_one = async |tx: &mut crate::Tx<'_>| {
                for row in 0..ROWS {
                    let value = tx.get(&rows, row).await?.expect("it was inserted");
                    tx.update(&rows, row, value + 1).await?;
                }
                Ok(())
            };
            client.transact(add_one).unwrap();
        }
        drop(begins);
        breaking.join().unwrap()
    });
    assert!(broken > TRANSACTIONS as usize, "{broken} connections were broken");
    let read_all = async |tx: &mut crate::Tx<'_>| {
        let mut values = Vec::new();
        for row in 0..ROWS {
            values.push(tx.get(&rows, row).await?.expect("it was inserted"));
        }
        Ok(values)
    };
    assert_eq!(client.transact(read_all).unwrap(), [TRANSACTIONS; ROWS as usize]);
    of.check().unwrap();
}
