use std::sync::atomic::{AtomicU32, Ordering};

use farpool_control::Listener;
use farpool_wire::control::node_server::{Node, NodeServer};
use farpool_wire::control::{
    AcquireResponse, AddGrantResponse, AwaitRevocationRequest, AwaitRevocationResponse, FenceGrantRequest,
    FenceGrantResponse, GrantRequest, GrantResponse, RegionsRequest, RegionsResponse, ReleaseResponse,
    RenewOutcome, RenewRequest, RenewResponse, ResizeRequest, ResizeResponse, RevokeRequest, RevokeResponse,
};
use tonic::{Request, Response, Status};

use super::*;

const REGION_BYTES: u64 = 1 << 20;
const REGION: RegionId = RegionId { node: NodeId(1), index: 0 };
/// How long a lease lasts by its node's clock.
const TTL: Millis = Millis(9_000);
/// An address on which nothing listens.
const NOBODY: &str = "127.0.0.1:1";

fn lease(node: u64, region: u32) -> Lease {
    lease_at(node, region, &format!("node{node}"))
}

/// A lease of a node whose control service has this address.
fn lease_at(node: u64, region: u32, control: &str) -> Lease {
    let address = NodeAddress { node, control: control.to_owned(), ..NodeAddress::default() };
    let (address, key) = (Some(address), vec![3; AccessKey::BYTES]);
    Lease { address, region, epoch: 7, key, ttl_ms: TTL.0, ..Lease::default() }
}

fn keys(leases: Vec<Lease>) -> JointKeys {
    JointKeys { owner: 5, region_bytes: REGION_BYTES, leases }
}

/// A holder of [`REGION`], whose lease it asked for at this time.
fn holder_since(asked_at: Millis) -> Holder {
    let mut holder = Holder::new(OwnerId(5), REGION_BYTES);
    let leases = vec![lease(REGION.node.0, REGION.index)];
    let answer = AcquireResponse { leases, region_bytes: REGION_BYTES, ..AcquireResponse::default() };
    assert_eq!(holder.acquisition_answered(asked_at, asked_at, Some(answer)).leases.len(), 1);
    holder
}

/// The leases of a holder that knows of no address.
fn shared_of(holder: Holder) -> Shared {
    Shared {
        keys: keys(Vec::new()),
        known: RwLock::default(),
        holder: Mutex::new(holder),
        transport: Transports::default(),
        tls: None,
        silent: Mutex::default(),
    }
}

/// The lease of [`REGION`], which nothing renews.
fn unrenewed() -> JointLeases {
    let lease = lease(REGION.node.0, REGION.index);
    let peer = peer_of(lease.address.as_ref().unwrap(), Transports::default().choice);
    let peers = BTreeMap::from([(REGION, (Epoch(lease.epoch), peer))]);
    let known = RwLock::new(Known { peers, ..Known::default() });
    let shared = Arc::new(Shared { known, ..shared_of(holder_since(Millis(0))) });
    let runtime = runtime().unwrap().handle().clone();
    JointLeases { shared, runtime, _renewing: Renewing { stop: None, thread: None } }
}

#[test]
fn a_region_that_was_leased_again_is_not_forgotten_with_its_earlier_lease() {
    let leases = unrenewed();
    let now = lease(REGION.node.0, REGION.index);
    leases.forget(&[Lease { epoch: now.epoch + 1, ..now.clone() }]);
    assert!(leases.peer(REGION).is_some());
    leases.forget(&[now]);
    assert!(leases.peer(REGION).is_none());
}

/// From now on the leases were last renewed when their node was asked at this time.
fn assume_renewed(leases: &JointLeases, asked_at: Millis) {
    *leases.shared.holder.lock() = holder_since(asked_at);
}

/// A time that counts as recent even if the machine is so busy that a test stands still for minutes.
fn in_the_future() -> Millis {
    now().plus(Millis(3_600_000))
}

