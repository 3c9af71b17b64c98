//! The pool as one process sees it, and the state its threads share.

use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};

use farpool_control::{Tls, this_host};
use farpool_fabric::{MonotonicClock, Peer, TransportChoice, Transports};
use farpool_keep::{Journal, Kept};
use farpool_lease::Millis;
use farpool_wire::control::NodeAddress;
use farpool_wire::{Epoch, GrantMode, NodeId, OwnerId};
use rustix_futex_sync::Mutex;

use crate::adoption::Adoption;
use crate::error::{GrantError, NoSpace, OverflowError, PoolError};
use crate::holder::ClientGrant;
use crate::keeper::{self, Keeper, View};
use crate::keeping::{KeptPool, overflow_indices};
use crate::overflow::directory::{Directory, KeptBy, Opening};
use crate::region::LeasedRegion;
use crate::session::{Confined, Session};
use crate::sharing;
use crate::space::{EXTENT_BYTES, Extent};
use crate::stock::{Capacity, Stock, StockConfig};
use crate::timed_mutex::TimedMutex;
use crate::watch::Watch;

/// How to reach the pool, and how much of it to use.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Address of the broker, HOST:PORT.
    pub broker: String,
    /// Certificates of the control plane. Without them only a broker on loopback can be used.
    pub tls: Option<Tls>,
    /// Which transports may be used.
    pub transport: Transports,
    /// Most bytes to lease; `None`: as many as the pool gives.
    pub limit_bytes: Option<u64>,
}

/// A local directory for what the pool has no room for.
#[derive(Clone, Debug)]
pub struct OverflowConfig {
    /// The directory.
    pub dir: PathBuf,
    /// Most bytes to allocate there; `None`: no limit. In any case a tenth of the file system stays free.
    pub limit_bytes: Option<u64>,
}

/// The state that a process keeps for a later one.
#[derive(Clone, Debug)]
pub struct KeptState<'a> {
    /// Where it is recorded.
    pub journal: Arc<dyn Journal>,
    /// What an earlier process has left.
    pub kept: &'a Kept,
    /// The directory of the state, which belongs to this process.
    pub dir: &'a Path,
}

/// A connection to the pool as one owner. Clones share it. Dropping the last clone gives all leases back,
/// unless a later process is to take them over ([`connect_keeping`](Self::connect_keeping)).
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    // Dropped in this order: first the watch over the nodes ends, then the leases go back.
    _watch: Watch,
    keeper: Keeper,
    shared: Arc<Shared>,
}

/// What the keeper, the watch and the blocking sessions share.
pub(crate) struct Shared {
    pub(crate) config: PoolConfig,
    pub(crate) stock: Arc<Stock>,
    pub(crate) sessions: Mutex<Vec<Weak<TimedMutex<Confined>>>>,
    /// Which session a borrower tries first: each in turn.
    pub(crate) next_lender: AtomicUsize,
}

impl Pool {
    /// Connects to the broker. Leases are taken when extents are.
    pub fn connect(config: PoolConfig) -> Result<Pool, PoolError> {
        Self::connect_with_overflow(config, None)
    }

    /// Like [`connect`](Self::connect), with a directory, if one is given, for data for which the pool has no
    /// room.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and [`PoolError::Overflow`] if the directory cannot be used.
    pub fn connect_with_overflow(
        config: PoolConfig,
        overflow: Option<&OverflowConfig>,
    ) -> Result<Pool, PoolError> {
        let opening = overflow.map(|overflow| Opening::start(overflow, None)).transpose()?;
        let directory = opening.map(Opening::wait).transpose()?;
        let view = keeper::first_view(&config)?;
        let stock = Self::stock_of(&config, &view, OwnerId(random_id()), None)?;
        Self::start(config, Arc::new(with_directory(stock, directory)))
    }

