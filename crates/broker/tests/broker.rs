//! The broker over real gRPC, with nodes that lend by the real rules.

mod support;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_broker::{BrokerConfig, BrokerError, StoreError, run};
use farpool_control::{ControlError, SERVER_NAME, Tls};
use farpool_lease::{LeaseClass, Millis};
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, NodeAddress, OwnerStatus, RegionState, RegisterRequest, RevokeRequest,
};
use futures_util::future::join_all;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use support::{FakeNode, PATIENCE, REGION_BYTES, RunningBroker, summary};

async fn a_broker() -> (tempfile::TempDir, RunningBroker) {
    let dir = tempfile::tempdir().unwrap();
    let broker = RunningBroker::start(&dir.path().join("broker.redb"), None).await;
    (dir, broker)
}

fn from_node(answer: &AcquireResponse, node: u64) -> usize {
    answer.leases.iter().filter(|lease| lease.address.as_ref().unwrap().node == node).count()
}

#[tokio::test]
async fn acquire_spreads_regions_over_nodes() {
    let (_dir, broker) = a_broker().await;
    for node in 1..=3 {
        FakeNode::join(&broker, node, 8).await;
    }
    let answer = broker.acquire(7, 6).await;
    assert_eq!([1, 2, 3].map(|node| from_node(&answer, node)), [2, 2, 2]);
    assert_eq!((answer.region_bytes, answer.short_reason.as_str()), (REGION_BYTES, ""));
}

#[tokio::test]
async fn a_node_with_regions_of_an_impossible_size_is_refused() {
    let (_dir, broker) = a_broker().await;
    let node = FakeNode::start(1, 4, None).await;
    for region_bytes in [0, 3, REGION_BYTES + 1, 4096] {
        let refusal = node.register_with(&broker, region_bytes).await.unwrap_err();
        assert_eq!(refusal.code(), Code::InvalidArgument, "{region_bytes}");
    }
    assert!(broker.status().await.nodes.is_empty());
    node.register(&broker).await.unwrap();
}

#[tokio::test]
async fn nodes_that_the_owner_cannot_reach_are_avoided() {
    let (_dir, broker) = a_broker().await;
    for node in 1..=2 {
        FakeNode::join(&broker, node, 8).await;
    }
    let class = LeaseClass::Pinned.to_wire();
    let request = AcquireRequest { owner: 7, count: 10, class, avoid: vec![1] };
    let answer = broker.client().acquire(request).await.unwrap().into_inner();
    assert_eq!((from_node(&answer, 1), from_node(&answer, 2)), (0, 8));
    assert!(answer.short_reason.contains("8 of 16 regions are free"), "{}", answer.short_reason);
}

#[tokio::test]
async fn acquire_falls_over_when_a_node_dies() {
    let (_dir, broker) = a_broker().await;
    let dead = FakeNode::join(&broker, 1, 8).await;
    FakeNode::join(&broker, 2, 8).await;
    dead.kill().await;
    let answer = broker.acquire(7, 6).await;
    assert_eq!((from_node(&answer, 1), from_node(&answer, 2)), (0, 6));
}

#[tokio::test]
async fn acquire_falls_over_when_a_node_stalls_and_leaves_it_alone_after() {
    let (_dir, broker) = a_broker().await;
    let stalled = FakeNode::join(&broker, 1, 8).await;
    let other = FakeNode::join(&broker, 2, 8).await;
    stalled.stalled.store(true, Ordering::Release);
    let answer = broker.acquire(7, 4).await;
    assert_eq!((from_node(&answer, 1), from_node(&answer, 2)), (0, 4));
    stalled.beat(&broker).await;
    other.beat(&broker).await;
    let began = Instant::now();
    assert_eq!(from_node(&broker.acquire(7, 2).await, 2), 2);
    assert!(began.elapsed() < Duration::from_secs(1), "the stalled node was asked again at once");
}

#[tokio::test]
async fn full_pool_answers_with_a_reason_and_no_leases() {
    let (_dir, broker) = a_broker().await;
    let empty = broker.acquire(7, 1).await;
    assert!(empty.leases.is_empty() && empty.short_reason.contains("no node has registered"));
    let node = FakeNode::join(&broker, 1, 4).await;
    let first = broker.acquire(7, 6).await;
    assert_eq!(first.leases.len(), 4);
    assert!(first.short_reason.contains("all 4 regions of 1 nodes are lent"), "{}", first.short_reason);
    let second = broker.acquire(8, 1).await;
    assert!(second.leases.is_empty());
    assert!(second.short_reason.contains("all 4 regions of 1 nodes are lent"), "{}", second.short_reason);
    assert_eq!(node.held(), 4);
}

