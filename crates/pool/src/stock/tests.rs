mod growing;

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::Context;

use farpool_keep::MemoryJournal;
use farpool_lease::LeaseClass;
use farpool_wire::control::RenewOutcome;
use futures_util::FutureExt;

use super::*;
use crate::giving_up::SILENCE;
use crate::growth::{FULL_FOR, UNREACHABLE_FOR};
use crate::overflow::scripted::Scripted;

const REGION_BYTES: u64 = 4 * EXTENT_BYTES;
const TTL: u64 = 10_000;
/// Until when a lease that was asked for at time 0 may be used.
const USABLE_UNTIL: u64 = 8_000;

struct HandClock(AtomicU64);

impl Clock for HandClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed) * 1_000_000
    }
}

fn config(
    clock: &Arc<HandClock>,
    limit_regions: Option<u64>,
    journal: Option<Arc<dyn Journal>>,
) -> StockConfig {
    let reach = |address: &NodeAddress| Peer {
        node: NodeId(address.node),
        tcp: address.tcp.parse().ok(),
        verbs: None,
        shm_socket: None,
    };
    StockConfig {
        owner: OwnerId(7),
        region_bytes: REGION_BYTES,
        limit_regions,
        clock: clock.clone(),
        reach: Box::new(reach),
        journal,
    }
}

/// A stock, and the clock that it goes by.
struct Rig {
    clock: Arc<HandClock>,
    stock: Stock,
}

impl Rig {
    fn new(limit_regions: Option<u64>, journal: Option<Arc<dyn Journal>>) -> Rig {
        let clock = Arc::new(HandClock(AtomicU64::new(0)));
        let stock = Stock::new(config(&clock, limit_regions, journal));
        Rig { clock, stock }
    }

    /// A stock with overflow.
    fn overflowing(limit_regions: Option<u64>, giver: Arc<Scripted>) -> Rig {
        let clock = Arc::new(HandClock(AtomicU64::new(0)));
        let stock = Stock::new(config(&clock, limit_regions, None)).with_overflow(giver);
        Rig { clock, stock }
    }

    /// An attempt to grow, with this outcome of the request to the broker. Returns whether a task that
    /// accepts an extent anywhere may get one in the directory.
    fn attempts(&self, of_broker: GrowthOutcome) -> bool {
        self.stock.want_overflow(&Where::Anywhere);
        self.stock.overflow_after(of_broker).now_or_never().expect("the giver answers at once");
        self.stock.may_overflow(&Where::Anywhere)
    }

    fn take(&self, within: &Where) -> Option<Extent> {
        self.stock.take_now(0, within)
    }

    fn at(&self, ms: u64) -> &Stock {
        self.clock.0.store(ms, Ordering::Relaxed);
        &self.stock
    }

    fn lends(&self, leases: &[Lease]) -> GrowthOutcome {
        let answer = AcquireResponse {
            leases: leases.to_vec(),
            region_bytes: REGION_BYTES,
            ..AcquireResponse::default()
        };
        let (outcome, unusable) = self.stock.acquisition_answered(self.stock.now(), Some(answer));
        assert!(unusable.is_empty());
        outcome
    }

    /// Renews all leases that are due, with this answer for each.
    fn renews(&self, outcome: RenewOutcome) {
        let now = self.stock.now();
        for renewal in self.stock.with_holder(|holder| holder.renewals(now, 100)) {
            let outcomes =
                renewal.request(self.stock.owner()).leases.iter().map(|_| outcome.clone()).collect();
            self.stock.renewal_answered(&renewal, &RenewResponse { outcomes });
        }
    }
}

fn lease(node: u64, index: u32, counter: u32) -> Lease {
    let address = NodeAddress { node, tcp: format!("127.0.0.1:{node}"), ..NodeAddress::default() };
    Lease {
        address: Some(address),
        region: index,
        epoch: Epoch::new(1, counter).0,
        key: vec![1; 16],
        ttl_ms: TTL,
        ..Lease::default()
    }
}