    /// Like [`connect_with_overflow`](Self::connect_with_overflow), but records all that it holds in the
    /// journal of a state. It takes over the leases and the overflow that an earlier process has left in this
    /// state, if they are still there. The caller names the extents that were in use
    /// ([`Stock::adopt_extent`]), and says when it has named all of them ([`Stock::finish_adoption`]).
    pub fn connect_keeping(
        config: PoolConfig,
        overflow: Option<&OverflowConfig>,
        state: KeptState<'_>,
    ) -> Result<(Pool, Adoption), PoolError> {
        let KeptState { journal, kept, dir } = state;
        let earlier = KeptPool::find(kept);
        let owner = OwnerId(earlier.as_ref().map_or_else(random_id, |earlier| earlier.owner));
        let named = overflow_indices(kept);
        if overflow.is_none() && !named.is_empty() {
            return Err(OverflowError::NotNamed { state: dir.to_owned() }.into());
        }
        // Beside the renewal of the leases: a disk that hangs costs no lease.
        let by = KeptBy { owner, dir: dir.to_owned(), named };
        let opening = overflow.map(|overflow| Opening::start(overflow, Some(by))).transpose()?;
        let (stock, mut adoption) = match &earlier {
            Some(earlier) => Self::adopted_stock(&config, earlier, kept, journal)?,
            None => Self::new_kept_stock(&config, owner, journal)?,
        };
        let stock = with_directory(stock, opening.map(Opening::wait).transpose()?);
        stock.adopt_overflow(&adoption).map_err(|reason| {
            let dir = overflow.map_or(dir, |overflow| &overflow.dir).to_owned();
            OverflowError::Unusable { dir, reason }
        })?;
        stock.adoption_ends(&mut adoption);
        Ok((Self::start(config, Arc::new(stock))?, adoption))
    }

    /// The stock of an earlier owner, with its leases that still run.
    fn adopted_stock(
        config: &PoolConfig,
        earlier: &KeptPool,
        kept: &Kept,
        journal: Arc<dyn Journal>,
    ) -> Result<(Stock, Adoption), PoolError> {
        // First renew the leases: they may end while this process waits for a broker.
        let region_bytes = earlier.region_bytes;
        if region_bytes == 0 || !region_bytes.is_multiple_of(EXTENT_BYTES) {
            return Err(PoolError::RegionSize { region_bytes, extent_bytes: EXTENT_BYTES });
        }
        let view = View { region_bytes, free_regions: 0 };
        let stock = Self::stock_of(config, &view, OwnerId(earlier.owner), Some(journal))?;
        let mut adoption = stock.begin_adoption(kept);
        keeper::adopt(config, &stock, &mut adoption)?;
        let view = keeper::first_view(config)?;
        if view.region_bytes != 0 && view.region_bytes != region_bytes {
            return Err(PoolError::OtherRegionSize { kept: region_bytes, found: view.region_bytes });
        }
        stock.pool_has_free(view.free_regions);
        Ok((stock, adoption))
    }

    /// The stock of a new owner, which keeps what it holds.
    fn new_kept_stock(
        config: &PoolConfig,
        owner: OwnerId,
        journal: Arc<dyn Journal>,
    ) -> Result<(Stock, Adoption), PoolError> {
        let view = keeper::first_view(config)?;
        let stock = Self::stock_of(config, &view, owner, Some(journal.clone()))?;
        journal.append(&[KeptPool { owner: owner.0, region_bytes: stock.region_bytes() }.put()]);
        let adoption = stock.begin_adoption(&Kept::default());
        Ok((stock, adoption))
    }

    fn stock_of(
        config: &PoolConfig,
        view: &View,
        owner: OwnerId,
        journal: Option<Arc<dyn Journal>>,
    ) -> Result<Stock, PoolError> {
        // The size is unknown until the first node has registered; until then no extent can be taken anyway.
        let region_bytes =
            if view.region_bytes == 0 { keeper::DEFAULT_REGION_BYTES } else { view.region_bytes };
        if !region_bytes.is_multiple_of(EXTENT_BYTES) {
            return Err(PoolError::RegionSize { region_bytes, extent_bytes: EXTENT_BYTES });
        }
        if let Some(limit_bytes) = config.limit_bytes
            && limit_bytes < region_bytes
        {
            return Err(PoolError::LimitTooSmall { limit_bytes, region_bytes });
        }
        let choice = config.transport.choice;
        let stock = Stock::new(StockConfig {
            owner,
            region_bytes,
            limit_regions: config.limit_bytes.map(|limit| limit / region_bytes),
            clock: Arc::new(MonotonicClock),
            reach: Box::new(move |address| peer_of(address, choice)),
            journal,
        });
        stock.pool_has_free(view.free_regions);
        Ok(stock)
    }

