//! A client without a thread: it runs transactions, and tries them again after conflicts.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::Endpoint;
use farpool_txn::recovery::{Fate, fate};
use farpool_txn::{CommitError, Fetched, SessionState, Worker};
use farpool_wire::Version;

use super::growing::Growing;
use super::indexing::Removal;
use crate::catalog::{self, Catalog, TableInfo, TableRow};
use crate::environment::Environment;
use crate::error::{DatabaseError, Ended, Stop, TxError, of_memory};
use crate::key::Key;
use crate::member::MemberCore;
use crate::member::living::IN_DOUBT;
use crate::table::{Table, TableCore, TableOptions};
use crate::transacting::{FullTable, Tx};
use crate::workers::ClientPlace;

/// How often opening or creating a table is tried: between two tries another client has created or dropped
/// it.
const OPEN_TRIES: u32 = 20;

/// A client of a member. All its futures run on one thread, with one endpoint.
pub struct ClientCore<E: Environment> {
    member: Arc<MemberCore<E>>,
    worker: Worker<E::Rules>,
    /// The place where it announces its snapshots. `None` once it has left.
    place: Option<ClientPlace>,
    /// How many transactions are open.
    open_count: Cell<u32>,
    catalog: Catalog,
    /// The state for random pauses: not secret, only different in each client.
    random: Cell<u64>,
    pub(super) removal: Removal,
}

/// Marks the client as busy until it is dropped: its snapshots stay protected.
pub struct BusyGuard<'a, E: Environment> {
    client: &'a ClientCore<E>,
}

/// Why one try of a transaction did not commit.
pub(super) enum Failed {
    Stop(Stop),
    /// A table was full; with the error that the caller gets if the table cannot grow.
    Full(FullTable, TxError),
    /// A table lies in regions that are not open.
    LacksRegions,
}

impl<S: Into<Stop>> From<S> for Failed {
    fn from(stop: S) -> Failed {
        Failed::Stop(stop.into())
    }
}

