//! The nodes' shells: they lend regions, add and fence grants, scrub, and lend again, until no client is
//! left.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::{HostId, ProcessId, Random, Service};
use farpool_fabric::{AccessKind, Peer, Scrubbed};
use farpool_wire::{AccessKey, Epoch, GrantMode, NodeId};

use super::history::LeaseName;
use super::layout::{REGION_BYTES, USED_WORDS};
use super::{NO_FENCE, NO_SCRUB, Run};
use crate::lending::LendingHost;

/// Regions of each node.
const REGIONS: u32 = 2;

/// The duration of a lease, in microseconds.
const LEASE_US: std::ops::Range<u64> = 60..1_000;
/// The pause between two attempts to scrub a region that is still in use. `SCRUB_TRIES` limits the attempts.
const SCRUB_RETRY: Duration = Duration::from_micros(15);
const SCRUB_TRIES: u32 = 2_000;

/// A node of the scenario. A restart replaces its memory and its process.
pub(super) struct FabricNode {
    pub(super) index: u64,
    pub(super) id: NodeId,
    pub(super) host: HostId,
    pub(super) process: Cell<ProcessId>,
    peer: RefCell<Option<Peer>>,
    service: Service,
    incarnation: Cell<u32>,
    counter: Cell<u32>,
}

/// A grant as its client knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) node: usize,
    pub(super) region: u32,
    pub(super) lease: LeaseName,
    pub(super) grant: Epoch,
    pub(super) key: AccessKey,
    pub(super) mode: GrantMode,
}

/// The grants of each client. This stands for the control plane, which `sim pool` tests.
#[derive(Default)]
pub(super) struct Board {
    pub(super) offers: Vec<Vec<Offer>>,
    leases: u64,
}

impl Board {
    pub(super) fn new(clients: usize) -> Self {
        Board { offers: vec![Vec::new(); clients], leases: 0 }
    }

    fn withdraw(&mut self, is_gone: impl Fn(&Offer) -> bool) {
        self.offers.iter_mut().for_each(|offers| offers.retain(|offer| !is_gone(offer)));
    }
}

impl FabricNode {
    pub(super) fn new(index: u64, host: HostId, service: Service, process: ProcessId) -> Self {
        FabricNode {
            index,
            id: NodeId(0xA0 + index),
            host,
            process: Cell::new(process),
            peer: RefCell::new(None),
            service,
            incarnation: Cell::new(0),
            counter: Cell::new(0),
        }
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer.borrow().clone().expect("nodes start before clients")
    }

    fn next_epoch(&self) -> Epoch {
        self.counter.set(self.counter.get() + 1);
        Epoch::new(self.incarnation.get(), self.counter.get())
    }
}

/// Starts a node, or restarts it with fresh memory.
pub(super) fn start(run: &Rc<Run>, node: &Rc<FabricNode>) {
    node.incarnation.set(node.incarnation.get() + 1);
    let memory = LendingHost::new(node.id, REGIONS, REGION_BYTES);
    let memory = Arc::new(if run.is_broken(NO_FENCE) { memory.without_fences() } else { memory });
    let peer = run.world.serve(node.host, memory.clone(), node.service);
    *node.peer.borrow_mut() = Some(peer);
    for region in 0..REGIONS {
        let random =
            run.random(100 + 1_000 * u64::from(node.incarnation.get()) + 10 * node.index + u64::from(region));
        let lender = Lender { run: run.clone(), node: node.clone(), memory: memory.clone(), region, random };
        run.tasks.spawn(node.process.get(), lender.lend());
    }
}

/// Kills a node's process, which loses all its leases. The caller restarts it.
pub(super) fn crash(run: &Run, node: &FabricNode) {
    run.tasks.kill(node.process.get());
    run.world.crash_node(node.id);
    let mut board = run.board.borrow_mut();
    let index = node.index as usize;
    for offer in board.offers.iter().flatten().filter(|offer| offer.node == index) {
        run.history.borrow_mut().lost(offer.lease);
    }
    board.withdraw(|offer| offer.node == index);
}

/// Lends one region again and again.
struct Lender {
    run: Rc<Run>,
    node: Rc<FabricNode>,
    memory: Arc<LendingHost>,
    region: u32,
    random: Random,
}

impl Lender {
    async fn lend(mut self) {
        let mut leftover: Option<Vec<u64>> = None;
        while !self.run.has_ended() {
            let lease = {
                let mut board = self.run.board.borrow_mut();
                board.leases += 1;
                LeaseName(board.leases)
            };
            let owner = self.node.next_epoch();
            self.memory.open(self.region, owner, key_of(owner));
            if let Some(words) = leftover.take() {
                self.put_back(owner, &words);
            }
            let numbers = [self.node.index, u64::from(self.region), lease.0, owner.0];
            self.run.world.note("node {} lends region {} as lease {}, epoch {}", &numbers);
            self.offer_all(lease, owner);
            self.change_grants(lease, owner).await;
            let words = self.end(lease, owner);
            if !self.scrub().await {
                return;
            }
            leftover = self.run.is_broken(NO_SCRUB).then_some(words);
        }
    }

