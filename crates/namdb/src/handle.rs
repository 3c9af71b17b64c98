//! Clients for programs on tokio or another executor: the client's work runs on a thread of its own, and can
//! be awaited.

use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::{mpsc, oneshot};

use crate::client::Client;
use crate::database::Process;
use crate::error::{DatabaseError, Ended};
use crate::member::MemberCore;

/// Most pieces of work that wait for the client's thread. A caller with another one waits until there is
/// room.
const MOST_WAITING: usize = 64;

/// A client on a thread of its own, with state that the thread keeps between two pieces of work: its open
/// tables, for instance. Work is done in the order in which it was submitted. Dropping the handle waits until
/// all of it is done.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{Client, Database, Reach, Table, TableOptions, TxError};
///
/// async fn visit(database: &Database) -> Result<Option<u64>, TxError> {
///     let visits = database.start_client(|client: &Client| {
///         client.open_or_create_table::<u64, u64>("visits", &TableOptions::rows(1_000))
///     })?;
///     let count = visits.run(|client, visits: &mut Table<u64, u64>| {
///         client.transact(async |tx| tx.get(visits, 7).await)
///     });
///     count.await.map_err(TxError::Ended)?
/// }
/// # Ok(())
/// # }
/// ```
pub struct ClientHandle<S> {
    /// `None` once the handle is being dropped, which ends the thread.
    work: Option<mpsc::Sender<Work<S>>>,
    thread: Option<JoinHandle<()>>,
}

type Work<S> = Box<dyn FnOnce(&Client, &mut S) + Send>;

impl<S: 'static> ClientHandle<S> {
    /// Starts the thread, and waits until its client and its state are ready.
    pub(crate) fn start<E: From<DatabaseError> + Send + 'static>(
        core: Arc<MemberCore<Process>>,
        prepare: impl FnOnce(&Client) -> Result<S, E> + Send + 'static,
    ) -> Result<Self, E> {
        let (work, given) = mpsc::channel(MOST_WAITING);
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let serve = move || {
            let prepared = Client::join(core).map_err(E::from).and_then(|client| {
                let kept = prepare(&client)?;
                Ok((client, kept))
            });
            match prepared {
                Ok((client, kept)) => {
                    let _ = tell.send(Ok(())); // it is received: `start` waits for it
                    work_until_dropped(&client, kept, given);
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name("db-client".into()).spawn(serve);
        let thread = thread.map_err(|error| E::from(DatabaseError::Thread(error)))?;
        let handle = ClientHandle { work: Some(work), thread: Some(thread) };
        told.recv().unwrap_or_else(|_| Err(E::from(panicked().into())))?;
        Ok(handle)
    }

    /// Does this work on the client's thread, and returns its result.
    ///
    /// # Errors
    /// When this or earlier work has panicked: the client is gone.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Client, &mut S) -> T + Send + 'static,
    ) -> Result<T, Ended> {
        let (tell, told) = oneshot::channel();
        let work: Work<S> = Box::new(move |client, kept| {
            let _ = tell.send(work(client, kept)); // fails if the caller no longer waits
        });
        let to = self.work.as_ref().expect("it is there until the handle is dropped");
        to.send(work).await.map_err(|_| panicked())?;
        told.await.map_err(|_| panicked())
    }
}

fn work_until_dropped<S>(client: &Client, mut kept: S, mut given: mpsc::Receiver<Work<S>>) {
    while let Some(work) = given.blocking_recv() {
        work(client, &mut kept);
    }
}

fn panicked() -> Ended {
    Ended::Failed("the thread of a client has panicked: start another client".to_owned())
}

impl<S> Drop for ClientHandle<S> {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a client panicked");
        }
    }
}
