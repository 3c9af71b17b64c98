//! A process's seat among the compute servers of a database: a [member](MemberCore) with a thread for each of
//! its parts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_control::{ControlError, Tls, locate};
use farpool_fabric::{Peer, Transports, block_on};
use farpool_pool::{ClientGrant, GrantError, JointError, JointLeases, PoolConfig};
use farpool_txn::layout::MOST_SLOTS;
use farpool_txn::oracle::Fetched;
use farpool_txn::{DatabaseLayout, DatabaseShape, LayoutError, Limits, Shipped};
use farpool_wire::control::Lease;
use farpool_wire::{Epoch, RegionId};

use crate::client::Client;
use crate::environment::{Environment, News, Timing};
use crate::error::{DatabaseError, Ended};
use crate::file::DatabaseFile;
use crate::handle::ClientHandle;
use crate::member::{DutyKind, MemberCore, MemberInfo};
use crate::threads;

/// By default, the copies of all logs together take a quarter of the memory,
const LOGS_DIVISOR: u64 = 4;
/// and a log takes at most a quarter of a region.
const REGION_DIVISOR: u64 = 4;
/// Fewest bytes of a log: twice what it takes to make or drop a table that lies on many nodes.
pub(crate) const LEAST_LOG_BYTES: u64 = 64 << 10;
/// Limits of the default size of a log.
const LEAST_DEFAULT_LOG_BYTES: u64 = 128 << 10;
const MOST_DEFAULT_LOG_BYTES: u64 = 64 << 20;
/// Buffers for a client's transfers: several times the intents and versions of the largest commit. The parts
/// of a member need less.
const ARENA_BYTES: usize = 4 << 20;
/// A live thread may wait this long for its processor.
const LEAST_PATIENCE: Duration = Duration::from_millis(200);
/// Records that a dead member has locked stay locked for that long, and other transactions wait for them.
const MOST_PATIENCE: Duration = Duration::from_secs(10);

/// How a process reaches the memory.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{Credentials, Database, Reach, TransportChoice};
///
/// let reach = Reach {
///     transport: TransportChoice::Tcp.into(),
///     credentials: Credentials::PlainText,
///     fetch_thread: true,
/// };
/// let database = Database::open("bank.far".as_ref(), &reach)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// Which transports may be used.
    pub transport: Transports,
    /// How the process shows the nodes that it belongs to the pool.
    pub credentials: Credentials,
    /// Whether a fetch thread reads the published cut for all clients, so that these begin transactions
    /// without asking far memory (paper 3, section 4.2). The thread never pauses. It pays off with many
    /// clients, or with high latency to far memory.
    pub fetch_thread: bool,
}

/// How a process shows that it belongs to the pool.
#[derive(Clone, Debug, Default)]
pub enum Credentials {
    /// By the certificates in the folder that `FARPOOL_TLS_DIR` names. Without that variable, by those of
    /// this user's `farpool up`, unless `FARPOOL_BROKER` names another broker. Otherwise in plain text.
    #[default]
    Found,
    /// In plain text, which only nodes on this host allow.
    PlainText,
    /// By these certificates.
    Tls(Tls),
}

impl Credentials {
    fn into_tls(self) -> Result<Option<Tls>, ControlError> {
        match self {
            Credentials::Found => Ok(locate(None, None)?.and_then(|broker| broker.tls)),
            Credentials::PlainText => Ok(None),
            Credentials::Tls(tls) => Ok(Some(tls)),
        }
    }
}