fn renewed(revoked: bool) -> RenewOutcome {
    RenewOutcome { renewed: true, remaining_ms: TTL, revoked, ..RenewOutcome::default() }
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// What a task gets that takes an extent, once what `meanwhile` does has happened.
fn taking(stock: &Stock, within: &Where, meanwhile: impl FnOnce()) -> Poll<Result<Extent, NoSpace>> {
    let mut taking = pin!(stock.take_extent_within(0, within));
    let Poll::Pending = poll(&mut taking) else { panic!("it does not wait for growth") };
    meanwhile();
    poll(&mut taking)
}

fn is_refused(taken: Poll<Result<Extent, NoSpace>>) -> bool {
    matches!(taken, Poll::Ready(Err(NoSpace)))
}

#[test]
fn a_node_whose_data_plane_is_silent_is_lost_with_its_regions_and_avoided() {
    let rig = Rig::new(None, None);
    let stock = rig.at(0);
    rig.lends(&[lease(1, 0, 1), lease(1, 1, 2), lease(2, 0, 3)]);
    let kept = stock.take_now(0, &Where::On(NodeId(1))).unwrap();
    let node = kept.region().node.clone();
    let silence = SILENCE.as_millis() as u64;
    let keeper: &dyn LeaseKeeper = stock;
    rig.at(100);
    keeper.node_answered(&node);
    rig.at(100 + silence - 1);
    assert!(!keeper.node_failed(&node, Sign::Silent) && !keeper.patience_ended(&node));
    assert_eq!(stock.losses(), 0);
    rig.at(100 + silence);
    assert!(keeper.node_failed(&node, Sign::Silent) && keeper.patience_ended(&node));
    assert!(keeper.node_failed(&node, Sign::Closed), "it stays lost");
    let nodes: Vec<_> = stock.nodes().iter().map(|node| node.peer.node).collect();
    assert_eq!((stock.losses(), nodes, stock.regions().len()), (1, vec![NodeId(2)], 1));
    assert_eq!(keeper.now(), Millis(100 + silence));
    assert!(kept.region().has_ended());
    let asked = stock.with_holder(|holder| holder.acquisition(stock.now(), LeaseClass::Revocable, 1));
    assert_eq!(asked.avoid, [1]);
    assert_eq!(stock.with_holder(|holder| holder.leases().count()), 1);
    drop(kept);
    assert_eq!(stock.take_far(0, &Where::Anywhere).1, 3);
}

#[test]
fn renewals_extend_regions_take_them_back_or_end_them() {
    let rig = Rig::new(None, None);
    let stock = rig.at(0);
    rig.lends(&[lease(1, 0, 1)]);
    let region = stock.regions()[0].clone();
    assert_eq!((region.usable_until_ms(), stock.is_to_leave()), (USABLE_UNTIL, false));
    rig.at(4_000);
    rig.renews(renewed(false));
    assert_eq!(region.usable_until_ms(), 4_000 + USABLE_UNTIL);
    let heard = region.node.hearing.trouble(Millis(4_500));
    assert_eq!(heard.renewed, Millis(4_000));
    rig.at(8_000);
    rig.renews(renewed(true));
    assert!(region.is_leaving() && stock.is_to_leave());
    assert!(stock.take_now(0, &Where::Anywhere).is_none(), "nothing new is put there");

    rig.lends(&[lease(2, 0, 2)]);
    let other = stock.regions().pop().unwrap();
    rig.at(12_000);
    rig.renews(RenewOutcome::default());
    assert!(other.has_ended());
    assert_eq!((stock.losses(), stock.regions().len()), (1, 1));
}

#[test]
fn a_newer_lease_of_a_region_replaces_the_older_whose_end_then_means_nothing() {
    let rig = Rig::new(None, None);
    rig.lends(&[lease(1, 0, 1)]);
    let older = rig.stock.regions()[0].clone();
    rig.lends(&[lease(1, 0, 2), lease(1, 1, 3)]);
    let newer = rig.stock.regions()[0].clone();
    assert!(older.has_ended() && Arc::ptr_eq(&older.node, &newer.node));
    let free = || rig.stock.capacity().free_bytes / EXTENT_BYTES;
    assert_eq!((rig.stock.losses(), free()), (1, 8));
    LeaseKeeper::lease_lost(&rig.stock, older.id, older.epoch);
    assert!(!newer.has_ended() && rig.stock.regions().len() == 2 && free() == 8);
    LeaseKeeper::lease_lost(&rig.stock, newer.id, newer.epoch);
    assert!(newer.has_ended() && rig.stock.regions().len() == 1 && free() == 4);
}

#[test]
fn a_node_that_is_reached_elsewhere_than_before_is_another() {
    let rig = Rig::new(None, None);
    rig.lends(&[lease(1, 0, 1)]);
    let moved = NodeAddress { node: 1, tcp: "127.0.0.1:99".to_owned(), ..NodeAddress::default() };
    rig.lends(&[lease(1, 1, 2), Lease { address: Some(moved), ..lease(1, 2, 3) }]);
    let nodes: Vec<_> = rig.stock.regions().iter().map(|region| region.node.clone()).collect();
    assert!(Arc::ptr_eq(&nodes[0], &nodes[1]) && !Arc::ptr_eq(&nodes[0], &nodes[2]));
}

#[test]
fn a_stock_in_use_keeps_room_and_an_unused_one_gives_all_back() {
    let rig = Rig::new(None, None);
    let regions = 2 * LOW_WATER_EXTENTS as u32 / 4 + 2;
    rig.lends(&(0..regions).map(|index| lease(1, index, index + 1)).collect::<Vec<_>>());
    let used = rig.stock.take_now(0, &Where::Anywhere).unwrap();
    let linger = Duration::from_secs(1);
    assert!(rig.at(999).shrink(linger).is_empty());
    assert_eq!(rig.at(1_000).shrink(linger).len(), 1);
    assert_eq!(rig.stock.regions().len() as u32, regions - 1);
    assert!(!rig.stock.is_low());
    drop(used);
    assert_eq!(rig.at(1_001).shrink(linger).len() as u32, regions - 2, "all but the one just emptied");
    let last = rig.at(2_001).shrink(linger);
    assert!(last.len() == 1 && last[0].has_ended() && rig.stock.regions().is_empty());
    assert_eq!(rig.stock.with_holder(|holder| holder.leases().count()), 0);
    rig.lends(&[lease(2, 0, regions + 1)]);
    assert_eq!(rig.stock.nodes().len(), 2);
    rig.stock.forget_idle_nodes();
    let nodes: Vec<_> = rig.stock.nodes().iter().map(|node| node.peer.node).collect();
    assert_eq!(nodes, [NodeId(2)]);
}

#[test]
fn the_capacity_is_what_is_held_and_what_the_pool_could_still_lend_within_the_limit() {
    let capacity = |rig: &Rig| {
        let Capacity { total_bytes, free_bytes } = rig.stock.capacity();
        (total_bytes / EXTENT_BYTES, free_bytes / EXTENT_BYTES)
    };
    let rig = Rig::new(Some(3), None);
    assert_eq!(capacity(&rig), (0, 0));
    rig.stock.pool_has_free(10);
    assert_eq!(capacity(&rig), (12, 12));
    rig.lends(&[lease(1, 0, 1)]);
    rig.stock.pool_has_lent(9);
    let _used = rig.stock.take_now(0, &Where::Anywhere).unwrap();
    assert_eq!(capacity(&rig), (8, 7));
    rig.stock.pool_has_lent(9);
    assert_eq!(capacity(&rig), (4, 3));
}

#[test]
fn all_regions_are_given_back_in_one_request() {
    let rig = Rig::new(None, None);
    rig.lends(&[lease(1, 0, 1), lease(1, 1, 2)]);
    let all = rig.stock.retire_all();
    assert!(all.iter().all(|region| region.has_ended()) && rig.stock.regions().is_empty());
    let request = rig.stock.release_request(&all);
    assert_eq!(request.owner, 7);
    assert_eq!(request.leases.iter().map(|lease| lease.region).collect::<Vec<_>>(), [0, 1]);
}

/// What an earlier process had: regions 0 and 1 on node 1 and region 0 on node 2, under the numbers 0, 1 and
/// 2. The extent with number 4 is in doubt.
fn earlier() -> Arc<MemoryJournal> {
    let journal = Arc::new(MemoryJournal::default());
    let rig = Rig::new(None, Some(journal.clone()));
    assert!(rig.stock.is_kept() && rig.stock.journal().is_some());
    rig.lends(&[lease(1, 0, 1), lease(1, 1, 2), lease(2, 0, 3)]);
    Keeping::new(journal.clone()).doubted(1, 0);
    journal
}

#[test]
fn a_later_process_has_what_still_runs_under_its_old_numbers() {
    let journal = earlier();
    let rig = Rig::new(None, Some(Arc::new(journal.successor())));
    let stock = &rig.stock;
    let mut adoption = stock.begin_adoption(&journal.kept());
    let questions = stock.adoption_questions(&adoption, 1);
    let asked: Vec<_> = questions
        .iter()
        .map(|(address, asked)| (address.node, asked.request(stock.owner()).leases.len()))
        .collect();
    assert_eq!(asked, [(1, 1), (1, 1), (2, 1)]);
    assert!(!adoption.is_answered());
    let answer = |outcome| RenewResponse { outcomes: vec![outcome] };
    stock.adoption_answered(&mut adoption, &questions[0].1, &answer(renewed(false)));
    stock.adoption_answered(&mut adoption, &questions[1].1, &answer(renewed(true)));
    assert!(!adoption.is_answered());
    stock.adoption_ends(&mut adoption);
    assert!(adoption.is_answered());
    assert_eq!(adoption.extents_held().collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());

    let sound = stock.adopt_extent(&mut adoption, 3).unwrap();
    let doubted = stock.adopt_extent(&mut adoption, 4).unwrap();
    assert_eq!((sound.number(), sound.is_in_doubt(), doubted.is_in_doubt()), (3, false, true));
    assert!(doubted.region().is_leaving(), "its node is taking it back");
    assert!(adoption.is_taken(3) && !adoption.is_taken(2) && stock.adopt_extent(&mut adoption, 3).is_none());
    let lost = stock.adopt_extent(&mut adoption, 9).unwrap();
    assert!(lost.region().has_ended(), "node 2 has not answered");
    stock.shun_extent(&adoption, 2);
    stock.finish_adoption(adoption);
    let rest = [0, 1].map(|place| stock.take_now(place, &Where::Anywhere).unwrap());
    let mut numbers = rest.each_ref().map(Extent::number);
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1], "2 is withheld");
    assert!(stock.take_now(0, &Where::Anywhere).is_none());
    assert_eq!(stock.losses(), 0);
    rig.lends(&[lease(3, 0, 4)]);
    let newest = stock.numbered_regions().into_iter().map(|held| held.number).max();
    assert_eq!(newest, Some(3), "number 2 is in use by the lost extent");
}

