//! A task's connections: opening, loss, reconnecting, and attaching regions.

use std::collections::BTreeMap;

use farpool_fabric::sim::Path;
use farpool_fabric::{OpError, Queue};
use farpool_wire::{AccessKey, Epoch, Refusal, RegionId};

use super::Client;
use crate::fabric::director::Offer;

/// A queue to one node.
pub(super) struct Connection {
    pub(super) queue: Queue,
    pub(super) session: u64,
    pub(super) incarnation: u64,
    /// The current incarnation can no longer be used.
    pub(super) lost: bool,
    attached: BTreeMap<u32, Epoch>,
    /// When the client last asked to attach each region, in the history's time.
    asked_for: BTreeMap<u32, u64>,
}

const PING: &[u8] = b"are you there?";

impl Client {
    /// Opens a connection, if there is none, and waits until the node has answered on it.
    pub(super) async fn connect(&mut self, node: usize) -> bool {
        match &mut self.connections[node] {
            None => {
                let Ok(queue) = self.endpoint.open(self.run.nodes[node].peer()) else { return false };
                self.connections[node] = Some(Connection {
                    queue,
                    session: self.session.get(),
                    incarnation: 1,
                    lost: false,
                    attached: BTreeMap::new(),
                    asked_for: BTreeMap::new(),
                });
            }
            Some(connection) if connection.lost => {
                connection.attached.clear();
                connection.incarnation += 1;
                if connection.queue.reconnect().is_err() {
                    return false;
                }
                connection.lost = false;
            }
            Some(_) => return true,
        }
        self.ping(node).await
    }

    /// Whether the node answers. Once it has answered, older incarnations of the queue have no further
    /// effect. The node refuses calls until a region is attached; that is an answer, too.
    async fn ping(&mut self, node: usize) -> bool {
        let Ok(mut buffer) = self.endpoint.arena().take(PING.len()) else { return false };
        buffer.copy_from_slice(PING);
        let connection = self.connections[node].as_ref().expect("connected before");
        let has_key = !connection.attached.is_empty();
        let answer = self.timed(connection.queue.call(buffer, PING.len())).await;
        let (session, incarnation) = (connection.session, connection.incarnation);
        match answer {
            Ok(answer) if has_key => {
                if &answer.buffer[..answer.bytes] != PING {
                    self.run.complain("a call was answered with other bytes than it sent".into());
                }
            }
            Ok(_) => self.run.complain("a call was answered though nothing was attached".into()),
            Err(OpError::Refused(Refusal::NotAttached)) if !has_key => {}
            Err(_) => {
                self.connections[node].as_mut().expect("connected before").lost = true;
                return false;
            }
        }
        self.run.history.borrow_mut().answered(session, incarnation);
        true
    }

    /// Attaches the grant's region, if it is not attached yet. Returns whether it is attached.
    pub(super) async fn attach(&mut self, offer: &Offer) -> bool {
        let region = RegionId { node: self.run.nodes[offer.node].id, index: offer.region };
        if self.random.chance(20) && !self.wrong_key_is_refused(offer, region).await {
            return false;
        }
        let connection = self.connections[offer.node].as_mut().expect("connected before");
        if connection.attached.get(&offer.region) == Some(&offer.grant) {
            return true;
        }
        connection.asked_for.insert(offer.region, self.run.history.borrow().now());
        let connection = self.connections[offer.node].as_ref().expect("connected before");
        let result = self.timed(connection.queue.attach(region, offer.grant, offer.key)).await;
        self.note_end(offer, &result);
        let connection = self.connections[offer.node].as_mut().expect("connected before");
        match result {
            Ok(()) => {
                let is_first = connection.attached.is_empty();
                connection.attached.insert(offer.region, offer.grant);
                !is_first || self.ping(offer.node).await
            }
            Err(_) => {
                connection.attached.remove(&offer.region);
                self.last = None;
                false
            }
        }
    }

    async fn wrong_key_is_refused(&mut self, offer: &Offer, region: RegionId) -> bool {
        let connection = self.connections[offer.node].as_ref().expect("connected before");
        let wrong = AccessKey::from_bytes([0xEE; AccessKey::BYTES]);
        let result = self.timed(connection.queue.attach(region, offer.grant, wrong)).await;
        match result {
            Ok(()) => self.run.complain("a wrong key opened a region".into()),
            Err(OpError::Refused(Refusal::WrongKey | Refusal::StaleEpoch)) => return true,
            Err(_) => {
                self.note_end(offer, &result);
            }
        }
        false
    }

    /// Checks that a refusal has a reason.
    pub(super) fn note_refusal(&mut self, offer: &Offer, refusal: Refusal) {
        let connection = self.connections[offer.node].as_mut().expect("connected before");
        match refusal {
            Refusal::StaleEpoch => {
                connection.attached.remove(&offer.region);
                self.last = None;
                self.read_back = None;
                if !self.run.history.borrow().has_ended(offer.lease, offer.grant) {
                    self.run.complain(format!("grant {} was refused without a fence", offer.grant));
                }
            }
            // `Busy` is not expected: moving a region takes no time here.
            Refusal::NotAttached => {
                connection.attached.remove(&offer.region);
                let asked_at = connection.asked_for.get(&offer.region).copied().unwrap_or(0);
                let by_word = self.place.path == Path::Shared;
                if !by_word || !self.run.history.borrow().was_disturbed_after(offer.lease, asked_at) {
                    self.run.complain(format!("grant {} was detached for no reason", offer.grant));
                }
            }
            Refusal::ReadOnly if offer.mode == farpool_wire::GrantMode::ReadOnly => {}
            other => self.run.complain(format!("grant {}: refused for no reason: {other}", offer.grant)),
        }
    }

    pub(super) fn queue(&self, offer: &Offer) -> &Queue {
        &self.connections[offer.node].as_ref().expect("connected before").queue
    }
}
