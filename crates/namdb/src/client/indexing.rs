//! Creating secondary indexes while their table is in use, and removing their entries that nobody needs.

use std::cell::Cell;
use std::rc::Rc;

use farpool_txn::horizon::horizon;
use farpool_txn::{Cut, SessionState};
use serde::de::DeserializeOwned;

use super::core::ClientCore;
use crate::catalog::{self, NewIndex, ToDrop};
use crate::environment::Environment;
use crate::error::TxError;
use crate::key::{Key, OwnedKey};
use crate::rules::MemberRules;
use crate::table::{Index, Known, Table, TableCore};
use crate::transacting::Tx;

/// Most steps that a client takes at a time to remove entries.
const MOST_STEPS: u32 = 4;
/// A client that has not committed for so many pauses cannot go on with what it has seen before: that is too
/// old. So it waits for the horizon once in a while, and takes more steps then.
const RARELY: u32 = 100;
const PAUSES_BETWEEN_WAITS: u32 = 10_000;
/// How many pauses it waits in all, at most: longer than an idle collector pauses.
const MOST_WAITS: u32 = 100;
const MOST_STEPS_WITH_WAITS: u32 = 32;

impl<E: Environment + 'static> ClientCore<E> {
    /// Creates an index that was declared, and enters all rows of its table, while others may use the table.
    /// `progress` is told how many of the table's places were looked at, and how many there are. If the
    /// client dies meanwhile, another one that creates the index goes on.
    ///
    /// # Errors
    /// [`TxError::IndexExists`]; [`TxError::OtherShape`] if there is an index of that name with other keys,
    /// or if one of the two is unique and the other is not; [`TxError::OldTransactions`];
    /// [`TxError::DuplicateIn`] if it is to be unique, and two rows have the same key there;
    /// [`TxError::IndexKeyTooLong`]; or when there is no room for it.
    pub async fn create_index<K: Key + ?Sized, V: DeserializeOwned, I: OwnedKey>(
        &self,
        session: &mut SessionState,
        table: &Table<K, V>,
        index: &Index<V, I>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), TxError> {
        let declared = index.declared();
        let new = NewIndex {
            table: (table.name(), table.first_record()),
            name: declared.name(),
            key_type: declared.key_type(),
            key_bytes: declared.wanted_bytes(),
            is_unique: declared.is_unique(),
        };
        catalog::create_index(self.member(), self.endpoint(), &new).await?;
        let find =
            async |tx: &mut Tx<'_, E::Rules>| Ok((tx.known_index(table, declared).await?, tx.cut().clone()));
        let (Known { number, .. }, since) = self.transact_up_to_date(session, &find).await?;
        if E::Rules::waits_for_old_transactions() {
            self.wait_for_horizon(&since, declared.name()).await?;
        }
        // From here on every transaction has the index. The next snapshot has what all others have written:
        // those transactions have ended, but perhaps they are not published yet.
        let mut next = Some(0);
        self.worker().catch_up_with_ended(session).await?;
        while let Some(first) = next {
            progress(first, table.records().records());
            let fill = async |tx: &mut Tx<'_, E::Rules>| {
                tx.fill_index(table, (number, declared.name()), first).await
            };
            next = match self.transact(session, &fill).await {
                // It never gets ready, unless another client finds other rows.
                Err(
                    error @ (TxError::DuplicateIn { .. }
                    | TxError::IndexKeyTooLong { .. }
                    | TxError::WrongType(_)),
                ) => {
                    let table = (table.name(), table.first_record());
                    let dropped = ToDrop::Unready(number, declared.name());
                    let dropped = catalog::drop_index(self.member(), self.endpoint(), table, dropped).await;
                    return match dropped {
                        Ok(()) | Err(TxError::NoSuchIndex(_)) => Err(error),
                        failed => failed,
                    };
                }
                filled => filled?,
            };
        }
        let records = table.records().records();
        progress(records, records);
        let (table, index) = ((table.name(), table.first_record()), (number, declared.name()));
        catalog::mark_index_ready(self.member(), self.endpoint(), table, index).await?;
        Ok(self.worker().catch_up(session).await?)
    }

    /// Creates an index, unless it exists.
    ///
    /// # Errors
    /// As [`create_index`](Self::create_index).
    pub async fn open_or_create_index<K: Key + ?Sized, V: DeserializeOwned, I: OwnedKey>(
        &self,
        session: &mut SessionState,
        table: &Table<K, V>,
        index: &Index<V, I>,
    ) -> Result<(), TxError> {
        match self.create_index(session, table, index, |_, _| ()).await {
            Err(TxError::IndexExists(_)) => Ok(self.worker().catch_up(session).await?),
            created => created,
        }
    }

    /// Drops an index: transactions that begin from now on do not have it.
    ///
    /// # Errors
    /// [`TxError::NoSuchIndex`].
    pub async fn drop_index<K: ?Sized, V>(&self, table: &Table<K, V>, index: &str) -> Result<(), TxError> {
        let table = (table.name(), table.first_record());
        catalog::drop_index(self.member(), self.endpoint(), table, ToDrop::Named(index)).await
    }

    /// Waits until all open transactions have begun from this cut or a later one.
    async fn wait_for_horizon(&self, since: &Cut, index: &str) -> Result<(), TxError> {
        let (member, timing) = (self.member(), self.member().timing());
        let give_up_at = self.endpoint().now_ns() + timing.catalog_timeout.as_nanos() as u64;
        loop {
            let found = horizon(self.worker().memory(), &member.at().horizon()).await;
            if found.map_err(TxError::Memory)?.is_some_and(|horizon| horizon.reaches(since)) {
                return Ok(());
            }
            member.check().map_err(TxError::Ended)?;
            if self.endpoint().now_ns() > give_up_at {
                return Err(TxError::OldTransactions(index.to_owned()));
            }
            self.endpoint().sleep(timing.catalog_pause).await;
        }
    }

    /// After a commit: removes entries that nobody needs from the indexes of the tables that were written to,
    /// now and then.
    pub(super) async fn remove_stale(&self, mut tables: Vec<Rc<TableCore>>) {
        if tables.is_empty() {
            return;
        }
        let (now_ns, pause) = (self.endpoint().now_ns(), self.member().timing().remove_pause);
        let later = |pauses: u32| now_ns + (pauses * pause).as_nanos() as u64;
        let is_rare = self.removal.rare_from_ns.replace(later(RARELY)) < now_ns;
        tables.retain(|table| table.keyed().has_stale());
        if tables.is_empty() || now_ns < self.removal.next_at_ns.get() {
            return;
        }
        self.removal.next_at_ns.set(later(1));
        let (steps, waits) = match is_rare && now_ns >= self.removal.waits_at_ns.get() {
            true => {
                self.removal.waits_at_ns.set(later(PAUSES_BETWEEN_WAITS));
                (MOST_STEPS_WITH_WAITS, MOST_WAITS)
            }
            false => (MOST_STEPS, 0),
        };
        for table in tables {
            self.remove_stale_of(&table, steps, waits).await;
        }
    }

    async fn remove_stale_of(&self, table: &TableCore, mut steps: u32, mut waits: u32) {
        let mut has_moved = false;
        while steps > 0 && table.keyed().has_stale() {
            let remove = async |tx: &mut Tx<'_, E::Rules>| tx.remove_stale(table).await;
            match self.try_once(&mut SessionState::new(), &remove, Vec::new()).await {
                Ok((1.., _)) => steps -= 1,
                // Nothing to do before the horizon has moved on.
                Ok((0, _)) if waits > 0 && table.keyed().stale_entries() > 0 => {
                    // Perhaps nobody else moves it.
                    if !has_moved && self.worker().commit_nothing().await.is_err() {
                        return;
                    }
                    (has_moved, waits) = (true, waits - 1);
                    self.endpoint().sleep(self.member().timing().remove_pause).await;
                }
                // Or it failed: then the client's next transaction finds out why.
                _ => return,
            }
        }
    }
}

/// When a client removes entries of secondary indexes.
#[derive(Default)]
pub(super) struct Removal {
    /// Not before this.
    next_at_ns: Cell<u64>,
    /// If it commits after this, it commits rarely.
    rare_from_ns: Cell<u64>,
    /// Until then it does not wait to do so.
    waits_at_ns: Cell<u64>,
}
