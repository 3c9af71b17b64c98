use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, InconsistentKeys, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::ControlError;
use crate::fault::CertificateFault;

/// The name that every certificate of a pool must carry as a DNS name: peers prove that they belong to the
/// pool, not which machine they run on. `.internal` is reserved for private use.
pub const SERVER_NAME: &str = "farpool.internal";

/// The name of the protocol inside TLS, which both sides announce (ALPN, RFC 7301).
const HTTP2: &[u8] = b"h2";

/// The pool's authority and this process's certificate and key.
#[derive(Clone)]
pub struct Tls {
    dir: PathBuf,
    authority: Vec<u8>,
    certificate: Vec<u8>,
    key: Arc<[u8]>,
}

impl Tls {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` from a directory.
    pub fn load(dir: &Path) -> Result<Self, ControlError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|source| ControlError::TlsFile { path, source })
        };
        Ok(Tls {
            dir: dir.to_owned(),
            authority: read("ca.pem")?,
            certificate: read("cert.pem")?,
            key: read("key.pem")?.into(),
        })
    }

    pub(crate) fn connector(&self) -> Result<TlsConnector, ControlError> {
        let config = || {
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
            let builder =
                builder.with_safe_default_protocol_versions()?.with_root_certificates(self.roots()?);
            let mut config = builder.with_client_auth_cert(self.chain()?, self.private_key()?)?;
            config.alpn_protocols = vec![HTTP2.to_vec()];
            Ok(TlsConnector::from(Arc::new(config)))
        };
        config().map_err(|reason| self.unusable(reason))
    }

    pub(crate) fn acceptor(&self) -> Result<TlsAcceptor, ControlError> {
        let config = || {
            let provider = Arc::new(ring::default_provider());
            let roots = Arc::new(self.roots()?);
            self.warn_of_refusal(roots.clone(), provider.clone())?;
            let peers = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
            let peers = peers.map_err(Unusable::of)?;
            let builder =
                ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
            let builder = builder.with_client_cert_verifier(peers);
            let mut config = builder.with_single_cert(self.chain()?, self.private_key()?)?;
            config.alpn_protocols = vec![HTTP2.to_vec()];
            Ok(TlsAcceptor::from(Arc::new(config)))
        };
        config().map_err(|reason| self.unusable(reason))
    }

    /// Warns if this process's own certificate is one that clients refuse.
    fn warn_of_refusal(
        &self,
        roots: Arc<RootCertStore>,
        provider: Arc<CryptoProvider>,
    ) -> Result<(), Unusable> {
        let clients = WebPkiServerVerifier::builder_with_provider(roots, provider).build();
        let chain = self.chain()?;
        let (own, others) = chain.split_first().expect("`certificates` returns at least one");
        let checked = clients.map_err(Unusable::of)?.verify_server_cert(
            own,
            others,
            &server_name(),
            &[],
            UnixTime::now(),
        );
        if let Err(rustls::Error::InvalidCertificate(wrong)) = checked {
            let wrong = CertificateFault::of(&wrong);
            tracing::warn!(dir = %self.dir.display(), "clients will refuse this process: its cert.pem {wrong}");
        }
        Ok(())
    }

    fn roots(&self) -> Result<RootCertStore, Unusable> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.authority, "ca.pem")? {
            roots.add(authority).map_err(|error| Unusable(format!("ca.pem: {error}")))?;
        }
        Ok(roots)
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, Unusable> {
        certificates(&self.certificate, "cert.pem")
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, Unusable> {
        PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| match error {
            pem::Error::NoItemsFound => Unusable("key.pem holds no private key".to_owned()),
            other => Unusable::pem("key.pem", other),
        })
    }

    fn unusable(&self, reason: Unusable) -> ControlError {
        ControlError::Certificates { dir: self.dir.clone(), reason: reason.0 }
    }
}

/// What is wrong with the certificate files.
struct Unusable(String);

impl Unusable {
    fn of(error: impl fmt::Display) -> Self {
        Unusable(error.to_string())
    }

    /// The errors of the library print lines of the file as numbers.
    fn pem(file: &str, error: pem::Error) -> Self {
        Unusable(match error {
            pem::Error::MissingSectionEnd { .. } => format!("{file} is not complete PEM"),
            pem::Error::IllegalSectionStart { .. } => format!("{file} is not PEM"),
            other => format!("{file}: {other}"),
        })
    }
}

impl From<rustls::Error> for Unusable {
    fn from(error: rustls::Error) -> Self {
        match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                Unusable("key.pem does not belong to cert.pem".to_owned())
            }
            other => Unusable::of(other),
        }
    }
}

fn certificates(pem: &[u8], file: &str) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| Unusable::pem(file, error))?;
    if found.is_empty() { Err(Unusable(format!("{file} holds no certificate"))) } else { Ok(found) }
}

/// The name that the other side must prove.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("it is a DNS name")
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("dir", &self.dir).finish_non_exhaustive()
    }
}