    fn start(config: PoolConfig, stock: Arc<Stock>) -> Result<Pool, PoolError> {
        let shared =
            Arc::new(Shared { config, stock, sessions: Mutex::default(), next_lender: AtomicUsize::new(0) });
        let keeper = Keeper::start(shared.clone())?;
        let watch = Watch::start(shared.clone()).map_err(PoolError::Start)?;
        Ok(Pool { inner: Arc::new(Inner { _watch: watch, keeper, shared }) })
    }

    /// The owner as which this process leases.
    pub fn owner(&self) -> OwnerId {
        self.inner.shared.stock.owner()
    }

    /// What this connection holds, for `async` code.
    pub fn stock(&self) -> &Arc<Stock> {
        &self.inner.shared.stock
    }

    /// A new session. Usually each thread has its own, but any thread may use any session. If a node has no
    /// place for another connection, sessions use each other's.
    pub fn session(&self) -> Session {
        Session::new(self.inner.shared.clone())
    }

    /// Takes an extent for the `place`-th stripe of a file; consecutive places go to consecutive nodes.
    pub async fn take_extent(&self, place: u64) -> Result<Extent, NoSpace> {
        self.inner.shared.stock.take_extent(place).await
    }

    /// Admits another client to a region, and returns for how long. The client counts that time from when it
    /// asked this process, by its own clock, and asks again before the time has passed.
    pub async fn add_grant(
        &self,
        region: &Arc<LeasedRegion>,
        mode: GrantMode,
    ) -> Result<(ClientGrant, Millis), GrantError> {
        let (shared, region) = (self.inner.shared.clone(), region.clone());
        let node = region.id.node;
        let asked = self.inner.keeper.run(async move { sharing::add_grant(&shared, &region, mode).await });
        asked.await.ok_or_else(|| ended(node))?
    }

    /// Fences a client's grant. Afterwards no operation under it takes effect any more. Operations that were
    /// acknowledged before stay.
    pub async fn fence_grant(&self, region: &Arc<LeasedRegion>, grant: Epoch) -> Result<(), GrantError> {
        let (shared, region) = (self.inner.shared.clone(), region.clone());
        let node = region.id.node;
        let asked = self.inner.keeper.run(async move { sharing::fence_grant(&shared, &region, grant).await });
        asked.await.ok_or_else(|| ended(node))?
    }

    /// Whether some region is being taken back.
    pub fn is_to_leave(&self) -> bool {
        self.inner.shared.stock.is_to_leave()
    }

    /// Size of the pool's regions.
    pub fn region_bytes(&self) -> u64 {
        self.inner.shared.stock.region_bytes()
    }

    /// How large the pool is for this owner. The number of free regions is the broker's last answer, at most
    /// seconds old.
    pub fn capacity(&self) -> Capacity {
        self.inner.shared.stock.capacity()
    }
}

