//! What a member runs in: nodes, fences and leases of a run's world.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::Peer;
use farpool_fabric::sim::{HostId, Random};
use farpool_namdb::{Environment, News, Timing};
use farpool_pool::{ClientGrant, GrantError};
use farpool_txn::horizon::CollectPauses;
use farpool_wire::{Epoch, GrantMode, RegionId};

use super::broken::Engine;
use super::{Run, key_of};

/// The times of a member: short, like the latencies of the network here.
const TIMING: Timing = Timing {
    node_silence: Duration::from_millis(2),
    role_pause: Duration::from_micros(40),
    collect_pauses: CollectPauses { busy: Duration::from_micros(50), idle: Duration::from_micros(400) },
    oracle_look: Duration::from_micros(10),
    catalog_timeout: Duration::from_millis(100),
    catalog_pause: Duration::from_micros(30),
    seat_pause: Duration::from_micros(40),
    attach_timeout: Duration::from_millis(20),
    attach_pause: Duration::from_micros(20),
    explain_pause: Duration::from_micros(5),
    wake_pause: Duration::from_micros(2),
    fence_deadline: Duration::from_millis(1),
    tries: 30,
    first_pause: Duration::from_micros(4),
    longest_pause: Duration::from_micros(50),
};
/// The longest time that a node takes to add a grant.
const MOST_GRANTING_NS: u64 = 3_000;

/// The surroundings of one process.
pub(super) struct Surroundings {
    pub(super) run: Rc<Run>,
    host: HostId,
    random: RefCell<Random>,
    /// The grants that the process has so far, in the order of the layout's regions.
    given: RefCell<Vec<Option<Epoch>>>,
    /// The lease of this region has ended.
    lost: Cell<Option<RegionId>>,
}

impl Surroundings {
    pub(super) fn new(run: &Rc<Run>, host: HostId) -> Surroundings {
        let given = RefCell::new(vec![None; run.layout.regions.len()]);
        let random = RefCell::new(run.ledger.notes.random());
        Surroundings { run: run.clone(), host, random, given, lost: Cell::new(None) }
    }

    /// The process learns that it has lost the lease of a region.
    pub(super) fn lose_lease(&self, region: RegionId) {
        self.lost.set(Some(region));
    }

    fn random_stream(&self) -> Random {
        Random::new(self.random.borrow_mut().bits(), 1)
    }

    /// Remembers a grant. When the process has a grant of each region, tells the observer about them.
    fn note_grant(&self, region: RegionId, grant: Epoch) {
        let mut given = self.given.borrow_mut();
        given[self.run.place_of(region)] = Some(grant);
        if let Some(grants) = given.iter().copied().collect::<Option<Vec<_>>>() {
            self.run.observer.lock().record_grants(&grants);
        }
    }
}

impl Environment for Surroundings {
    type Rules = Engine;

    fn peer(&self, region: RegionId) -> Option<&Peer> {
        Some(&self.run.node_of(region).peer)
    }

    async fn add_grant(&self, region: RegionId) -> Result<ClientGrant, GrantError> {
        let taking = self.random_stream().below(MOST_GRANTING_NS);
        self.run.world.sleep(Duration::from_nanos(taking)).await;
        let (epoch, mode) = (Epoch(100 + self.run.ledger.notes.next_name()), GrantMode::ReadWrite);
        self.run.node_of(region).memory.regions.open_grant(region.index, epoch, key_of(epoch), mode);
        self.note_grant(region, epoch);
        Ok(ClientGrant { region, epoch, key: key_of(epoch), mode })
    }

    async fn fence_grant(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        let mut random = self.random_stream();
        self.run.fence(region, grant, &mut random).await
    }

    fn lost_region(&self) -> Option<RegionId> {
        self.lost.get()
    }

    fn nodes_answer(&self) -> bool {
        !self.run.is_cut_off(self.host)
    }

    fn random(&self) -> u64 {
        self.random.borrow_mut().bits()
    }

    fn timing(&self) -> &Timing {
        &TIMING
    }

    fn report(&self, news: News<'_>) {
        let run = &self.run;
        match &news {
            News::Recovered(slot, undone) => {
                let numbers = [slot.index() as u64, *undone as u64];
                run.world.note("seat {} was recovered; {} commits were rolled back", &numbers);
            }
            News::RecoveryFailed(slot, _) => {
                run.world.note("seat {} could not be recovered", &[slot.index() as u64]);
            }
            News::Stuck(_) => run.world.note("a part of a member is stuck", &[]),
            News::Progressing => run.world.note("no part of a member is stuck any more", &[]),
        }
        if !run.faults.are_any() {
            run.ledger.notes.complain(format!("unexpected news, though nothing fails here: {news:?}"));
        }
    }
}
