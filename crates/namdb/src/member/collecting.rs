//! The collector among a member's parts: it publishes which versions no snapshot needs, and moves versions
//! that a snapshot may need out of rings that are nearly full.

use farpool_txn::horizon::collect;
use farpool_txn::membership::{Duty, Role, fill_role};
use farpool_txn::{BeginError, Cut, Memory, ReadError, SessionState, Table, Worker};

use super::{BEATS, MemberCore};
use crate::catalog::Catalog;
use crate::environment::{Environment, News};
use crate::error::DatabaseError;
use crate::rules::MemberRules;

impl<E: Environment> MemberCore<E> {
    /// Collects, while no other member does.
    pub(super) async fn collect_if_role_is_free(
        &self,
        memory: Memory,
        duty: &Duty,
    ) -> Result<(), DatabaseError> {
        // It commits nothing and announces no snapshot: the horizon stands still while it reads one.
        let worker = Worker::sharing(memory, self.at().oracle(), self.slot.clone());
        let worker = worker.expect("the oracle has a slot for it");
        let (memory, timing) = (worker.memory(), self.timing());
        let (at, oracle, horizon) = (self.at().members(), self.at().oracle(), self.at().horizon());
        let work = async || {
            let catalog = Catalog::new(self.at());
            let mut known = Known { member: self, worker: &worker, catalog, changes: None };
            let tables = async |cut: &Cut| known.tables(cut).await;
            let has_ended = duty.rounds(|| self.has_ended());
            collect::<E::Rules, _>(memory, &oracle, &horizon, tables, timing.collect_pauses, has_ended).await
        };
        let role = (Role::Collector, self.seat.claim);
        let collected = fill_role(memory, &at, role, timing.role_pause, || self.has_ended(), work);
        duty.run(memory, self.patience / BEATS, collected).await
    }
}

/// What the collector knows of the tables.
struct Known<'a, E: Environment> {
    member: &'a MemberCore<E>,
    worker: &'a Worker<E::Rules>,
    catalog: Catalog,
    /// The version of the catalog that it has read.
    changes: Option<u64>,
}

impl<E: Environment> Known<'_, E> {
    /// The tables of this cut, or of a later one. `None`: the same as at the last call.
    async fn tables(&mut self, cut: &Cut) -> Result<Option<Vec<Table>>, DatabaseError> {
        if self.changes == Some(self.catalog.changes(cut)) || !E::Rules::collects_tables() {
            return Ok(None);
        }
        // From that cut on, versions are moved only in tables that the cut has: the memory of any other may
        // already belong to another table.
        let mut session = SessionState::behind(cut);
        let transaction = self.worker.begin(&mut session).await.map_err(|error| match error {
            BeginError::Memory(error) => DatabaseError::Memory(error),
            error => DatabaseError::Begin(error),
        })?;
        let mut tables = self.catalog.own_tables().to_vec();
        let rows = match self.catalog.rows(&transaction).await {
            Ok(rows) => rows,
            Err(ReadError::Memory(error)) => return Err(error.into()),
            Err(error) => {
                // Another collector could not read it either. Until the catalog changes, only the catalog's
                // own versions are moved.
                self.member.environment.report(News::CatalogUnreadable(&error));
                Vec::new()
            }
        };
        // A row that makes no sense is skipped: clients that open the table get the error.
        tables.extend(rows.iter().filter_map(|row| row.table(self.member.at())));
        self.changes = Some(self.catalog.changes(transaction.cut()));
        Ok(Some(tables))
    }
}