/// A node that gives each renewal the same answer; `None`: it is unavailable.
#[derive(Default)]
struct FakeNode {
    answer: Mutex<Option<RenewResponse>>,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Node for FakeNode {
    async fn renew(&self, _: Request<RenewRequest>) -> Answer<RenewResponse> {
        self.answer.lock().clone().map(Response::new).ok_or(Status::unavailable(""))
    }

    async fn grant(&self, _: Request<GrantRequest>) -> Answer<GrantResponse> {
        Err(Status::unimplemented(""))
    }

    async fn add_grant(&self, _: Request<AddGrantRequest>) -> Answer<AddGrantResponse> {
        Err(Status::unimplemented(""))
    }

    async fn fence_grant(&self, _: Request<FenceGrantRequest>) -> Answer<FenceGrantResponse> {
        Err(Status::unimplemented(""))
    }

    async fn revoke(&self, _: Request<RevokeRequest>) -> Answer<RevokeResponse> {
        Err(Status::unimplemented(""))
    }

    async fn await_revocation(&self, _: Request<AwaitRevocationRequest>) -> Answer<AwaitRevocationResponse> {
        Err(Status::unimplemented(""))
    }

    async fn resize(&self, _: Request<ResizeRequest>) -> Answer<ResizeResponse> {
        Err(Status::unimplemented(""))
    }

    async fn release(&self, _: Request<ReleaseRequest>) -> Answer<ReleaseResponse> {
        Err(Status::unimplemented(""))
    }

    async fn regions(&self, _: Request<RegionsRequest>) -> Answer<RegionsResponse> {
        Err(Status::unimplemented(""))
    }
}

/// A fake node, and the runtime that serves it until it is dropped.
struct Served {
    node: Arc<FakeNode>,
    address: String,
    _runtime: Runtime,
}

impl Served {
    fn new() -> Served {
        let runtime = Runtime::new().unwrap();
        let node = Arc::new(FakeNode::default());
        let listener = runtime.block_on(Listener::bind("127.0.0.1:0".parse().unwrap(), None)).unwrap();
        let address = listener.address().to_string();
        runtime.spawn(listener.serve(NodeServer::from_arc(node.clone()), std::future::pending()));
        Served { node, address, _runtime: runtime }
    }

    /// From now on the node renews the first so many leases of each request, and leaves out the others.
    fn renews(&self, leases: usize) {
        let outcome = RenewOutcome { renewed: true, remaining_ms: TTL.0, ..RenewOutcome::default() };
        *self.node.answer.lock() = Some(RenewResponse { outcomes: vec![outcome; leases] });
    }

    /// From now on the node renews nothing.
    fn refuses(&self) {
        *self.node.answer.lock() = None;
    }
}

/// Counts the warnings of the thread for which it is set.
struct Warnings(AtomicU32);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed); // one thread only; pairs with nothing
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn keys_survive_the_way_to_another_process_and_keep_the_order_of_regions() {
    let keys = keys(vec![lease(2, 1), lease(1, 0), lease(2, 0)]);
    let read = JointKeys::decode(keys.encode_to_vec().as_slice()).unwrap();
    assert_eq!(read, keys);
    let regions = read.regions().unwrap();
    assert_eq!(
        regions.iter().map(|region| (region.node.0, region.index)).collect::<Vec<_>>(),
        [(2, 1), (1, 0), (2, 0)]
    );
    let nodes = by_node(&read).unwrap();
    assert_eq!(
        nodes.iter().map(|(node, _, leases)| (node.0, leases.len())).collect::<Vec<_>>(),
        [(1, 1), (2, 2)]
    );
}

#[test]
fn keys_without_an_address_are_damaged() {
    let keys = keys(vec![Lease { address: None, ..lease(1, 0) }]);
    assert!(keys.regions().is_none() && matches!(by_node(&keys), Err(JointError::Damaged)));
}

#[test]
fn a_lease_whose_renewals_are_not_answered_is_lost_only_when_it_has_ended_by_any_clock() {
    let shared = shared_of(holder_since(Millis(0)));
    let (stops, ended) = (TTL.0 * 4 / 5, longest(TTL).0);
    assert!(shared.grant_request(Millis(stops - 1), REGION).is_ok());
    for unsure in [stops, TTL.0, ended - 1] {
        let refused = shared.grant_request(Millis(unsure), REGION).unwrap_err();
        assert!(matches!(refused, GrantError::NoAnswer { .. }), "{unsure} ms: {refused}");
    }
    let refused = shared.grant_request(Millis(ended), REGION).unwrap_err();
    assert!(matches!(refused, GrantError::LeaseLost { .. }), "{refused}");
}

