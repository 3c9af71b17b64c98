//! The node itself: it keeps leases and memory in step, and answers the data plane and the control plane.
//!
//! The rules are in [`NodeCore`]; this module connects them to the clock, the random source and the memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use farpool_fabric::{Host, RegionSet};
use farpool_lease::{Grant, GrantRefusal, LeaseClass, LeaseRefusal, Lending, Millis, RegionCounts, Term};
use farpool_wire::control::{Lease, LeaseRef, NodeAddress, RegionState, ResizeResponse, RevokeResponse};
use farpool_wire::{AccessKey, CALL_ECHO, CALL_PING, Epoch, GrantMode, NodeId, OwnerId, Refusal};
use rustix_futex_sync::Mutex;
use tokio::sync::{Notify, watch};

use crate::answers::{lease_message, resize};
use crate::keeper::Keeper;
use crate::lender::{FenceError, Lender};
use crate::lending::NodeCore;
use crate::pressure::{LimitChange, Measured, Pressure};

/// State shared by the data plane, the control plane and the keeper.
pub(crate) struct Core {
    node: NodeId,
    started: Instant,
    address: OnceLock<NodeAddress>,
    pub(crate) leases: Mutex<NodeCore>,
    pub(crate) regions: RegionSet,
    /// Wakes the keeper when a region was fenced or the node was resized. Its capacity is one message: more
    /// would say the same.
    wake: SyncSender<()>,
    /// Held from the end of a lease in the table until the lease is fenced: a second request to end it is
    /// answered only after that.
    fencing: Mutex<()>,
    /// Tells the registration that the number of free or of withdrawn regions has changed.
    counts_changed: Notify,
    /// Tells owners that wait for it that leases are taken back, or, with `true`, that the node ends.
    revocations: watch::Sender<bool>,
    rejected: AtomicU64,
}

impl Core {
    /// A core and its keeper, which leaves `reserve_bytes` of memory to the machine. With 0, it does not
    /// watch the pressure on memory.
    pub(crate) fn start(
        node: NodeId,
        incarnation: u32,
        ttl: Millis,
        regions: RegionSet,
        reserve_bytes: u64,
    ) -> std::io::Result<(Arc<Self>, Keeper)> {
        let (core, woken) = Core::new(node, incarnation, ttl, regions);
        let keeper = Keeper::start(core.clone(), woken, reserve_bytes)?;
        Ok((core, keeper))
    }

    /// A core, and the messages that wake its keeper.
    fn new(node: NodeId, incarnation: u32, ttl: Millis, regions: RegionSet) -> (Arc<Self>, Receiver<()>) {
        let (wake, inbox) = sync_channel(1);
        let core = Arc::new(Core {
            node,
            started: Instant::now(),
            address: OnceLock::new(),
            leases: Mutex::new(NodeCore::new(incarnation, regions.regions(), ttl)),
            regions,
            wake,
            fencing: Mutex::new(()),
            counts_changed: Notify::new(),
            revocations: watch::Sender::new(false),
            rejected: AtomicU64::new(0),
        });
        (core, inbox)
    }

    /// Sets the node's address; once, before the node registers.
    pub(crate) fn set_address(&self, address: NodeAddress) {
        self.address.set(address).expect("the address is set once");
    }

    pub(crate) fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    /// The number of free or of withdrawn regions has changed: the registration tells the broker soon.
    pub(crate) fn tell_broker(&self) {
        self.counts_changed.notify_one();
    }

    /// Gives memory back that the machine needs according to a measurement, or lends more again.
    pub(crate) fn apply_pressure(&self, pressure: &mut Pressure, measured: Measured) {
        let (now, region_bytes) = (self.now(), self.regions.region_bytes());
        let change = pressure.apply(&mut self.leases.lock(), now, measured, region_bytes);
        let Some(LimitChange { before, after, taken_back, .. }) = change else { return };
        let (revoked, available_mib) = (taken_back.revoked, measured.available_bytes >> 20);
        if after < before {
            self.revocations.send_modify(|_| {});
            tracing::warn!(
                regions = after,
                before,
                revoked,
                available_mib,
                "the machine needs memory: regions go back"
            );
        } else if after > before {
            tracing::info!(
                regions = after,
                before,
                available_mib,
                "the machine has memory again: lending more"
            );
        }
    }

    /// Answers the owners that wait for revocations: the node ends, and waits for requests in progress.
    pub(crate) fn end_waits(&self) {
        self.revocations.send_replace(true);
    }

