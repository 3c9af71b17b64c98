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
            let Some(usable) = self.usable_region() else { continue };
            let Some(queue) = self.reach(usable).await else { continue };
            if self.chance(500) {
                self.write(usable, &queue).await;
            } else {
                self.read(usable, &queue).await;
            }
        }
        self.connections.borrow_mut().clear();
    }

    fn usable_region(&self) -> Option<UsableRegion> {
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
        let others = others.filter(|usable| self.is_told(usable.region, usable.grant));
        let places: Vec<UsableRegion> = own.chain(others).collect();
        (!places.is_empty()).then(|| places[self.below(places.len() as u64) as usize])
    }

    /// Whether the client may still use the region: time passes while a connection is made.
    fn may_use(&self, usable: UsableRegion) -> bool {
        match usable.own {
            true => self.trusts(usable.region, usable.grant),
            false => self.is_told(usable.region, usable.grant),
        }
    }

    /// Returns a queue on which the region is attached.
    async fn reach(&self, usable: UsableRegion) -> Option<Rc<Queue>> {
        let node = usable.region.node;
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
        if connection.borrow().attached.get(&usable.region.index) == Some(&usable.grant) {
            return Some(queue);
        }
        let posted = self.run.oracle.borrow_mut().moment();
        let result = queue.attach(usable.region, usable.grant, usable.key).await;
        self.note_end(usable, &result);
        result.ok()?;
        self.run.oracle.borrow_mut().acknowledged(usable.lease, usable.grant, posted);
        connection.borrow_mut().attached.insert(usable.region.index, usable.grant);
        self.may_use(usable).then_some(queue)
    }

    fn buffer(&self, words: u64) -> Option<ArenaBuf> {
        self.endpoint.arena().take((words * WORD_BYTES) as usize).ok()
    }

    async fn write(&self, usable: UsableRegion, queue: &Queue) {
        let Some(mut buffer) = self.buffer(1) else { return };
        let (value, posted) = {
            let mut oracle = self.run.oracle.borrow_mut();
            (oracle.value(usable.lease), oracle.moment())
        };
        buffer.copy_from_slice(&value.to_le_bytes());
        let to = RemoteAddr { region: usable.region, offset: self.own_word * WORD_BYTES };
        let (_, result) = queue.write(to, usable.grant, buffer).await;
        match result {
            Ok(()) => {
                self.run.oracle.borrow_mut().acknowledged(usable.lease, usable.grant, posted);
                self.written.borrow_mut().insert(usable.lease, value);
            }
            Err(OpError::Unknown { .. }) => {
                self.written.borrow_mut().remove(&usable.lease);
            }
            Err(_) => {}
        }
        self.note_end(usable, &result);
    }

    async fn read(&self, usable: UsableRegion, queue: &Queue) {
        let Some(buffer) = self.buffer(WORDS) else { return };
        let posted = self.run.oracle.borrow_mut().moment();
        let from = RemoteAddr { region: usable.region, offset: 0 };
        let (buffer, result) = queue.read(from, usable.grant, buffer).await;
        if result.is_ok() {
            let words = buffer.chunks_exact(WORD_BYTES as usize);
            let words: Vec<u64> =
                words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
            let mut oracle = self.run.oracle.borrow_mut();
            oracle.acknowledged(usable.lease, usable.grant, posted);
            oracle.read(usable.lease, &words);
            let own = words[self.own_word as usize];
            if let Some(&written) = self.written.borrow().get(&usable.lease)
                && own != written
            {
                oracle.complain(format!(
                    "lease {}: {written:#x} was written, but {own:#x} is there",
                    usable.lease.0
                ));
            }
        }
        self.note_end(usable, &result);
    }

    /// Updates the client's state for how an operation ended.
    fn note_end(&self, usable: UsableRegion, result: &Result<(), OpError>) {
        let connection = self.connections.borrow().get(&usable.region.node).cloned();
        let Some(connection) = connection else { return };
        let mut connection = connection.borrow_mut();
        match result {
            Ok(()) => {}
            Err(OpError::NotSent { .. } | OpError::Unknown { .. }) => connection.lost = true,
            Err(OpError::Refused(refusal)) => {
                connection.attached.remove(&usable.region.index);
                self.note_refusal(usable, *refusal);
            }
        }
    }

    /// A client with a grant from another client gives the grant up when it is refused. An owner learns of
    /// the end of its leases from the node's control plane.
    fn note_refusal(&self, usable: UsableRegion, refusal: Refusal) {
        if matches!(refusal, Refusal::NotAttached | Refusal::Busy) {
            return;
        }
        // A client that does not ask may be refused at any time.
        let expects_to_go_on = (usable.own || self.seat.asks) && self.may_use(usable);
        let mut oracle = self.run.oracle.borrow_mut();
        if oracle.is_in_force(usable.lease, usable.grant) && expects_to_go_on {
            oracle.complain(format!("lease {}: refused for no reason: {refusal}", usable.lease.0));
        }
        if !usable.own {
            self.forget_grant(usable.region, usable.grant);
        }
    }
}
