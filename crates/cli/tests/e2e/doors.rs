//! The errors of each command when client and broker cannot talk to each other. The tests of the C library do
//! the same for C and Rust.

use std::fs;
use std::path::Path;

use farpool_control::{CONTROL_VERSION, Listener, SERVER_NAME};
use farpool_wire::control::broker_server::{Broker, BrokerServer};
use farpool_wire::control::{
    AcquireRequest, AcquireResponse, HeartbeatRequest, HeartbeatResponse, RegisterRequest, RegisterResponse,
    RevokeRequest, RevokeResponse, StatusRequest, StatusResponse,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;
use tonic::{Request, Response, Status};

use crate::support::{Pool, PoolOptions, Process, Up, assert_complaint, farpool, run_command};

/// Every command that needs a broker fails with these words.
#[track_caller]
fn assert_every_command_says(broker: &str, tls: Option<&Path>, words: &str) {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(path("far")).unwrap();
    let (far, file) = (path("far"), path("db"));
    let commands: [&[&str]; 4] = [
        &["status"],
        &["mount", &far],
        &["db", "up", &file],
        &["node", "--no-lock", "--memory", "1MiB", "--region-size", "1MiB"],
    ];
    for command in commands {
        let tls = tls.map(|dir| ["--tls-dir", dir.to_str().unwrap()]);
        let args = command.iter().copied().chain(["--broker", broker]).chain(tls.into_iter().flatten());
        let mut command = farpool(args);
        command.env("FARPOOL_LOG", "error"); // a node also warns that its certificate is of no use
        assert_complaint(&run_command(command), 1, words);
    }
}

#[test]
fn plain_text_to_a_pool_with_tls_is_named_by_client_and_broker() {
    let up = Up::start();
    assert_every_command_says(&up.address, None, "wants TLS");
    up.process.await_complaint("spoke plain text");
}

#[test]
fn tls_to_a_pool_without_tls_is_named_by_client_and_broker() {
    let up = Up::start();
    let pool = Pool::start(PoolOptions { nodes: 1, ..PoolOptions::default() });
    assert_every_command_says(&pool.address, Some(&up.run_dir().join("tls")), "does not speak TLS");
    pool.broker.await_complaint("spoke TLS");
}

/// Makes a TLS directory with a certificate that expires in `until_year`.
fn certificate(dir: &Path, authority: &CertifiedIssuer<'static, KeyPair>, until_year: i32) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
    params.not_after = date_time_ymd(until_year, 1, 1);
    let certificate = params.signed_by(&key, authority).unwrap();
    fs::create_dir(dir).unwrap();
    for (name, pem) in
        [("ca.pem", authority.pem()), ("cert.pem", certificate.pem()), ("key.pem", key.serialize_pem())]
    {
        fs::write(dir.join(name), pem).unwrap();
    }
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

#[test]
fn expired_and_foreign_certificates_are_named_by_client_and_broker() {
    let dir = TempDir::new().unwrap();
    let of = |name: &str| dir.path().join(name);
    let (ours, theirs) = (authority(), authority());
    certificate(&of("good"), &ours, 3000);
    certificate(&of("expired"), &ours, 2002);
    certificate(&of("foreign"), &theirs, 3000);
    fs::copy(of("good").join("ca.pem"), of("foreign").join("ca.pem")).unwrap();
    let mut command = farpool(["broker", "--listen", "127.0.0.1:0", "--store"]);
    command.arg(of("broker.redb")).arg("--tls-dir").arg(of("good"));
    let (broker, ready) = Process::ready("the broker", command);
    let address = ready.strip_prefix("ready ").unwrap();
    assert_every_command_says(address, Some(&of("expired")), "has expired");
    broker.await_complaint("its certificate has expired");
    assert_every_command_says(address, Some(&of("foreign")), "is not of this pool's authority");
    broker.await_complaint("its certificate is not of this pool's authority");
}

/// A broker of another release. No request reaches it: clients of this release are refused before.
struct OtherRelease;

#[tonic::async_trait]
impl Broker for OtherRelease {
    async fn register(&self, _: Request<RegisterRequest>) -> Result<Response<RegisterResponse>, Status> {
        unreachable!()
    }
    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatResponse>, Status> {
        unreachable!()
    }
    async fn acquire(&self, _: Request<AcquireRequest>) -> Result<Response<AcquireResponse>, Status> {
        unreachable!()
    }
    async fn revoke(&self, _: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        unreachable!()
    }
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        unreachable!()
    }
}

#[test]
fn broker_of_another_version_is_named_with_both_numbers() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(Listener::bind("127.0.0.1:0".parse().unwrap(), None)).unwrap();
    let listener = listener.speaking(CONTROL_VERSION + 1);
    let address = listener.address().to_string();
    runtime.spawn(listener.serve(BrokerServer::new(OtherRelease), std::future::pending()));
    let words = format!(
        "it speaks version {} of the control plane, and this side version {CONTROL_VERSION}: run the same release",
        CONTROL_VERSION + 1
    );
    assert_every_command_says(&address, None, &words);
}
