//! A process's seat among the compute servers of a database.
//!
//! D1. The process works under grants of its own. Once it has a seat, others fence them before they undo what
//!     it left.
//! D2. It says that it lives, on a thread that does nothing long; when it was shut out, nothing that it does
//!     takes effect, and it says so.
//! D3. It gives its seat back only when nothing of it is under way: else the others look after it, as after
//!     one that has died.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_control::{ControlError, Tls, locate};
use farpool_fabric::{Endpoint, OpError, Transports, block_on};
use farpool_pool::{ClientGrant, GrantError, JointError, JointLeases, PoolConfig};
use farpool_txn::hash::{IndexLayout, IndexSpares};
use farpool_txn::horizon::HorizonAt;
use farpool_txn::log::LogAt;
use farpool_txn::membership::{Duties, MembersAt, Seat, wait_for_seat};
use farpool_txn::oracle::Fetched;
use farpool_txn::recovery::recover;
use farpool_txn::slab::{Slab, SlabLayout};
use farpool_txn::{Memory, MemoryError, Oracle, Piece, SharedSlot, Shipped};
use farpool_wire::{Epoch, Refusal, RegionId, Slot};
use futures_util::future::join_all;
use parking_lot::{Condvar, Mutex};

use crate::client::Client;
use crate::error::{DatabaseError, Ended};
use crate::file::DatabaseFile;
use crate::plan::{MOST_SLOTS, Plan, Shape};
use crate::service;
use crate::workers::Workers;

/// For a thread's transfers: the largest commit's intents and versions several times over.
const ARENA_BYTES: usize = 4 << 20;
/// For who joins, and the service threads: one transfer, and what recovery reads.
const SERVICE_ARENA_BYTES: usize = 4 << 20;
/// How long a region is waited for whose memory moves while it is attached.
const ATTACH_PATIENCE: Duration = Duration::from_secs(20);
const ATTACH_PAUSE: Duration = Duration::from_millis(1);

/// Between two looks at whether a seat is free.
const SEAT_PAUSE: Duration = Duration::from_millis(20);

/// A thread that waits for its processor is not dead.
const LEAST_PATIENCE: Duration = Duration::from_millis(200);
/// What the dead have locked stays so for that long, and others wait for it.
const MOST_PATIENCE: Duration = Duration::from_secs(10);

/// How a process reaches the memory.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// Which transports may be used.
    pub transport: Transports,
    /// How the process shows the nodes that it belongs to the pool.
    pub credentials: Credentials,
    /// A thread of its own reads what is published for all clients, so that these begin transactions without
    /// asking far memory (paper 3, section 4.2). It never stops; worth it where there are many clients, or
    /// far memory is far.
    pub fetch_thread: bool,
}

/// How a process shows that it belongs to the pool.
#[derive(Clone, Debug, Default)]
pub enum Credentials {
    /// By the certificates in the folder that `FARPOOL_TLS_DIR` names; else by those of this user's `farpool
    /// up`, unless `FARPOOL_BROKER` names another broker; else in plain text.
    #[default]
    Found,
    /// In plain text, which nodes on this host alone allow.
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

/// What a new database is to be.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Its memory, rounded up to whole regions of the pool.
    pub bytes: u64,
    /// Compute servers at a time, at most 63.
    pub servers: u16,
    /// Parts of the timestamp oracle, each on another node as long as there are some, at most 16, and not
    /// more than compute servers and one (paper 3, section 4.2). Each has less to carry; reading a cut of
    /// several takes two looks at all of them.
    pub partitions: u16,
    /// For the intents of one compute server's commits under way: what they write, with the places.
    pub log_bytes: u64,
    /// A compute server that is silent for so long is taken for dead, from 0.2 to 10 seconds. Longer than a
    /// busy machine keeps a thread waiting.
    pub patience: Duration,
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            bytes: 256 << 20,
            servers: 16,
            partitions: 1,
            log_bytes: 128 << 10,
            patience: Duration::from_secs(3),
        }
    }
}

/// A seat among the compute servers of a database. Dropping it gives the seat back.
pub struct Database {
    pub(crate) shared: Arc<Shared>,
    file: DatabaseFile,
    threads: Vec<JoinHandle<()>>,
}

/// Tries to get grants of all regions. Each may leave one of a region behind, of which nobody knows.
const GRANT_TRIES: u32 = 3;

/// Tables of which a process remembers what it has taken of their indexes, though no thread has them open.
const MOST_SPARES: usize = 1_024;

