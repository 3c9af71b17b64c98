//! Threads that run transactions, and the users of each.

use std::cell::{Cell, RefCell, RefMut};
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::block_on;
use farpool_txn::recovery::{Fate, fate};
use farpool_txn::{CommitError, Fetched, LeaveError, Rules, Shipped, Worker};
use farpool_wire::Version;

use crate::catalog::{Catalog, TableInfo};
use crate::database::Shared;
use crate::error::{DatabaseError, Ended, Stop, TxError};
use crate::plan::MOST_WORKERS;
use crate::service::IN_DOUBT;
use crate::table::{Key, Table, TableOptions};
use crate::transacting::Tx;
use crate::trouble::failed;
use crate::workers::Place;

/// Tries of a transaction before its caller is told: with the pauses between them, some seconds.
const TRIES: u32 = 1_000;
/// The longest pause before the second try, and twice as long before each later one...
const FIRST_PAUSE: Duration = Duration::from_micros(4);
/// ...up to this. Pauses are drawn at random below: who was in each other's way is so no longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(8);

/// One thread's way to a database: it may be used by the thread that made it alone.
pub struct Client {
    shared: Arc<Shared>,
    worker: Worker<Shipped>,
    /// Where it announces its snapshots; there until the client is dropped.
    place: Option<Place>,
    /// Transactions that are open.
    open: Cell<u32>,
    catalog: Catalog,
    own: RefCell<farpool_txn::Session>,
    /// For pauses: no secret, only different in each client.
    random: Cell<u64>,
}

/// One user of a client, who sees what he has committed. Several may be at work on a thread at a time.
pub struct Session<'a> {
    client: &'a Client,
    session: farpool_txn::Session,
}

impl Client {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Client, DatabaseError> {
        let fetched = shared.fetched.clone();
        Self::beginning_from(shared, fetched)
    }

    /// A client whose transactions begin from what a fetch thread has read, if there is one.
    pub(crate) fn beginning_from(
        shared: Arc<Shared>,
        fetched: Option<Arc<Fetched>>,
    ) -> Result<Client, DatabaseError> {
        let no_slot = || DatabaseError::NoSeat(shared.plan.shape.slots);
        let place = shared.workers.take().ok_or(DatabaseError::TooManyClients(MOST_WORKERS))?;
        // From here on the seat is not given back, but it may have been.
        shared.check()?;
        let memory = shared.memory().map_err(|error| shared.explained_here(error))?;
        let worker = Worker::sharing(memory, shared.at().oracle(), shared.slot.clone());
        let worker = worker.ok_or_else(no_slot)?;
        let worker = match fetched {
            Some(fetched) => worker.with_fetched(fetched),
            None => worker,
        };
        let worker = match announced(&shared, worker, &place) {
            Ok(worker) => worker,
            Err(error) => {
                // Its word may be there, or come.
                place.keep();
                return Err(failed(&shared, error));
            }
        };
        let place = Some(place);
        let catalog = Catalog::new(&shared);
        let seed = getrandom::u64().unwrap_or(1) | 1;
        Ok(Client {
            shared,
            worker,
            place,
            open: Cell::new(0),
            catalog,
            own: RefCell::default(),
            random: Cell::new(seed),
        })
    }