/// Options of a new database.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{CreateOptions, Database, PoolConfig, TransportChoice};
///
/// let pool = PoolConfig {
///     broker: "127.0.0.1:7117".to_owned(),
///     tls: None,
///     transport: TransportChoice::Auto.into(),
///     limit_bytes: None,
/// };
/// let options = CreateOptions { bytes: 1 << 30, servers: 8, ..CreateOptions::default() };
/// let database = Database::create(&pool, "bank.far".as_ref(), &options)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Its memory, rounded up to whole regions of the pool.
    pub bytes: u64,
    /// Compute servers at a time, at most 63.
    pub servers: u16,
    /// Parts of the timestamp oracle, on different nodes as far as possible: at most 16, and at most one more
    /// than `servers` (paper 3, section 4.2). With more parts each has less load, but reading a cut takes two
    /// looks at all of them.
    pub partitions: u16,
    /// Bytes of the log of one compute server, of which there are two copies: for the versions of rows that
    /// its commits have replaced, while a snapshot may need them; at least 64 KiB. `None`: a quarter of the
    /// database for all logs, from 128 KiB to 64 MiB each, but no more than a quarter of a region.
    pub log_bytes: Option<u64>,
    /// The heartbeat timeout, from 0.2 to 10 seconds. It must be longer than a busy machine keeps a thread
    /// waiting.
    pub patience: Duration,
}

impl CreateOptions {
    /// The shape of a database in these regions.
    fn shape(&self, region_bytes: u64, regions: &[RegionId]) -> DatabaseShape {
        let slots = self.servers.clamp(1, MOST_SLOTS);
        let shape = |log_bytes: u64| {
            let log_bytes = log_bytes.next_multiple_of(8);
            DatabaseShape { slots, partitions: self.partitions, log_bytes, region_bytes }
        };
        if let Some(log_bytes) = self.log_bytes {
            return shape(log_bytes);
        }
        // One more than compute servers: the catalog has a log of its own.
        let copies = 2 * (u64::from(slots) + 1);
        let most = MOST_DEFAULT_LOG_BYTES.min(region_bytes / REGION_DIVISOR).max(LEAST_DEFAULT_LOG_BYTES);
        let mut log_bytes = (self.bytes / LOGS_DIVISOR / copies).clamp(LEAST_DEFAULT_LOG_BYTES, most);
        // A node that lends little must hold its share of the logs.
        while log_bytes > LEAST_DEFAULT_LOG_BYTES
            && DatabaseLayout::new(shape(log_bytes), Limits::SHIPPED, regions.to_vec()).is_err()
        {
            log_bytes = (log_bytes / 2).max(LEAST_DEFAULT_LOG_BYTES);
        }
        shape(log_bytes)
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            bytes: 256 << 20,
            servers: 16,
            partitions: 1,
            log_bytes: None,
            patience: Duration::from_secs(3),
        }
    }
}

/// A seat among the compute servers of a database. Dropping it gives the seat back.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use farpool_namdb::{Database, Reach};
///
/// let database = Database::open("bank.far".as_ref(), &Reach::default())?;
/// for member in database.members()? {
///     println!("{member:?}");
/// }
/// database.check()?; // fails once the others have evicted this process
/// # Ok(())
/// # }
/// ```
pub struct Database {
    pub(crate) core: Arc<MemberCore<Process>>,
    file: DatabaseFile,
    threads: Vec<JoinHandle<()>>,
}

/// A process: the surroundings of a member in production.
pub struct Process {
    pub(crate) leases: JointLeases,
    /// How it asks for more memory.
    pub(crate) pool: PoolConfig,
}

