//! What a listener of the control plane lets in.

mod support;

use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use farpool_control::{ControlError, Listener, SERVER_NAME, SHUTDOWN_GRACE, Tls, dial};
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::node_server::NodeServer;
use farpool_wire::control::{RegionsRequest, RenewRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use support::{Authority, FakeNode, PATIENCE, load, regions_total, start};

#[tokio::test]
async fn two_processes_of_one_authority_talk_over_tls() {
    let authority = Authority::new();
    let address = start(Some(load(&authority.directory(&authority)))).await;
    let client = load(&authority.directory(&authority));
    assert_eq!(regions_total(&address, Some(&client)).await.unwrap(), 7);
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let dir = authority.directory(&authority);
    let address = start(Some(load(&dir))).await;
    let tls = ClientTlsConfig::new()
        .domain_name(SERVER_NAME)
        .ca_certificate(Certificate::from_pem(std::fs::read(dir.path().join("ca.pem")).unwrap()));
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
    let mut node = NodeClient::new(endpoint.connect_lazy());
    node.regions(RegionsRequest {}).await.unwrap_err();
    regions_total(&address, None).await.unwrap_err();
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused_by_either_side() {
    let (authority, other) = (Authority::new(), Authority::new());
    let address = start(Some(load(&authority.directory(&authority)))).await;
    let stranger = load(&authority.directory(&other));
    regions_total(&address, Some(&stranger)).await.unwrap_err();
    let distrustful = load(&other.directory(&authority));
    regions_total(&address, Some(&distrustful)).await.unwrap_err();
}

#[tokio::test]
async fn plaintext_off_loopback_is_refused() {
    let anywhere = "0.0.0.0:0".parse().unwrap();
    let error = Listener::bind(anywhere, None).await.unwrap_err();
    assert!(matches!(error, ControlError::PlaintextOffLoopback { .. }));
    assert!(error.to_string().contains("--tls-dir"));
    let authority = Authority::new();
    let tls = load(&authority.directory(&authority));
    Listener::bind(anywhere, Some(tls)).await.unwrap();
}

#[tokio::test]
async fn unusable_tls_files_are_errors_that_name_them() {
    let error = Tls::load(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/ca.pem") && error.contains("key.pem"), "{error}");

    let authority = Authority::new();
    let dir = authority.directory(&authority);
    std::fs::write(dir.path().join("cert.pem"), "no certificate").unwrap();
    let error = dial("127.0.0.1:1", Some(&load(&dir))).unwrap_err();
    assert!(error.to_string().contains(&dir.path().display().to_string()), "{error}");
    assert!(!format!("{:?}", load(&dir)).contains("PRIVATE"));

    std::fs::write(dir.path().join("cert.pem"), "-----BEGIN CERTIFICATE-----\nMIIB").unwrap();
    let error = dial("127.0.0.1:1", Some(&load(&dir))).unwrap_err().to_string();
    assert!(error.contains("cert.pem is not complete PEM"), "{error}");

    let (dir, other) = (authority.directory(&authority), authority.directory(&authority));
    std::fs::copy(other.path().join("key.pem"), dir.path().join("key.pem")).unwrap();
    let error = dial("127.0.0.1:1", Some(&load(&dir))).unwrap_err().to_string();
    assert!(error.contains("key.pem does not belong to cert.pem"), "{error}");
}

#[tokio::test]
async fn a_port_in_use_is_an_error_that_names_the_fix() {
    let first = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let error = Listener::bind(first.address(), None).await.unwrap_err();
    assert!(error.to_string().contains("--listen"), "{error}");
}

#[tokio::test]
async fn garbage_on_the_port_does_nothing() {
    let address = start(None).await;
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xFF; 4096], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xFFgarbage!"]
    {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let _ = stream.write_all(garbage).await; // the server may have closed already
        stream.shutdown().await.ok();
        let mut answer = Vec::new();
        let closed = stream.read_to_end(&mut answer);
        let _ = tokio::time::timeout(Duration::from_secs(5), closed).await.expect("the connection is closed");
    }
    assert_eq!(regions_total(&address, None).await.unwrap(), 7);
}

#[tokio::test]
async fn peers_without_a_correct_greeting_are_counted_and_others_are_not() {
    let rejected = Arc::new(AtomicU64::new(0));
    let counter = rejected.clone();
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let listener = listener.on_rejected(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let address = listener.address().to_string();
    tokio::spawn(listener.serve(NodeServer::new(FakeNode::default()), std::future::pending()));
    for greeting in [&b""[..], b"PRI * HT", b"GET / HTTP/1.1\r\n\r\n", &[22, 3, 1, 0]] {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let _ = stream.write_all(greeting).await; // the server may have closed already
        stream.shutdown().await.ok();
        // Wait until the listener has closed this connection before opening the next one.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    assert_eq!(regions_total(&address, None).await.unwrap(), 7);
    assert_eq!(rejected.load(Ordering::Relaxed), 3, "all except the connection that sent nothing");
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_is_closed() {
    let address = start(None).await;
    let mut stream = TcpStream::connect(&address).await.unwrap();
    let began = tokio::time::Instant::now();
    let _ = stream.read_to_end(&mut Vec::new()).await;
    assert!(began.elapsed() < 2 * farpool_control::GREETING_DEADLINE);
}

/// Half-open handshakes that a flood holds: more than a listener's places and the kernel's queue of 1,024
/// together.
const HALF_OPEN: usize = 3_500;

/// Threads that open them, so that an honest peer is one of many.
const FLOODERS: usize = 8;

/// Interval at which each thread opens one: 4,000 a second in all. Without a pause, the threads would leave
/// the server no processor time on a small machine, and the test would measure that.
const FLOOD_EVERY: Duration = Duration::from_millis(2);

/// Opens connections that begin a TLS handshake and say no more, until told to stop.
fn flood(address: &str, stop: &AtomicBool, opened: &AtomicU64) {
    let mut held = VecDeque::new();
    while !stop.load(Ordering::Acquire) {
        let timeout = Duration::from_millis(100); // the kernel's queue is full
        if let Ok(mut stream) = std::net::TcpStream::connect_timeout(&address.parse().unwrap(), timeout) {
            let _ = stream.write_all(&[&[22, 3, 1, 2, 0][..], &[1; 40]].concat()); // it may be closed already
            held.push_back(stream);
            opened.fetch_add(1, Ordering::Release);
        }
        if held.len() > HALF_OPEN / FLOODERS {
            held.pop_front();
        }
        std::thread::sleep(FLOOD_EVERY);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_peers_get_through_a_flood_of_half_open_handshakes_from_their_own_address() {
    let wanted = 3 * HALF_OPEN as u64;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert!(
        limit.maximum.is_none_or(|most| most >= wanted),
        "raise the hard limit on open files: ulimit -Hn {wanted}"
    );
    let raised = rustix::process::Rlimit { current: Some(wanted), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();

    let authority = Authority::new();
    let address = start(Some(load(&authority.directory(&authority)))).await;
    let client = load(&authority.directory(&authority));
    let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let flooding: Vec<_> = (0..FLOODERS)
        .map(|_| {
            let (address, stop, opened) = (address.clone(), stop.clone(), opened.clone());
            std::thread::spawn(move || flood(&address, &stop, &opened))
        })
        .collect();
    let full = async {
        while opened.load(Ordering::Acquire) < HALF_OPEN as u64 {
            tokio::task::yield_now().await;
        }
    };
    let full = tokio::time::timeout(PATIENCE, full).await;
    let mut answers = Vec::new();
    for _ in 0..5 {
        answers.push(
            regions_total(&address, Some(&client)).await.map_err(|status| farpool_control::explain(&status)),
        );
    }
    stop.store(true, Ordering::Release);
    flooding.into_iter().for_each(|flooder| flooder.join().unwrap());
    assert!(answers.iter().all(|answer| *answer == Ok(7)), "{answers:?} beside {full:?}");
}

#[tokio::test]
async fn a_request_that_never_ends_does_not_hold_up_the_shutdown() {
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let address = listener.address().to_string();
    let (stop, stopped) = oneshot::channel::<()>();
    let node = FakeNode::default();
    let renewing = node.renewing.clone();
    let serving = tokio::spawn(listener.serve(NodeServer::new(node), async { stopped.await.unwrap() }));
    let mut node = NodeClient::new(dial(&address, None).unwrap());
    let endless = tokio::spawn(async move { node.renew(RenewRequest::default()).await });
    renewing.notified().await;
    stop.send(()).unwrap();
    let ended = tokio::time::timeout(2 * SHUTDOWN_GRACE, serving).await.expect("the server ends in time");
    ended.unwrap().unwrap();
    endless.abort();
}
