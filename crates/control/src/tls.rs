use std::fmt;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::ControlError;
use crate::dial::CONNECT_TIMEOUT;

/// The name that every certificate of a pool must carry as a DNS name: peers prove that they belong to the pool,
/// not which machine they run on. `.internal` is reserved for private use.
pub const SERVER_NAME: &str = "farpool.internal";

/// The pool's authority and this process's certificate and key.
#[derive(Clone)]
pub struct Tls {
    dir: PathBuf,
    authority: Certificate,
    identity: Identity,
}

impl Tls {
    /// Reads `ca.pem`, `cert.pem` and `key.pem` from a directory.
    pub fn load(dir: &Path) -> Result<Self, ControlError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|source| ControlError::TlsFile { path, source })
        };
        let authority = Certificate::from_pem(read("ca.pem")?);
        let identity = Identity::from_pem(read("cert.pem")?, read("key.pem")?);
        Ok(Tls { dir: dir.to_owned(), authority, identity })
    }

    pub(crate) fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .domain_name(SERVER_NAME)
            .ca_certificate(self.authority.clone())
            .identity(self.identity.clone())
            .timeout(CONNECT_TIMEOUT)
    }

    pub(crate) fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new()
            .client_ca_root(self.authority.clone())
            .identity(self.identity.clone())
            .timeout(CONNECT_TIMEOUT)
    }

    pub(crate) fn unusable(&self, source: tonic::transport::Error) -> ControlError {
        ControlError::Certificates { dir: self.dir.clone(), source }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("dir", &self.dir).finish_non_exhaustive()
    }
}