    /// Runs a future that uses this client, on this thread.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(self.worker.memory().endpoint(), future)
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// A user of this client, for `async` code.
    pub fn session(&self) -> Session<'_> {
        Session { client: self, session: farpool_txn::Session::new() }
    }

    /// Runs a transaction: `body` reads and writes, and what it has written takes effect when it returns, all
    /// of it or nothing. Where others were first, it is run again from the beginning. What it reads is one
    /// snapshot, which has all that this client has committed before.
    ///
    /// # Errors
    /// What `body` returns, and then nothing of the transaction is left; or why it cannot be committed.
    ///
    /// # Panics
    /// When it is called by a transaction's body.
    pub fn transact<T>(&self, body: impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>) -> Result<T, TxError> {
        let mut session = self.own_session();
        self.block_on(self.run(&mut session, &body))
    }

    fn own_session(&self) -> RefMut<'_, farpool_txn::Session> {
        self.own.try_borrow_mut().expect("a transaction within another")
    }

    /// Makes a table. Others can open it at once.
    ///
    /// # Errors
    /// When there is one of that name, or no room for it.
    pub fn create_table<K: Key, V>(
        &self,
        name: &str,
        options: &TableOptions,
    ) -> Result<Table<K, V>, TxError> {
        crate::catalog::create(&self.shared, name, K::BYTES, options)?;
        self.open_table(name)
    }

    /// Opens a table that was there when this was called.
    ///
    /// # Errors
    /// When there is none of that name, or its keys are others.
    pub fn open_table<K: Key, V>(&self, name: &str) -> Result<Table<K, V>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.open_table_in(&mut session, name))
    }

    pub(crate) async fn open_table_in<K: Key, V>(
        &self,
        session: &mut farpool_txn::Session,
        name: &str,
    ) -> Result<Table<K, V>, TxError> {
        let find = async |tx: &mut Tx<'_>| Ok((tx.schema(), tx.find_table(name).await?));
        let (schema, row) = self.run_up_to_date(session, &find).await?;
        let row = row.ok_or_else(|| TxError::NoSuchTable(name.to_owned()))?;
        Table::new(&self.shared, name, row, schema)
    }

    /// Drops a table: transactions that begin from now on do not have it.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn drop_table(&self, name: &str) -> Result<(), TxError> {
        crate::catalog::drop_table(&self.shared, name)
    }

    /// All tables, in the order of their names.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub fn tables(&self) -> Result<Vec<TableInfo>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.run_up_to_date(&mut session, &async |tx| tx.tables().await))
    }

    /// What became of a commit of which nobody could tell ([`TxError::Unknown`]), also of another compute
    /// server's.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub fn outcome(&self, version: Version) -> Result<Fate, DatabaseError> {
        let (oracle, log) = (self.shared.at().oracle(), self.shared.at().log(version.slot()));
        let memory = self.worker.memory();
        self.block_on(async {
            match fate(memory, &oracle, &log, version).await {
                Ok(fate) => Ok(fate),
                Err(error) => Err(self.shared.explained(memory.endpoint(), error.into()).await),
            }
        })
    }

    /// Runs a transaction whose snapshot has every commit that anybody was told of by now. Which tables there
    /// are is learnt in other ways than from far memory: from another process, another thread, or the change
    /// of the catalog that has just found a table of that name. None of these shares the session, which alone
    /// would not go back.
    async fn run_up_to_date<T>(
        &self,
        session: &mut farpool_txn::Session,
        body: &impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>,
    ) -> Result<T, TxError> {
        if let Err(error) = self.worker.catch_up(session).await {
            return Err(self.explained(error.into()).await);
        }
        self.run(session, body).await
    }

    async fn run<T>(
        &self,
        session: &mut farpool_txn::Session,
        body: &impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>,
    ) -> Result<T, TxError> {
        let _open = match self.begins().await {
            Ok(open) => open,
            Err(error) => return Err(self.explained(error).await),
        };
        let mut pause = FIRST_PAUSE;
        let mut last = TxError::Conflict;
        let endpoint = self.worker.memory().endpoint();
        // What somebody has locked who has died is free after the patience, and a little.
        let patience_ns = (2 * self.shared.patience).as_nanos() as u64;
        let mut patient_until = endpoint.now_ns() + patience_ns;
        for tries in 0.. {
            if pause == LONGEST_PAUSE && !self.shared.leases.are_answered() {
                // Other clients wait for a node that has stopped, and keep their locks until it goes on.
                patient_until = endpoint.now_ns() + patience_ns;
            }
            if tries >= TRIES && endpoint.now_ns() > patient_until {
                break;
            }
            match self.try_once(session, body).await {
                Ok(done) => return Ok(done),
                Err(Stop::For(error)) => return Err(self.explained(error).await),
                Err(Stop::Again(error)) => last = error,
            }
            endpoint.sleep(self.below(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Err(last)
    }

    /// Something is open, until what this gives is dropped.
    pub(crate) async fn begins(&self) -> Result<Open<'_>, TxError> {
        let place = self.place.as_ref().expect("it is there until the client is dropped");
        self.open.set(self.open.get() + 1);
        let open = Open { client: self };
        place.wake(&self.worker, || self.shared.check()).await?;
        Ok(open)
    }

    async fn try_once<T>(
        &self,
        session: &mut farpool_txn::Session,
        body: &impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>,
    ) -> Result<T, Stop> {
        self.shared.check().map_err(TxError::Ended)?;
        let transaction = self.worker.begin(session).await.map_err(TxError::from)?;
        let mut tx = Tx::new(transaction, &self.catalog);
        let done = body(&mut tx).await;
        let (transaction, done) = match (tx.into_inner(), done) {
            (Some(transaction), done) => (transaction, done?),
            (None, done) => return Err(Stop::Again(done.err().unwrap_or(TxError::Conflict))),
        };
        match transaction.commit().await {
            Ok(_) => Ok(done),
            Err(CommitError::Conflict | CommitError::Busy) => Err(Stop::Again(TxError::Conflict)),
            Err(CommitError::Unknown(version)) => Err(TxError::Unknown(version).into()),
            Err(CommitError::Nothing(error)) => Err(TxError::Memory(error).into()),
            Err(error @ CommitError::TooLarge { .. }) => Err(TxError::TooLarge(error).into()),
            Err(CommitError::Stuck) => Err(TxError::Ended(Ended::Failed(IN_DOUBT.to_owned())).into()),
        }
    }

    /// The cause of a failure, where that is known.
    pub(crate) async fn explained(&self, error: TxError) -> TxError {
        self.shared.explained_tx(self.worker.memory().endpoint(), error).await
    }

    /// A random time below `pause`: xorshift64.
    fn below(&self, pause: Duration) -> Duration {
        let mut word = self.random.get();
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        self.random.set(word);
        pause.mul_f64((word >> 11) as f64 / (1_u64 << 53) as f64)
    }
}

/// A client is gone. Where it could not take its word away, what its snapshots needed is kept until the
/// process's seat is looked after: so that has to be.
pub(crate) fn has_left(shared: &Shared, place: Place, left: Result<(), LeaveError>) {
    let Err(error) = left else { return };
    place.keep();
    if let LeaveError::Memory(error) = error {
        failed(shared, error.into());
    }
}

/// A worker that has announced itself.
pub(crate) fn announced<R: Rules>(
    shared: &Shared,
    worker: Worker<R>,
    place: &Place,
) -> Result<Worker<R>, DatabaseError> {
    let number = shared.plan.workers(shared.seat.slot).start + place.number();
    let endpoint = worker.memory().endpoint().clone();
    let announced = block_on(&endpoint, worker.announcing(shared.at().horizon(), number))?;
    Ok(announced.expect("the plan has a place for each"))
}

/// A client has something open.
pub(crate) struct Open<'a> {
    client: &'a Client,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let Client { open, place, worker, .. } = self.client;
        open.set(open.get() - 1);
        if let (0, Some(place)) = (open.get(), place)
            && !worker.is_needed()
        {
            place.rest();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        has_left(&self.shared, place, self.block_on(self.worker.leave()));
    }
}

impl Session<'_> {
    /// As [`Client::transact`].
    ///
    /// # Errors
    /// As there.
    pub async fn transact<T>(
        &mut self,
        body: impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>,
    ) -> Result<T, TxError> {
        self.client.run(&mut self.session, &body).await
    }
}
