//! The node itself: its lease table, its memory, and the thread that keeps both in order.
//!
//! N1. The table says who may; the regions make it so. A lease is opened in the regions only after the table
//!     has granted it, and fenced there before anyone is told that it ended.
//! N2. A region comes back to the table as free only after its memory was scrubbed or replaced.
//! N3. Leases end on time: the keeper wakes when the first one is due.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::{
    AccessError, AccessKind, Cut, Host, HostIdentity, LentMemory, Mapping, RegionSet, Scrubbed, SharedRegion,
};
use farpool_lease::{
    LeaseClass, LeaseRefusal, Lending, Millis, RegionCounts, RegionStatus, RegionTable, Released,
};
use farpool_wire::control::{Lease, LeaseRef, NodeAddress, RegionState};
use farpool_wire::{AccessKey, CALL_ECHO, CALL_PING, Epoch, NodeId, OwnerId, Refusal};
use parking_lot::Mutex;

use crate::lender::Lender;

/// Longest sleep of the keeper, and how often it looks whether held memory was let go.
const KEEPER_TICK: Duration = Duration::from_millis(200);

/// State shared by the data plane, the control plane and the keeper.
pub(crate) struct Core {
    node: NodeId,
    started: Instant,
    address: OnceLock<NodeAddress>,
    table: Mutex<RegionTable>,
    regions: RegionSet,
    /// Wakes the keeper: a region was fenced.
    fenced: Sender<Lending>,
    rejected: AtomicU64,
}

/// A region on its way back to the free ones.
struct Returning {
    lending: Lending,
    /// The table knows that it is being scrubbed.
    scrubbing: bool,
}

/// The keeper's thread; ends when dropped.
pub(crate) struct Keeper {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Core {
    /// A core and its keeper.
    pub(crate) fn start(
        node: NodeId,
        incarnation: u32,
        ttl: Millis,
        regions: RegionSet,
    ) -> std::io::Result<(Arc<Self>, Keeper)> {
        let (fenced, inbox) = std::sync::mpsc::channel();
        let core = Arc::new(Core {
            node,
            started: Instant::now(),
            address: OnceLock::new(),
            table: Mutex::new(RegionTable::new(incarnation, regions.regions(), ttl)),
            regions,
            fenced,
            rejected: AtomicU64::new(0),
        });
        let (stop, stopped) = std::sync::mpsc::channel();
        let kept = core.clone();
        let thread = std::thread::Builder::new()
            .name("node-keeper".into())
            .spawn(move || kept.keep(&inbox, &stopped))?;
        Ok((core, Keeper { stop: Some(stop), thread: Some(thread) }))
    }

    /// Sets where the node is reached; once, before it registers.
    pub(crate) fn set_address(&self, address: NodeAddress) {
        self.address.set(address).expect("the address is set once");
    }

    fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    /// The keeper's loop: ends leases whose time is over, and makes fenced regions free again.
    fn keep(&self, inbox: &Receiver<Lending>, stopped: &Receiver<()>) {
        let mut pending: Vec<Returning> = Vec::new();
        let mut more = false;
        loop {
            let due = self.table.lock().next_deadline();
            let until_due = due.map_or(KEEPER_TICK, |due| Duration::from_millis(due.since(self.now()).0));
            let sleep = if more { Duration::ZERO } else { until_due.min(KEEPER_TICK) };
            match inbox.recv_timeout(sleep) {
                Ok(lending) => pending.push(Returning { lending, scrubbing: false }),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if !matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
                return;
            }
            let ended = self.table.lock().expire(self.now());
            for lending in ended {
                tracing::info!(region = lending.region, epoch = %lending.epoch, "lease ended without renewal");
                self.regions.fence(lending.region);
                pending.push(Returning { lending, scrubbing: false });
            }
            // One at a time, so that leases end on time meanwhile.
            let next = pending.iter().position(|returning| !self.regions.is_held(returning.lending.region));
            more = next.is_some();
            if let Some(next) = next {
                let mut returning = pending.swap_remove(next);
                if !self.make_free(&mut returning) {
                    pending.push(returning);
                    more = false;
                }
            }
        }
    }