impl Database {
    /// Makes a database in memory that the pool lends, and writes the file by which others find it. The
    /// caller is its first compute server. The database lives as long as it has one.
    ///
    /// # Errors
    /// When the pool has less memory than that, or the file cannot be written. Nothing of the database is
    /// left then.
    pub fn create(
        pool: &PoolConfig,
        file: &Path,
        options: &CreateOptions,
    ) -> Result<Database, DatabaseError> {
        // Before anything is leased: a path that cannot be written to is reported at once.
        let not_a_database = || DatabaseError::NotADatabase(PathBuf::from(file));
        let folder = file.parent().ok_or_else(not_a_database)?;
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let bad_folder = |reason| DatabaseError::File { file: folder.to_owned(), reason };
        std::fs::metadata(folder).map_err(bad_folder)?;
        if file.try_exists().map_err(bad_folder)? {
            let (file, reason) = (file.to_owned(), std::io::ErrorKind::AlreadyExists.into());
            return Err(DatabaseError::File { file, reason });
        }
        if let Some(log_bytes) = options.log_bytes.filter(|bytes| *bytes < LEAST_LOG_BYTES) {
            return Err(DatabaseError::SmallLog(log_bytes));
        }
        let region_bytes = JointLeases::region_bytes_of(pool)?;
        let regions = options.bytes.div_ceil(region_bytes).max(1);
        let regions = u32::try_from(regions).map_err(|_| LayoutError::TooManyRegions)?;
        let leases = JointLeases::acquire(pool, regions)?;
        let make_file = || {
            let regions = leases.keys().regions().ok_or_else(not_a_database)?;
            let shape = options.shape(leases.keys().region_bytes(), &regions);
            let patience = options.patience.clamp(LEAST_PATIENCE, MOST_PATIENCE);
            let written = DatabaseFile::new(shape, patience, leases.keys().clone(), pool.broker.clone());
            DatabaseLayout::new(shape, Limits::SHIPPED, regions)?;
            written.save(file)?;
            Ok(written)
        };
        match make_file() {
            Ok(made) => {
                let keys = leases.keys().clone();
                let process = Process { leases, pool: pool.clone() };
                Self::join_and_start(file, made, process, None).inspect_err(|_| {
                    // No other process uses the database yet.
                    let _ = std::fs::remove_file(file);
                    keys.release(pool.tls.as_ref());
                })
            }
            Err(error) => {
                leases.release();
                Err(error)
            }
        }
    }

    /// Opens a database: this process becomes one of its compute servers.
    ///
    /// # Errors
    /// When the database does not exist any more, cannot be reached, or has no free seat.
    pub fn open(file: &Path, reach: &Reach) -> Result<Database, DatabaseError> {
        let found = DatabaseFile::load(file)?;
        let keys = found.keys().cloned().ok_or_else(|| DatabaseError::NotADatabase(file.to_owned()))?;
        let tls = reach.credentials.clone().into_tls()?;
        let leases = JointLeases::join(keys, reach.transport, tls.clone()).map_err(|error| match error {
            JointError::Ended { region } => DatabaseError::Gone { file: file.to_owned(), region },
            JointError::Node(reason @ GrantError::NoAnswer { .. }) => {
                DatabaseError::NoAnswer { file: file.to_owned(), reason }
            }
            error => error.into(),
        })?;
        let (broker, transport) = (found.broker().to_owned(), reach.transport);
        let process = Process { leases, pool: PoolConfig { broker, tls, transport, limit_bytes: None } };
        Self::join_and_start(file, found, process, reach.fetch_thread.then(Arc::default))
    }

    fn join_and_start(
        path: &Path,
        file: DatabaseFile,
        process: Process,
        fetched: Option<Arc<Fetched>>,
    ) -> Result<Database, DatabaseError> {
        let damaged = || DatabaseError::NotADatabase(path.to_owned());
        let shape = file.shape().ok_or_else(damaged)?;
        let regions = process.leases.keys().regions().ok_or_else(damaged)?;
        let layout = DatabaseLayout::new(shape, Limits::SHIPPED, regions)?;
        let endpoint = process.endpoint();
        let joining = MemberCore::join(process, layout, file.patience(), fetched, endpoint.clone());
        let core = Arc::new(block_on(&endpoint, joining)?);
        let threads = start_parts(&core).inspect_err(|_| core.end(Ended::Closed))?;
        Ok(Database { core, file, threads })
    }

    /// Makes another client, for the calling thread.
    ///
    /// # Errors
    /// When the memory cannot be reached.
    pub fn client(&self) -> Result<Client, DatabaseError> {
        Client::join(self.core.clone())
    }

    /// Starts a client on a thread of its own, for programs that await its work. `prepare` returns what the
    /// thread keeps between two pieces of work: its open tables, for instance.
    ///
    /// # Errors
    /// Those of `prepare`, or when the memory cannot be reached.
    pub fn start_client<S: 'static, E: From<DatabaseError> + Send + 'static>(
        &self,
        prepare: impl FnOnce(&Client) -> Result<S, E> + Send + 'static,
    ) -> Result<ClientHandle<S>, E> {
        ClientHandle::start(self.core.clone(), prepare)
    }

