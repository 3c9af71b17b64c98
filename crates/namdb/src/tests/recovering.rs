//! A member that evicts another one while a node does not answer.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use farpool_fabric::TransportChoice;
use farpool_txn::membership::Seat;

use super::proxy::Proxy;
use super::rig::{Onlooker, Rig, SOON, open, until};
use crate::Database;

/// The heartbeat timeout: a member is taken for dead before it is known that a node does not answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Heartbeats of several timeouts.
const BEATS: u64 = 40;
/// A member that leaves gives its seat back within this time. A member that waited for its fence would take
/// longer: the fence fails after three seconds at the earliest.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// A database with one member, and another that has died: its recoverer waits for a node to fence it.
struct Recovering {
    recoverer: Database,
    dead: Seat,
    onlooker: Onlooker,
    /// Between the recoverer and that node's control service.
    proxy: Proxy,
    _died: Onlooker,
    _rig: Rig,
}

impl Recovering {
    fn new() -> Recovering {
        let rig = Rig::new();
        let maker = rig.create_with(TransportChoice::Tcp, PATIENCE);
        let onlooker = Onlooker::of(&rig.file(), TransportChoice::Tcp);
        let [_, other] = onlooker.nodes();
        let address = onlooker.address(other);
        let proxy = Proxy::before(address.control.parse().unwrap());
        let file = rig.file_with(|address| {
            if address.node == other.0 {
                address.control = proxy.address().to_string();
            }
        });
        let recoverer = open(&file, TransportChoice::Tcp);
        let died = Onlooker::of(&rig.file(), TransportChoice::Tcp);
        drop(maker);
        let dead = died.takes_seat();
        proxy.hold_back(true);
        let recovering = Recovering { recoverer, dead, onlooker, proxy, _died: died, _rig: rig };
        until("the dead member is being recovered", || recovering.is_being_recovered());
        recovering
    }

    fn is_being_recovered(&self) -> bool {
        let recoverer = self.onlooker.seat_of(self.dead.claim).and_then(|seat| seat.recoverer);
        recoverer == Some(self.recoverer.core.seat().claim)
    }

    fn beats(&self) -> u64 {
        self.onlooker.seat_of(self.recoverer.core.seat().claim).expect("it has its seat").beat
    }
}

#[test]
fn a_recoverer_sends_heartbeats_while_its_fence_is_not_answered() {
    let recovering = Recovering::new();
    let before = recovering.beats();
    until("it goes on sending heartbeats", || recovering.beats() >= before + BEATS);
    assert!(recovering.is_being_recovered(), "the fence should take longer");
    recovering.proxy.hold_back(false);
    until("the dead member's seat is free", || recovering.onlooker.seat_of(recovering.dead.claim).is_none());
    recovering.recoverer.check().unwrap();
}

#[test]
fn a_recoverer_that_leaves_while_its_fence_is_not_answered_gives_its_seat_back() {
    let Recovering { recoverer, dead, onlooker, proxy, _died, _rig } = Recovering::new();
    let (claim, began) = (recoverer.core.seat().claim, Instant::now());
    let (left, has_left) = mpsc::channel();
    let leaving = std::thread::spawn(move || {
        drop(recoverer);
        left.send(began.elapsed()).unwrap();
    });
    until("its seat is free", || onlooker.seat_of(claim).is_none());
    let took = began.elapsed();
    assert!(took < LEAVES_WITHIN, "{took:?}");
    proxy.hold_back(false);
    has_left.recv_timeout(SOON).unwrap();
    leaving.join().unwrap();
    assert!(onlooker.seat_of(dead.claim).is_some(), "another member recovers it");
}