#[test]
fn a_number_of_a_lost_region_in_which_nothing_was_in_use_is_free_again() {
    let journal = earlier();
    let rig = Rig::new(None, Some(Arc::new(journal.successor())));
    let mut adoption = rig.stock.begin_adoption(&journal.kept());
    rig.stock.adoption_ends(&mut adoption);
    assert_eq!(adoption.extents_held().count(), 0);
    rig.stock.finish_adoption(adoption);
    rig.lends(&[lease(3, 0, 4)]);
    assert_eq!(rig.stock.numbered_regions()[0].number, 2);
}

#[test]
fn a_region_lost_while_files_are_taken_over_is_found_as_a_lost_one() {
    let journal = earlier();
    let rig = Rig::new(None, Some(Arc::new(journal.successor())));
    let stock = &rig.stock;
    let mut adoption = stock.begin_adoption(&journal.kept());
    let answer = RenewResponse { outcomes: vec![renewed(false)] };
    for (_, question) in stock.adoption_questions(&adoption, 1) {
        stock.adoption_answered(&mut adoption, &question, &answer);
    }
    stock.adoption_ends(&mut adoption);
    for held in stock.numbered_regions().into_iter().filter(|held| held.number < 2) {
        stock.lease_lost(held.region.id, held.region.epoch);
    }
    let lost = stock.adopt_extent(&mut adoption, 3).unwrap();
    assert!(lost.region().has_ended() && lost.number() == 3);
    stock.finish_adoption(adoption);
    let numbers: Vec<u64> = stock.numbered_regions().iter().map(|held| held.number).collect();
    assert_eq!(numbers, [2]);
    rig.lends(&[lease(3, 0, 4), lease(3, 1, 5)]);
    let mut numbers: Vec<u64> = stock.numbered_regions().iter().map(|held| held.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3], "nothing refers to number 1, but a file to number 0");
}

