//! How a client manages its leases, as production's keeper does: it renews, grows, gives grants to others,
//! and gives leases back.

use std::rc::Rc;
use std::time::Duration;

use farpool_lease::Millis;
use farpool_pool::{Change, ClientGrant, HeldLease, Renewal};
use farpool_wire::control::{AcquireResponse, AwaitRevocationRequest, Lease};
use farpool_wire::{AccessKey, Epoch, GrantMode, MAX_GRANTS_PER_REGION, RegionId};

use super::{Client, Held};
use crate::plane::node::Node;
use crate::plane::oracle::Loss;
use crate::plane::post::{Answer, Invitation, Question};
use crate::pool::Phase;

/// As in production's keeper.
const TICK: Millis = Millis(100);
const ACQUIRE_PATIENCE: Duration = Duration::from_secs(8);
const REQUEST_PATIENCE: Duration = Duration::from_secs(3);
const REVOCATION_PATIENCE: Duration = Duration::from_secs(7);
const REVOCATION_PAUSE: Duration = Duration::from_secs(1);
/// Leases in one renewal: few, so that there are several renewals.
const LEASES_PER_REQUEST: usize = 2;

impl Client {
    pub(super) async fn keep_leases(self: Rc<Self>) {
        while !self.has_left.get() {
            let now = self.now();
            if !self.is_broken() {
                let lapsed = self.holder.borrow_mut().lapsed(now);
                lapsed.into_iter().for_each(|(region, epoch)| self.note_loss(region, epoch));
            }
            for renewal in self.holder.borrow_mut().renewals(now, LEASES_PER_REQUEST) {
                self.run.tasks.spawn(self.process, self.clone().renew(renewal));
            }
            let next = self.holder.borrow().next_deadline().map_or(TICK, |due| due.since(now).min(TICK));
            let next = Duration::from_millis(next.0.max(1));
            self.run.world.sleep_by(self.seat.host, next).await;
        }
    }

    /// Has leases on a node renewed as soon as the node says that some of them are taken back.
    pub(super) async fn await_revocations(self: Rc<Self>, node: Rc<Node>) {
        let mut seen = 0;
        while !self.has_left.get() {
            let has_lease = self.holder.borrow().leases().any(|(region, _)| region.node == node.id);
            let answer = match has_lease {
                true => {
                    let question = AwaitRevocationRequest { owner: self.owner.0, seen };
                    let question = Question::AwaitRevocation(question);
                    self.post().ask(node.process.get(), question, REVOCATION_PATIENCE).await
                }
                false => None,
            };
            let Some(Answer::Revocation(answer)) = answer else {
                seen = 0;
                self.run.world.sleep_by(self.seat.host, REVOCATION_PAUSE).await;
                continue;
            };
            seen = answer.seen;
            if answer.revoked {
                let now = self.now();
                self.holder.borrow_mut().revocation_announced(now, node.id);
            }
        }
    }

    /// The leases of which the client does not know that they are taken back.
    pub(in crate::pool) fn staying(&self) -> Vec<(RegionId, Epoch)> {
        let holder = self.holder.borrow();
        let staying = holder.leases().filter(|(_, held)| !held.is_revoked());
        staying.map(|(region, held)| (region, held.epoch)).collect()
    }

    async fn renew(self: Rc<Self>, renewal: Renewal) {
        let asked_ns = self.run.world.now_ns();
        let node = self.run.node(renewal.node).process.get();
        let question = Question::Renew(renewal.request(self.owner));
        let Some(Answer::Renewed(answer)) = self.post().ask(node, question, REQUEST_PATIENCE).await else {
            return;
        };
        let changes = self.holder.borrow_mut().renewal_answered(self.now(), &renewal, &answer);
        for change in changes {
            match change {
                Change::Extended { region, .. } | Change::Leave { region, .. } => {
                    if let Some(held) = self.held.borrow_mut().get_mut(&region) {
                        held.since_ns = held.since_ns.max(asked_ns);
                    }
                }
                Change::Lost { region, epoch } => self.note_loss(region, epoch),
            }
        }
    }