    /// Scrubs a fenced region; false to try again later.
    fn make_free(&self, returning: &mut Returning) -> bool {
        let lending = returning.lending;
        if !returning.scrubbing && !self.table.lock().begin_scrub(lending) {
            return true; // not this lending's turn: somebody else has seen to it
        }
        returning.scrubbing = true;
        match self.regions.scrub(lending.region) {
            Ok(Scrubbed::Clean) => {
                let _in_turn = self.table.lock().scrubbed(lending);
            }
            Ok(Scrubbed::StillHeld) => return false,
            Err(error) => {
                tracing::error!(region = lending.region, %error, "no memory to replace a region's; trying again");
                return false;
            }
        }
        true
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the keeper panicked");
        }
    }
}

impl Host for Core {
    fn identity(&self) -> HostIdentity {
        HostIdentity {
            node: self.node,
            region_bytes: self.regions.region_bytes(),
            regions: self.regions.regions(),
        }
    }

    fn attach(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.table.lock().check(self.now(), Lending { region, epoch }, key)?;
        self.regions.check(region, epoch, key)
    }

    fn with_region(
        &self,
        region: u32,
        epoch: Epoch,
        kind: AccessKind,
        access: &mut dyn FnMut(&Mapping) -> Result<(), AccessError>,
    ) -> Result<(), Refusal> {
        self.regions.with_region(region, epoch, kind, access)
    }

    fn share(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<SharedRegion, Refusal> {
        self.table.lock().check(self.now(), Lending { region, epoch }, key)?;
        self.regions.share(region, epoch, key)
    }

    fn lend(
        &self,
        region: u32,
        epoch: Epoch,
        key: &AccessKey,
        cut: Arc<dyn Cut>,
    ) -> Result<LentMemory, Refusal> {
        self.table.lock().check(self.now(), Lending { region, epoch }, key)?;
        self.regions.lend(region, epoch, key, cut)
    }

    fn call(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), Refusal> {
        if request.starts_with(CALL_ECHO) {
            answer.extend_from_slice(request);
            return Ok(());
        }
        if request == CALL_PING { Ok(()) } else { Err(Refusal::UnknownCall) }
    }

    fn rejected(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed); // a statistic: pairs with nothing
    }
}

impl Lender for Core {
    fn address(&self) -> NodeAddress {
        self.address.get().cloned().unwrap_or_default()
    }

    fn region_bytes(&self) -> u64 {
        self.regions.region_bytes()
    }

    fn regions_total(&self) -> u32 {
        self.regions.regions()
    }

    fn lease_ttl_ms(&self) -> u64 {
        self.table.lock().ttl().0
    }

    fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease> {
        let mut table = self.table.lock();
        let ttl_ms = table.ttl().0;
        let grants = table.grant(self.now(), owner, class, count, &mut random_key);
        for grant in &grants {
            self.regions.open(grant.lending.region, grant.lending.epoch, grant.key);
        }
        drop(table);
        let address = self.address();
        let lease = |grant: &farpool_lease::Grant| Lease {
            address: Some(address.clone()),
            region: grant.lending.region,
            epoch: grant.lending.epoch.0,
            key: grant.key.as_bytes().to_vec(),
            ttl_ms,
            class: class.to_wire(),
        };
        grants.iter().map(lease).collect()
    }

    fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
        let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
        let lending = Lending { region: lease.region, epoch: Epoch(lease.epoch) };
        self.table.lock().renew(self.now(), owner, lending, &key).map(drop)
    }

    fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
        let key = lease.access_key().ok_or(LeaseRefusal::WrongKey)?;
        let lending = Lending { region: lease.region, epoch: Epoch(lease.epoch) };
        let released = self.table.lock().release(owner, lending, &key)?;
        if released == Released::Fence {
            self.regions.fence(lending.region);
            let _ = self.fenced.send(lending); // fails only while the node is ending
        }
        Ok(())
    }

    fn states(&self) -> Vec<RegionState> {
        let now = self.now();
        let state = |(region, status): (u32, RegionStatus)| match status {
            RegionStatus::Free => None,
            RegionStatus::Held { epoch, owner, class, until } => Some(RegionState {
                region,
                owner: owner.0,
                epoch: epoch.0,
                class: class.to_wire(),
                remaining_ms: until.since(now).0,
                held: true,
            }),
            RegionStatus::Fenced { epoch } | RegionStatus::Scrubbing { epoch } => {
                Some(RegionState { region, epoch: epoch.0, held: false, ..RegionState::default() })
            }
        };
        (0u32..).zip(self.table.lock().statuses()).filter_map(state).collect()
    }

    fn counts(&self) -> RegionCounts {
        self.table.lock().counts()
    }

    fn frames_rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }
}

fn random_key() -> AccessKey {
    let mut bytes = [0; AccessKey::BYTES];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    AccessKey::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: OwnerId = OwnerId(5);
    const REGION_BYTES: u64 = 64 << 10;

    fn core(ttl_ms: u64) -> (Arc<Core>, Keeper) {
        let regions = RegionSet::create(2, REGION_BYTES, false, |_| {}).unwrap();
        Core::start(NodeId(1), 1, Millis(ttl_ms), regions).unwrap()
    }

    fn reference(lease: &Lease) -> LeaseRef {
        LeaseRef { region: lease.region, epoch: lease.epoch, key: lease.key.clone() }
    }

    fn wait_until(mut condition: impl FnMut() -> bool) {
        let started = Instant::now();
        while !condition() {
            assert!(started.elapsed() < Duration::from_secs(20), "waited too long");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_lease_that_is_not_renewed_is_fenced_and_its_region_lent_again_clean() {
        let (core, _keeper) = core(100);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        let epoch = Epoch(lease.epoch);
        core.with_region(lease.region, epoch, AccessKind::Write, &mut |memory| memory.write(0, &[1; 64]))
            .unwrap();
        wait_until(|| core.counts().free == 2);
        let access =
            core.with_region(lease.region, epoch, AccessKind::Write, &mut |memory| memory.write(0, &[2; 64]));
        assert_eq!(access, Err(Refusal::StaleEpoch));
        assert_eq!(core.renew(OWNER, &reference(&lease)), Err(LeaseRefusal::Ended));
        for lease in core.grant(OWNER, LeaseClass::Revocable, 2) {
            let mut bytes = [9; 64];
            let look = &mut |memory: &Mapping| memory.read(0, &mut bytes);
            core.with_region(lease.region, Epoch(lease.epoch), AccessKind::Read, look).unwrap();
            assert_eq!(bytes, [0; 64]);
        }
    }

    #[test]
    fn a_released_region_is_not_lent_while_a_process_still_maps_it() {
        let (core, _keeper) = core(60_000);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        let key = AccessKey::from_slice(&lease.key).unwrap();
        let shared = core.share(lease.region, Epoch(lease.epoch), &key).unwrap();
        core.release(OWNER, &reference(&lease)).unwrap();
        assert_eq!(core.counts(), RegionCounts { free: 1, held: 0, returning: 1 });
        assert_eq!(core.grant(OWNER, LeaseClass::Revocable, 2).len(), 1);
        drop(shared);
        wait_until(|| core.counts().free == 1);
    }

    #[test]
    fn keys_are_fresh_with_every_lease() {
        let (core, _keeper) = core(60_000);
        let leases = core.grant(OWNER, LeaseClass::Revocable, 2);
        assert_ne!(leases[0].key, leases[1].key);
        assert!(leases.iter().all(|lease| lease.key != vec![0; 16]));
    }
}
