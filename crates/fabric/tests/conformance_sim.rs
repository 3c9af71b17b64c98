//! The conformance suite over the simulated fabric. It covers packets that a node checks, served whole or
//! torn word by word, and memory that clients copy to and from themselves, later or at once.
//!
//! The suite uses threads and blocks, so the thread that polls drives the simulated world. Scenarios in which
//! one seed gives one history are in the crate `farpool-sim`.

use std::any::Any;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use farpool_fabric::conformance::{
    Carrier, SuiteHost, what_is_behind_an_operation_refused_as_busy_waits_for_an_attachment,
};
use farpool_fabric::sim::{HostId, Mutation, Path, Service, World, WorldConfig};
use farpool_fabric::{Clock, Host, Peer, Transport, conformance_tests};

/// One world per check, since all nodes of the suite have the same name.
struct Simulated {
    path: Path,
    service: Service,
    at_once: bool,
    place: LazyLock<(World, HostId)>,
}

impl Simulated {
    const fn new(path: Path, service: Service) -> Self {
        let place = LazyLock::new((|| world(WorldConfig::new(1))) as Making);
        Simulated { path, service, at_once: false, place }
    }

    const fn at_once() -> Self {
        let making = || world(WorldConfig { at_once_permille: 1_000, ..WorldConfig::new(1) });
        let place = LazyLock::new(making as Making);
        Simulated { path: Path::Shared, service: Service::Whole, at_once: true, place }
    }

    const fn with_busy_forgotten() -> Self {
        let making = || world(WorldConfig { mutation: Some(Mutation::BusyForgotten), ..WorldConfig::new(1) });
        let place = LazyLock::new(making as Making);
        Simulated { path: Path::Checked, service: Service::Whole, at_once: false, place }
    }
}

type Making = fn() -> (World, HostId);

fn world(config: WorldConfig) -> (World, HostId) {
    let world = World::new(WorldConfig { self_driven: true, ..config });
    let host = world.add_host(1_000_000);
    (world, host)
}

/// Ends the node when dropped.
struct Crash(World, Peer);

impl Drop for Crash {
    fn drop(&mut self) {
        self.0.crash_node(self.1.node);
    }
}

impl Carrier for Simulated {
    fn serve(&self, host: Arc<SuiteHost>, _at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        let (world, place) = &*self.place;
        let observed = host.clone();
        let ready = Box::new(move || !observed.is_stalled());
        let peer = world.serve_when(*place, host as Arc<dyn Host>, self.service, Some(ready));
        (peer.clone(), Box::new(Crash(world.clone(), peer)))
    }

    fn transport(&self) -> Rc<dyn Transport> {
        let (world, node_host) = &*self.place;
        let host = if self.path == Path::Shared { *node_host } else { world.add_host(1_000_000) };
        world.transport(world.add_process(host), self.path)
    }

    fn reaches_other_processes(&self) -> bool {
        false
    }

    fn reads_now(&self) -> bool {
        self.at_once
    }

    fn clock(&self) -> Rc<dyn Clock> {
        let (world, host) = &*self.place;
        Rc::new(world.clock(*host))
    }
}

macro_rules! suites {
    ($($suite:ident: $carrier:expr;)*) => {
        $(mod $suite {
            use super::*;

            conformance_tests!($carrier);
        })*
    };
}

suites! {
    checked_whole: Simulated::new(Path::Checked, Service::Whole);
    checked_torn: Simulated::new(Path::Checked, Service::Torn);
    shared: Simulated::new(Path::Shared, Service::Whole);
    shared_at_once: Simulated::at_once();
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn a_node_that_carries_out_what_is_behind_an_operation_refused_as_busy_is_noticed() {
    static BROKEN: Simulated = Simulated::with_busy_forgotten();
    what_is_behind_an_operation_refused_as_busy_waits_for_an_attachment(&BROKEN);
}
