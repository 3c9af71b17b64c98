//! A member that shuts another one out while a node does not answer.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use farpool_fabric::TransportChoice;
use farpool_txn::membership::Seat;

use super::proxy::Proxy;
use super::rig::{Onlooker, Rig, SOON, open, until};
use crate::Database;

/// A member is taken for dead before it is known that a node does not answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Beats of several patiences.
const BEATS: u64 = 40;
/// A member that leaves gives its seat back within so long. One that waited for its fence would take longer:
/// the fence fails after three seconds at the earliest.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// A database with one member, and another that has died: its carer waits for a node to fence it.
struct Caring {
    carer: Database,
    dead: Seat,
    onlooker: Onlooker,
    /// Between the carer and that node's control service.
    proxy: Proxy,
    _died: Onlooker,
    _rig: Rig,
}

impl Caring {
    fn new() -> Caring {
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
        let carer = open(&file, TransportChoice::Tcp);
        let died = Onlooker::of(&rig.file(), TransportChoice::Tcp);
        drop(maker);
        let dead = died.takes_seat();
        proxy.hold_back(true);
        let caring = Caring { carer, dead, onlooker, proxy, _died: died, _rig: rig };
        until("the dead member is looked after", || caring.is_looked_after());
        caring
    }

    fn is_looked_after(&self) -> bool {
        let carer = self.onlooker.seat_of(self.dead.claim).and_then(|seat| seat.carer);
        carer == Some(self.carer.core.seat().claim)
    }

    fn beats(&self) -> u64 {
        self.onlooker.seat_of(self.carer.core.seat().claim).expect("it has its seat").beat
    }
}

#[test]
fn a_carer_says_that_it_lives_while_its_fence_is_not_answered() {
    let caring = Caring::new();
    let before = caring.beats();
    until("it goes on saying that it lives", || caring.beats() >= before + BEATS);
    assert!(caring.is_looked_after(), "the fence was to take longer");
    caring.proxy.hold_back(false);
    until("the dead member's seat is free", || caring.onlooker.seat_of(caring.dead.claim).is_none());
    caring.carer.check().unwrap();
}

#[test]
fn a_carer_that_leaves_while_its_fence_is_not_answered_gives_its_seat_back() {
    let Caring { carer, dead, onlooker, proxy, _died, _rig } = Caring::new();
    let (claim, began) = (carer.core.seat().claim, Instant::now());
    let (left, has_left) = mpsc::channel();
    let leaving = std::thread::spawn(move || {
        drop(carer);
        left.send(began.elapsed()).unwrap();
    });
    until("its seat is free", || onlooker.seat_of(claim).is_none());
    let took = began.elapsed();
    assert!(took < LEAVES_WITHIN, "{took:?}");
    proxy.hold_back(false);
    has_left.recv_timeout(SOON).unwrap();
    leaving.join().unwrap();
    assert!(onlooker.seat_of(dead.claim).is_some(), "another looks after it");
}