/// What all threads of the process share.
pub(crate) struct Shared {
    pub(crate) leases: JointLeases,
    pub(crate) plan: Plan,
    pub(crate) grants: Vec<ClientGrant>,
    pub(crate) seat: Seat,
    pub(crate) slot: Arc<SharedSlot>,
    pub(crate) patience: Duration,
    /// Threads that run transactions.
    pub(crate) workers: Arc<Workers>,
    /// What it does for all.
    pub(crate) duties: Duties,
    /// What the fetch thread has read, if there is one.
    pub(crate) fetched: Option<Arc<Fetched>>,
    /// Slabs of tables, by the table's first record: what the process knows of its chunks is known to all its
    /// threads, for as long as it is a compute server.
    slabs: Mutex<BTreeMap<u64, Arc<Slab>>>,
    /// What the process has taken of tables' indexes, likewise.
    spares: Mutex<BTreeMap<u64, Arc<IndexSpares>>>,
    /// One thread at a time changes tables.
    pub(crate) catalog: Mutex<()>,
    ended: Mutex<Option<Ended>>,
    /// Told when that is there.
    over: Condvar,
    is_over: AtomicBool,
    /// The seat was given back.
    has_left: AtomicBool,
}

impl Database {
    /// Makes a database of memory that the pool lends, and writes the file by which others find it. The
    /// caller is its first compute server; it lasts as long as there is one.
    ///
    /// # Errors
    /// When there is not so much memory, or the file cannot be written. Nothing is left of it then.
    pub fn create(
        pool: &PoolConfig,
        file: &Path,
        options: &CreateOptions,
    ) -> Result<Database, DatabaseError> {
        // Before anything is leased: a path that cannot be written to is found out at once.
        let place = || DatabaseError::NotADatabase(PathBuf::from(file));
        let folder = file.parent().ok_or_else(place)?;
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let trouble = |reason| DatabaseError::File { file: folder.to_owned(), reason };
        std::fs::metadata(folder).map_err(trouble)?;
        if file.try_exists().map_err(trouble)? {
            let (file, reason) = (file.to_owned(), std::io::ErrorKind::AlreadyExists.into());
            return Err(DatabaseError::File { file, reason });
        }
        let region_bytes = JointLeases::region_bytes_of(pool)?.max(1);
        let regions = options.bytes.div_ceil(region_bytes).max(1);
        let regions = u32::try_from(regions)
            .map_err(|_| DatabaseError::TooManyRegions { most: crate::plan::MOST_REGIONS })?;
        let leases = JointLeases::acquire(pool, regions)?;
        let made = || {
            let shape = Shape {
                slots: options.servers.clamp(1, MOST_SLOTS),
                partitions: options.partitions,
                log_bytes: options.log_bytes.next_multiple_of(8),
                region_bytes: leases.keys().region_bytes(),
            };
            let patience = options.patience.clamp(LEAST_PATIENCE, MOST_PATIENCE);
            let written = DatabaseFile::new(shape, patience, leases.keys().clone());
            let regions = leases.keys().regions().ok_or_else(place)?;
            Plan::new(shape, &regions)?;
            written.save(file)?;
            Ok(written)
        };
        match made() {
            Ok(made) => Self::take_part(file, made, leases, None).inspect_err(|_| {
                // Nobody else can have it: the leases end by themselves.
                let _ = std::fs::remove_file(file);
            }),
            Err(error) => {
                leases.release();
                Err(error)
            }
        }
    }

    /// Becomes a compute server of a database.
    ///
    /// # Errors
    /// When it is not there any more, cannot be reached, or has as many as it can.
    pub fn open(file: &Path, reach: &Reach) -> Result<Database, DatabaseError> {
        let found = DatabaseFile::load(file)?;
        let keys = found.keys().cloned().ok_or_else(|| DatabaseError::NotADatabase(file.to_owned()))?;
        let tls = reach.credentials.clone().into_tls()?;
        let leases = JointLeases::join(keys, reach.transport, tls).map_err(|error| match error {
            JointError::Ended { region } => DatabaseError::Gone { file: file.to_owned(), region },
            error => error.into(),
        })?;
        Self::take_part(file, found, leases, reach.fetch_thread.then(Arc::default))
    }

