//! A node's core and memory, joined as in production's shell, and the mutations of this shell.

use std::sync::Arc;

use farpool_fabric::sim::SimClock;
use farpool_fabric::{AccessError, AccessKind, Clock, Host, Locking, Mapping, RegionSet};
use farpool_lease::{GrantRefusal, LeaseRefusal, Lending, Millis, Term};
use farpool_node::{NodeCore, Pressure};
use farpool_wire::control::LeaseRef;
use farpool_wire::{AccessKey, CALL_PING, Epoch, GrantMode, NodeId, Refusal};
use rustix_futex_sync::Mutex;

use super::promises::Promises;
use super::{LATE_REVOCATION, UNFENCED_GRANT};

pub(crate) struct Shell {
    node: NodeId,
    clock: SimClock,
    pub(crate) core: Mutex<NodeCore>,
    pub(crate) regions: RegionSet,
    pub(crate) pressure: Mutex<Pressure>,
    /// What the node has promised in its answers: each of its actions is checked against it.
    pub(crate) promises: Mutex<Promises>,
    /// Mutation: clients' grants that are not fenced with their lease, by region.
    left_over: Option<Mutex<Vec<LeftOver>>>,
    /// Mutation: leases that were taken back and have ended, and until when the node keeps them all the same.
    overdue: Option<Mutex<Vec<(Millis, Lending)>>>,
}

#[derive(Clone, Default)]
struct LeftOver {
    /// The owner's grant of the current lease.
    present: Option<Epoch>,
    /// The clients' grants of the current lease.
    clients: Vec<Epoch>,
    /// The clients' grants of earlier leases.
    ended: Vec<Epoch>,
}

impl Shell {
    pub(crate) fn new(
        node: NodeId,
        incarnation: u32,
        (regions, region_bytes): (u32, u64),
        ttl: Millis,
        clock: SimClock,
        mutation: Option<&'static str>,
    ) -> Arc<Self> {
        let overdue = (mutation == Some(LATE_REVOCATION)).then(Mutex::default);
        let left_over = (mutation == Some(UNFENCED_GRANT))
            .then(|| Mutex::new(vec![LeftOver::default(); regions as usize]));
        Arc::new(Shell {
            node,
            clock,
            core: Mutex::new(NodeCore::new(incarnation, regions, ttl)),
            regions: RegionSet::create(regions, region_bytes, Locking::None, |_| {})
                .expect("a few pages of memory"),
            pressure: Mutex::new(Pressure::new(region_bytes * u64::from(super::node::RESERVE))),
            promises: Mutex::new(Promises::new(ttl)),
            left_over,
            overdue,
        })
    }

    pub(crate) fn now(&self) -> Millis {
        Millis(self.clock.now_ns() / 1_000_000)
    }

    /// Opens a clean region for a lease.
    pub(crate) fn open(&self, region: u32, epoch: Epoch, key: AccessKey) {
        self.regions.open(region, epoch, key);
        if let Some(left_over) = &self.left_over {
            left_over.lock()[region as usize].present = Some(epoch);
        }
    }

    /// Opens a client's grant.
    pub(crate) fn open_grant(&self, region: u32, epoch: Epoch, key: AccessKey) {
        self.regions.open_grant(region, epoch, key, GrantMode::ReadWrite);
        if let Some(left_over) = &self.left_over {
            left_over.lock()[region as usize].clients.push(epoch);
        }
    }

    /// Fences one grant.
    pub(crate) fn fence_grant(&self, grant: Lending) {
        self.regions.close_grant(grant.region, grant.epoch);
        self.regions.fence_grant(grant.region, grant.epoch).expect("a page of memory");
        if let Some(left_over) = &self.left_over {
            left_over.lock()[grant.region as usize].clients.retain(|epoch| *epoch != grant.epoch);
        }
    }

    /// Fences the whole lease.
    pub(crate) fn fence(&self, lease: Lending) {
        if let Some(left_over) = &self.left_over {
            let of_region = &mut left_over.lock()[lease.region as usize];
            let clients = std::mem::take(&mut of_region.clients);
            of_region.ended.extend(clients);
        }
        self.regions.fence(lease.region);
        self.core.lock().fenced(lease);
    }

    /// Ends the leases whose time has passed, and returns those that are to be fenced.
    pub(crate) fn expire(&self, now: Millis) -> Vec<Lending> {
        let mut core = self.core.lock();
        let Some(overdue) = &self.overdue else { return core.expire(now) };
        let table = core.states(now);
        let is_revoked = |lease: &Lending| {
            table.iter().any(|state| state.held && state.revoked && state.region == lease.region)
        };
        let (late, mut ended): (Vec<_>, Vec<_>) = core.expire(now).into_iter().partition(is_revoked);
        let mut overdue = overdue.lock();
        ended.extend(overdue.extract_if(.., |(until, _)| now >= *until).map(|(_, lease)| lease));
        overdue.extend(late.into_iter().map(|lease| (now.plus(core.ttl()), lease)));
        ended
    }

    /// Mutation: fences a grant, but leaves it in the table.
    pub(crate) fn fence_without_noting(
        &self,
        now: Millis,
        lease: &LeaseRef,
        grant: Epoch,
    ) -> Result<Lending, GrantRefusal> {
        let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
        let own = Lending { region: lease.region, epoch: Epoch(lease.epoch) };
        self.core.lock().check(now, own, &key).map_err(|_| LeaseRefusal::Ended)?;
        Ok(Lending { region: lease.region, epoch: grant })
    }

    /// Mutation: answers that a lease is renewed, but does not record the renewal in the table.
    pub(crate) fn renew_without_counting(&self, now: Millis, lease: &LeaseRef) -> Result<Term, LeaseRefusal> {
        let core = self.core.lock();
        let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
        let lending = Lending { region: lease.region, epoch: Epoch(lease.epoch) };
        core.check(now, lending, &key).map_err(|_| LeaseRefusal::Ended)?;
        Ok(Term { remaining: core.ttl(), revoked: false })
    }

    /// Mutation: the epoch under which accesses of an unfenced grant of an earlier lease are served.
    fn stand_in(&self, region: u32, epoch: Epoch) -> Option<Epoch> {
        let left_over = self.left_over.as_ref()?.lock();
        let of_region = &left_over[region as usize];
        of_region.present.filter(|_| of_region.ended.contains(&epoch))
    }
}

impl Host for Shell {
    fn node(&self) -> NodeId {
        self.node
    }

    fn regions(&self) -> &RegionSet {
        &self.regions
    }

    fn admit(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        let (now, grant) = (self.now(), Lending { region, epoch });
        let admitted = self.core.lock().check(now, grant, key);
        self.promises.lock().admitted(now, grant, admitted.is_ok());
        admitted
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        match (self.regions.with_region(region, epoch, kind, access), self.stand_in(region, epoch)) {
            (Err(Refusal::StaleEpoch), Some(present)) => {
                self.regions.with_region(region, present, kind, access)
            }
            (result, _) => result,
        }
    }

    fn call(&self, request: &[u8], _: &mut Vec<u8>) -> Result<(), Refusal> {
        if request == CALL_PING { Ok(()) } else { Err(Refusal::UnknownCall) }
    }
}
