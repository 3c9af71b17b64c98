//! A node's life: memory, data plane, control plane, registration, and an orderly end.

use std::any::Any;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use farpool_control::limits::REGION_GRANULE_BYTES;
use farpool_control::{ControlError, Listener, Tls, host_name, is_loopback, this_host};
use farpool_fabric::{Host, Listeners, Locking, RegionSet, ServerHandle, serve};
use farpool_lease::DEFAULT_TTL;
use farpool_wire::NodeId;
use farpool_wire::control::NodeAddress;
use rustix::io::Errno;

use crate::control::control_service;
use crate::core::Core;
use crate::identity::{self, Held, Identity};
use crate::keeper::Keeper;
use crate::memory::{available_memory, lockable_memory};
use crate::register::{Registration, find_broker};
use crate::socket::bind_unix;

/// Smallest region: room for several extents of a client's file.
pub const LEAST_REGION_BYTES: u64 = 1 << 20;

/// Serves a node's memory through a network card. The implementation has a crate of its own, and the program
/// that runs the node supplies it.
pub trait CardService: fmt::Debug + Send + Sync {
    /// The address on which it is to listen, as text for people.
    fn place(&self) -> String;

    /// Serves `host` until the guard is dropped. Returns the address for clients.
    ///
    /// # Errors
    /// Faults of the machine's set-up; the text says how to fix them.
    fn serve(&self, host: Arc<dyn Host>) -> io::Result<(SocketAddr, Box<dyn Any + Send>)>;
}

/// How a node is set up.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The broker to register with, HOST:PORT.
    pub broker: String,
    /// Where owners renew their leases.
    pub control_listen: SocketAddr,
    /// Where clients on other hosts read and write.
    pub data_listen: SocketAddr,
    /// Name or address by which other machines reach these two listeners, if it is not the one that they
    /// listen on.
    pub advertise: Option<String>,
    /// How long the node tries to register before it gives up. Once it has registered, it survives restarts
    /// of the broker.
    pub register_within: Duration,
    /// The socket from which clients on this host get the memory itself.
    pub shm_socket: Option<PathBuf>,
    /// Serves clients through a network card as well.
    pub card: Option<Arc<dyn CardService>>,
    /// How much to lend; rounded down to whole regions.
    pub memory_bytes: u64,
    /// How much memory to leave available to the machine: while it has less, the node gives regions back.
    /// With 0, the node gives none back by itself.
    pub reserve_bytes: u64,
    /// Size of each region.
    pub region_bytes: u64,
    /// Whether the memory is kept out of swap.
    pub locking: Locking,
    /// Where to keep the node's id; without it every start is a new node.
    pub state_dir: Option<PathBuf>,
    /// Certificates of the control plane.
    pub tls: Option<Tls>,
}