    /// Checks that this process is still one of the compute servers.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), Ended> {
        self.core.check()
    }

    /// The compute servers, and the roles that they have.
    ///
    /// # Errors
    /// When the memory cannot be reached.
    pub fn members(&self) -> Result<Vec<MemberInfo>, DatabaseError> {
        let endpoint = self.core.environment().endpoint();
        block_on(&endpoint, self.core.members(endpoint.clone()))
    }

    /// What the file of this database says.
    pub fn file(&self) -> &DatabaseFile {
        &self.file
    }
}

/// Starts a thread for each part of a member. They run until the member has ended.
fn start_parts(core: &Arc<MemberCore<Process>>) -> Result<Vec<JoinHandle<()>>, DatabaseError> {
    let fetcher = core.fetched().map(|_| DutyKind::Fetcher);
    // All duties begin before any thread can notice that the member has ended.
    let begun: Vec<_> = DutyKind::ALL.into_iter().chain(fetcher).map(|kind| core.begin_duty(kind)).collect();
    let mut started = vec![threads::start(core, "members", |core| {
        let endpoint = core.environment().endpoint();
        block_on(&endpoint, core.run_main_part(endpoint.clone()));
    })?];
    for begun in begun {
        started.push(threads::start(core, begun.kind().name(), move |core| {
            let endpoint = core.environment().endpoint();
            block_on(&endpoint, core.run_duty(begun, endpoint.clone()));
        })?);
    }
    Ok(started)
}

impl Drop for Database {
    fn drop(&mut self) {
        self.core.end(Ended::Closed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a service thread of a database panicked");
            }
        }
        if self.core.has_left() {
            let endpoint = self.core.environment().endpoint();
            block_on(&endpoint, self.core.fence_own_grants());
        }
    }
}

impl Process {
    /// An endpoint for the calling thread.
    pub(crate) fn endpoint(&self) -> farpool_fabric::Endpoint {
        self.leases.endpoint(ARENA_BYTES)
    }
}

impl Environment for Process {
    type Rules = Shipped;

    fn peer(&self, region: RegionId) -> Option<Peer> {
        self.leases.peer(region)
    }

    async fn add_grant(&self, region: RegionId) -> Result<ClientGrant, GrantError> {
        self.leases.add_grant(region).await
    }

    async fn fence_grant(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        self.leases.fence_grant(region, grant).await
    }

    async fn acquire_regions(&self, regions: u32) -> Result<Vec<Lease>, JointError> {
        self.leases.acquire_more(&self.pool, regions).await
    }

    async fn adopt_regions(&self, leases: Vec<Lease>) -> Result<(), JointError> {
        self.leases.adopt(leases).await
    }

    fn forget_regions(&self, leases: &[Lease]) {
        self.leases.forget(leases);
    }

    async fn give_back_regions(&self, leases: Vec<Lease>) {
        self.leases.give_back(leases).await;
    }

    fn lost_regions(&self) -> Vec<RegionId> {
        self.leases.lost()
    }

    fn nodes_answer(&self) -> bool {
        self.leases.are_answered()
    }

    fn random(&self) -> u64 {
        getrandom::u64().unwrap_or(1)
    }

    fn timing(&self) -> &Timing {
        &Timing::SHIPPED
    }

    fn report(&self, news: News<'_>) {
        match news {
            News::Stuck(part) => {
                tracing::error!(%part, "no progress: the other compute servers will evict this one");
            }
            News::Progressing => tracing::warn!("all parts of this compute server make progress again"),
            News::Recovered(slot, undone) => {
                let slot = slot.index();
                tracing::warn!(slot, undone, "a compute server missed its heartbeats and was evicted");
            }
            News::NotLent(why) => tracing::warn!(why, "no more memory for this database"),
            News::RecoveryFailed(slot, error) => {
                let slot = slot.index();
                tracing::error!(slot, %error, "cannot evict a silent compute server yet; trying again");
            }
        }
    }
}