#[test]
fn of_two_leases_of_a_region_the_later_is_taken_over() {
    let journal = Arc::new(MemoryJournal::default());
    let keeping = Keeping::new(journal.clone());
    keeping.held(0, &lease(1, 0, 5));
    keeping.held(1, &lease(1, 0, 9));
    keeping.held(2, &lease(1, 0, 7));
    keeping.held(3, &lease(1, 1, 11));
    keeping.gone(3);
    let rig = Rig::new(None, None);
    assert!(!rig.stock.is_kept());
    let adoption = rig.stock.begin_adoption(&journal.kept());
    let questions = rig.stock.adoption_questions(&adoption, 10);
    let [(_, asked)] = &questions[..] else { panic!("one node") };
    let epochs: Vec<_> = asked.request(rig.stock.owner()).leases.iter().map(|lease| lease.epoch).collect();
    assert_eq!(epochs, [Epoch::new(1, 9).0]);
}

const EXTENTS: u64 = REGION_BYTES / EXTENT_BYTES;

#[test]
fn a_full_pool_overflows_and_far_memory_comes_first() {
    let rig = Rig::overflowing(None, Scripted::new(2, REGION_BYTES));
    rig.lends(&[lease(1, 0, 1)]);
    assert!(rig.attempts(GrowthOutcome::Full));
    let mut extents: Vec<Extent> =
        (0..2 * EXTENTS).map(|_| rig.take(&Where::NotOn(vec![NodeId(2)])).unwrap()).collect();
    let in_overflow: Vec<bool> = extents.iter().map(|extent| extent.region().is_overflow()).collect();
    assert_eq!(in_overflow, [false, false, false, false, true, true, true, true]);
    let numbers: BTreeSet<u64> = extents.iter().map(Extent::number).collect();
    assert_eq!(numbers.len() as u64, 2 * EXTENTS);
    assert_eq!(rig.stock.overflow_used_bytes(), Some(REGION_BYTES));
    drop(extents.split_off(3));
    assert_eq!(rig.stock.overflow_used_bytes(), Some(0));
    assert!(!rig.take(&Where::Anywhere).unwrap().region().is_overflow());
    let on_another = rig.take(&Where::On(NodeId(2)));
    assert!(on_another.is_none(), "who wants one node has no use for the directory");
    assert!(rig.take(&Where::NotOn(vec![NodeId(1)])).unwrap().region().is_overflow());
}

