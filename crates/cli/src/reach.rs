//! Where the broker is, and how to ask it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use farpool_control::{ControlError, Tls, check_address, dial};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::{StatusRequest, StatusResponse};

use crate::run_dir;

/// Longest wait for the broker's answer to a question that it answers from memory.
const STATUS_DEADLINE: Duration = Duration::from_secs(5);

/// How a user names the broker.
#[derive(Clone, Debug, clap::Args)]
pub struct BrokerAt {
    /// Where the broker listens [default: the pool of this user's `farpool up`]
    #[arg(long, value_name = "HOST:PORT", env = "FARPOOL_BROKER", hide_env_values = true, value_parser = parse_address)]
    broker: Option<String>,

    /// Folder with ca.pem, cert.pem and key.pem of the pool; without it only loopback addresses are dialled
    /// [default: that of this user's `farpool up`, for its own broker]
    #[arg(long, value_name = "DIR", env = "FARPOOL_TLS_DIR", hide_env_values = true)]
    tls_dir: Option<PathBuf>,
}

/// Where a broker listens, as an option.
pub fn parse_address(text: &str) -> Result<String, ControlError> {
    check_address(text).map(|()| text.to_owned())
}

/// A broker and what it takes to be let in.
#[derive(Clone, Debug)]
pub struct Located {
    /// Its `host:port`.
    pub address: String,
    /// The pool's certificates.
    pub tls: Option<Tls>,
}

impl BrokerAt {
    /// What was said, completed by what a running `farpool up` has published; `None` when neither names a broker.
    pub fn find(&self) -> Result<Option<Located>> {
        let published = run_dir::published(&run_dir::default_path())?;
        let own = published.as_ref();
        let Some(address) = self.broker.clone().or_else(|| own.map(|pool| pool.broker.clone())) else {
            return Ok(None);
        };
        let own_tls = own.filter(|pool| pool.broker == address).map(|pool| pool.tls_dir.clone());
        let tls = self.tls_dir.clone().or(own_tls).map(|dir| Tls::load(&dir)).transpose()?;
        Ok(Some(Located { address, tls }))
    }

    /// As [`find`](Self::find); no broker is an error.
    pub fn require(&self) -> Result<Located> {
        self.find()?
            .context("there is no broker to ask: start one with `farpool up`, or give --broker HOST:PORT")
    }
}

impl Located {
    /// What the broker knows.
    pub async fn status(&self) -> Result<StatusResponse> {
        let mut client = BrokerClient::new(dial(&self.address, self.tls.as_ref())?);
        match tokio::time::timeout(STATUS_DEADLINE, client.status(StatusRequest {})).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.unreachable(&cause(&status))),
            Err(_) => Err(self.unreachable(&format!("no answer within {STATUS_DEADLINE:?}"))),
        }
    }

    fn unreachable(&self, cause: &str) -> anyhow::Error {
        let fix = if self.tls.is_some() {
            "start one with `farpool up`, or give --broker HOST:PORT and its --tls-dir"
        } else {
            "start one with `farpool up`, or give --broker HOST:PORT, and --tls-dir if it uses TLS"
        };
        anyhow!("cannot reach the broker at {}: {cause};\n{fix}", self.address)
    }
}

/// The innermost reason: "Connection refused" says more than "transport error".
fn cause(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}

/// A runtime for the control plane: one thread, since nothing here is worth two.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}
