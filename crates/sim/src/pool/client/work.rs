//! What clients do to regions: each writes a word of its own, and all read all words.

use std::cell::RefCell;
use std::rc::Rc;

use farpool_fabric::{ArenaBuf, OpError, Queue};
use farpool_wire::{AccessKey, Epoch, Refusal, RegionId, RemoteAddr};

use super::{Client, Connection};
use crate::plane::oracle::LeaseNo;
use crate::plane::post::Invitation;
use crate::pool::{WORD_BYTES, WORDS};

/// A region that a client may use.
#[derive(Clone, Copy)]
struct UsableRegion {
    region: RegionId,
    lease: LeaseNo,
    grant: Epoch,
    key: AccessKey,
    /// Whether the client holds the lease itself. Otherwise another client gave it a grant, and may fence it.
    own: bool,
}

impl Client {
    pub(super) async fn work(self: Rc<Self>) {
        while !self.is_leaving() {
            self.sleep_ms(10, 300).await;
            let Some(place) = self.some_place() else { continue };
            let Some(queue) = self.reach(place).await else { continue };
            if self.chance(500) {
                self.write(place, &queue).await;
            } else {
                self.read(place, &queue).await;
            }
        }
        self.connections.borrow_mut().clear();
    }

    fn some_place(&self) -> Option<UsableRegion> {
        let held = self.held.borrow();
        let own = self.trusted().into_iter().map(|(region, grant, key)| {
            let lease = held[&region].lease;
            UsableRegion { region, lease, grant, key, own: true }
        });
        let invited = self.invited.borrow();
        let others = invited.iter().map(|known| known.invitation);
        let others = others.map(|Invitation { region, lease, grant, key, .. }| UsableRegion {
            region,
            lease,
            grant,
            key,
            own: false,
        });
        let others = others.filter(|place| self.is_told(place.region, place.grant));
        let places: Vec<UsableRegion> = own.chain(others).collect();
        (!places.is_empty()).then(|| places[self.below(places.len() as u64) as usize])
    }

    /// Whether the client may still use the place: time passes while a connection is made.
    fn may_use(&self, place: UsableRegion) -> bool {
        match place.own {
            true => self.trusts(place.region, place.grant),
            false => self.is_told(place.region, place.grant),
        }
    }

    /// Returns a queue on which the region is attached.
    async fn reach(&self, place: UsableRegion) -> Option<Rc<Queue>> {
        let node = place.region.node;
        let known = self.connections.borrow().get(&node).cloned();
        let connection = match known {
            Some(connection) => connection,
            None => {
                let queue = Rc::new(self.endpoint.open(self.run.node(node).peer()).ok()?);
                let attached = Default::default();
                let fresh = Rc::new(RefCell::new(Connection { queue, lost: false, attached }));
                self.connections.borrow_mut().insert(node, fresh.clone());
                fresh
            }
        };
        let queue = {
            let mut connection = connection.borrow_mut();
            if connection.lost {
                connection.attached.clear();
                connection.queue.reconnect().ok()?;
                connection.lost = false;
            }
            connection.queue.clone()
        };
        if connection.borrow().attached.get(&place.region.index) == Some(&place.grant) {
            return Some(queue);
        }
        let posted = self.run.oracle.borrow_mut().moment();
        let result = queue.attach(place.region, place.grant, place.key).await;
        self.note_end(place, &result);
        result.ok()?;
        self.run.oracle.borrow_mut().acknowledged(place.lease, place.grant, posted);
        connection.borrow_mut().attached.insert(place.region.index, place.grant);
        self.may_use(place).then_some(queue)
    }

    fn buffer(&self, words: u64) -> Option<ArenaBuf> {
        self.endpoint.arena().take((words * WORD_BYTES) as usize).ok()
    }

    async fn write(&self, place: UsableRegion, queue: &Queue) {
        let Some(mut buffer) = self.buffer(1) else { return };
        let (value, posted) = {
            let mut oracle = self.run.oracle.borrow_mut();
            (oracle.value(place.lease), oracle.moment())
        };
        buffer.copy_from_slice(&value.to_le_bytes());
        let to = RemoteAddr { region: place.region, offset: self.own_word * WORD_BYTES };
        let (_, result) = queue.write(to, place.grant, buffer).await;
        match result {
            Ok(()) => {
                self.run.oracle.borrow_mut().acknowledged(place.lease, place.grant, posted);
                self.written.borrow_mut().insert(place.lease, value);
            }
            Err(OpError::Unknown { .. }) => {
                self.written.borrow_mut().remove(&place.lease);
            }
            Err(_) => {}
        }
        self.note_end(place, &result);
    }

    async fn read(&self, place: UsableRegion, queue: &Queue) {
        let Some(buffer) = self.buffer(WORDS) else { return };
        let posted = self.run.oracle.borrow_mut().moment();
        let from = RemoteAddr { region: place.region, offset: 0 };
        let (buffer, result) = queue.read(from, place.grant, buffer).await;
        if result.is_ok() {
            let words = buffer.chunks_exact(WORD_BYTES as usize);
            let words: Vec<u64> =
                words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
            let mut oracle = self.run.oracle.borrow_mut();
            oracle.acknowledged(place.lease, place.grant, posted);
            oracle.read(place.lease, &words);
            let own = words[self.own_word as usize];
            if let Some(&written) = self.written.borrow().get(&place.lease)
                && own != written
            {
                oracle.complain(format!(
                    "lease {}: {written:#x} was written, but {own:#x} is there",
                    place.lease.0
                ));
            }
        }
        self.note_end(place, &result);
    }

    /// Updates the client's state for how an operation ended.
    fn note_end(&self, place: UsableRegion, result: &Result<(), OpError>) {
        let connection = self.connections.borrow().get(&place.region.node).cloned();
        let Some(connection) = connection else { return };
        let mut connection = connection.borrow_mut();
        match result {
            Ok(()) => {}
            Err(OpError::NotSent { .. } | OpError::Unknown { .. }) => connection.lost = true,
            Err(OpError::Refused(refusal)) => {
                connection.attached.remove(&place.region.index);
                self.note_refusal(place, *refusal);
            }
        }
    }

    /// A client with a grant from another client gives the grant up when it is refused. An owner learns of
    /// the end of its leases from the node's control plane.
    fn note_refusal(&self, place: UsableRegion, refusal: Refusal) {
        if matches!(refusal, Refusal::NotAttached | Refusal::Busy) {
            return;
        }
        // A client that does not ask may be refused at any time.
        let expects_to_go_on = (place.own || self.seat.asks) && self.may_use(place);
        let mut oracle = self.run.oracle.borrow_mut();
        if oracle.is_in_force(place.lease, place.grant) && expects_to_go_on {
            oracle.complain(format!("lease {}: refused for no reason: {refusal}", place.lease.0));
        }
        if !place.own {
            self.forget_grant(place.region, place.grant);
        }
    }
}
