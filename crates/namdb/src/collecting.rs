//! The collector among the compute servers: it says what no snapshot needs any more, and moves versions that
//! some may need out of rings that are nearly full.

use std::time::Duration;

use farpool_fabric::block_on;
use farpool_txn::horizon::collect;
use farpool_txn::membership::{Duty, Role, fill_role};
use farpool_txn::{BeginError, Cut, ReadError, Session, Shipped, Table, Worker};

use crate::catalog::Catalog;
use crate::database::Shared;
use crate::error::DatabaseError;
use crate::service::{ROLE_PAUSE, show_pause};

/// Between two looks at what no snapshot needs any more: a row whose ring is full waits so long, and a few
/// READs of all words are cheap.
const COLLECT_PAUSE: Duration = Duration::from_micros(300);

/// Collects while nobody else does.
pub(crate) fn collect_if_nobody_does(shared: &Shared, duty: &Duty) -> Result<(), DatabaseError> {
    // It commits nothing. Nor does it announce its snapshots: while it reads one, no horizon goes on.
    let worker = Worker::sharing(shared.memory()?, shared.at().oracle(), shared.slot.clone())
        .expect("the oracle has a slot for it");
    let memory = worker.memory();
    let (at, oracle, horizon) = (shared.at().members(), shared.at().oracle(), shared.at().horizon());
    let work = async || {
        let mut known = Known { shared, worker: &worker, catalog: Catalog::new(shared), changes: None };
        let tables = async |cut: &Cut| known.tables(cut).await;
        collect::<Shipped, _>(
            memory,
            &oracle,
            &horizon,
            tables,
            COLLECT_PAUSE,
            duty.rounds(|| shared.is_over()),
        )
        .await
    };
    let role = (Role::Collector, shared.seat.claim);
    let collected = fill_role(memory, &at, role, ROLE_PAUSE, || shared.is_over(), work);
    block_on(memory.endpoint(), duty.does(memory, show_pause(shared), collected))
}

/// What the collector knows of the tables.
struct Known<'a> {
    shared: &'a Shared,
    worker: &'a Worker<Shipped>,
    catalog: Catalog,
    /// How often tables were made and dropped by then.
    changes: Option<u64>,
}

impl Known<'_> {
    /// The tables that a cut has, or a later one has; `None`: the same as the last time.
    async fn tables(&mut self, cut: &Cut) -> Result<Option<Vec<Table>>, DatabaseError> {
        if self.changes == Some(self.catalog.changes(cut)) {
            return Ok(None);
        }
        // Behind that cut nothing is moved in a table that it does not have: its memory may be another's.
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
                // The others would fare no better. Nothing is moved in tables of which nobody knows whether
                // they are there.
                tracing::error!(%error, "the catalog cannot be read: tables have no overflow regions for now");
                Vec::new()
            }
        };
        // Of a row that makes no sense, whoever opens the table complains.
        tables.extend(rows.iter().filter_map(|row| row.table(self.shared)));
        self.changes = Some(self.catalog.changes(transaction.cut()));
        Ok(Some(tables))
    }
}