impl Shared {
    pub(crate) fn register_session(&self, session: Weak<TimedMutex<Confined>>) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(session);
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<TimedMutex<Confined>>> {
        self.sessions.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

fn with_directory(stock: Stock, directory: Option<Directory>) -> Stock {
    match directory {
        Some(directory) => stock.with_overflow(Arc::new(directory)),
        None => stock,
    }
}

fn ended(node: NodeId) -> GrantError {
    GrantError::NoAnswer { node, reason: "the pool is being closed".to_owned() }
}

/// How to reach a node's data plane from here.
pub(crate) fn peer_of(address: &NodeAddress, transport: TransportChoice) -> Peer {
    let same_host = !address.host.is_empty() && address.host == this_host();
    let shm = match transport {
        TransportChoice::Shm => true,
        TransportChoice::Auto => same_host,
        TransportChoice::Tcp | TransportChoice::Verbs => false,
    };
    let shm = shm && !address.shm_socket.is_empty();
    Peer {
        node: NodeId(address.node),
        tcp: address.tcp.to_socket_addrs().ok().and_then(|mut found| found.next()),
        verbs: address.rdma.parse().ok(),
        shm_socket: shm.then(|| PathBuf::from(&address.shm_socket)),
    }
}

pub(crate) fn random_id() -> u64 {
    getrandom::u64().expect("the kernel gives random bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_keep::MemoryJournal;

    const REGION_BYTES: u64 = 4 * EXTENT_BYTES;

    /// A configuration whose broker does not exist.
    fn config(limit_bytes: Option<u64>) -> PoolConfig {
        let transport = TransportChoice::Tcp.into();
        PoolConfig { broker: "127.0.0.1:1".to_owned(), tls: None, transport, limit_bytes }
    }

    fn stock(limit_bytes: Option<u64>) -> Result<Stock, PoolError> {
        let view = View { region_bytes: REGION_BYTES, free_regions: 10 };
        Pool::stock_of(&config(limit_bytes), &view, OwnerId(1), None)
    }

    #[test]
    fn a_limit_allows_whole_regions_and_at_least_one() {
        let allowed = |limit_bytes| stock(limit_bytes).unwrap().capacity().total_bytes / REGION_BYTES;
        assert_eq!(allowed(None), 10);
        assert_eq!(allowed(Some(3 * REGION_BYTES - 1)), 2);
        assert_eq!(allowed(Some(REGION_BYTES)), 1);
        let too_small = stock(Some(REGION_BYTES - 1));
        assert!(matches!(too_small, Err(PoolError::LimitTooSmall { region_bytes: REGION_BYTES, .. })));
    }

    #[test]
    fn a_pool_tells_the_size_of_the_regions_that_the_broker_lends() {
        let pool = Pool::start(config(None), Arc::new(stock(None).unwrap())).unwrap();
        assert_eq!(pool.region_bytes(), REGION_BYTES);
    }

    #[test]
    fn a_kept_pool_whose_regions_have_an_impossible_size_is_refused_before_a_broker_is_asked() {
        for impossible in [0, EXTENT_BYTES + 1] {
            let journal = MemoryJournal::default();
            journal.append(&[KeptPool { owner: 7, region_bytes: impossible }.put()]);
            let (successor, kept) = (Arc::new(journal.successor()), journal.kept());
            let state = KeptState { journal: successor, kept: &kept, dir: Path::new("/") };
            let connected = Pool::connect_keeping(config(None), None, state);
            let Err(PoolError::RegionSize { region_bytes, .. }) = connected else { panic!("{impossible}") };
            assert_eq!(region_bytes, impossible);
        }
    }

    #[test]
    fn the_sessions_of_a_pool_are_those_that_have_not_ended() {
        let pool = Pool::start(config(None), Arc::new(stock(None).unwrap())).unwrap();
        let shared = &pool.inner.shared;
        let (first, second) = (pool.session(), pool.session());
        assert_eq!(shared.sessions().len(), 2);
        drop(first);
        let _third = pool.session();
        assert_eq!((shared.sessions().len(), shared.sessions.lock().len()), (2, 2));
        drop(second);
        assert_eq!(shared.sessions().len(), 1);
    }

    #[test]
    fn memory_is_shared_with_nodes_of_this_host_unless_the_operator_chooses() {
        let is_shared = |host: &str, choice| {
            let shm_socket = "/run/node.sock".to_owned();
            let address =
                NodeAddress { node: 3, host: host.to_owned(), shm_socket, ..NodeAddress::default() };
            peer_of(&address, choice).shm_socket.is_some()
        };
        let here = this_host();
        assert!(is_shared(&here, TransportChoice::Auto));
        assert!(!is_shared("another", TransportChoice::Auto) && !is_shared("", TransportChoice::Auto));
        assert!(is_shared("another", TransportChoice::Shm));
        assert!(!is_shared(&here, TransportChoice::Tcp) && !is_shared(&here, TransportChoice::Verbs));
        let without = NodeAddress { host: here, ..NodeAddress::default() };
        assert_eq!(peer_of(&without, TransportChoice::Shm).shm_socket, None);
    }

    #[test]
    fn two_random_ids_differ() {
        assert_ne!(random_id(), random_id());
    }
}
