//! A fake node that answers one kind of request, and authorities with certificates.

use std::sync::Arc;
use std::time::Duration;

use farpool_control::{Listener, SERVER_NAME, Tls, dial};
use farpool_wire::control::node_client::NodeClient;
use farpool_wire::control::node_server::{Node, NodeServer};
use farpool_wire::control::{
    AddGrantRequest, AddGrantResponse, AwaitRevocationRequest, AwaitRevocationResponse, FenceGrantRequest,
    FenceGrantResponse, GrantRequest, GrantResponse, RegionsRequest, RegionsResponse, ReleaseRequest,
    ReleaseResponse, RenewRequest, RenewResponse, ResizeRequest, ResizeResponse, RevokeRequest,
    RevokeResponse,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::sync::Notify;
use tonic::{Request, Response, Status};

/// Longest wait of the tests: whatever takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Answers `Regions`. A `Renew` signals that it has begun, and never ends.
#[derive(Default)]
pub struct FakeNode {
    pub renewing: Arc<Notify>,
}

#[tonic::async_trait]
impl Node for FakeNode {
    async fn grant(&self, _: Request<GrantRequest>) -> Result<Response<GrantResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn renew(&self, _: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        self.renewing.notify_one();
        std::future::pending().await
    }

    async fn add_grant(&self, _: Request<AddGrantRequest>) -> Result<Response<AddGrantResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn fence_grant(
        &self,
        _: Request<FenceGrantRequest>,
    ) -> Result<Response<FenceGrantResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn revoke(&self, _: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn await_revocation(
        &self,
        _: Request<AwaitRevocationRequest>,
    ) -> Result<Response<AwaitRevocationResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn resize(&self, _: Request<ResizeRequest>) -> Result<Response<ResizeResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn release(&self, _: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn regions(&self, _: Request<RegionsRequest>) -> Result<Response<RegionsResponse>, Status> {
        Ok(Response::new(RegionsResponse { regions_total: 7, ..Default::default() }))
    }
}

pub async fn start(tls: Option<Tls>) -> String {
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), tls).await.unwrap();
    let address = listener.address().to_string();
    tokio::spawn(listener.serve(NodeServer::new(FakeNode::default()), std::future::pending()));
    address
}

pub async fn regions_total(address: &str, tls: Option<&Tls>) -> Result<u32, Status> {
    let mut node = NodeClient::new(dial(address, tls).unwrap());
    node.regions(RegionsRequest {}).await.map(|answer| answer.into_inner().regions_total)
}

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A TLS directory of a process that trusts this authority, with a certificate from `issuer`.
    pub fn directory(&self, issuer: &Authority) -> TempDir {
        self.directory_with(issuer, CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap())
    }

    /// The same with a certificate made from `params`.
    pub fn directory_with(&self, issuer: &Authority, params: CertificateParams) -> TempDir {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer.0).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), self.0.pem()).unwrap();
        std::fs::write(dir.path().join("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(dir.path().join("key.pem"), key.serialize_pem()).unwrap();
        dir
    }
}

pub fn load(dir: &TempDir) -> Tls {
    Tls::load(dir.path()).unwrap()
}