    fn note_loss(&self, region: RegionId, epoch: Epoch) {
        let mut all = self.held.borrow_mut();
        let Some(held) = all.get(&region).filter(|held| held.epoch == epoch) else { return };
        self.run.world.note("process {} loses lease {}", &[self.process.number(), held.lease.0]);
        self.run.oracle.borrow_mut().lost(Loss {
            lease: held.lease,
            holder: self.seat.host,
            node: self.run.node(region.node).host,
            since_ns: held.since_ns,
            now_ns: self.run.world.now_ns(),
            fleeting: held.fleeting,
        });
        all.remove(&region);
    }

    /// Leases regions, gives grants to other clients and fences them, and gives leases back, as the seed
    /// says.
    pub(super) async fn manage(self: Rc<Self>) {
        while !self.is_leaving() {
            self.sleep_ms(100, 1_500).await;
            if self.run.phase.get() != Phase::Busy {
                continue;
            }
            if self.held.borrow().len() < self.seat.wants && self.chance(800) {
                self.grow().await;
            }
            self.give_some_revoked_back().await;
            match self.below(100) {
                0..8 => self.give_one_back().await,
                8..48 => self.let_client_in().await,
                48..58 => self.fence_client().await,
                58 => self.let_many_in().await,
                _ => {}
            }
        }
        self.leave().await;
    }

    async fn grow(&self) {
        let asked_at = self.now();
        let asked_ns = self.run.world.now_ns();
        let count = (self.seat.wants - self.held.borrow().len()) as u32;
        let request = self.holder.borrow_mut().acquisition(asked_at, self.seat.class, count);
        let broker = self.run.broker.process.get();
        let answer = self.post().ask(broker, Question::Acquire(request), ACQUIRE_PATIENCE).await;
        let answer: Option<AcquireResponse> = match answer {
            Some(Answer::Acquired(answer)) => Some(answer),
            _ => None,
        };
        let now = self.now();
        let acquired = self.holder.borrow_mut().acquisition_answered(now, asked_at, answer);
        for HeldLease { region, epoch, key, usable_until, lease } in acquired.leases {
            let number = self.run.oracle.borrow().lease_of(region, epoch);
            let Some(number) = number else {
                self.run.complain(format!("a lease of {region} has epoch {epoch}, which no node granted"));
                continue;
            };
            // The oracle assumes a certain number of tries to renew, which take half of the lease's time.
            let fleeting = usable_until.since(now).0 < lease.ttl_ms / 2;
            let guests = Vec::new();
            let held = Held { epoch, key, lease: number, since_ns: asked_ns, fleeting, guests };
            self.held.borrow_mut().insert(region, held);
        }
        for (lease, _) in acquired.unusable {
            self.release_useless(&lease).await;
        }
    }

    async fn release_useless(&self, lease: &Lease) {
        if let (Some(region), Some(key)) = (lease.region_id(), lease.access_key()) {
            self.release(region, Epoch(lease.epoch), key).await;
        }
    }

    async fn release(&self, region: RegionId, epoch: Epoch, key: AccessKey) {
        let request = self.holder.borrow().release(std::iter::once((region.index, epoch, &key)));
        let node = self.run.node(region.node).process.get();
        // Without an answer the lease expires by itself.
        let _ = self.post().ask(node, Question::Release(request), REQUEST_PATIENCE).await;
    }

    /// Stops using a region, then gives it back.
    async fn give_back(&self, region: RegionId) {
        let Some(held) = self.held.borrow_mut().remove(&region) else { return };
        self.holder.borrow_mut().dropped(region, held.epoch);
        self.run.world.note("process {} gives lease {} back", &[self.process.number(), held.lease.0]);
        self.release(region, held.epoch, held.key).await;
    }