    /// Mutation: restores what an earlier holder wrote.
    fn put_back(&self, epoch: Epoch, words: &[u64]) {
        let put = self.memory.regions.with_region(self.region, epoch, AccessKind::Write, &mut |memory| {
            (0u64..).zip(words).try_for_each(|(word, &value)| memory.store(8 * word, value))
        });
        debug_assert_eq!(put, Ok(()));
    }

    /// Gives the owner's grant to one client, and further grants to some of the others.
    fn offer_all(&mut self, lease: LeaseName, owner: Epoch) {
        let clients = self.run.board.borrow().offers.len();
        let first = self.random.index(clients);
        self.offer(first, lease, owner, GrantMode::ReadWrite);
        for client in (0..clients).filter(|&client| client != first) {
            if self.random.chance(700) {
                self.grant_another(lease, client);
            }
        }
    }

    fn grant_another(&mut self, lease: LeaseName, client: usize) {
        let epoch = self.node.next_epoch();
        let mode = if self.random.chance(150) { GrantMode::ReadOnly } else { GrantMode::ReadWrite };
        self.memory.regions.open_grant(self.region, epoch, key_of(epoch), mode);
        self.offer(client, lease, epoch, mode);
    }

    fn offer(&self, client: usize, lease: LeaseName, grant: Epoch, mode: GrantMode) {
        let (node, region) = (self.node.index as usize, self.region);
        let offer = Offer { node, region, lease, grant, key: key_of(grant), mode };
        self.run.board.borrow_mut().offers[client].push(offer);
    }

    /// Fences and replaces single grants while the lease lasts.
    async fn change_grants(&mut self, lease: LeaseName, owner: Epoch) {
        let stretches = 1 + self.random.below(3);
        let each_us = (LEASE_US.start + self.random.below(LEASE_US.end - LEASE_US.start)) / stretches;
        for stretch in 0..stretches {
            self.run.world.sleep(Duration::from_micros(each_us)).await;
            if self.run.has_ended() {
                return;
            }
            if stretch + 1 < stretches {
                self.fence_one(lease, owner);
            }
        }
    }

    fn fence_one(&mut self, lease: LeaseName, owner: Epoch) {
        let run = self.run.clone();
        let others: Vec<(usize, Epoch)> = {
            let board = run.board.borrow();
            let of_lease = board.offers.iter().enumerate().flat_map(|(client, offers)| {
                offers.iter().filter(|offer| offer.lease == lease).map(move |offer| (client, offer.grant))
            });
            of_lease.filter(|(_, grant)| *grant != owner).collect()
        };
        if others.is_empty() {
            return;
        }
        let (client, grant) = others[self.random.index(others.len())];
        if !run.is_broken(NO_FENCE) {
            self.memory.regions.fence_grant(self.region, grant).expect("a page of memory");
        }
        run.history.borrow_mut().fenced(lease, grant);
        run.world.note("grant {} of client {} is fenced", &[grant.0, client as u64]);
        run.board.borrow_mut().withdraw(|offer| offer.grant == grant && offer.lease == lease);
        if self.random.chance(600) {
            self.grant_another(lease, client);
        }
    }

    /// Fences the whole lease. Returns what the region held at that moment.
    fn end(&self, lease: LeaseName, owner: Epoch) -> Vec<u64> {
        // Nothing can happen between the read and the fence: virtual time does not advance.
        let words = self.memory.look(self.region, owner, USED_WORDS);
        self.memory.regions.fence(self.region);
        self.run.history.borrow_mut().ended(lease, words.clone());
        self.run.world.note("lease {} is fenced", &[lease.0]);
        self.run.board.borrow_mut().withdraw(|offer| offer.lease == lease);
        words
    }

    async fn scrub(&self) -> bool {
        for _ in 0..SCRUB_TRIES {
            match self.memory.regions.scrub(self.region).expect("a page of memory") {
                Scrubbed::Clean => return true,
                Scrubbed::StillHeld => self.run.world.sleep(SCRUB_RETRY).await,
            }
        }
        self.run.complain(format!(
            "region {} of node {} stays in use after its fence",
            self.region, self.node.index
        ));
        false
    }
}

/// Any key will do, as long as each grant has a different one.
fn key_of(epoch: Epoch) -> AccessKey {
    let mut bytes = [0x33; AccessKey::BYTES];
    bytes[..8].copy_from_slice(&epoch.0.to_le_bytes());
    AccessKey::from_bytes(bytes)
}

const _: () = assert!(USED_WORDS * 8 <= REGION_BYTES, "the layout fits a region");
