//! Where the broker is, and how to ask it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use farpool_control::{ControlError, Fault, Located, ask, check_address, dial, explain, fault_of, locate};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::{StatusRequest, StatusResponse};
use tokio::time::{Instant, sleep};

/// Longest wait for the broker's status, which it answers from memory.
const STATUS_DEADLINE: Duration = Duration::from_secs(5);

/// Most pages of one status: each has hundreds of nodes and thousands of owners.
const MOST_PAGES: usize = 1_024;

/// Longest `--wait`, in seconds: a day.
pub const LONGEST_WAIT_S: u64 = 24 * 60 * 60;
/// From one check for a pool to the next.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long a command waits for a pool.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Wait {
    /// How long to wait for a broker and its first node, in seconds, so that a pool and its clients can be
    /// started in any order
    #[arg(long = "wait", value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=LONGEST_WAIT_S))]
    seconds: u64,
}

impl Wait {
    /// When it ends, counted from now.
    pub fn deadline(self) -> Instant {
        Instant::now() + Duration::from_secs(self.seconds)
    }
}

/// How a user names the broker.
#[derive(Clone, Debug, clap::Args)]
pub struct BrokerAt {
    /// Where the broker listens [default: the pool of this user's `farpool up`]
    #[arg(long, value_name = "HOST:PORT", env = "FARPOOL_BROKER", hide_env_values = true, value_parser = parse_address)]
    broker: Option<String>,

    /// Folder with ca.pem, cert.pem and key.pem of the pool. Without certificates, only a broker on a
    /// loopback address can be used [default: the certificates of this user's `farpool up`, if the broker is
    /// that of its pool]
    #[arg(long, value_name = "DIR", env = "FARPOOL_TLS_DIR", hide_env_values = true)]
    tls_dir: Option<PathBuf>,
}

/// Parses the address of a broker, for an option.
pub fn parse_address(text: &str) -> Result<String, ControlError> {
    check_address(text).map(|()| text.to_owned())
}

/// Parses a host's name or address, for an option.
pub fn parse_host(text: &str) -> Result<String, String> {
    let host = text.trim_matches(['[', ']']);
    let is_address = host.parse::<std::net::IpAddr>().is_ok();
    if is_address || check_address(&format!("{host}:1")).is_ok() {
        return Ok(host.to_owned());
    }
    Err("write a host's name or address, without a port".to_owned())
}

impl BrokerAt {
    /// The broker of the options, completed by what a running `farpool up` has published. `None` if neither
    /// names a broker.
    pub fn find(&self) -> Result<Option<Located>> {
        Ok(locate(self.broker.as_deref(), self.tls_dir.as_deref())?)
    }

    /// As [`require`](Self::require), but waits until there is a broker with a node, or time is up.
    pub fn require_within(&self, wait: Wait) -> Result<Located> {
        if wait.seconds == 0 {
            return self.require();
        }
        runtime()?.block_on(async {
            let deadline = wait.deadline();
            loop {
                let looked = async {
                    let located = self.require()?;
                    anyhow::Ok((sums_of(&located).await?.nodes_alive > 0).then_some(located))
                };
                match looked.await {
                    Ok(Some(located)) => return Ok(located),
                    Err(error) if Instant::now() >= deadline => return Err(error),
                    Ok(None) if Instant::now() >= deadline => {
                        bail!(
                            "no node has registered with the broker within {} s: start one with `farpool node`, or \
                             give a longer --wait",
                            wait.seconds
                        )
                    }
                    Err(error) if error.is::<ControlError>() => return Err(error), // waiting does not help
                    _ => sleep(LOOK_EVERY).await,
                }
            }
        })
    }

    /// As [`find`](Self::find); no broker is an error.
    pub fn require(&self) -> Result<Located> {
        self.find()?
            .context("there is no broker to ask: start one with `farpool up`, or give --broker HOST:PORT")
    }
}

/// All that a broker knows.
pub async fn status_of(broker: &Located) -> Result<StatusResponse> {
    let mut all = page(broker, StatusRequest::default()).await?;
    let mut is_whole = !all.more;
    for _ in 1..MOST_PAGES {
        if is_whole {
            return Ok(all);
        }
        let last_node = all.nodes.last().and_then(|node| Some(node.address.as_ref()?.node));
        let last_owner = all.owners.last().map(|owner| owner.owner);
        let next = StatusRequest { nodes_after: last_node, owners_after: last_owner, ..Default::default() };
        let page = page(broker, next).await?;
        is_whole = !page.more || (page.nodes.is_empty() && page.owners.is_empty());
        all.nodes.extend(page.nodes);
        all.owners.extend(page.owners);
    }
    ensure!(
        is_whole,
        "the broker at {} has more nodes and owners than {MOST_PAGES} answers hold",
        broker.address
    );
    Ok(all)
}

/// The pool's totals, without its nodes and owners.
pub async fn sums_of(broker: &Located) -> Result<StatusResponse> {
    page(broker, StatusRequest { only_sums: true, ..Default::default() }).await
}

async fn page(broker: &Located, request: StatusRequest) -> Result<StatusResponse> {
    let client = BrokerClient::new(dial(&broker.address, broker.tls.as_ref())?);
    let asked = ask(STATUS_DEADLINE, || {
        let mut client = client.clone();
        async move { client.status(request).await }
    });
    asked.await.map_err(|status| unreachable(broker, &status))
}

fn unreachable(broker: &Located, status: &tonic::Status) -> anyhow::Error {
    let reason = explain(status);
    let fix = match fault_of(status) {
        // The text of these already names the fix.
        Some(fault)
            if !matches!(fault, Fault::Unreachable(_) | Fault::Late | Fault::Closed | Fault::NotFarpool) =>
        {
            return anyhow!("cannot use the broker at {}: {reason}", broker.address);
        }
        _ if broker.tls.is_some() => {
            "start one with `farpool up`, or give --broker HOST:PORT and its --tls-dir"
        }
        _ => "start one with `farpool up`, or give --broker HOST:PORT, and --tls-dir if it uses TLS",
    };
    anyhow!("cannot reach the broker at {}: {reason};\n{fix}", broker.address)
}

/// A runtime for the control plane, which needs no more than one thread.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}