#[tokio::test]
async fn a_region_is_never_handed_out_twice_to_owners_that_ask_at_once() {
    let (_dir, broker) = a_broker().await;
    for node in 1..=2 {
        FakeNode::join(&broker, node, 16).await;
    }
    let answers = join_all((0..8).map(|owner| broker.acquire(owner, 8))).await;
    let leases: Vec<_> = answers.iter().flat_map(|answer| &answer.leases).collect();
    let distinct: BTreeSet<_> = leases.iter().map(|lease| lease.region_id().unwrap()).collect();
    assert_eq!((leases.len(), distinct.len()), (32, 32));
}

#[tokio::test]
async fn revocable_leases_are_taken_back_on_one_node_at_a_time_and_pinned_ones_on_none() {
    let (_dir, broker) = a_broker().await;
    for node in 1..=2 {
        FakeNode::join(&broker, node, 8).await;
    }
    let acquire = |class: LeaseClass, count| AcquireRequest {
        owner: 7,
        count,
        class: class.to_wire(),
        ..Default::default()
    };
    broker.client().acquire(acquire(LeaseClass::Pinned, 2)).await.unwrap();
    broker.client().acquire(acquire(LeaseClass::Revocable, 6)).await.unwrap();
    let revoke = |count| RevokeRequest { owner: 7, count, grace_ms: 30_000 };
    let answer = broker.client().revoke(revoke(4)).await.unwrap().into_inner();
    assert_eq!((answer.revoked, answer.pinned, answer.remaining_ms), (3, 2, 30_000));
    assert_eq!(answer.revocable, 3);
    let answer = broker.client().revoke(revoke(4)).await.unwrap().into_inner();
    assert_eq!((answer.revoked, answer.pinned, answer.revocable), (0, 2, 3));
    assert!(answer.short_reason.contains("one node at a time"), "{}", answer.short_reason);
    assert_eq!(broker.client().revoke(revoke(0)).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn broker_restart_rebuilds_its_state_from_the_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("broker.redb");
    let broker = RunningBroker::start(&store, None).await;
    let nodes = [FakeNode::join(&broker, 1, 4).await, FakeNode::join(&broker, 2, 4).await];
    assert_eq!(broker.acquire(7, 3).await.leases.len(), 3);
    broker.stop().await;
    // Something changes while no broker runs. The next broker learns it from the nodes named in its store.
    let ended = nodes[0].table.lock().expire(Millis(u64::MAX)).len();
    let broker = RunningBroker::start(&store, None).await;
    let status = broker.status().await;
    let [first, second] = [nodes[0].held(), nodes[1].held()];
    assert_eq!(first, 0);
    assert_eq!(summary(&status), [(1, true, 4 - ended as u32, 0), (2, true, 4 - second, second)]);
    assert_eq!(status.owners, [OwnerStatus { owner: 7, regions: second }]);
    assert_eq!(broker.acquire(8, 8).await.leases.len(), 5);
}

#[tokio::test]
async fn a_broker_that_lost_its_store_learns_the_pool_from_heartbeats() {
    let (_dir, broker) = a_broker().await;
    let node = FakeNode::start(1, 4, None).await;
    assert!(node.beat(&broker).await, "an unknown node is told to register");
    node.register(&broker).await.unwrap();
    assert!(!node.beat(&broker).await);
    assert_eq!(broker.acquire(7, 1).await.leases.len(), 1);
    assert!(!node.beat(&broker).await, "what the broker placed itself it knows");
    let _ = node.table.lock().expire(Millis(u64::MAX));
    assert!(node.beat(&broker).await, "a lease that ended without the broker makes the node report");
}

#[tokio::test]
async fn status_shows_what_the_nodes_say_now() {
    let (_dir, broker) = a_broker().await;
    let node = FakeNode::join(&broker, 1, 4).await;
    let dead = FakeNode::join(&broker, 2, 4).await;
    assert_eq!(broker.acquire(7, 4).await.leases.len(), 4);
    let _ = node.table.lock().expire(Millis(u64::MAX));
    node.beat(&broker).await;
    dead.kill().await;
    let status = broker.status().await;
    assert_eq!(summary(&status), [(1, true, 2, 0), (2, true, 2, 2)]);
    assert_eq!(status.nodes[0].frames_rejected, 3);
    assert_eq!(status.region_bytes, REGION_BYTES);
}

#[tokio::test]
async fn impossible_requests_are_refused() {
    let (_dir, broker) = a_broker().await;
    let class = LeaseClass::Revocable.to_wire();
    let good = AcquireRequest { owner: 7, count: 1, class, avoid: Vec::new() };
    for bad in [
        AcquireRequest { count: 0, ..good.clone() },
        AcquireRequest { count: u32::MAX, ..good.clone() },
        AcquireRequest { class: 0, ..good.clone() },
        AcquireRequest { class: 9, ..good.clone() },
        AcquireRequest { avoid: (0..5_000).collect(), ..good },
    ] {
        assert_eq!(broker.client().acquire(bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
}

#[tokio::test]
async fn plaintext_off_loopback_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let listen = "0.0.0.0:0".parse().unwrap();
    let config = BrokerConfig { listen, store: dir.path().join("broker.redb"), tls: None };
    let error = run(config, |_| (), std::future::pending()).await.unwrap_err();
    assert!(matches!(error, BrokerError::Control(ControlError::PlaintextOffLoopback { .. })), "{error}");
}

#[tokio::test]
async fn two_brokers_on_one_store_is_an_error() {
    let (dir, _broker) = a_broker().await;
    let listen = "127.0.0.1:0".parse().unwrap();
    let config = BrokerConfig { listen, store: dir.path().join("broker.redb"), tls: None };
    let error = run(config, |_| (), std::future::pending()).await.unwrap_err();
    assert!(matches!(error, BrokerError::Store(StoreError::InUse { .. })), "{error}");
}

#[tokio::test]
async fn garbage_on_the_grpc_port_does_nothing() {
    let (_dir, broker) = a_broker().await;
    FakeNode::join(&broker, 1, 4).await;
    let mut stream = TcpStream::connect(broker.address).await.unwrap();
    let _ = stream.write_all(&[0xA5; 10_000]).await; // the broker may have closed already
    let mut answer = Vec::new();
    let closed = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    let _ = closed.expect("the connection is closed");
    assert_eq!(broker.acquire(7, 4).await.leases.len(), 4);
}

#[tokio::test]
async fn broker_and_nodes_talk_over_tls_and_strangers_are_refused() {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let files =
        [("ca.pem", authority.pem()), ("cert.pem", certificate.pem()), ("key.pem", key.serialize_pem())];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let tls = Tls::load(dir.path()).unwrap();
    let broker = RunningBroker::start(&dir.path().join("broker.redb"), Some(tls)).await;
    FakeNode::join(&broker, 1, 4).await;
    assert_eq!(broker.acquire(7, 2).await.leases.len(), 2);
    let mut stranger = farpool_wire::control::broker_client::BrokerClient::new(
        farpool_control::dial(&broker.address.to_string(), None).unwrap(),
    );
    stranger.status(farpool_wire::control::StatusRequest::default()).await.unwrap_err();
}

/// 20,000 owners with a region each.
fn a_report(node: u64) -> RegisterRequest {
    let control = "127.0.0.1:1".to_owned(); // no process listens there
    let state = |region: u32| RegionState {
        region,
        owner: node << 32 | u64::from(region),
        epoch: 1,
        class: LeaseClass::Revocable.to_wire(),
        held: true,
        ..Default::default()
    };
    RegisterRequest {
        address: Some(NodeAddress { node, incarnation: 1, control, ..Default::default() }),
        region_bytes: REGION_BYTES,
        regions_total: 20_000,
        lent: (0..20_000).map(state).collect(),
    }
}

#[tokio::test]
async fn a_peer_that_registers_too_many_owners_is_refused_and_the_store_stays_small() {
    let (dir, broker) = a_broker().await;
    let mut client = broker.client();
    let mut refused = None;
    let most = (farpool_broker::MAX_OWNERS_PER_IDENTITY / 20_000) as u64;
    for node in 1..=most + 1 {
        refused = client.register(a_report(node)).await.err();
        assert_eq!(refused.is_some(), node > most, "{refused:?}");
    }
    let refused = refused.unwrap();
    assert!(refused.message().contains("owners") && refused.message().contains("certificate"), "{refused}");
    let status = broker.status().await;
    assert_eq!(status.nodes.len() as u64, most);
    let stored = std::fs::metadata(dir.path().join("broker.redb")).unwrap().len();
    assert!(stored < 8 << 20, "{stored} bytes");
}