#[test]
fn the_directory_gives_a_region_only_if_the_broker_gives_none_and_none_is_free_there() {
    let giver = Scripted::new(2, REGION_BYTES);
    let rig = Rig::overflowing(None, giver.clone());
    let left = || giver.left.load(Ordering::Relaxed);
    assert_eq!((rig.attempts(GrowthOutcome::Grown), left()), (true, 2));
    assert_eq!((rig.attempts(GrowthOutcome::Unreachable), left()), (true, 1));
    assert_eq!((rig.attempts(GrowthOutcome::Full), left()), (true, 1));
    let taken = rig.take(&Where::Anywhere).unwrap();
    assert_eq!((rig.attempts(GrowthOutcome::Full), left()), (true, 0));
    let rest: Vec<Extent> = std::iter::from_fn(|| rig.take(&Where::Anywhere)).collect();
    assert_eq!(rest.len() as u64, 2 * EXTENTS - 1);
    let epochs: BTreeSet<u64> = rest.iter().map(|extent| extent.region().epoch.0).collect();
    assert!(epochs.len() == 2 && !epochs.contains(&0), "{epochs:?}");
    assert!(!rig.attempts(GrowthOutcome::Full), "both are full");
    assert!(!rig.attempts(GrowthOutcome::Unreachable));
    assert!(!rig.stock.may_overflow(&Where::On(NodeId(1))));
    drop((taken, rest));
}

