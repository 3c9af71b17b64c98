//! `farpool broker`: places leases, in the foreground.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use farpool_broker::BrokerConfig;
use farpool_control::Tls;
use farpool_fabric::raise_limit;

use crate::notify;
use crate::output::say;
use crate::reach::runtime;
use crate::shutdown::Shutdown;
use crate::tether::{self, Tether};

/// Run a broker: it knows which nodes have room, and gives clients leases on their memory
///
/// A lease is the right to use a region of a node's memory for some seconds; its client renews it at the
/// node. Runs in the foreground and prints `ready ADDRESS` once it serves requests. Clients and nodes keep
/// working without it; it is needed only to get new leases, and to take leases back by command. After a
/// restart at the same address it learns from the nodes what they have lent.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool broker --store /var/lib/farpool/broker.redb
  farpool broker --store broker.redb --listen 10.0.0.5:7117 --tls-dir /etc/farpool/tls")]
pub struct BrokerArgs {
    /// Where to listen: an IP address and a port; port 0 takes any free one. An address other than loopback
    /// needs --tls-dir
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7117")]
    listen: SocketAddr,

    /// File with the nodes that the broker knows; created if it does not exist. No other user may be able to
    /// change its folder
    #[arg(long, value_name = "FILE")]
    store: PathBuf,

    /// Folder with ca.pem, cert.pem and key.pem of the pool
    #[arg(long, value_name = "DIR", env = "FARPOOL_TLS_DIR", hide_env_values = true)]
    tls_dir: Option<PathBuf>,

    #[command(flatten)]
    tether: Tether,
}

/// Serves until asked to stop.
pub fn run(args: BrokerArgs) -> Result<()> {
    tether::fasten(&args.tether)?;
    raise_limit(); // each connection takes a descriptor
    let tls = args.tls_dir.as_deref().map(Tls::load).transpose()?;
    let config = BrokerConfig { listen: args.listen, store: args.store, tls };
    runtime()?.block_on(async {
        let mut shutdown = Shutdown::listen()?;
        let greet = |address| {
            say(format!("ready {address}"));
            notify::ready();
        };
        farpool_broker::run(config, greet, shutdown.asked()).await?;
        Ok(())
    })
}
