//! Threads that run transactions, and the users of each.

mod core;
mod growing;
mod indexing;

use std::cell::{RefCell, RefMut};
use std::sync::Arc;

use farpool_fabric::block_on;
use farpool_txn::recovery::Fate;
use farpool_txn::{SessionState, Traffic};
use farpool_wire::Version;
use serde::de::DeserializeOwned;

use crate::catalog::TableInfo;
use crate::database::Process;
use crate::error::{DatabaseError, TxError};
use crate::key::{Key, OwnedKey};
use crate::member::MemberCore;
use crate::table::{Index, Table, TableOptions};
use crate::transacting::Tx;
pub use core::{BusyGuard, ClientCore};

/// One thread's access to a database. Only the thread that made it uses it.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use farpool_namdb::{Database, Reach, Table, TableOptions};
/// # let database = Database::open("bank.far".as_ref(), &Reach::default())?;
/// let client = database.client()?;
/// let visits: Table<str, u64> = client.open_or_create_table("visits", &TableOptions::rows(1_000))?;
/// let count = client.transact(async |tx| {
///     let count = tx.get(&visits, "Ada").await?;
///     match count {
///         None => tx.insert(&visits, "Ada", 1).await?,
///         Some(count) => tx.update(&visits, "Ada", count + 1).await?,
///     }
///     Ok(count.unwrap_or_default() + 1)
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Client {
    core: ClientCore<Process>,
    own: RefCell<SessionState>,
}

/// One user of a client. It always sees its own commits. Several sessions may be active on a thread at a
/// time.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use farpool_namdb::{Database, Reach, Table, TableOptions};
/// # let database = Database::open("bank.far".as_ref(), &Reach::default())?;
/// # let client = database.client()?;
/// # let visits: Table<u64, u64> = client.open_table("visits")?;
/// let (mut one, mut other) = (client.session(), client.session());
/// let both = client.block_on(futures_util::future::join(
///     one.transact(async |tx| tx.get(&visits, 1).await),
///     other.transact(async |tx| tx.get(&visits, 2).await),
/// ));
/// # Ok(())
/// # }
/// ```
pub struct Session<'a> {
    client: &'a Client,
    session: SessionState,
}

impl Client {
    pub(crate) fn new(core: ClientCore<Process>) -> Client {
        Client { core, own: RefCell::default() }
    }

    /// Another client of the process's member, for the calling thread.
    pub(crate) fn join(member: Arc<MemberCore<Process>>) -> Result<Client, DatabaseError> {
        let endpoint = member.environment().endpoint();
        Ok(Client::new(block_on(&endpoint, ClientCore::join(member, endpoint.clone()))?))
    }

