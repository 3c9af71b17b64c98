//! What a member runs in: nodes, fences and leases of a run's world.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::Peer;
use farpool_fabric::sim::{HostId, Random};
use farpool_namdb::{Environment, News, Timing};
use farpool_pool::{ClientGrant, GrantError, JointError};
use farpool_txn::horizon::CollectPauses;
use farpool_wire::control::{Lease, NodeAddress};
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
    lease_pause: Duration::from_micros(300),
    tidy_pause: Duration::from_micros(200),
    remove_pause: Duration::from_micros(20),
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
/// Adoptions of leases, in thousandths, that fail.
const UNANSWERED_PERMILLE: u32 = 200;

/// The surroundings of one process.
pub(super) struct Surroundings {
    pub(super) run: Rc<Run>,
    host: HostId,
    random: RefCell<Random>,
    /// The grants that the process has so far, in the order of the layout's regions.
    given: RefCell<Vec<Option<Epoch>>>,
    /// The regions that the database got later, of which this process is a holder.
    held: RefCell<BTreeSet<(RegionId, Epoch)>>,
    /// The lease of this region has ended.
    lost: Cell<Option<RegionId>>,
}

impl Surroundings {
    pub(super) fn new(run: &Rc<Run>, host: HostId) -> Surroundings {
        let given = RefCell::new(vec![None; run.layout.regions.len()]);
        let random = RefCell::new(run.ledger.notes.random());
        Surroundings {
            run: run.clone(),
            host,
            random,
            given,
            held: RefCell::default(),
            lost: Cell::new(None),
        }
    }

    /// Whether the process renews this lease of a region that the database got later.
    pub(super) fn holds(&self, lease: (RegionId, Epoch)) -> bool {
        self.held.borrow().contains(&lease)
    }

    /// The process learns that it has lost the lease of a region.
    pub(super) fn lose_lease(&self, region: RegionId) {
        self.lost.set(Some(region));
    }

    fn random_stream(&self) -> Random {
        Random::new(self.random.borrow_mut().bits(), 1)
    }

    /// Remembers a grant. When the process has a grant of each region that the database was created with,
    /// tells the observer about them; from then on about each other one.
    fn note_grant(&self, region: RegionId, grant: Epoch) {
        let (mut given, regions) = (self.given.borrow_mut(), &self.run.layout.regions);
        let mut observer = self.run.observer.lock();
        match regions.iter().position(|known| *known == region) {
            Some(place) => {
                given[place] = Some(grant);
                if let Some(grants) = given.iter().copied().collect::<Option<Vec<_>>>() {
                    let all = regions.iter().zip(&grants);
                    all.for_each(|(region, grant)| observer.record_grant(grants[0], *region, *grant));
                }
            }
            None => observer.record_grant(given[0].expect("it has a seat to get"), region, grant),
        }
    }

    async fn wait_for_answer(&self) {
        let taking = self.random_stream().below(MOST_GRANTING_NS);
        self.run.world.sleep(Duration::from_nanos(taking)).await;
    }
}

/// The lease of a region, without what only real nodes look at.
fn lease_of((region, epoch): (RegionId, Epoch)) -> Lease {
    let address = NodeAddress { node: region.node.0, ..NodeAddress::default() };
    Lease { address: Some(address), region: region.index, epoch: epoch.0, ..Lease::default() }
}

/// The region of a lease, and its epoch.
fn named(lease: &Lease) -> (RegionId, Epoch) {
    (lease.region_id().expect("a lease of this run"), Epoch(lease.epoch))
}

impl Environment for Surroundings {
    type Rules = Engine;

    fn peer(&self, region: RegionId) -> Option<Peer> {
        Some(self.run.node_of(region).peer.clone())
    }

    async fn add_grant(&self, region: RegionId) -> Result<ClientGrant, GrantError> {
        self.wait_for_answer().await;
        let (epoch, mode) = (Epoch(100 + self.run.ledger.notes.next_name()), GrantMode::ReadWrite);
        self.run.node_of(region).memory.regions.open_grant(region.index, epoch, key_of(epoch), mode);
        self.note_grant(region, epoch);
        Ok(ClientGrant { region, epoch, key: key_of(epoch), mode })
    }

    async fn fence_grant(&self, region: RegionId, grant: Epoch) -> Result<(), GrantError> {
        let mut random = self.random_stream();
        self.run.fence(region, grant, &mut random).await
    }

    async fn acquire_regions(&self, regions: u32) -> Result<Vec<Lease>, JointError> {
        self.wait_for_answer().await;
        let lent = self.run.lend(regions as usize);
        if lent.is_empty() {
            let (wanted_mib, free_mib, reason) = (1, 0, "all regions are leased".to_owned());
            return Err(JointError::NoSpace { wanted_mib, free_mib, reason });
        }
        self.held.borrow_mut().extend(&lent);
        Ok(lent.into_iter().map(lease_of).collect())
    }

    async fn adopt_regions(&self, leases: Vec<Lease>) -> Result<(), JointError> {
        self.wait_for_answer().await;
        let run = &self.run;
        if run.faults.are_any() && !run.is_quiet.get() && self.random_stream().chance(UNANSWERED_PERMILLE) {
            let node = leases[0].region_id().expect("a lease of this run").node;
            return Err(GrantError::NoAnswer { node, reason: "the request was lost".to_owned() }.into());
        }
        if let Some((region, _)) = leases.iter().map(named).find(|lease| !run.is_lent(*lease)) {
            return Err(JointError::Ended { region });
        }
        self.held.borrow_mut().extend(leases.iter().map(named));
        Ok(())
    }

    fn forget_regions(&self, leases: &[Lease]) {
        self.held.borrow_mut().retain(|held| !leases.iter().any(|lease| named(lease) == *held));
    }

    async fn give_back_regions(&self, leases: Vec<Lease>) {
        self.forget_regions(&leases);
        self.wait_for_answer().await;
        leases.iter().for_each(|lease| self.run.take_back(named(lease)));
    }

    fn lost_regions(&self) -> Vec<RegionId> {
        self.lost.get().into_iter().collect()
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
            News::NotLent(_) => return run.world.note("no more memory is lent", &[]),
            News::Stuck(_) => run.world.note("a part of a member is stuck", &[]),
            News::Progressing => run.world.note("no part of a member is stuck any more", &[]),
        }
        if !run.faults.are_any() {
            run.ledger.notes.complain(format!("unexpected news, though nothing fails here: {news:?}"));
        }
    }
}