    fn wake_keeper(&self) {
        let _ = self.wake.try_send(()); // full: the keeper wakes up anyway; closed: the node is ending
    }

    /// Ends leases in the table and fences them. It does not hold the lock of the leases while it fences,
    /// since a fence may have to wait.
    pub(crate) fn end<E>(
        &self,
        in_table: impl FnOnce(&mut NodeCore) -> Result<Vec<Lending>, E>,
    ) -> Result<Vec<Lending>, E> {
        let _one_at_a_time = self.fencing.lock();
        let ended = in_table(&mut self.leases.lock())?;
        for lease in &ended {
            self.regions.fence(lease.region);
            self.leases.lock().fenced(*lease);
        }
        Ok(ended)
    }
}

impl Host for Core {
    fn node(&self) -> NodeId {
        self.node
    }

    fn regions(&self) -> &RegionSet {
        &self.regions
    }

    fn admit(&self, region: u32, epoch: Epoch, key: &AccessKey) -> Result<(), Refusal> {
        self.leases.lock().check(self.now(), Lending { region, epoch }, key)
    }

    fn owner(&self, region: u32, epoch: Epoch) -> Option<OwnerId> {
        self.leases.lock().owner(Lending { region, epoch })
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

    fn grant(&self, owner: OwnerId, class: LeaseClass, count: u32) -> Vec<Lease> {
        let mut leases = self.leases.lock();
        let ttl = leases.ttl();
        let grants = leases.grant(self.now(), owner, class, count, &mut random_key);
        // Under the lock: a lease that ends at once must not be fenced before it is open.
        for grant in &grants {
            self.regions.open(grant.lending.region, grant.lending.epoch, grant.key);
        }
        drop(leases);
        grants.iter().map(|grant| lease_message(grant, class, ttl, self.address())).collect()
    }

    fn add_grant(&self, owner: OwnerId, lease: &LeaseRef, mode: GrantMode) -> Result<Grant, GrantRefusal> {
        let mut leases = self.leases.lock();
        let grant = leases.add_grant(self.now(), owner, lease, mode, random_key())?;
        // Under the lock: a grant that ends at once must not be fenced before it is open.
        self.regions.open_grant(grant.lending.region, grant.lending.epoch, grant.key, mode);
        Ok(grant)
    }

    fn fence_grant(&self, owner: OwnerId, lease: &LeaseRef, grant: Epoch) -> Result<(), FenceError> {
        let ended = {
            let mut leases = self.leases.lock();
            let ended = leases.fence_grant(self.now(), owner, lease, grant)?;
            // Under the lock: the table may give the grant's place to another grant at once.
            self.regions.close_grant(ended.region, ended.epoch);
            ended
        };
        self.regions.fence_grant(ended.region, ended.epoch).map_err(FenceError::NoMemory)
    }

    fn renew(&self, owner: OwnerId, lease: &LeaseRef) -> Result<Term, LeaseRefusal> {
        self.leases.lock().renew(self.now(), owner, lease)
    }

    fn revoke(&self, owner: OwnerId, count: u32, grace: Millis) -> RevokeResponse {
        let answer = self.leases.lock().revoke(self.now(), owner, count, grace);
        self.revocations.send_modify(|_| {});
        answer
    }

    fn last_revocation(&self, owner: OwnerId) -> u64 {
        self.leases.lock().last_revocation(owner)
    }

    fn revocations(&self) -> watch::Receiver<bool> {
        self.revocations.subscribe()
    }

    fn release(&self, owner: OwnerId, lease: &LeaseRef) -> Result<(), LeaseRefusal> {
        let ended = self.end(|leases| Ok(leases.release(owner, lease)?.into_iter().collect()))?;
        if !ended.is_empty() {
            self.wake_keeper();
        }
        Ok(())
    }

    fn resize(&self, regions: u32, grace: Millis) -> ResizeResponse {
        let answer = resize(&mut self.leases.lock(), self.now(), regions, grace);
        self.revocations.send_modify(|_| {});
        self.wake_keeper();
        answer
    }

    fn regions_target(&self) -> u32 {
        self.leases.lock().target()
    }

    fn expired_revocations(&self) -> u64 {
        self.leases.lock().expired_revocations()
    }

    fn states(&self) -> Vec<RegionState> {
        self.leases.lock().states(self.now())
    }

    fn counts(&self) -> (RegionCounts, u64) {
        let leases = self.leases.lock();
        (leases.counts(), leases.table_sum(self.now()))
    }

    fn counts_changed(&self) -> impl Future<Output = ()> + Send {
        self.counts_changed.notified()
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
pub(crate) mod tests {
    use std::convert::Infallible;
    use std::sync::mpsc::{Sender, TryRecvError, channel};
    use std::time::Duration;

    use farpool_fabric::{AccessKind, CutOff, HostIdentity, Locking, Mapping};

    use super::*;
    use crate::logged::logged;

    const OWNER: OwnerId = OwnerId(5);
    pub(crate) const REGION_BYTES: u64 = 64 << 10;

    fn regions() -> RegionSet {
        RegionSet::create(2, REGION_BYTES, Locking::None, |_| {}).unwrap()
    }

    fn core(ttl_ms: u64) -> (Arc<Core>, Keeper) {
        Core::start(NodeId(1), 1, Millis(ttl_ms), regions(), 0).unwrap()
    }

    /// A core with two regions whose leases are not ended on time.
    pub(crate) fn core_without_keeper(ttl_ms: u64) -> (Arc<Core>, Receiver<()>) {
        Core::new(NodeId(1), 1, Millis(ttl_ms), regions())
    }

    pub(crate) fn reference(lease: &Lease) -> LeaseRef {
        LeaseRef { region: lease.region, epoch: lease.epoch, key: lease.key.clone() }
    }

    pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
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
        wait_until(|| core.counts().0.free == 2);
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

    /// A card that is cut off at once.
    struct Obedient;

    impl CutOff for Obedient {
        fn cut(&self) {}
    }

    #[test]
    fn a_released_region_is_not_lent_while_a_card_still_has_its_memory() {
        let (core, _keeper) = core(60_000);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        let key = AccessKey::from_slice(&lease.key).unwrap();
        let lent = core.lend(lease.region, Epoch(lease.epoch), &key, Arc::new(Obedient)).unwrap();
        core.release(OWNER, &reference(&lease)).unwrap();
        assert_eq!(core.counts().0, RegionCounts { free: 1, returning: 1, ..RegionCounts::default() });
        assert_eq!(core.grant(OWNER, LeaseClass::Revocable, 2).len(), 1);
        drop(lent);
        wait_until(|| core.counts().0.free == 1);
    }

    #[test]
    fn a_client_s_grant_is_fenced_alone_and_the_lease_goes_on() {
        let (core, _keeper) = core(60_000);
        let lease = core.grant(OWNER, LeaseClass::Pinned, 1).remove(0);
        let client = core.add_grant(OWNER, &reference(&lease), GrantMode::ReadWrite).unwrap();
        let Lending { region, epoch } = client.lending;
        core.attach(region, epoch, &client.key).unwrap();
        let write =
            |epoch| core.with_region(region, epoch, AccessKind::Write, &mut |memory| memory.write(0, &[1]));
        write(epoch).unwrap();
        core.fence_grant(OWNER, &reference(&lease), epoch).unwrap();
        assert_eq!(write(epoch), Err(Refusal::StaleEpoch));
        assert_eq!(core.attach(region, epoch, &client.key), Err(Refusal::StaleEpoch));
        assert_eq!(write(Epoch(lease.epoch)), Ok(()));
        core.fence_grant(OWNER, &reference(&lease), epoch).unwrap();
        let own = core.fence_grant(OWNER, &reference(&lease), Epoch(lease.epoch));
        assert!(matches!(own, Err(FenceError::Refused(_))), "{own:?}");
        core.release(OWNER, &reference(&lease)).unwrap();
        wait_until(|| core.counts().0.free == 2);
    }

    /// Reports that a fence has reached it, and holds the fence up until told to go on.
    struct HeldUp {
        reached: Sender<()>,
        go_on: Mutex<Receiver<()>>,
    }

    impl CutOff for HeldUp {
        fn cut(&self) {
            self.reached.send(()).unwrap();
            self.go_on.lock().recv().unwrap();
        }
    }

    #[test]
    fn the_place_of_a_fenced_grant_is_reused_while_its_fence_waits_for_another() {
        let (core, _keeper) = core(60_000);
        let leases: Vec<_> = core.grant(OWNER, LeaseClass::Pinned, 2).iter().map(reference).collect();
        let add = |lease: &LeaseRef| core.add_grant(OWNER, lease, GrantMode::ReadWrite);
        let slow = add(&leases[0]).unwrap();
        let full = add(&leases[1]).unwrap();
        while add(&leases[1]).is_ok() {}
        let ((reached, has_reached), (go_on, goes_on)) = (channel(), channel());
        let cut = Arc::new(HeldUp { reached, go_on: Mutex::new(goes_on) });
        let lent = core.lend(slow.lending.region, slow.lending.epoch, &slow.key, cut).unwrap();
        std::thread::scope(|scope| {
            let go_on = go_on; // dropped if an assertion fails, so that no thread waits for it
            scope.spawn(|| core.fence_grant(OWNER, &leases[0], slow.lending.epoch).unwrap());
            has_reached.recv_timeout(Duration::from_secs(20)).unwrap();
            scope.spawn(|| core.fence_grant(OWNER, &leases[1], full.lending.epoch).unwrap());
            let grants = || core.states()[1].grants as usize;
            wait_until(|| grants() < farpool_wire::MAX_GRANTS_PER_REGION);
            add(&leases[1]).unwrap();
            assert_eq!(add(&leases[1]).unwrap_err(), GrantRefusal::Full);
            go_on.send(()).unwrap();
        });
        drop(lent);
    }

    #[test]
    fn a_lease_that_was_taken_back_ends_though_it_is_renewed() {
        let (core, _keeper) = core(300);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        assert_eq!(core.revoke(OWNER, 1, Millis(0)).revoked, 1);
        wait_until(|| core.renew(OWNER, &reference(&lease)).is_err());
        wait_until(|| core.counts().0.free == 2);
    }

    #[test]
    fn a_lease_tells_its_owner_where_the_region_is_and_how_long_it_lasts() {
        let (core, _keeper) = core(60_000);
        let address = NodeAddress { node: 1, incarnation: 1, tcp: "10.0.0.2:7".into(), ..Default::default() };
        core.set_address(address.clone());
        let lease = core.grant(OWNER, LeaseClass::Pinned, 1).remove(0);
        assert_eq!((lease.ttl_ms, LeaseClass::from_wire(lease.class)), (60_000, Some(LeaseClass::Pinned)));
        assert_eq!((lease.address, core.address()), (Some(address.clone()), address));
    }

    #[test]
    fn clients_and_the_broker_are_told_the_node_s_id_and_the_size_and_number_of_its_regions() {
        let (core, _keeper) = core(60_000);
        let told = HostIdentity { node: NodeId(1), region_bytes: REGION_BYTES, regions: 2 };
        assert_eq!(core.identity(), told);
        assert_eq!((core.region_bytes(), core.regions_total()), (REGION_BYTES, 2));
    }

    #[test]
    fn all_grants_of_a_lease_count_as_its_owner_s_until_it_ends() {
        let (core, _keeper) = core(60_000);
        let lease = core.grant(OWNER, LeaseClass::Pinned, 1).remove(0);
        let client = core.add_grant(OWNER, &reference(&lease), GrantMode::ReadOnly).unwrap().lending;
        let owners = || [Epoch(lease.epoch), client.epoch].map(|epoch| core.owner(lease.region, epoch));
        assert_eq!(owners(), [Some(OWNER); 2]);
        core.release(OWNER, &reference(&lease)).unwrap();
        assert_eq!(owners(), [None; 2]);
    }

    #[test]
    fn a_node_answers_a_ping_with_nothing_and_an_echo_with_the_request() {
        let (core, _keeper) = core(60_000);
        let call = |request: &[u8]| {
            let mut answer = Vec::new();
            core.call(request, &mut answer).map(|()| answer)
        };
        assert_eq!(call(CALL_PING), Ok(Vec::new()));
        let echo = [CALL_ECHO, b" and more"].concat();
        assert_eq!(call(&echo), Ok(echo.clone()));
        assert_eq!(call(b"pong"), Err(Refusal::UnknownCall));
    }

    #[test]
    fn each_connection_that_was_cut_off_for_malformed_input_is_counted() {
        let (core, _keeper) = core(60_000);
        assert_eq!(core.frames_rejected(), 0);
        for count in 1..=2 {
            core.rejected();
            assert_eq!(core.frames_rejected(), count);
        }
    }

    #[test]
    fn a_lease_whose_time_has_passed_admits_no_client_though_it_was_not_fenced_yet() {
        let (core, _fenced) = core_without_keeper(1);
        let lease = core.grant(OWNER, LeaseClass::Pinned, 1).remove(0);
        let (epoch, key) = (Epoch(lease.epoch), AccessKey::from_slice(&lease.key).unwrap());
        wait_until(|| core.now() > Millis(1));
        assert_eq!(core.regions.check(lease.region, epoch, &key), Ok(()), "it was not fenced");
        assert_eq!(core.attach(lease.region, epoch, &key), Err(Refusal::StaleEpoch));
    }

    #[test]
    fn a_release_wakes_the_keeper_once() {
        let (core, fenced) = core_without_keeper(60_000);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        core.release(OWNER, &reference(&lease)).unwrap();
        assert_eq!(fenced.try_recv(), Ok(()));
        core.release(OWNER, &reference(&lease)).unwrap();
        assert_eq!(fenced.try_recv(), Err(TryRecvError::Empty), "there is nothing to make free");
    }

    #[test]
    fn leases_that_the_machine_s_need_takes_back_are_announced_to_owners_that_wait() {
        let (core, _woken) = core_without_keeper(60_000);
        core.grant(OWNER, LeaseClass::Revocable, 2);
        let told = core.revocations();
        let measured = Measured { available_bytes: 0, stalled: Duration::ZERO };
        core.apply_pressure(&mut Pressure::new(REGION_BYTES), measured);
        assert!(told.has_changed().unwrap());
        let revoked = core.states().iter().filter(|state| state.revoked).count();
        assert_eq!((revoked, core.last_revocation(OWNER), core.regions_target()), (1, 1, 2));
    }

    /// Applies a measurement that allows one region more: 5 MiB are available, and nothing is reserved.
    fn take_memory_again(core: &Core) {
        let measured = Measured { available_bytes: 5 << 20, stalled: Duration::ZERO };
        core.apply_pressure(&mut Pressure::new(0), measured);
    }

    #[test]
    fn an_operator_reads_that_the_machine_has_memory_again() {
        let (core, _woken) = core_without_keeper(60_000);
        core.leases.lock().allow(Millis(0), 1, Millis(0));
        let read = logged(|| take_memory_again(&core));
        assert_eq!(read.len(), 1, "{read:?}");
        assert!(read[0].contains("regions=2 before=1 available_mib=5 "), "{read:?}");
        assert_eq!(core.leases.lock().limit(), 2);
    }

    #[test]
    fn pressure_that_leaves_the_operator_s_limit_in_force_is_announced_to_nobody() {
        let (core, _woken) = core_without_keeper(60_000);
        core.leases.lock().allow(Millis(0), 1, Millis(0));
        core.resize(1, Millis(0));
        let told = core.revocations();
        let read = logged(|| take_memory_again(&core));
        let leases = core.leases.lock();
        assert_eq!((leases.allowed(), leases.limit()), (2, 1));
        assert!(read.is_empty() && !told.has_changed().unwrap(), "{read:?}");
    }

    #[test]
    fn owners_that_wait_for_revocations_are_told_that_the_node_ends() {
        let (core, _woken) = core_without_keeper(60_000);
        let mut told = core.revocations();
        assert!(!*told.borrow_and_update());
        core.end_waits();
        assert!(told.has_changed().unwrap() && *told.borrow());
        assert!(*core.revocations().borrow(), "so is an owner that asks later");
    }

    #[test]
    fn revocations_are_numbered_and_those_that_expire_before_the_lease_is_given_back_are_counted() {
        let (core, _woken) = core_without_keeper(60_000);
        let leases = core.grant(OWNER, LeaseClass::Revocable, 2);
        for number in 0..3 {
            assert_eq!((core.last_revocation(OWNER), core.expired_revocations()), (number, 0));
            core.revoke(OWNER, 1, Millis(0));
        }
        let Ok(ended) = core.end(|table| Ok::<_, Infallible>(table.expire(Millis(u64::MAX))));
        assert_eq!(ended.len(), leases.len());
        assert_eq!((core.last_revocation(OWNER), core.expired_revocations()), (0, 2));
    }

    #[tokio::test]
    async fn the_registration_is_told_when_a_released_region_is_free() {
        let (core, _keeper) = core(60_000);
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        core.release(OWNER, &reference(&lease)).unwrap();
        tokio::time::timeout(Duration::from_secs(20), core.counts_changed())
            .await
            .expect("a region becomes free");
        assert_eq!(core.counts().0.free, 2);
    }

    #[test]
    fn keys_are_fresh_with_every_lease() {
        let (core, _keeper) = core(60_000);
        let leases = core.grant(OWNER, LeaseClass::Revocable, 2);
        assert_ne!(leases[0].key, leases[1].key);
        assert!(leases.iter().all(|lease| lease.key != vec![0; 16]));
    }
}
