use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a process cannot take part in the control plane. An operator has to fix each of these.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Pass a TLS directory, or stay on loopback.
    #[error("{address} is not a loopback address: pass --tls-dir DIR, plain text never leaves the machine")]
    PlaintextOffLoopback {
        /// The address to listen on or to dial.
        address: String,
    },
    /// Correct the address.
    #[error("`{address}` is not an address: write HOST:PORT, for instance 127.0.0.1:7117")]
    Address {
        /// What was given.
        address: String,
    },
    /// Make the folder this user's own, or name the broker and its certificates.
    #[error("cannot use the folder {}: {reason}", path.display())]
    RunDir {
        /// The run directory of `farpool up`.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Put the file there, or name the right directory.
    #[error("cannot read {}: {source}; --tls-dir needs ca.pem, cert.pem and key.pem", path.display())]
    TlsFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Create the certificates again.
    #[error("the certificates in {} are unusable: {reason}; create them again", dir.display())]
    Certificates {
        /// Where they are.
        dir: PathBuf,
        /// What is wrong with them.
        reason: String,
    },
    /// End the process that has the port, or choose another port.
    #[error("cannot listen on {address}: {source}; choose another address with --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The server ended without being asked to.
    #[error("the control plane's server stopped: {0}")]
    Serve(#[source] tonic::transport::Error),
}