impl<E: Environment + 'static> ClientCore<E> {
    /// Another client of a member.
    ///
    /// # Errors
    /// When the member has ended, or has the most clients that it can; or when far memory does not answer.
    pub async fn join(member: Arc<MemberCore<E>>, endpoint: Endpoint) -> Result<Self, DatabaseError> {
        let fetched = member.fetched().cloned();
        Self::beginning_from(member, endpoint, fetched).await
    }

    /// A client whose transactions begin from the cuts that a fetcher has read, if there is one.
    pub(crate) async fn beginning_from(
        member: Arc<MemberCore<E>>,
        endpoint: Endpoint,
        fetched: Option<Arc<Fetched>>,
    ) -> Result<Self, DatabaseError> {
        let place = member.take_place()?;
        let memory = match member.memory(endpoint.clone()).await {
            Ok(memory) => memory,
            Err(error) => {
                place.free(); // nothing was announced
                return Err(member.find_cause(&endpoint, error).await);
            }
        };
        let worker = Worker::sharing(memory, member.at().oracle(), member.slot().clone());
        let worker = worker.expect("the oracle has a slot for each member");
        let worker = match fetched {
            Some(fetched) => worker.with_fetched(fetched),
            None => worker,
        };
        let worker = match member.announce_in_place(worker, place.number()).await {
            Ok(worker) => worker,
            // Its announcement may have landed, or may still land: the place is kept.
            Err(error) => return Err(member.end_after(error.into())),
        };
        // The client counts as idle at once: one that never begins anything must not pin versions.
        place.rest();
        let catalog = Catalog::new(member.at());
        let random = Cell::new(member.environment().random() | 1);
        let (place, open_count, removal) = (Some(place), Cell::new(0), Removal::default());
        Ok(ClientCore { member, worker, place, open_count, catalog, random, removal })
    }

    /// The member that the client belongs to.
    pub fn member(&self) -> &Arc<MemberCore<E>> {
        &self.member
    }

    pub(super) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The worker that runs its transactions. A caller that uses it itself first [marks](Self::mark_busy) the
    /// client as busy.
    pub fn worker(&self) -> &Worker<E::Rules> {
        &self.worker
    }

    /// The endpoint that has to be polled.
    pub fn endpoint(&self) -> &Endpoint {
        self.worker.memory().endpoint()
    }

    /// Runs a transaction, and tries it again after conflicts.
    ///
    /// # Errors
    /// What `body` returns, and then nothing of the transaction is left; or why it cannot be committed.
    pub async fn transact<T>(
        &self,
        session: &mut SessionState,
        body: &impl AsyncFn(&mut Tx<'_, E::Rules>) -> Result<T, TxError>,
    ) -> Result<T, TxError> {
        let mut busy = match self.mark_busy().await {
            Ok(busy) => Some(busy),
            Err(error) => return Err(self.find_cause(error).await),
        };
        let timing = self.member.timing();
        let (mut pause, mut last) = (timing.first_pause, TxError::Conflict);
        let mut growing = Growing::default();
        // The records that a dead member has locked are free a little after its heartbeat timeout.
        let patience_ns = (2 * self.member.patience()).as_nanos() as u64;
        let mut patient_until = self.endpoint().now_ns() + patience_ns;
        let mut tries = 0;
        loop {
            if pause == timing.longest_pause && !self.member.environment().nodes_answer() {
                // Other clients wait for a node that has stopped, and keep their locks until it goes on.
                patient_until = self.endpoint().now_ns() + patience_ns;
            }
            if tries >= timing.tries && self.endpoint().now_ns() > patient_until {
                break;
            }
            match self.try_once(session, body, growing.vain()).await {
                Ok((done, indexed)) => {
                    self.remove_stale(indexed).await;
                    return Ok(done);
                }
                Err(Failed::Stop(Stop::For(error))) => return Err(self.find_cause(error).await),
                Err(Failed::Stop(Stop::Again(error))) => last = error,
                Err(Failed::LacksRegions) => {
                    last = TxError::Damaged(
                        "a table lies in a region that the database does not have".to_owned(),
                    );
                    if let Err(error) = self.open_regions().await {
                        return Err(self.find_cause(error).await);
                    }
                }
                Err(Failed::Full(full, error)) => {
                    last = error;
                    match self.make_room(session, &full, &mut growing, &mut busy).await {
                        Ok(true) => {
                            (pause, tries) = (timing.first_pause, 0);
                            patient_until = self.endpoint().now_ns() + patience_ns;
                        }
                        Ok(false) => {}
                        // Such a try may take long.
                        Err(Stop::Again(error)) if self.endpoint().now_ns() > patient_until => {
                            return Err(error);
                        }
                        Err(Stop::Again(error)) => last = error,
                        Err(Stop::For(error)) => return Err(self.find_cause(error).await),
                    }
                }
            }
            self.endpoint().sleep(self.random_pause(pause)).await;
            pause = (pause * 2).min(timing.longest_pause);
            tries += 1;
        }
        Err(last)
    }

    /// Runs a transaction once. Returns also the tables with secondary indexes to which it has written.
    pub(super) async fn try_once<T>(
        &self,
        session: &mut SessionState,
        body: &impl AsyncFn(&mut Tx<'_, E::Rules>) -> Result<T, TxError>,
        vain: Vec<u64>,
    ) -> Result<(T, Vec<Rc<TableCore>>), Failed> {
        self.member.check().map_err(TxError::Ended)?;
        let transaction = self.worker.begin(session).await.map_err(TxError::from)?;
        let mut tx = Tx::new(transaction, &self.catalog, vain);
        let done = body(&mut tx).await;
        if tx.lacks_regions() {
            return Err(Failed::LacksRegions);
        }
        if let Some(full) = tx.take_full() {
            let error = done.err().unwrap_or_else(|| full.error());
            return Err(Failed::Full(full, error));
        }
        let indexed = tx.take_indexed();
        let (transaction, done) = match (tx.into_inner(), done) {
            (Some(transaction), done) => (transaction, done?),
            (None, done) => return Err(Stop::Again(done.err().unwrap_or(TxError::Conflict)).into()),
        };
        match transaction.commit().await {
            Ok(_) => Ok((done, indexed)),
            Err(CommitError::Conflict | CommitError::Busy) => Err(Stop::Again(TxError::Conflict).into()),
            Err(CommitError::LogFull) => Err(Stop::Again(TxError::NoRoomForVersions).into()),
            Err(CommitError::Unknown(version)) => Err(TxError::Unknown(version).into()),
            Err(CommitError::Nothing(error)) => Err(of_memory(error).into()),
            Err(error @ CommitError::TooLarge { .. }) => Err(TxError::TooLarge(error).into()),
            Err(CommitError::Stuck) => Err(TxError::Ended(Ended::Failed(IN_DOUBT.to_owned())).into()),
        }
    }

    /// Runs a transaction whose snapshot has every commit that any client was told of by now. A client may
    /// learn of a table from another process or thread, or from a `create_table` that finds the name taken.
    /// None of these shares this session, so by itself the session might begin from an older cut.
    pub(super) async fn transact_up_to_date<T>(
        &self,
        session: &mut SessionState,
        body: &impl AsyncFn(&mut Tx<'_, E::Rules>) -> Result<T, TxError>,
    ) -> Result<T, TxError> {
        if let Err(error) = self.worker.catch_up(session).await {
            return Err(self.find_cause(error.into()).await);
        }
        self.transact(session, body).await
    }

    /// Creates a table. Other clients can open it at once.
    ///
    /// # Errors
    /// When a table of that name exists, or there is no room for it; [`TxError::NoSuchTable`] or
    /// [`TxError::Dropped`] if another client has dropped it meanwhile.
    pub async fn create_table<K: Key + ?Sized, V>(
        &self,
        session: &mut SessionState,
        name: &str,
        options: &TableOptions,
    ) -> Result<Table<K, V>, TxError> {
        let key = (K::type_name(), K::BYTES.unwrap_or(options.key_bytes));
        let first_record = catalog::create(&self.member, self.endpoint(), name, key, options).await?;
        let (schema, row) = self.find_table(session, name).await?;
        // Others may have dropped it meanwhile, and made another one of that name.
        if row.first_record != first_record {
            return Err(TxError::Dropped(name.to_owned()));
        }
        Table::new(&self.member, name, row, schema)
    }

    /// Opens a table, or creates it if it does not exist.
    ///
    /// # Errors
    /// As [`open_table`](Self::open_table) and [`create_table`](Self::create_table).
    pub async fn open_or_create_table<K: Key + ?Sized, V>(
        &self,
        session: &mut SessionState,
        name: &str,
        options: &TableOptions,
    ) -> Result<Table<K, V>, TxError> {
        for _ in 0..OPEN_TRIES {
            match self.open_table(session, name).await {
                Err(TxError::NoSuchTable(_)) => {}
                opened => return opened,
            }
            match self.create_table(session, name, options).await {
                Err(TxError::TableExists(_) | TxError::NoSuchTable(_) | TxError::Dropped(_)) => {}
                created => return created,
            }
        }
        Err(TxError::CatalogBusy)
    }

    /// Opens a table. Finds each table that existed when this was called.
    ///
    /// # Errors
    /// When no table has that name, its keys are of another type, or far memory does not answer.
    pub async fn open_table<K: Key + ?Sized, V>(
        &self,
        session: &mut SessionState,
        name: &str,
    ) -> Result<Table<K, V>, TxError> {
        let (schema, row) = self.find_table(session, name).await?;
        Table::new(&self.member, name, row, schema)
    }

    /// Opens a table, whatever its keys are.
    ///
    /// # Errors
    /// As [`open_table`](Self::open_table).
    pub(crate) async fn open_any_table(
        &self,
        session: &mut SessionState,
        name: &str,
    ) -> Result<Table<(), ()>, TxError> {
        let (schema, row) = self.find_table(session, name).await?;
        Table::of_any_type(&self.member, name, row, schema)
    }

    /// The catalog's row of a table, and how often the catalog had changed in the snapshot that has it.
    async fn find_table(&self, session: &mut SessionState, name: &str) -> Result<(u64, TableRow), TxError> {
        let find = async |tx: &mut Tx<'_, E::Rules>| Ok((tx.schema(), tx.find_table(name).await?));
        let (schema, row) = self.transact_up_to_date(session, &find).await?;
        let row = row.ok_or_else(|| TxError::NoSuchTable(name.to_owned()))?;
        if !row.is_open(&self.member.regions(), self.worker.memory())
            && let Err(error) = self.open_regions().await
        {
            return Err(self.find_cause(error).await);
        }
        Ok((schema, row))
    }

    /// Opens the regions that the database has got by now.
    async fn open_regions(&self) -> Result<(), TxError> {
        Ok(self.member.open_later_regions(self.worker.memory()).await?)
    }

    /// Drops a table: transactions that begin from now on do not have it.
    ///
    /// # Errors
    /// When no table has that name.
    pub async fn drop_table(&self, name: &str) -> Result<(), TxError> {
        catalog::drop_table(&self.member, self.endpoint(), name).await
    }

    /// All tables, in the order of their names.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub async fn tables(&self, session: &mut SessionState) -> Result<Vec<TableInfo>, TxError> {
        self.transact_up_to_date(session, &async |tx: &mut Tx<'_, E::Rules>| tx.tables().await).await
    }

    /// The outcome of a commit, by this member or another one, that was [in doubt](TxError::Unknown).
    ///
    /// # Errors
    /// When far memory does not answer, or this member has ended.
    pub async fn outcome(&self, version: Version) -> Result<Fate, DatabaseError> {
        let (oracle, log) = (self.member.at().oracle(), self.member.at().log(version.slot()));
        match fate(self.worker.memory(), &oracle, &log, version).await {
            Ok(fate) => Ok(fate),
            Err(error) => Err(self.member.find_cause(self.endpoint(), error.into()).await),
        }
    }

    /// Called before a transaction: the client counts as busy until the returned guard is dropped.
    ///
    /// # Errors
    /// When the member has ended, or far memory does not answer.
    pub async fn mark_busy(&self) -> Result<BusyGuard<'_, E>, TxError> {
        let place = self.place.as_ref().expect("it is there until the client leaves");
        self.open_count.set(self.open_count.get() + 1);
        let busy = BusyGuard { client: self };
        place.begin(&self.worker, &self.member).await?;
        Ok(busy)
    }

    /// The cause of a failure, where that is known.
    pub(crate) async fn find_cause(&self, error: TxError) -> TxError {
        self.member.find_cause_tx(self.endpoint(), error).await
    }

    /// A random time below `pause`: xorshift64.
    fn random_pause(&self, pause: Duration) -> Duration {
        let mut word = self.random.get();
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        self.random.set(word);
        pause.mul_f64((word >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// Ends the client: its word is cleared, and its place is free. Call it when no transaction is open. A
    /// client that is dropped without this keeps its place, since its word may still be there.
    pub async fn leave(&mut self) {
        if let Some(place) = self.place.take() {
            self.member.return_place(place, self.worker.leave().await);
        }
    }
}

impl<E: Environment> Drop for BusyGuard<'_, E> {
    fn drop(&mut self) {
        let ClientCore { open_count, place, worker, .. } = self.client;
        open_count.set(open_count.get() - 1);
        if let (0, Some(place)) = (open_count.get(), place)
            && !worker.is_needed()
        {
            place.rest();
        }
    }
}