#[test]
fn while_the_directory_is_in_use_its_next_region_is_allocated_ahead() {
    let giver = Scripted::new(3, REGION_BYTES);
    let rig = Rig::overflowing(None, giver.clone());
    let left = || giver.left.load(Ordering::Relaxed);
    let ends = |outcome| rig.stock.overflow_after(outcome).now_or_never().expect("the giver answers at once");
    ends(GrowthOutcome::Full);
    assert_eq!(left(), 3, "nobody wants one");
    rig.attempts(GrowthOutcome::Full);
    let _in_use = rig.take(&Where::Anywhere).unwrap();
    rig.lends(&[lease(1, 0, 1)]);
    let request =
        |stock: &Stock| stock.with_holder(|holder| holder.acquisition(stock.now(), LeaseClass::Revocable, 1));
    rig.stock.want_elsewhere(&Where::NotOn(vec![NodeId(1)]));
    assert_eq!(request(&rig.stock).avoid, [1]);
    ends(GrowthOutcome::Full);
    assert_eq!(left(), 2, "the request left a node out, which may have room");
    assert!(request(&rig.stock).avoid.is_empty());
    ends(GrowthOutcome::Full);
    assert_eq!(left(), 1);
    ends(GrowthOutcome::Full);
    assert_eq!(left(), 1, "enough is free there");
}

#[test]
fn a_broker_that_had_no_regions_is_not_asked_again_for_a_while() {
    let rig = Rig::overflowing(None, Scripted::new(1, REGION_BYTES));
    assert!(rig.stock.regions_wanted() > 0);
    rig.attempts(GrowthOutcome::Full);
    assert_eq!(rig.at(FULL_FOR.0 - 1).regions_wanted(), 0);
    rig.attempts(GrowthOutcome::Full); // not asked: the time does not begin anew
    assert!(rig.at(FULL_FOR.0).regions_wanted() > 0);
    rig.attempts(GrowthOutcome::Unreachable);
    assert_eq!(rig.at(FULL_FOR.0 + UNREACHABLE_FOR.0 - 1).regions_wanted(), 0);
    assert!(rig.at(FULL_FOR.0 + UNREACHABLE_FOR.0).regions_wanted() > 0);
}

#[test]
fn a_task_that_finds_the_directory_full_waits_for_a_broker_that_did_not_answer() {
    let rig = Rig::overflowing(None, Scripted::new(1, REGION_BYTES));
    rig.attempts(GrowthOutcome::Unreachable);
    let mut taken: Vec<Extent> = std::iter::from_fn(|| rig.take(&Where::Anywhere)).collect();
    assert!(!rig.attempts(GrowthOutcome::Unreachable), "the directory is full");
    rig.stock.growth_ended(GrowthOutcome::Unreachable);
    let extent = taking(&rig.stock, &Where::Anywhere, || {
        assert!(rig.stock.regions_wanted() > 0);
        let outcome = rig.lends(&[lease(1, 0, 1)]);
        rig.stock.growth_ended(outcome);
    });
    assert!(matches!(extent, Poll::Ready(Ok(extent)) if !extent.region().is_overflow()));
    assert_eq!(taken.len() as u64, EXTENTS);
    taken.pop();
    assert_eq!(rig.stock.regions_wanted(), 0, "the directory has an extent again");
}

#[test]
fn extents_move_back_once_two_regions_of_far_memory_are_free() {
    let rig = Rig::overflowing(Some(3), Scripted::new(1, REGION_BYTES));
    rig.attempts(GrowthOutcome::Full);
    rig.stock.pool_has_free(1);
    let extent = rig.take(&Where::Anywhere).unwrap();
    assert!(!rig.stock.is_to_move_back());
    rig.stock.pool_has_free(2);
    assert!(rig.stock.is_to_move_back());
    rig.stock.pool_has_free(0);
    rig.lends(&[lease(1, 0, 1), lease(1, 1, 2)]);
    assert!(rig.stock.is_to_move_back());
    let far = rig.take(&Where::Anywhere).unwrap();
    assert!(!rig.stock.is_to_move_back());
    rig.stock.pool_has_free(9);
    assert!(rig.stock.is_to_move_back(), "the limit allows one more region");
    drop(extent);
    assert!(!rig.stock.is_to_move_back(), "nothing lies in the directory");
    drop(far);
}