    fn take_part(
        path: &Path,
        file: DatabaseFile,
        leases: JointLeases,
        fetched: Option<Arc<Fetched>>,
    ) -> Result<Database, DatabaseError> {
        let damaged = || DatabaseError::NotADatabase(path.to_owned());
        let shape = file.shape().ok_or_else(damaged)?;
        let regions = leases.keys().regions().ok_or_else(damaged)?;
        let plan = Plan::new(shape, &regions)?;
        let endpoint = leases.endpoint(SERVICE_ARENA_BYTES);
        let grants = block_on(&endpoint, add_grants_or_again(&endpoint, &leases, &regions))?;
        let seated = attach_all(endpoint.clone(), &leases, &grants).and_then(|memory| {
            let epochs: Vec<Epoch> = grants.iter().map(|grant| grant.epoch).collect();
            let (at, waits) = (At { plan: &plan, grants: &grants }, (file.patience(), SEAT_PAUSE));
            let members = at.members();
            let seat = block_on(&endpoint, wait_for_seat::<Shipped>(&memory, &members, &epochs, waits))?;
            Ok((seat, memory))
        });
        let (seat, memory) = match seated {
            Ok((Some(seat), memory)) => (seat, memory),
            no_seat => {
                block_on(&endpoint, fence_all(&leases, &grants));
                return Err(no_seat.err().unwrap_or(DatabaseError::NoSeat(shape.slots)));
            }
        };
        // From here on others look after the seat, if this fails.
        let at = At { plan: &plan, grants: &grants };
        let log = at.log(seat.slot);
        let recovered = block_on(&endpoint, recover(&memory, &at.oracle(), &log, seat.slot))?;
        let shared = Arc::new(Shared {
            slot: Arc::new(SharedSlot::after(seat.slot, log, recovered.last)),
            leases,
            plan,
            grants,
            seat,
            patience: file.patience(),
            workers: Arc::default(),
            duties: Duties::default(),
            fetched,
            slabs: Mutex::default(),
            spares: Mutex::default(),
            catalog: Mutex::new(()),
            ended: Mutex::new(None),
            over: Condvar::new(),
            is_over: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
        });
        drop(memory);
        let threads = service::start(&shared).inspect_err(|_| shared.end(Ended::Closed))?;
        Ok(Database { shared, file, threads })
    }

    /// A thread's way to the database: it may be used by the thread that made it alone.
    ///
    /// # Errors
    /// When the memory cannot be reached.
    pub fn client(&self) -> Result<Client, DatabaseError> {
        self.check()?;
        Client::new(self.shared.clone())
    }

    /// Whether this process is one of the compute servers still.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), Ended> {
        self.shared.check()
    }

    /// The compute servers, and what they do for all.
    ///
    /// # Errors
    /// When the memory cannot be reached.
    pub fn members(&self) -> Result<Vec<service::MemberInfo>, DatabaseError> {
        service::members(&self.shared)
    }

    /// What the file of this database says.
    pub fn file(&self) -> &DatabaseFile {
        &self.file
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.shared.end(Ended::Closed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a service thread of a database panicked");
            }
        }
        if self.shared.has_left.load(Ordering::Acquire) {
            // A region has so many grants at most. Nobody else knows of these any more, and nothing is
            // attached under them.
            let endpoint = self.shared.leases.endpoint(SERVICE_ARENA_BYTES);
            block_on(&endpoint, fence_all(&self.shared.leases, &self.shared.grants));
        }
    }
}

impl Shared {
    /// A thread's way to all regions.
    pub(crate) fn memory(&self) -> Result<Memory, DatabaseError> {
        attach_all(self.leases.endpoint(ARENA_BYTES), &self.leases, &self.grants)
    }

    pub(crate) fn at(&self) -> At<'_> {
        At { plan: &self.plan, grants: &self.grants }
    }

    /// The slab of a table that has that first record. `None`: no table has such a one.
    pub(crate) fn slab(
        &self,
        first_record: u64,
        layout: SlabLayout,
        pieces: Vec<Piece>,
    ) -> Option<Arc<Slab>> {
        let mut slabs = self.slabs.lock();
        if let Some(slab) = slabs.get(&first_record) {
            return Some(slab.clone());
        }
        let slab = Slab::new(pieces, layout, self.at().members(), self.seat.claim)?;
        slabs.insert(first_record, slab.clone());
        Some(slab)
    }

    /// What the process has taken of the index of a table that has that first record.
    pub(crate) fn spares(&self, first_record: u64, layout: &IndexLayout) -> Arc<IndexSpares> {
        let mut spares = self.spares.lock();
        if spares.len() > MOST_SPARES {
            // Of tables that no thread has open; some numbers of those that are still there are lost.
            spares.retain(|_, of_table| Arc::strong_count(of_table) > 1);
        }
        spares.entry(first_record).or_insert_with(|| Arc::new(IndexSpares::new(layout))).clone()
    }

    /// Whether the process is one of the compute servers still.
    pub(crate) fn check(&self) -> Result<(), Ended> {
        // Acquire: pairs with the release in `end`.
        if !self.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.ended())
    }

    /// Why it is over.
    pub(crate) fn ended(&self) -> Ended {
        self.ended.lock().clone().unwrap_or(Ended::Closed)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The seat was given back, and nothing is done under the grants any more.
    pub(crate) fn mark_left(&self) {
        self.has_left.store(true, Ordering::Release); // pairs with the acquire where the database is dropped
    }

    /// Ends this member's part, for that reason. The first reason counts.
    pub(crate) fn end(&self, why: Ended) {
        let mut ended = self.ended.lock();
        ended.get_or_insert(why);
        self.is_over.store(true, Ordering::Release);
        self.over.notify_all();
    }

    /// Waits until this member's part has ended, for so long at most.
    pub(crate) fn wait_for_end(&self, long: Duration) {
        let until = Instant::now() + long;
        let mut ended = self.ended.lock();
        while ended.is_none() && !self.over.wait_until(&mut ended, until).timed_out() {}
    }
}

