//! Tests specific to network cards: counts of doorbells and completions, limits on what a card may be asked,
//! and that a client that is gone reaches no memory.

mod support;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{
    Batch, Endpoint, EndpointConfig, Host, Locking, MonotonicClock, OpError, Peer, Queue, RegionSet, block_on,
};
use farpool_fabric_verbs::{
    Counters, Level, ServeOptions, VerbsConfig, VerbsServer, VerbsTransport, device_addresses, diagnose,
    serve_verbs,
};
use farpool_wire::{AccessKey, Epoch, NodeId, Refusal, RegionId, RemoteAddr, SessionId};
use futures_util::future::join_all;

const NODE: NodeId = NodeId(7);
const KEY: AccessKey = AccessKey::from_bytes([9; 16]);
const EPOCH: Epoch = Epoch(1);
const REGIONS: u32 = 3;
const REGION_BYTES: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

/// A node whose regions are all lent under one key.
struct Node(RegionSet);

impl Node {
    fn new() -> Arc<Self> {
        let regions = RegionSet::create(REGIONS, REGION_BYTES, Locking::None, |_| {}).unwrap();
        (0..REGIONS).for_each(|region| regions.open(region, EPOCH, KEY));
        Arc::new(Node(regions))
    }
}

impl Host for Node {
    fn node(&self) -> NodeId {
        NODE
    }

    fn regions(&self) -> &RegionSet {
        &self.0
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        answer.extend_from_slice(request);
        Ok(())
    }
}

struct Rig {
    node: Arc<Node>,
    server: VerbsServer,
    transport: VerbsTransport,
    endpoint: Endpoint,
}

impl Rig {
    fn new(options: ServeOptions) -> Self {
        let node = Node::new();
        let server = serve_verbs(node.clone(), support::device_address(), options).unwrap();
        let (transport, endpoint) = client();
        Rig { node, server, transport, endpoint }
    }

    fn peer(&self) -> Peer {
        Peer { node: NODE, tcp: None, verbs: Some(self.server.address()), shm_socket: None }
    }

    fn attached(&self) -> Queue {
        let queue = self.endpoint.open(self.peer()).unwrap();
        attach(&self.endpoint, &queue, 0);
        queue
    }

    /// The counters' increase during `work`.
    fn counted(&self, work: impl FnOnce()) -> Counters {
        let before = self.transport.counters();
        work();
        let after = self.transport.counters();
        Counters {
            doorbells: after.doorbells - before.doorbells,
            work_requests: after.work_requests - before.work_requests,
            completions: after.completions - before.completions,
            answers: after.answers - before.answers,
        }
    }
}

fn client() -> (VerbsTransport, Endpoint) {
    let transport = VerbsTransport::new(VerbsConfig { deadline: DEADLINE }).unwrap();
    let mut next = std::process::id() as u64;
    let endpoint = Endpoint::new(EndpointConfig {
        transport: Rc::new(transport.clone()),
        clock: Rc::new(MonotonicClock),
        session_ids: Box::new(move || {
            next += 1;
            SessionId(next)
        }),
        arena_bytes: 4 << 20,
        deadline: DEADLINE,
    });
    (transport, endpoint)
}

fn attach(endpoint: &Endpoint, queue: &Queue, region: u32) {
    block_on(endpoint, queue.attach(RegionId { node: NODE, index: region }, EPOCH, KEY)).unwrap();
}

fn at(offset: u64) -> RemoteAddr {
    RemoteAddr { region: RegionId { node: NODE, index: 0 }, offset }
}

fn batch_of_reads(rig: &Rig, queue: &Queue, reads: usize) {
    let mut batch = Batch::new(rig.endpoint.arena().take(reads * 64).unwrap());
    for place in 0..reads {
        batch.read(at(place as u64 * 4096), EPOCH, place * 64..(place + 1) * 64);
    }
    let batch = block_on(&rig.endpoint, queue.run(batch));
    assert!(batch.results().iter().all(Result::is_ok), "{:?}", batch.results());
}

#[test]
fn a_batch_of_sixteen_reads_costs_one_doorbell_and_one_completion() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    let counted = rig.counted(|| batch_of_reads(&rig, &queue, 16));
    assert_eq!(counted, Counters { doorbells: 1, work_requests: 16, completions: 1, answers: 0 });
}

#[test]
fn operations_posted_one_by_one_before_a_poll_share_a_doorbell() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    let counted = rig.counted(|| {
        let reads =
            (0..40).map(|place| queue.read(at(place * 64), EPOCH, rig.endpoint.arena().take(64).unwrap()));
        let ended = block_on(&rig.endpoint, join_all(reads));
        assert!(ended.iter().all(|(_, result)| result.is_ok()));
    });
    assert_eq!(counted, Counters { doorbells: 1, work_requests: 40, completions: 3, answers: 0 });
}

#[test]
fn atomics_cost_the_node_no_message_when_cards_do_them() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    let add = || block_on(&rig.endpoint, queue.fetch_and_add(at(8), EPOCH, 5)).unwrap();
    assert_eq!(rig.counted(|| assert_eq!(add(), 0)).answers, 0);
    assert_eq!(add(), 5);
}

#[test]
fn atomics_go_by_message_where_cards_do_not_do_them() {
    let rig = Rig::new(ServeOptions { card_atomics: false, ..ServeOptions::default() });
    let queue = rig.attached();
    let swap = || block_on(&rig.endpoint, queue.compare_and_swap(at(8), EPOCH, 0, 5)).unwrap();
    assert_eq!(rig.counted(|| assert_eq!(swap(), 0)).answers, 1);
    assert_eq!(swap(), 5);
    let misaligned = block_on(&rig.endpoint, queue.compare_and_swap(at(4), EPOCH, 0, 5));
    assert_eq!(misaligned.unwrap_err(), OpError::Refused(Refusal::Misaligned));
}

