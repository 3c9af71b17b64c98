use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError};
use tonic::{Code, Status};

use crate::{CONNECT_TIMEOUT, SERVER_NAME};

/// Why a peer and this process cannot talk to each other. Both sides use the same words. Each variant calls
/// for a different action of the operator.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// Start it, or correct the address.
    #[error("{0}")]
    Unreachable(String),
    /// Start it, or find out what delays it.
    #[error("nothing came back within {} s", CONNECT_TIMEOUT.as_secs())]
    Late,
    /// Pass `--tls-dir`.
    #[error("it wants TLS, and this side spoke plain text: pass the pool's certificates with --tls-dir DIR")]
    WantsTls,
    /// Leave `--tls-dir` out.
    #[error("it does not speak TLS, and this side does: start it with --tls-dir DIR, or leave that out here")]
    NoTls,
    /// Create its certificate again.
    #[error("its certificate {0}")]
    ItsCertificate(CertificateFault),
    /// Create our certificate again.
    #[error("it refuses this side's certificate, which {0}")]
    OurCertificate(CertificateFault),
    /// Give it `--tls-dir`.
    #[error(
        "it spoke plain text, and this side wants TLS: give it the pool's certificates with --tls-dir DIR"
    )]
    SpokePlainText,
    /// Start this side with TLS, or that one without.
    #[error("it spoke TLS, and this side does not: start this side with --tls-dir DIR, or that one without")]
    SpokeTls,
    /// Close connections there, or raise the bound.
    #[error("this side has as many connections as it can serve")]
    NoPlace,
    /// Name another address.
    #[error("it does not speak the protocol of Farpool's brokers and nodes: check the address")]
    NotFarpool,
    /// Try again: its process has ended, or it has too many connections.
    #[error(
        "it closed the connection before the greeting: it has ended, or it has too many connections; try again"
    )]
    Closed,
}

/// What is wrong with a certificate.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CertificateFault {
    /// Create it again.
    #[error("has expired: create it again")]
    Expired,
    /// Set the clocks.
    #[error("is not valid yet: compare the clocks of the two machines")]
    NotYetValid,
    /// Have it signed by the pool's authority.
    #[error("is not of this pool's authority: cert.pem must be signed by the ca.pem of the other side")]
    Stranger,
    /// Create it with that name.
    #[error("does not carry the name {SERVER_NAME}: create it again with that name")]
    Name,
    /// Pass one.
    #[error("is missing: put cert.pem and key.pem into the --tls-dir")]
    Missing,
    /// Create it again.
    #[error("is unusable ({0}): create it again")]
    Unusable(String),
}

impl Fault {
    /// The fault behind a failed handshake, as the client sees it.
    pub(crate) fn of_dialled(error: &io::Error) -> Fault {
        match tls_cause(error) {
            Some(rustls::Error::InvalidMessage(_)) => Fault::NoTls,
            Some(rustls::Error::InvalidCertificate(wrong)) => {
                Fault::ItsCertificate(CertificateFault::of(wrong))
            }
            Some(rustls::Error::AlertReceived(alert)) => {
                Fault::OurCertificate(CertificateFault::told_by(*alert))
            }
            Some(other) => Fault::ItsCertificate(CertificateFault::Unusable(other.to_string())),
            None => Fault::of_stream(error),
        }
    }

    /// The fault behind a failed handshake, as the server sees it.
    pub(crate) fn of_accepted(error: &io::Error) -> Fault {
        match tls_cause(error) {
            Some(rustls::Error::NoCertificatesPresented) => Fault::ItsCertificate(CertificateFault::Missing),
            Some(rustls::Error::AlertReceived(alert)) => {
                Fault::OurCertificate(CertificateFault::told_by(*alert))
            }
            Some(rustls::Error::InvalidCertificate(wrong)) => {
                Fault::ItsCertificate(CertificateFault::of(wrong))
            }
            Some(_) => Fault::NotFarpool,
            None => Fault::of_stream(error),
        }
    }

    /// The fault of a connection that failed without a message of TLS.
    pub(crate) fn of_stream(error: &io::Error) -> Fault {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Fault::Closed
            }
            io::ErrorKind::TimedOut => Fault::Late,
            _ => Fault::Unreachable(error.to_string()),
        }
    }
}

impl CertificateFault {
    pub(crate) fn of(wrong: &CertificateError) -> Self {
        use CertificateError as Wrong;
        match wrong {
            Wrong::Expired | Wrong::ExpiredContext { .. } => CertificateFault::Expired,
            Wrong::NotValidYet | Wrong::NotValidYetContext { .. } => CertificateFault::NotYetValid,
            Wrong::UnknownIssuer | Wrong::BadSignature => CertificateFault::Stranger,
            Wrong::NotValidForName | Wrong::NotValidForNameContext { .. } => CertificateFault::Name,
            other => CertificateFault::Unusable(other.to_string()),
        }
    }

    /// The alerts by which rustls refuses a certificate (RFC 8446, section 6.2).
    fn told_by(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::CertificateExpired => CertificateFault::Expired,
            AlertDescription::UnknownCA | AlertDescription::DecryptError => CertificateFault::Stranger,
            AlertDescription::CertificateRequired => CertificateFault::Missing,
            other => CertificateFault::Unusable(format!("TLS alert {other:?}")),
        }
    }
}

/// The error of TLS behind a failed handshake.
fn tls_cause(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The fault that prevented the request's connection, if that is why the request failed.
pub fn fault_of(status: &Status) -> Option<&Fault> {
    causes(status).find_map(|cause| cause.downcast_ref())
}

/// Why a request failed, as text for people: the fault of the connection, or else the peer's message.
pub fn explain(status: &Status) -> String {
    if let Some(fault) = fault_of(status) {
        return fault.to_string();
    }
    match (status.code(), causes(status).last()) {
        (Code::Unimplemented, _) => {
            "it does not know this request: check the address, and that both sides run the same release"
                .to_owned()
        }
        (_, Some(cause)) => format!("the connection was lost ({cause})"),
        _ => status.message().to_owned(),
    }
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |error: &&(dyn Error + 'static)| (*error).source())
}