/// Where things lie, for one compute server.
pub(crate) struct At<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) grants: &'a [ClientGrant],
}

impl At<'_> {
    /// A place of a region.
    pub(crate) fn piece(&self, region: usize, start: u64) -> Piece {
        let grant = &self.grants[region];
        Piece { region: grant.region, epoch: grant.epoch, start }
    }

    pub(crate) fn members(&self) -> MembersAt {
        MembersAt { piece: self.piece(0, 0), layout: self.plan.members }
    }

    pub(crate) fn oracle(&self) -> Oracle {
        let parts = self.plan.parts.iter().map(|&(region, start)| self.piece(region, start));
        let oracle = Oracle::split(self.plan.shape.slots + 1, &parts.collect::<Vec<_>>());
        oracle.expect("the plan has no more parts than slots")
    }

    pub(crate) fn horizon(&self) -> HorizonAt {
        HorizonAt { piece: self.piece(0, self.plan.horizon.0), layout: self.plan.horizon.1 }
    }

    pub(crate) fn log(&self, slot: Slot) -> LogAt {
        let copies = self.plan.log(slot).map(|(region, start)| self.piece(region, start));
        LogAt { copies, layout: self.plan.log }
    }
}

/// Opens all regions on a thread.
pub(crate) fn attach_all(
    endpoint: Endpoint,
    leases: &JointLeases,
    grants: &[ClientGrant],
) -> Result<Memory, DatabaseError> {
    let mut memory = Memory::new(endpoint.clone());
    block_on(&endpoint, async {
        let give_up_at = endpoint.now_ns() + ATTACH_PATIENCE.as_nanos() as u64;
        for grant in grants {
            let no_lease = GrantError::LeaseLost { region: grant.region };
            let peer = leases.peer(grant.region).ok_or(no_lease)?;
            loop {
                match memory.attach(peer, grant.region, grant.epoch, grant.key).await {
                    Ok(()) => break,
                    Err(MemoryError::Failed(OpError::Refused(Refusal::Busy)))
                        if endpoint.now_ns() < give_up_at =>
                    {
                        endpoint.sleep(ATTACH_PAUSE).await;
                    }
                    Err(error) => return Err(DatabaseError::from(error)),
                }
            }
        }
        Ok(())
    })?;
    Ok(memory)
}

/// A grant of each region. A node that is too busy to answer is asked again.
async fn add_grants_or_again(
    endpoint: &Endpoint,
    leases: &JointLeases,
    regions: &[RegionId],
) -> Result<Vec<ClientGrant>, GrantError> {
    for _ in 1..GRANT_TRIES {
        match add_grants(leases, regions).await {
            Err(GrantError::NoAnswer { node, reason }) => {
                tracing::debug!(%node, reason, "no answer about a grant; trying again");
                endpoint.sleep(SEAT_PAUSE).await;
            }
            told => return told,
        }
    }
    add_grants(leases, regions).await
}

/// A grant of each region, or none of any.
pub(crate) async fn add_grants(
    leases: &JointLeases,
    regions: &[RegionId],
) -> Result<Vec<ClientGrant>, GrantError> {
    let asked = join_all(regions.iter().map(|&region| leases.add_grant(region))).await;
    let (mut added, mut failure) = (Vec::new(), None);
    for answer in asked {
        match answer {
            Ok(grant) => added.push(grant),
            Err(error) => failure = Some(error),
        }
    }
    let Some(error) = failure else { return Ok(added) };
    fence_all(leases, &added).await;
    Err(error)
}

/// Ends grants that nobody will use; what is not fenced ends with the leases.
async fn fence_all(leases: &JointLeases, grants: &[ClientGrant]) {
    for grant in grants {
        if let Err(error) = leases.fence_grant(grant.region, grant.epoch).await {
            tracing::debug!(%error, "a grant is left over");
        }
    }
}