#[test]
fn a_region_is_reported_lost_from_when_its_lease_has_ended_by_any_clock() {
    let leases = unrenewed();
    assume_renewed(&leases, now().since(longest(TTL)));
    assert_eq!(leases.lost(), [REGION]);
    assume_renewed(&leases, in_the_future());
    assert_eq!(leases.lost(), []);
}

#[test]
fn nodes_count_as_not_answering_once_the_last_answered_renewal_is_as_old_as_the_limit() {
    let leases = unrenewed();
    assume_renewed(&leases, now().since(SILENCE));
    assert!(!leases.are_answered());
    assume_renewed(&leases, in_the_future());
    assert!(leases.are_answered());
}

#[test]
fn no_thread_renews_leases_any_more_once_they_are_dropped() {
    let keys = keys(vec![lease_at(REGION.node.0, REGION.index, NOBODY)]);
    // Several times, since a thread that is not waited for may happen to end at once.
    for _ in 0..8 {
        let (holder, transport) = (Mutex::new(holder_since(now())), Transports::default());
        let leases = JointLeases::start(runtime().unwrap(), keys.clone(), holder, transport, None).unwrap();
        let shared = Arc::downgrade(&leases.shared);
        drop(leases);
        assert!(shared.upgrade().is_none(), "the thread still has them");
    }
}

#[test]
fn a_process_joins_only_if_each_lease_has_been_answered() {
    let served = Served::new();
    let keys = keys((0..3).map(|region| lease_at(1, region, &served.address)).collect());
    let join = || JointLeases::join(keys.clone(), Transports::default(), None);
    served.renews(2);
    assert!(matches!(join(), Err(JointError::Damaged)));
    served.renews(3);
    let joined = join().unwrap();
    assert_eq!((joined.lost(), joined.keys()), (vec![], &keys));
}

#[test]
fn a_holder_adopts_leases_that_another_got_later_all_or_none() {
    let served = Served::new();
    let lease = |region| lease_at(1, region, &served.address);
    served.renews(1);
    let holder = JointLeases::join(keys(vec![lease(0)]), Transports::default(), None).unwrap();
    let region = |index| RegionId { node: NodeId(1), index };
    let adopt = |regions: &[u32]| {
        let leases = regions.iter().map(|&region| lease(region)).collect();
        runtime().unwrap().block_on(holder.adopt(leases))
    };
    let known = || [1, 2, 3].map(|index| holder.peer(region(index)).is_some());
    // The node does not answer about one of them.
    assert!(matches!(adopt(&[1, 2]), Err(JointError::Damaged)));
    assert_eq!(known(), [false; 3]);
    served.renews(2);
    adopt(&[1, 2]).unwrap();
    assert_eq!(known(), [true, true, false]);
    served.renews(1);
    adopt(&[1, 2, 3]).unwrap();
    assert_eq!((known(), holder.lost()), ([true; 3], vec![]));
    runtime().unwrap().block_on(holder.give_back(vec![lease(3)]));
    assert_eq!((known(), holder.lost()), ([true, true, false], vec![]));
}

#[test]
fn an_operator_reads_once_that_a_node_does_not_renew_leases_and_once_that_it_does_again() {
    let (served, here) = (Served::new(), runtime().unwrap());
    let holder = holder_since(now());
    let renewals = holder.last_renewals(now(), MAX_LEASES_PER_REQUEST);
    let client = {
        let _inside = here.enter(); // channels belong to a runtime
        dial_node(REGION.node, &served.address, None).unwrap()
    };
    let clients = BTreeMap::from([(REGION.node, client)]);
    let known = RwLock::new(Known { clients, ..Known::default() });
    let shared = Arc::new(Shared { known, ..shared_of(holder) });
    let warnings = Arc::new(Warnings(AtomicU32::new(0)));
    let _set = tracing::subscriber::set_default(warnings.clone());
    let renewing_warns = || {
        let before = warnings.0.load(Ordering::Relaxed);
        renewals.iter().for_each(|renewal| here.block_on(renew(shared.clone(), renewal.clone())));
        warnings.0.load(Ordering::Relaxed) - before
    };
    for _ in 0..2 {
        served.refuses();
        assert_eq!([renewing_warns(), renewing_warns()], [1, 0]);
        served.renews(1);
        assert_eq!([renewing_warns(), renewing_warns()], [1, 0]);
    }
}
