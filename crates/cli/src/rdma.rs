//! Network cards: the only module of this binary that uses the verbs transport.

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use farpool_fabric::{Host, Transport, TransportChoice};
use farpool_fabric_verbs::{ServeOptions, VerbsConfig, VerbsTransport, device_addresses, serve_verbs};
use farpool_node::CardService;

/// One endpoint's transport through a network card.
pub fn card_transport(deadline: Duration) -> io::Result<Rc<dyn Transport>> {
    Ok(Rc::new(VerbsTransport::new(VerbsConfig { deadline })?))
}

/// An error if the transport needs RDMA and this machine has none.
pub fn check_choice(choice: TransportChoice) -> Result<()> {
    if choice == TransportChoice::Verbs
        && let Err(error) = card_transport(Duration::from_secs(1))
    {
        bail!(
            "--transport verbs: {error}; choose auto, shm or tcp (`farpool doctor` tells what RDMA lacks here)"
        );
    }
    Ok(())
}

/// Where a node serves its memory by RDMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RdmaListen {
    /// An address of the card.
    At(SocketAddr),
    /// The first card's first address, any free port.
    Auto,
}

impl FromStr for RdmaListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(RdmaListen::Auto),
            address => address.parse().map(RdmaListen::At).map_err(|_| {
                format!("'{address}' is not an address with a port: give for instance 10.0.0.8:7119, or auto")
            }),
        }
    }
}

impl RdmaListen {
    /// The service that the node starts.
    pub fn service(self, card_atomics: bool) -> Arc<dyn CardService> {
        Arc::new(VerbsService {
            listen: self,
            options: ServeOptions { card_atomics, ..ServeOptions::default() },
        })
    }
}

#[derive(Debug)]
struct VerbsService {
    listen: RdmaListen,
    options: ServeOptions,
}

impl CardService for VerbsService {
    fn place(&self) -> String {
        match self.listen {
            RdmaListen::At(address) => address.to_string(),
            RdmaListen::Auto => "any RDMA device".into(),
        }
    }

    fn serve(&self, host: Arc<dyn Host>) -> io::Result<(SocketAddr, Box<dyn Any + Send>)> {
        let address = match self.listen {
            RdmaListen::At(address) => address,
            RdmaListen::Auto => SocketAddr::new(device_addresses()?[0], 0),
        };
        let server = serve_verbs(host, address, self.options)?;
        Ok((server.address(), Box::new(server)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_listens_at_an_address_or_on_the_first_card() {
        assert_eq!("auto".parse(), Ok(RdmaListen::Auto));
        assert_eq!("10.0.0.8:0".parse(), Ok(RdmaListen::At("10.0.0.8:0".parse().unwrap())));
        assert!("card".parse::<RdmaListen>().unwrap_err().contains("10.0.0.8:7119"));
    }
}