#[test]
fn a_message_behind_a_write_and_a_write_behind_a_message_keep_their_order() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    let other = rig.attached();
    for round in 1..20u64 {
        let mut word = rig.endpoint.arena().take(8).unwrap();
        word.copy_from_slice(&round.to_le_bytes());
        let call = rig.endpoint.arena().take(64).unwrap();
        let mut last = rig.endpoint.arena().take(8).unwrap();
        last.copy_from_slice(&(round + 1000).to_le_bytes());
        let all = async {
            futures_util::join!(
                queue.write(at(0), EPOCH, word),
                queue.call(call, 8),
                queue.write(at(0), EPOCH, last),
            )
        };
        let (first, answer, second) = block_on(&rig.endpoint, all);
        assert!(first.1.is_ok() && answer.is_ok() && second.1.is_ok());
        let (read, _) =
            block_on(&rig.endpoint, other.read(at(0), EPOCH, rig.endpoint.arena().take(8).unwrap()));
        assert_eq!(read[..], (round + 1000).to_le_bytes());
    }
}

#[test]
fn a_fence_ends_a_queue_with_many_operations_in_flight_and_frees_the_memory() {
    for windows in [true, false] {
        let rig = Rig::new(ServeOptions { windows, ..ServeOptions::default() });
        let queue = rig.attached();
        let writes = async {
            let posted = (0..32)
                .map(|place| queue.write(at(place * 8192), EPOCH, rig.endpoint.arena().take(8192).unwrap()));
            futures_util::join!(join_all(posted), async { rig.node.0.fence(0) }).0
        };
        let ended = block_on(&rig.endpoint, writes);
        let told = |result: &Result<(), OpError>| {
            matches!(result, Ok(()) | Err(OpError::Unknown { .. } | OpError::Refused(Refusal::StaleEpoch)))
        };
        assert!(ended.iter().all(|(_, result)| told(result)));
        assert!(!rig.node.0.is_held(0), "a cut card holds nothing");
        rig.node.0.scrub(0).unwrap();
    }
}

#[test]
fn a_queue_that_lost_one_region_reconnects_and_goes_on_with_another() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    attach(&rig.endpoint, &queue, 1);
    rig.node.0.fence(0);
    let read = |region, offset| {
        let from = RemoteAddr { region: RegionId { node: NODE, index: region }, offset };
        block_on(&rig.endpoint, queue.read(from, EPOCH, rig.endpoint.arena().take(64).unwrap())).1
    };
    assert!(read(0, 0).is_err());
    queue.reconnect().unwrap();
    attach(&rig.endpoint, &queue, 1);
    read(1, 64).unwrap();
}

#[test]
fn a_small_write_is_taken_from_its_buffer_at_once_and_a_large_one_arrives_as_well() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.attached();
    for bytes in [0, 1, 8, 127, 128, 129, 4096, 300_000] {
        let mut buffer = rig.endpoint.arena().take(bytes).unwrap();
        buffer.fill(bytes as u8 | 1);
        block_on(&rig.endpoint, queue.write(at(1024), EPOCH, buffer)).1.unwrap();
        let back = rig.endpoint.arena().take(bytes).unwrap();
        let (back, result) = block_on(&rig.endpoint, queue.read(at(1024), EPOCH, back));
        result.unwrap();
        assert!(back.iter().all(|&byte| byte == bytes as u8 | 1), "{bytes} bytes");
    }
}

#[test]
fn an_address_without_a_device_is_an_error_that_says_how_to_get_one() {
    let error =
        serve_verbs(Node::new(), "127.0.0.1:0".parse().unwrap(), ServeOptions::default()).err().unwrap();
    assert!(error.to_string().contains("rdma link add"), "{error}");
    let error =
        serve_verbs(Node::new(), "0.0.0.0:0".parse().unwrap(), ServeOptions::default()).err().unwrap();
    assert!(error.to_string().contains("0.0.0.0"), "{error}");
}

#[test]
fn a_peer_without_a_card_is_refused_at_once_and_one_that_does_not_listen_soon() {
    let rig = Rig::new(ServeOptions::default());
    let without = Peer { verbs: None, ..rig.peer() };
    assert!(rig.endpoint.open(without).err().unwrap().to_string().contains("--listen-rdma"));
    let mut unused = support::device_address();
    unused.set_port(1);
    let queue = rig.endpoint.open(Peer { verbs: Some(unused), ..rig.peer() }).unwrap();
    let attach = block_on(&rig.endpoint, queue.attach(RegionId { node: NODE, index: 0 }, EPOCH, KEY));
    assert!(matches!(attach, Err(OpError::Unknown { .. })), "{attach:?}");
}

#[test]
fn another_node_at_the_address_is_not_mistaken_for_the_wanted_one() {
    let rig = Rig::new(ServeOptions::default());
    let queue = rig.endpoint.open(Peer { node: NodeId(8), ..rig.peer() }).unwrap();
    let attach = block_on(&rig.endpoint, queue.attach(RegionId { node: NodeId(8), index: 0 }, EPOCH, KEY));
    assert!(matches!(attach, Err(OpError::Unknown { .. })), "{attach:?}");
}

#[test]
fn the_machine_under_test_has_nothing_wrong_and_a_device_with_windows_and_atomics() {
    let findings = diagnose();
    assert!(findings.iter().all(|finding| finding.level == Level::Good), "{findings:?}");
    let device = findings.iter().find(|finding| finding.subject.starts_with("device")).unwrap();
    assert_eq!(device.found, "atomics by the card, memory windows");
    assert!(device_addresses().unwrap().contains(&support::device_address().ip()));
}
