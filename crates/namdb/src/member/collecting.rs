//! The collector among a member's parts: it says which versions no snapshot needs, and moves versions that
//! some snapshot may need out of rings that are nearly full.

use farpool_txn::horizon::collect;
use farpool_txn::membership::{Duty, Role, fill_role};
use farpool_txn::{BeginError, Cut, Memory, ReadError, Session, Table, Worker};

use super::{BEATS, MemberCore};
use crate::catalog::Catalog;
use crate::environment::{Environment, News};
use crate::error::DatabaseError;
use crate::rules::MemberRules;

impl<E: Environment> MemberCore<E> {
    /// Collects while no other member does.
    pub(super) async fn collect_if_nobody_does(
        &self,
        memory: Memory,
        duty: &Duty,
    ) -> Result<(), DatabaseError> {
        // It commits nothing. Nor does it announce its snapshots: while it reads one, no horizon goes on.
        let worker = Worker::sharing(memory, self.at().oracle(), self.slot.clone());
        let worker = worker.expect("the oracle has a slot for it");
        let (memory, timing) = (worker.memory(), self.timing());
        let (at, oracle, horizon) = (self.at().members(), self.at().oracle(), self.at().horizon());
        let work = async || {
            let catalog = Catalog::new(self.at());
            let mut known = Known { member: self, worker: &worker, catalog, changes: None };
            let tables = async |cut: &Cut| known.tables(cut).await;
            let is_over = duty.rounds(|| self.is_over());
            collect::<E::Rules, _>(memory, &oracle, &horizon, tables, timing.collect_pause, is_over).await
        };
        let role = (Role::Collector, self.seat.claim);
        let collected = fill_role(memory, &at, role, timing.role_pause, || self.is_over(), work);
        duty.does(memory, self.patience / BEATS, collected).await
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
    /// The tables that a cut has, or a later one has. `None`: the same as the last time.
    async fn tables(&mut self, cut: &Cut) -> Result<Option<Vec<Table>>, DatabaseError> {
        if self.changes == Some(self.catalog.changes(cut)) || !E::Rules::collects_tables() {
            return Ok(None);
        }
        // From that cut on, nothing is moved in a table that it does not have: another table may have its
        // memory.
        let mut session = Session::behind(cut);
        let transaction = self.worker.begin(&mut session).await.map_err(|error| match error {
            BeginError::Memory(error) => DatabaseError::Memory(error),
            error => DatabaseError::Begin(error),
        })?;
        let mut tables = self.catalog.own_tables().to_vec();
        let rows = match self.catalog.rows(&transaction).await {
            Ok(rows) => rows,
            Err(ReadError::Memory(error)) => return Err(error.into()),
            Err(error) => {
                // Another collector would fare no better. Nothing is moved in tables that may not exist.
                self.member.environment.tell(News::CatalogUnreadable(&error));
                Vec::new()
            }
        };
        // Whoever opens a table complains of a row that makes no sense.
        tables.extend(rows.iter().filter_map(|row| row.table(self.member.at())));
        self.changes = Some(self.catalog.changes(transaction.cut()));
        Ok(Some(tables))
    }
}