#[test]
fn an_empty_region_of_the_directory_is_freed_after_a_while_even_if_a_late_write_may_land_there() {
    let giver = Scripted::new(1, REGION_BYTES);
    let rig = Rig::overflowing(None, giver.clone());
    let left = || giver.left.load(Ordering::Relaxed);
    let linger = Duration::from_secs(5);
    for doubts in [false, true] {
        rig.attempts(GrowthOutcome::Full);
        let (one, other) = (rig.take(&Where::Anywhere).unwrap(), rig.take(&Where::Anywhere).unwrap());
        if doubts {
            one.doubt();
        }
        drop(one);
        rig.stock.shrink(Duration::ZERO);
        assert_eq!(left(), 0, "an extent is in use");
        drop(other);
        let free = std::iter::from_fn(|| rig.take(&Where::Anywhere)).collect::<Vec<_>>().len() as u64;
        assert_eq!(free, EXTENTS - u64::from(doubts), "no other holder gets an extent in doubt");
        assert_eq!(rig.stock.overflow_used_bytes(), Some(0));
        let now = rig.stock.now().0;
        rig.at(now).shrink(linger);
        rig.at(now + 4_999).shrink(linger);
        assert_eq!(left(), 0);
        rig.at(now + 5_000).shrink(linger);
        assert_eq!(left(), 1);
    }
}

#[test]
fn the_capacity_counts_the_directory_too() {
    let rig = Rig::overflowing(Some(2), Scripted::new(3, REGION_BYTES + 1));
    rig.stock.pool_has_free(5);
    let regions = |bytes: u64| bytes as f64 / REGION_BYTES as f64;
    let capacity = || {
        let Capacity { total_bytes, free_bytes } = rig.stock.capacity();
        (regions(total_bytes), regions(free_bytes))
    };
    assert_eq!(capacity(), (5.0, 5.0));
    rig.attempts(GrowthOutcome::Full);
    assert_eq!(capacity(), (5.0, 5.0));
    let _extent = rig.take(&Where::Anywhere).unwrap();
    assert_eq!(capacity(), (5.0, 4.75));
}

#[test]
fn a_task_that_finds_all_extents_of_a_new_region_taken_waits_for_the_next_one() {
    let giver = Scripted::new(2, REGION_BYTES);
    let rig = Rig::overflowing(None, giver.clone());
    let mut taking = pin!(rig.stock.take_extent(0));
    let mut context = Context::from_waker(Waker::noop());
    let mut rest = Vec::new();
    for _ in 0..2 {
        assert!(taking.as_mut().poll(&mut context).is_pending());
        rig.attempts(GrowthOutcome::Full);
        rest.extend(std::iter::from_fn(|| rig.take(&Where::Anywhere)));
        rig.stock.growth_ended(GrowthOutcome::Full);
    }
    assert!(taking.as_mut().poll(&mut context).is_pending());
    rig.attempts(GrowthOutcome::Full);
    rig.stock.growth_ended(GrowthOutcome::Full);
    assert!(matches!(taking.as_mut().poll(&mut context), Poll::Ready(Err(NoSpace))), "both are full");
    assert_eq!(rest.len() as u64, 2 * EXTENTS);
}

#[test]
fn a_directory_is_asked_for_regions_as_fast_as_they_fill() {
    let rig = Rig::overflowing(None, Scripted::new(2, REGION_BYTES));
    let pause_after = |outcome| {
        rig.stock.want_overflow(&Where::Anywhere);
        rig.stock.attempt_ended(outcome).now_or_never().expect("the giver answers at once")
    };
    let mut taken = Vec::new();
    for _ in 0..2 {
        assert_eq!(pause_after(GrowthOutcome::Full), Duration::ZERO);
        taken.extend(std::iter::from_fn(|| rig.take(&Where::Anywhere)));
    }
    assert_eq!(taken.len() as u64, 2 * EXTENTS);
    taken.pop();
    assert!(rig.stock.has_overflow());
    assert!(pause_after(GrowthOutcome::Full) > Duration::ZERO, "the directory gives no more regions");
}

#[test]
fn a_broker_is_left_alone_for_a_while_though_the_directory_gives_regions() {
    let rig = Rig::overflowing(None, Scripted::new(2, REGION_BYTES));
    rig.stock.want_overflow(&Where::Anywhere);
    rig.stock.with_holder(|holder| holder.want_elsewhere(vec![NodeId(1)]));
    rig.stock.with_holder(|holder| holder.acquisition(Millis(0), LeaseClass::Revocable, 1));
    let pause = rig.stock.attempt_ended(GrowthOutcome::Full).now_or_never();
    assert!(rig.stock.has_overflow() && rig.stock.regions_wanted() > 0, "other nodes may have room");
    assert!(pause.expect("the giver answers at once") > Duration::ZERO);
}