    /// Runs a future that uses this client, on this thread.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(self.core.endpoint(), future)
    }

    pub(crate) fn core(&self) -> &ClientCore<Process> {
        &self.core
    }

    /// The operations on far memory, and the bytes, that transactions of this client have taken so far.
    pub fn traffic(&self) -> Traffic {
        self.core.worker().memory().traffic()
    }

    /// Lets other futures of this thread run.
    pub async fn yield_now(&self) {
        self.core.endpoint().yield_now().await;
    }

    /// A new session of this client, for `async` code.
    pub fn session(&self) -> Session<'_> {
        Session { client: self, session: SessionState::new() }
    }

    /// Runs a transaction: `body` reads and writes. When it returns, either all of its writes take effect or
    /// none does. After a conflict with another transaction, and after a table that was full has grown,
    /// `body` is run again from the beginning. It reads one snapshot, which has all earlier commits of this
    /// client.
    ///
    /// # Errors
    /// What `body` returns, and then nothing of the transaction is left; or why it cannot be committed.
    ///
    /// # Panics
    /// When it is called by a transaction's body.
    pub fn transact<T>(&self, body: impl AsyncFn(&mut Tx<'_>) -> Result<T, TxError>) -> Result<T, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.transact(&mut session, &body))
    }

    fn own_session(&self) -> RefMut<'_, SessionState> {
        self.own.try_borrow_mut().expect("a transaction within another")
    }

    /// Creates a table. Other clients can open it at once.
    ///
    /// # Errors
    /// When a table of that name exists, or there is no room for it; [`TxError::NoSuchTable`] or
    /// [`TxError::Dropped`] if another client has dropped it meanwhile.
    pub fn create_table<K: Key + ?Sized, V>(
        &self,
        name: &str,
        options: &TableOptions,
    ) -> Result<Table<K, V>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.create_table(&mut session, name, options))
    }

    /// Opens a table, or creates it if it does not exist.
    ///
    /// # Errors
    /// As [`open_table`](Self::open_table) and [`create_table`](Self::create_table).
    pub fn open_or_create_table<K: Key + ?Sized, V>(
        &self,
        name: &str,
        options: &TableOptions,
    ) -> Result<Table<K, V>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.open_or_create_table(&mut session, name, options))
    }

    /// Opens a table. Finds each table that existed when this was called.
    ///
    /// # Errors
    /// When no table has that name, its keys are of another type, or far memory does not answer.
    pub fn open_table<K: Key + ?Sized, V>(&self, name: &str) -> Result<Table<K, V>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.open_table(&mut session, name))
    }

    pub(crate) fn open_any_table(&self, name: &str) -> Result<Table<(), ()>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.open_any_table(&mut session, name))
    }

    /// Drops a table: transactions that begin from now on do not have it.
    ///
    /// # Errors
    /// When no table has that name.
    pub fn drop_table(&self, name: &str) -> Result<(), TxError> {
        self.block_on(self.core.drop_table(name))
    }

    /// Creates an index that was declared for a table, and enters all rows of the table, while others may use
    /// it. `progress` is told how many of the table's places were looked at, and how many there are. Once
    /// this has returned, every transaction that begins can search the index. If this process dies meanwhile,
    /// create the index again: that goes on from what is there.
    ///
    /// All programs that write to the table must have [declared](Table::declare) the index by then: the
    /// writes of others fail with [`TxError::Undeclared`].
    ///
    /// # Errors
    /// [`TxError::IndexExists`]; [`TxError::OtherShape`] if there is an index of that name with other keys,
    /// or if one of the two is unique and the other is not; [`TxError::OldTransactions`];
    /// [`TxError::DuplicateIn`] if it is to be unique, and two rows have the same key there;
    /// [`TxError::IndexKeyTooLong`]; or when there is no room for it.
    pub fn create_index<K: Key + ?Sized, V: DeserializeOwned, I: OwnedKey>(
        &self,
        table: &Table<K, V>,
        index: &Index<V, I>,
        progress: impl FnMut(u64, u64),
    ) -> Result<(), TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.create_index(&mut session, table, index, progress))
    }

    /// Creates an index that was declared for a table, unless it exists.
    ///
    /// # Errors
    /// As [`create_index`](Self::create_index), but for [`TxError::IndexExists`].
    pub fn open_or_create_index<K: Key + ?Sized, V: DeserializeOwned, I: OwnedKey>(
        &self,
        table: &Table<K, V>,
        index: &Index<V, I>,
    ) -> Result<(), TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.open_or_create_index(&mut session, table, index))
    }

    /// Drops an index of a table: transactions that begin from now on do not have it.
    ///
    /// # Errors
    /// [`TxError::NoSuchIndex`].
    pub fn drop_index<K: ?Sized, V>(&self, table: &Table<K, V>, index: &str) -> Result<(), TxError> {
        self.block_on(self.core.drop_index(table, index))
    }

    /// All tables, in the order of their names.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub fn tables(&self) -> Result<Vec<TableInfo>, TxError> {
        let mut session = self.own_session();
        self.block_on(self.core.tables(&mut session))
    }

    /// The outcome of a commit that was [in doubt](TxError::Unknown), of this compute server or another one.
    ///
    /// # Errors
    /// When far memory does not answer.
    pub fn outcome(&self, version: Version) -> Result<Fate, DatabaseError> {
        self.block_on(self.core.outcome(version))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let endpoint = self.core.endpoint().clone();
        block_on(&endpoint, self.core.leave());
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
        self.client.core.transact(&mut self.session, &body).await
    }
}