/// Why a node did not start, or did not go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Lend more memory, or use smaller regions.
    #[error(
        "{memory_bytes} bytes are less than one region of {region_bytes}; \
         raise --memory or lower --region-size"
    )]
    NoRegion {
        /// What was offered.
        memory_bytes: u64,
        /// The region size.
        region_bytes: u64,
    },
    /// Choose another size.
    #[error(
        "regions cannot have {region_bytes} bytes; \
         --region-size takes a multiple of {REGION_GRANULE_BYTES} bytes"
    )]
    RegionSize {
        /// What was given.
        region_bytes: u64,
    },
    /// Lend less memory.
    #[error(
        "only {} MiB of memory are available, not {} MiB (with --shm-socket, one region more than is lent); \
         lower --memory, or use --memory auto",
        available_bytes >> 20,
        needed_bytes >> 20
    )]
    NotAvailable {
        /// What was offered, plus the spare region.
        needed_bytes: u64,
        /// What is available.
        available_bytes: u64,
    },
    /// Raise the limit, or do without locking.
    #[error(
        "only {} may be locked, not {} (with --shm-socket, one region more than is lent); \
         raise the limit (ulimit -l, or LimitMEMLOCK= in the unit), or pass --lock allowed or --no-lock",
        in_unit(lockable_bytes),
        in_unit(needed_bytes)
    )]
    NotLockable {
        /// What was offered, plus the spare region.
        needed_bytes: u64,
        /// What the limit allows.
        lockable_bytes: u64,
    },
    /// Raise the limit: each region takes a descriptor.
    #[error(
        "{regions} regions need as many descriptors; \
         raise the limit on open files (ulimit -n), or --region-size"
    )]
    Descriptors {
        /// How many regions.
        regions: u32,
    },
    /// Raise the limit: to the kernel, memory that processes share is a file.
    #[error(
        "the kernel treats regions as files, and {} MiB exceed the limit on file sizes; \
         raise it (ulimit -f unlimited)",
        region_bytes >> 20
    )]
    FileSize {
        /// The region size.
        region_bytes: u64,
    },
    /// Listen on an address that other machines reach, or advertise one.
    #[error(
        "the broker at {broker} is on another machine, which cannot reach {address}: give {flag} an address \
         of this machine, or pass --advertise with the address by which others reach it"
    )]
    NotReachable {
        /// The broker.
        broker: String,
        /// The address that the node would register.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// Start the broker, or fix what the reason names.
    #[error(
        "cannot register with the broker at {broker}: {reason}; with --wait SECONDS the node waits for it"
    )]
    NotRegistered {
        /// The broker.
        broker: String,
        /// Why.
        reason: String,
    },
    /// Lend less memory: the kernel refused to reserve it.
    #[error("cannot reserve the memory: {0}; lower --memory")]
    Reserve(#[source] io::Error),
    /// End the process that uses the place, or choose another place.
    #[error("cannot listen on {place}: {source}; choose another with {flag}")]
    Listen {
        /// Address or path.
        place: String,
        /// The flag that sets it.
        flag: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Fix the state directory.
    #[error("cannot store the node's identity in {}: {source}", directory.display())]
    State {
        /// The directory.
        directory: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system is short of threads or descriptors.
    #[error("cannot start the node's threads: {0}; raise the limits on processes and open files")]
    Start(#[source] io::Error),
    /// Fix the address or the certificates.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// A number of bytes as people read it: a limit on locked memory may be less than 1 MiB.
fn in_unit(bytes: &u64) -> String {
    if *bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

/// What a node tells its operator once it serves.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Its id.
    pub node: NodeId,
    /// Its addresses.
    pub address: NodeAddress,
    /// How many regions it lends.
    pub regions: u32,
    /// Size of each.
    pub region_bytes: u64,
}

/// Runs a node until `shutdown`. `on_ready` is called once the node serves and has registered with the
/// broker. From then on the node survives restarts of the broker.
///
/// A shutdown while the memory is being reserved ends this function at once, but a thread of the runtime is
/// then still reserving it. End the runtime with `shutdown_background`, which does not wait for that thread.
pub async fn run(
    config: NodeConfig,
    on_ready: impl FnOnce(&Ready),
    shutdown: impl Future<Output = ()>,
) -> Result<(), NodeError> {
    check_reach(&config)?;
    let available_bytes = available_memory().map_err(NodeError::Reserve)?;
    let regions = check(&config, available_bytes, lockable_memory())?;
    warn_of_reserve(&config, regions, available_bytes);
    farpool_fabric::raise_limit(); // regions and connections take a descriptor each
    let (identity, _state_held) = identify(config.state_dir.as_deref())?;
    // Bound before the memory is reserved, so that a port in use is reported at once.
    let control = Listener::bind(config.control_listen, config.tls.clone()).await?;
    let listeners = listen(&config)?;
    let mut shutdown = pin!(shutdown);
    let starting = async {
        if config.register_within.is_zero() {
            // Before the memory is reserved, which can take minutes.
            let found = find_broker(&config.broker, config.tls.as_ref()).await?;
            found.map_err(|reason| not_registered(&config, reason))?;
        }
        start(&config, identity, regions, listeners).await
    };
    let started = tokio::select! {
        biased;
        () = shutdown.as_mut() => {
            leave_socket(&config);
            return Ok(());
        }
        started = starting => started,
    };
    let (core, _keeper, server) = started.inspect_err(|_| leave_socket(&config))?;
    let (rdma, _card_server) = serve_by_card(&config, &core)?;
    let address = NodeAddress { rdma, ..address(&config, identity, &control, &server) };
    core.set_address(address.clone());
    be_first_to_go();
    let mut registration = Registration::new(core.clone(), &config.broker, config.tls.as_ref())?;
    let counting = core.clone();
    let control = control.on_rejected(move || counting.rejected());
    let registered = async {
        let first = registration.first(config.register_within).await;
        let first = first.map_err(|reason| not_registered(&config, reason))?;
        on_ready(&Ready { node: identity.node, address, regions, region_bytes: config.region_bytes });
        Ok(registration.keep(first).await)
    };
    let ending = core.clone();
    let shutdown = async {
        shutdown.await;
        ending.end_waits();
    };
    // The node serves before it registers: the broker may send requests as soon as it knows the node.
    let serving = control.serve(control_service(core), shutdown);
    tokio::select! {
        served = serving => served.map_err(NodeError::from),
        ended = registered => ended.map(|never| match never {}),
    }
}

fn not_registered(config: &NodeConfig, reason: String) -> NodeError {
    NodeError::NotRegistered { broker: config.broker.clone(), reason }
}

/// This node's identity, and its lock on the folder that keeps it, if there is one.
fn identify(state_dir: Option<&Path>) -> Result<(Identity, Option<Held>), NodeError> {
    let Some(directory) = state_dir else {
        return Ok((identity::fresh().map_err(NodeError::Start)?, None));
    };
    let kept = |source| NodeError::State { directory: directory.to_owned(), source };
    let (identity, held) = identity::next_life(directory).map_err(kept)?;
    Ok((identity, Some(held)))
}

/// Starts the service through a network card, if there is to be one. Returns its address for clients.
fn serve_by_card(
    config: &NodeConfig,
    core: &Arc<Core>,
) -> Result<(String, Option<Box<dyn Any + Send>>), NodeError> {
    let Some(card) = &config.card else { return Ok((String::new(), None)) };
    let listen = |source| NodeError::Listen { place: card.place(), flag: "--listen-rdma", source };
    let (address, guard) = card.serve(core.clone()).map_err(listen)?;
    Ok((address.to_string(), Some(guard)))
}

/// Refuses addresses that only this machine reaches if the broker is on another one: clients there could not
/// use them.
fn check_reach(config: &NodeConfig) -> Result<(), NodeError> {
    if config.advertise.is_some() || is_loopback(&config.broker) {
        return Ok(());
    }
    for (address, flag) in [(config.control_listen, "--listen"), (config.data_listen, "--data-listen")] {
        if address.ip().to_canonical().is_loopback() || address.ip().is_unspecified() {
            return Err(NodeError::NotReachable { broker: config.broker.clone(), address, flag });
        }
    }
    Ok(())
}

/// Checks the configuration against itself and the machine: how much memory is available, and how much may be
/// locked if there is a limit. Returns the number of regions.
fn check(config: &NodeConfig, available_bytes: u64, lockable_bytes: Option<u64>) -> Result<u32, NodeError> {
    let &NodeConfig { memory_bytes, region_bytes, .. } = config;
    if region_bytes < LEAST_REGION_BYTES || !region_bytes.is_multiple_of(REGION_GRANULE_BYTES) {
        return Err(NodeError::RegionSize { region_bytes });
    }
    let regions = u32::try_from(memory_bytes / region_bytes).unwrap_or(u32::MAX);
    if regions == 0 {
        return Err(NodeError::NoRegion { memory_bytes, region_bytes });
    }
    let needed_bytes = needed_bytes(config, regions);
    if needed_bytes > available_bytes {
        return Err(NodeError::NotAvailable { needed_bytes, available_bytes });
    }
    if config.locking == Locking::Required
        && let Some(lockable_bytes) = lockable_bytes
        && lockable_bytes < needed_bytes
    {
        return Err(NodeError::NotLockable { needed_bytes, lockable_bytes });
    }
    Ok(regions)
}

/// The memory of the node's regions, with the spare one if there is to be one.
fn needed_bytes(config: &NodeConfig, regions: u32) -> u64 {
    let spare_regions = u64::from(keeps_spare(config));
    u64::from(regions).saturating_add(spare_regions).saturating_mul(config.region_bytes)
}

/// Warns if so much memory is lent that the node will have to give some of it back.
fn warn_of_reserve(config: &NodeConfig, regions: u32, available_bytes: u64) {
    let left_bytes = available_bytes.saturating_sub(needed_bytes(config, regions));
    if left_bytes < config.reserve_bytes {
        tracing::warn!(
            left_mib = left_bytes >> 20,
            reserve_mib = config.reserve_bytes >> 20,
            "less memory than the reserve is left to the machine, so the node will give some back; lower --memory \
             or --reserve"
        );
    }
}

/// Whether the node has memory for one region more than it lends. A process that has a region's memory mapped
/// is fenced by moving the region to other memory.
fn keeps_spare(config: &NodeConfig) -> bool {
    config.shm_socket.is_some()
}

fn listen(config: &NodeConfig) -> Result<Listeners, NodeError> {
    let tcp = TcpListener::bind(config.data_listen).map_err(|source| NodeError::Listen {
        place: config.data_listen.to_string(),
        flag: "--data-listen",
        source,
    })?;
    let unix = config.shm_socket.as_ref().map(|path| {
        bind_unix(path).map(|listener| (listener, path.clone())).map_err(|source| NodeError::Listen {
            place: path.display().to_string(),
            flag: "--shm-socket",
            source,
        })
    });
    Ok(Listeners { tcp: Some(tcp), unix: unix.transpose()? })
}

/// Removes the socket's path if the data plane, which would have owned it, was not started.
fn leave_socket(config: &NodeConfig) {
    if let Some(path) = &config.shm_socket
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!(path = %path.display(), %error, "the socket could not be removed");
    }
}

/// Reserves the memory, which can take seconds, and starts the data plane.
async fn start(
    config: &NodeConfig,
    identity: Identity,
    regions: u32,
    listeners: Listeners,
) -> Result<(Arc<Core>, Keeper, ServerHandle), NodeError> {
    let (region_bytes, locking) = (config.region_bytes, config.locking);
    let keeps_spare = keeps_spare(config);
    let reserving = tokio::task::spawn_blocking(move || {
        let mut memory = RegionSet::create(regions, region_bytes, locking, |done| {
            tracing::debug!(done, of = regions, "regions reserved");
        })?;
        if keeps_spare {
            memory.keep_spare()?;
        }
        Ok(memory)
    });
    let memory = reserving.await.map_err(|error| NodeError::Start(io::Error::other(error)))?;
    let memory = memory.map_err(|error| not_reserved(error, regions, region_bytes))?;
    let started = Core::start(identity.node, identity.incarnation, DEFAULT_TTL, memory, config.reserve_bytes);
    let (core, keeper) = started.map_err(NodeError::Start)?;
    let server = serve(core.clone(), listeners).map_err(NodeError::Start)?;
    Ok((core, keeper, server))
}

/// Why `regions` regions were not reserved.
fn not_reserved(error: io::Error, regions: u32, region_bytes: u64) -> NodeError {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => NodeError::Descriptors { regions },
        Some(Errno::FBIG) => NodeError::FileSize { region_bytes },
        _ => NodeError::Reserve(error),
    }
}

fn address(
    config: &NodeConfig,
    identity: Identity,
    control: &Listener,
    server: &ServerHandle,
) -> NodeAddress {
    let reached = |at| reached(config.advertise.as_deref(), at);
    let shm_socket = server.unix().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    NodeAddress {
        node: identity.node.0,
        incarnation: identity.incarnation,
        control: reached(control.address()),
        tcp: server.tcp().map(reached).unwrap_or_default(),
        shm_socket: shm_socket.map(|path| path.display().to_string()).unwrap_or_default(),
        host: this_host(),
        host_name: host_name(),
        rdma: String::new(),
    }
}

/// The address by which clients reach a listener of this node.
fn reached(advertise: Option<&str>, at: SocketAddr) -> String {
    match advertise {
        Some(host) if host.contains(':') => format!("[{host}]:{}", at.port()),
        Some(host) => format!("{host}:{}", at.port()),
        None => at.to_string(),
    }
}

/// Asks the kernel to kill this process first when memory runs out: a node lends only idle memory.
fn be_first_to_go() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "1000") {
        tracing::warn!(%error, "when memory runs out, the kernel may kill other processes before this node");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    use farpool_control::dial;
    use farpool_lease::LeaseClass;
    use farpool_wire::control::GrantRequest;
    use farpool_wire::control::node_client::NodeClient;
    use tokio::sync::oneshot;

    use super::*;
    use crate::logged::logged;
    use crate::register::fake::{Heard, PATIENCE, RunningBroker};

    fn config(memory_bytes: u64, region_bytes: u64) -> NodeConfig {
        let any = "127.0.0.1:0".parse().unwrap();
        NodeConfig {
            broker: "127.0.0.1:1".into(),
            control_listen: any,
            data_listen: any,
            advertise: None,
            register_within: Duration::ZERO,
            shm_socket: None,
            card: None,
            memory_bytes,
            reserve_bytes: 0,
            region_bytes,
            locking: Locking::None,
            state_dir: None,
            tls: None,
        }
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_flag_to_change() {
        for (memory, region, flag) in [
            (1 << 30, 0, "--region-size"),
            (1 << 30, (1 << 20) + 1, "--region-size"),
            (1 << 20, 64 << 20, "--memory"),
            (1 << 60, 64 << 20, "--memory"),
        ] {
            let error = check(&config(memory, region), 1 << 40, None).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
        assert_eq!(check(&config(130 << 20, 64 << 20), 1 << 40, None).unwrap(), 2);
    }

    #[test]
    fn a_node_lends_all_memory_that_is_available_and_may_be_locked_and_not_a_byte_more() {
        const MIB: u64 = 1 << 20;
        let lends = |bytes| NodeConfig { locking: Locking::Required, ..config(bytes, MIB) };
        let lends_to_processes =
            |bytes| NodeConfig { shm_socket: Some("/run/node.sock".into()), ..lends(bytes) };
        // Processes of the same host need the spare region.
        for (config, needed) in [(lends(4 * MIB), 4 * MIB), (lends_to_processes(3 * MIB), 4 * MIB)] {
            let regions = check(&config, needed, Some(needed)).unwrap();
            assert_eq!(u64::from(regions) * MIB, config.memory_bytes);
            assert_eq!(check(&config, needed, None).unwrap(), regions);
            let error = check(&config, needed - 1, None).unwrap_err();
            let expected = (needed, needed - 1);
            assert!(matches!(error, NodeError::NotAvailable { needed_bytes, available_bytes }
                if (needed_bytes, available_bytes) == expected));
            let error = check(&config, needed, Some(needed - 1)).unwrap_err();
            assert!(matches!(error, NodeError::NotLockable { needed_bytes, lockable_bytes }
                if (needed_bytes, lockable_bytes) == expected));
            for locking in [Locking::AsAllowed, Locking::None] {
                let config = NodeConfig { locking, ..config.clone() };
                assert_eq!(check(&config, needed, Some(0)).unwrap(), regions);
            }
        }
    }

    #[test]
    fn a_limit_on_locked_memory_is_read_in_kib_below_a_mib_and_in_mib_from_there() {
        let refused = |lockable_bytes| NodeError::NotLockable { needed_bytes: 5 << 20, lockable_bytes };
        for (lockable_bytes, text) in
            [(64 << 10, "64 KiB"), ((1 << 20) - 1, "1023 KiB"), (1 << 20, "1 MiB"), (3 << 20, "3 MiB")]
        {
            let text = format!("only {text} may be locked, not 5 MiB");
            let error = refused(lockable_bytes).to_string();
            assert!(error.contains(&text), "{error}");
        }
    }

    #[test]
    fn an_operator_is_warned_of_lending_so_much_that_less_than_the_reserve_is_left() {
        const MIB: u64 = 1 << 20;
        let config = NodeConfig { reserve_bytes: 3 * MIB, ..config(4 * MIB, MIB) };
        let warnings = |available_bytes| logged(|| warn_of_reserve(&config, 4, available_bytes));
        assert!(warnings(9 * MIB).is_empty() && warnings(7 * MIB).is_empty());
        for (available_bytes, left_mib) in [(7 * MIB - 1, 2), (0, 0)] {
            let warnings = warnings(available_bytes);
            assert_eq!(warnings.len(), 1);
            assert!(warnings[0].contains(&format!("left_mib={left_mib} reserve_mib=3")), "{warnings:?}");
        }
    }

    #[test]
    fn a_limit_that_keeps_memory_from_being_reserved_is_named_with_the_command_that_raises_it() {
        for (errno, fix) in [
            (Errno::MFILE, "ulimit -n"),
            (Errno::NFILE, "ulimit -n"),
            (Errno::FBIG, "ulimit -f"),
            (Errno::NOMEM, "lower --memory"),
        ] {
            let error = not_reserved(errno.into(), 2, 1 << 20).to_string();
            assert!(error.contains(fix), "{error}");
        }
    }

    #[test]
    fn clients_get_the_advertised_name_with_the_real_port() {
        let at = "10.0.0.2:7".parse().unwrap();
        assert_eq!(reached(None, at), "10.0.0.2:7");
        assert_eq!(reached(Some("db-17"), at), "db-17:7");
        assert_eq!(reached(Some("10.0.0.3"), at), "10.0.0.3:7");
        assert_eq!(reached(Some("fd00::3"), at), "[fd00::3]:7");
    }

    #[test]
    fn a_node_that_others_cannot_reach_is_refused_where_the_broker_is_on_another_machine() {
        let here = config(1 << 20, 1 << 20);
        let far = NodeConfig { broker: "10.0.0.1:7117".into(), ..here.clone() };
        let listening = |control: &str, data: &str| NodeConfig {
            control_listen: control.parse().unwrap(),
            data_listen: data.parse().unwrap(),
            ..far.clone()
        };
        check_reach(&here).unwrap();
        for (config, flag) in [
            (far.clone(), "--listen"),
            (listening("10.0.0.2:0", "127.0.0.1:0"), "--data-listen"),
            (listening("0.0.0.0:0", "10.0.0.2:0"), "--listen"),
        ] {
            let error = check_reach(&config).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("--advertise"), "{error}");
        }
        check_reach(&listening("10.0.0.2:0", "10.0.0.2:0")).unwrap();
        check_reach(&NodeConfig { advertise: Some("db-17".into()), ..far }).unwrap();
    }

    /// A card that serves while its guard, a clone of this, lives; or that does not work.
    #[derive(Debug)]
    struct FakeCard {
        works: bool,
        serves: Arc<()>,
    }

    const CARD_ADDRESS: &str = "10.0.0.3:7";

    impl CardService for FakeCard {
        fn place(&self) -> String {
            "mlx5_0".into()
        }

        fn serve(&self, _: Arc<dyn Host>) -> io::Result<(SocketAddr, Box<dyn Any + Send>)> {
            if !self.works {
                return Err(io::ErrorKind::NotFound.into());
            }
            Ok((CARD_ADDRESS.parse().unwrap(), Box::new(self.serves.clone())))
        }
    }

    #[tokio::test]
    async fn owners_and_the_broker_are_given_addresses_on_which_the_node_serves_until_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let (state, socket) = (directory.path().join("state"), directory.path().join("node.sock"));
        let mut broker = RunningBroker::start("127.0.0.1:0", false).await;
        let serves = Arc::new(());
        let config = NodeConfig {
            broker: broker.address.to_string(),
            register_within: PATIENCE,
            shm_socket: Some(socket.clone()),
            card: Some(Arc::new(FakeCard { works: true, serves: serves.clone() })),
            state_dir: Some(state.clone()),
            ..config(2 << 20, 1 << 20)
        };
        let ((tell, told), (stop, stopped)) = (oneshot::channel(), oneshot::channel::<()>());
        let node = run(config, |ready| tell.send(ready.clone()).unwrap(), async { stopped.await.unwrap() });
        let client = async {
            let Ready { node, address, regions, region_bytes } = told.await.unwrap();
            assert_eq!((address.node, address.incarnation), (node.0, 1));
            assert_eq!((regions, region_bytes), (2, 1 << 20));
            assert_eq!(broker.next_report().await.address.as_ref(), Some(&address));

            TcpStream::connect(&address.tcp).unwrap();
            assert_eq!(Path::new(&address.shm_socket), socket);
            UnixStream::connect(&socket).unwrap();
            assert_eq!((address.rdma.as_str(), Arc::strong_count(&serves)), (CARD_ADDRESS, 3));
            let mut control = NodeClient::new(dial(&address.control, None).unwrap());
            let grant = GrantRequest { owner: 7, count: 3, class: LeaseClass::Pinned.to_wire() };
            let leases = control.grant(grant).await.unwrap().into_inner().leases;
            assert_eq!(leases.len(), 2);
            assert!(leases.iter().all(|lease| lease.address.as_ref() == Some(&address)));

            TcpStream::connect(&address.control).unwrap().write_all(&[0; 64]).unwrap();
            let beats_that_tell_of_it = async {
                while !matches!(broker.next().await, Heard::Beat(beat) if beat.frames_rejected == 1) {}
            };
            tokio::time::timeout(PATIENCE, beats_that_tell_of_it).await.expect("it is counted");
            assert_eq!(std::fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim(), "1000");
            stop.send(()).unwrap();
            node
        };
        let (ended, node) = tokio::join!(node, client);
        ended.unwrap();
        assert_eq!((Arc::strong_count(&serves), socket.exists()), (1, false));
        let (next, _held) = identity::next_life(&state).unwrap();
        assert_eq!(next, Identity { node, incarnation: 2 });
    }

    #[tokio::test]
    async fn a_node_without_its_broker_or_its_card_ends_with_the_flag_to_change() {
        let far = config(1 << 20, 1 << 20);
        let broken = Arc::new(FakeCard { works: false, serves: Arc::new(()) });
        // With a wait, the broker is asked only once the node serves.
        let cardless = NodeConfig { card: Some(broken), register_within: PATIENCE, ..far.clone() };
        for (config, place, flag) in [(far, "127.0.0.1:1", "--wait"), (cardless, "mlx5_0", "--listen-rdma")] {
            let node = run(config, |_| panic!("the node should have ended"), std::future::pending());
            let ended = tokio::time::timeout(PATIENCE, node).await.expect("it ends");
            let error = ended.unwrap_err().to_string();
            assert!(error.contains(place) && error.contains(flag), "{error}");
        }
    }

    #[tokio::test]
    async fn a_shutdown_while_memory_is_reserved_ends_the_node_before_it_is_ready() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.sock");
        let config = NodeConfig { shm_socket: Some(path.clone()), ..config(1 << 20, 1 << 20) };
        run(config, |_| panic!("the node should have ended"), std::future::ready(())).await.unwrap();
        assert!(!path.exists());
    }
}
