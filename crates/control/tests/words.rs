//! What both sides say when they cannot talk to each other: the same words, with the reason and the fix.

mod support;

use std::sync::{Arc, Mutex};

use farpool_control::{CONTROL_VERSION, Listener, SERVER_NAME, Tls, ask, dial, explain};
use farpool_wire::control::RegionsRequest;
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::node_server::NodeServer;
use rcgen::{CertificateParams, date_time_ymd};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tonic::Code;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use support::{Authority, FakeNode, PATIENCE, load, regions_total, start};

/// Collects log messages of the levels that operators see.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<String>>);

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl Subscriber for Said {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The client's error and the listener's log after the client has dialled the listener.
async fn words(listener: Option<Tls>, client: Option<Tls>) -> (String, String) {
    let said = Said::default();
    // The tests' runtime has one thread, on which all of this runs.
    let _guard = tracing::subscriber::set_default(said.clone());
    let address = start(listener).await;
    said.0.lock().unwrap().clear(); // what the listener says of its own certificate
    let status = regions_total(&address, client.as_ref()).await.unwrap_err();
    let heard = async {
        while said.0.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let _ = tokio::time::timeout(PATIENCE, heard).await;
    let said = said.0.lock().unwrap().clone();
    (explain(&status), said)
}

#[tokio::test]
async fn both_sides_report_plain_text_to_an_endpoint_with_tls() {
    let authority = Authority::new();
    let (client, listener) = words(Some(load(&authority.directory(&authority))), None).await;
    assert!(client.contains("wants TLS") && client.contains("--tls-dir"), "{client}");
    assert!(listener.contains("spoke plain text") && listener.contains("--tls-dir"), "{listener}");
}

#[tokio::test]
async fn both_sides_report_tls_to_an_endpoint_without_it() {
    let authority = Authority::new();
    let (client, listener) = words(None, Some(load(&authority.directory(&authority)))).await;
    assert!(client.contains("does not speak TLS"), "{client}");
    assert!(listener.contains("spoke TLS"), "{listener}");
}

#[tokio::test]
async fn both_sides_report_a_certificate_of_another_authority() {
    let (authority, other) = (Authority::new(), Authority::new());
    let good = || Some(load(&authority.directory(&authority)));
    let (client, listener) = words(good(), Some(load(&authority.directory(&other)))).await;
    assert!(client.contains("refuses this side's certificate") && client.contains("authority"), "{client}");
    assert!(listener.contains("its certificate is not of this pool's authority"), "{listener}");
    let (client, listener) = words(Some(load(&authority.directory(&other))), good()).await;
    assert!(client.contains("its certificate is not of this pool's authority"), "{client}");
    assert!(listener.contains("refuses this side's certificate"), "{listener}");
}

/// A certificate of this authority that has expired.
fn expired(authority: &Authority) -> Option<Tls> {
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
    (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    Some(load(&authority.directory_with(authority, params)))
}

#[tokio::test]
async fn both_sides_report_an_expired_certificate() {
    let authority = Authority::new();
    let good = || Some(load(&authority.directory(&authority)));
    let (client, listener) = words(good(), expired(&authority)).await;
    assert!(client.contains("refuses this side's certificate, which has expired"), "{client}");
    assert!(listener.contains("its certificate has expired"), "{listener}");
    let (client, listener) = words(expired(&authority), good()).await;
    assert!(client.contains("its certificate has expired"), "{client}");
    assert!(listener.contains("refuses this side's certificate, which has expired"), "{listener}");
}

#[tokio::test]
async fn a_listener_says_at_its_start_that_clients_will_refuse_its_certificate() {
    let (authority, said) = (Authority::new(), Said::default());
    let _guard = tracing::subscriber::set_default(said.clone());
    start(Some(load(&authority.directory(&authority)))).await;
    assert_eq!(*said.0.lock().unwrap(), "");
    start(expired(&authority)).await;
    let said = said.0.lock().unwrap();
    assert!(said.contains("clients will refuse") && said.contains("has expired"), "{said}");
}

#[tokio::test]
async fn a_certificate_without_the_name_of_the_pool_is_reported() {
    let authority = Authority::new();
    let params = CertificateParams::new(vec!["elsewhere.internal".to_owned()]).unwrap();
    let other = load(&authority.directory_with(&authority, params));
    let (client, _) = words(Some(other), Some(load(&authority.directory(&authority)))).await;
    assert!(client.contains(SERVER_NAME), "{client}");
}

#[tokio::test]
async fn both_sides_report_another_version_with_both_numbers() {
    let said = Said::default();
    let _guard = tracing::subscriber::set_default(said.clone());
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let listener = listener.speaking(CONTROL_VERSION + 1);
    let address = listener.address().to_string();
    tokio::spawn(listener.serve(NodeServer::new(FakeNode::default()), std::future::pending()));
    let status = regions_total(&address, None).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let (client, ours, theirs) = (explain(&status), CONTROL_VERSION, CONTROL_VERSION + 1);
    assert!(client.contains(&format!("speaks version {theirs}")), "{client}");
    assert!(
        client.contains(&format!("this side version {ours}")) && client.contains("same release"),
        "{client}"
    );
    let listener = said.0.lock().unwrap().clone();
    assert!(listener.contains("another version"), "{listener}");
}

#[tokio::test]
async fn a_hundred_refusals_in_a_row_are_one_line_for_each_reason() {
    const REFUSED: usize = 100;
    let said = Said::default();
    let _guard = tracing::subscriber::set_default(said.clone());
    let (authority, other) = (Authority::new(), Authority::new());
    let address = start(Some(load(&authority.directory(&authority)))).await;
    let stranger = load(&authority.directory(&other));
    for client in std::iter::repeat_n(None, REFUSED).chain([Some(&stranger)]) {
        regions_total(&address, client).await.unwrap_err();
    }
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
    let listener = listener.speaking(CONTROL_VERSION + 1);
    let address = listener.address().to_string();
    tokio::spawn(listener.serve(NodeServer::new(FakeNode::default()), std::future::pending()));
    for _ in 0..REFUSED {
        regions_total(&address, None).await.unwrap_err();
    }
    let said = said.0.lock().unwrap().clone();
    for reason in ["spoke plain text", "not of this pool's authority", "another version"] {
        assert_eq!(said.matches(reason).count(), 1, "{reason}: {said}");
    }
}

#[tokio::test]
async fn a_peer_that_is_not_farpool_and_an_absent_peer_give_different_errors() {
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = other.local_addr().unwrap().to_string();
    let answering = tokio::spawn(async move {
        for answer in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b""] {
            let (mut stream, _) = other.accept().await.unwrap();
            stream.read_exact(&mut [0; 24]).await.unwrap();
            stream.write_all(answer).await.unwrap();
        }
    });
    let mut told = Vec::new();
    for _ in 0..2 {
        told.push(explain(&regions_total(&address, None).await.unwrap_err()));
    }
    answering.await.unwrap();
    told.push(explain(&regions_total(&address, None).await.unwrap_err()));
    assert!(told[0].contains("does not speak the protocol of Farpool's"), "{told:?}");
    assert!(told[1].contains("closed the connection"), "{told:?}");
    assert!(told[2].contains("refused"), "{told:?}");
}

/// Forwards connections to a listener, except that it cuts the first one once both sides have greeted.
async fn cut_the_first(listener: String) -> String {
    let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = between.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut near, _) = between.accept().await.unwrap();
        near.read_exact(&mut [0; 24]).await.unwrap();
        near.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        near.read_exact(&mut [0; 40]).await.unwrap();
        drop(near);
        while let Ok((mut near, _)) = between.accept().await {
            let mut far = tokio::net::TcpStream::connect(&listener).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
        }
    });
    address
}

#[tokio::test]
async fn a_request_that_is_lost_with_its_connection_says_so_and_is_sent_again() {
    let once = cut_the_first(start(None).await).await;
    let told = explain(&regions_total(&once, None).await.unwrap_err());
    assert!(told.contains("connection was lost"), "{told}");
    let again = cut_the_first(start(None).await).await;
    let node = NodeClient::new(dial(&again, None).unwrap());
    let answer = ask(PATIENCE, || {
        let mut node = node.clone();
        async move { node.regions(RegionsRequest {}).await }
    });
    assert_eq!(answer.await.unwrap().regions_total, 7);
}