    fn some_region(&self) -> Option<RegionId> {
        let trusted = self.trusted();
        (!trusted.is_empty()).then(|| trusted[self.below(trusted.len() as u64) as usize].0)
    }

    async fn give_one_back(&self) {
        if let Some(region) = self.some_region() {
            self.give_back(region).await;
        }
    }

    /// Gives back some of the leases that are being taken back, and keeps the others until they end.
    async fn give_some_revoked_back(&self) {
        let leaving: Vec<RegionId> = self.holder.borrow().to_leave().map(|(region, _)| region).collect();
        for region in leaving {
            if !self.seat.stays && self.chance(400) {
                self.give_back(region).await;
            }
        }
    }

    async fn let_client_in(&self) {
        let (Some(region), false) = (self.some_region(), self.seat.guests.is_empty()) else { return };
        let guest = self.seat.guests[self.below(self.seat.guests.len() as u64) as usize];
        let Some(ClientGrant { epoch: grant, key, .. }) = self.add_grant(region).await else { return };
        let Some(lease) = self.run.oracle.borrow().lease_of(region, grant) else {
            return self
                .run
                .complain(format!("a grant of {region} has epoch {grant}, which no node granted"));
        };
        if let Some(held) = self.held.borrow_mut().get_mut(&region) {
            if held.lease != lease {
                self.run.complain(format!("grant {grant} of {region} is taken for one of another lease"));
            }
            held.guests.push((guest, grant));
        }
        let invitation = Invitation { owner: self.process, region, lease, grant, key };
        let there = self.run.client(guest).map(|client| client.process);
        if let Some(there) = there {
            let _ = self.post().ask(there, Question::LetIn(invitation), REQUEST_PATIENCE).await;
        }
    }

    /// Adds grants that no client uses, until the node gives no more, and fences some of them.
    async fn let_many_in(&self) {
        let (Some(region), true) = (self.some_region(), self.run.phase.get() == Phase::Busy) else { return };
        let mut added = Vec::new();
        while let Some(grant) = self.add_grant(region).await
            && added.len() <= MAX_GRANTS_PER_REGION
        {
            added.push(grant.epoch);
        }
        for grant in added.into_iter().take(self.below(MAX_GRANTS_PER_REGION as u64) as usize) {
            self.fence(region, grant).await;
        }
    }

    /// Adds a grant to the lease of a region, as far as the node and the holder agree to it.
    async fn add_grant(&self, region: RegionId) -> Option<ClientGrant> {
        let request = self.holder.borrow().add_grant(self.now(), region, GrantMode::ReadWrite)?;
        let node = self.run.node(region.node).process.get();
        let question = Question::AddGrant(request.clone());
        let Some(Answer::GrantAdded(added)) = self.post().ask(node, question, REQUEST_PATIENCE).await else {
            return None;
        };
        self.holder.borrow().grant_added(self.now(), region, &request, &added)
    }

    async fn fence_client(&self) {
        let Some(region) = self.some_region() else { return };
        let guest = self.held.borrow().get(&region).and_then(|held| held.guests.first().copied());
        let Some((_, grant)) = guest else { return };
        self.fence(region, grant).await;
    }

    async fn fence(&self, region: RegionId, grant: Epoch) {
        let Some(request) = self.holder.borrow().fence_grant(region, grant) else { return };
        let node = self.run.node(region.node).process.get();
        let answer = self.post().ask(node, Question::FenceGrant(request), REQUEST_PATIENCE).await;
        if let (Some(Answer::Done), Some(held)) = (answer, self.held.borrow_mut().get_mut(&region)) {
            held.guests.retain(|(_, other)| *other != grant);
        }
    }

    async fn leave(&self) {
        self.invited.borrow_mut().clear();
        let all: Vec<RegionId> = self.held.borrow().keys().copied().collect();
        for region in all {
            self.give_back(region).await;
        }
        self.has_left.set(true);
    }
}
