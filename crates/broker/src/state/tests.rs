use farpool_wire::control::{OwnerStatus, RegionState};

use super::*;

const OWNER: OwnerId = OwnerId(7);

fn report(node: u64, regions_total: u32, held: u32) -> RegisterRequest {
    let address =
        NodeAddress { node, incarnation: 1, control: "127.0.0.1:1".to_owned(), ..Default::default() };
    let lent = table(held);
    RegisterRequest { address: Some(address), region_bytes: 64, regions_total, lent }
}

fn table(held: u32) -> Vec<RegionState> {
    let held = (0..held).map(|region| RegionState {
        region,
        owner: OWNER.0,
        epoch: u64::from(region) + 1,
        held: true,
        ..Default::default()
    });
    held.collect()
}

fn beat(node: u64, regions_free: u32, regions_lent: u32) -> HeartbeatRequest {
    let table = sum(&table(regions_lent));
    HeartbeatRequest {
        node,
        incarnation: 1,
        regions_free,
        regions_lent,
        table,
        ..HeartbeatRequest::default()
    }
}

fn sum(table: &[RegionState]) -> u64 {
    table.iter().fold(0, |sum, region| sum.wrapping_add(region.mark()))
}

fn pool_of(reports: &[RegisterRequest]) -> Pool {
    let mut pool = Pool::default();
    for report in reports {
        pool.report(Millis(0), report).unwrap();
    }
    pool
}

fn shares(plan: Vec<(NodeAddress, u32)>) -> Vec<(u64, u32)> {
    plan.into_iter().map(|(address, share)| (address.node, share)).collect()
}

#[test]
fn a_node_that_missed_its_heartbeats_gets_nothing_until_it_is_heard_again() {
    let mut pool = pool_of(&[report(1, 8, 0), report(2, 8, 0)]);
    assert!(pool.heartbeat(Millis(2_999), &beat(2, 8, 0)));
    let plan = pool.plan(DEAD_AFTER, OWNER, &BTreeSet::new(), 4);
    assert_eq!(shares(plan), [(2, 4)]);
    assert!(pool.heartbeat(DEAD_AFTER, &beat(1, 8, 0)));
    assert_eq!(shares(pool.plan(DEAD_AFTER, OWNER, &BTreeSet::new(), 4)), [(1, 2), (2, 2)]);
}

#[test]
fn a_node_is_told_to_report_when_it_is_unknown_restarted_or_its_counts_disagree() {
    let mut pool = pool_of(&[report(1, 8, 2)]);
    assert!(pool.heartbeat(Millis(1), &beat(1, 6, 2)));
    assert!(!pool.heartbeat(Millis(1), &beat(1, 7, 1)));
    assert!(!pool.heartbeat(Millis(1), &beat(2, 8, 0)));
    assert!(!pool.heartbeat(Millis(1), &HeartbeatRequest { incarnation: 2, ..beat(1, 6, 2) }));
    pool.remember(Millis(1), &report(3, 8, 0));
    assert!(!pool.heartbeat(Millis(1), &beat(3, 8, 0)));
}

#[test]
fn a_node_is_told_to_report_when_its_leases_differ_although_their_number_is_the_same() {
    let mut pool = pool_of(&[report(1, 8, 2)]);
    // One lease has ended, and another was granted, but the answer with it was lost.
    let mut other = table(2);
    other[1].epoch = 3;
    assert!(!pool.heartbeat(Millis(1), &HeartbeatRequest { table: sum(&other), ..beat(1, 6, 2) }));
    other[1].owner = OWNER.0 + 1;
    pool.report(Millis(2), &RegisterRequest { lent: other.clone(), ..report(1, 8, 2) }).unwrap();
    assert!(pool.heartbeat(Millis(3), &HeartbeatRequest { table: sum(&other), ..beat(1, 6, 2) }));
    // An old report comes late and replaces the new one.
    pool.report(Millis(4), &report(1, 8, 2)).unwrap();
    assert!(!pool.heartbeat(Millis(5), &HeartbeatRequest { table: sum(&other), ..beat(1, 6, 2) }));
    // One lease is being taken back: the broker must not count it as revocable.
    pool.report(Millis(6), &RegisterRequest { lent: other.clone(), ..report(1, 8, 2) }).unwrap();
    other[0].revoked = true;
    assert!(!pool.heartbeat(Millis(7), &HeartbeatRequest { table: sum(&other), ..beat(1, 6, 2) }));
}

#[test]
fn a_report_replaces_everything_known_of_the_node() {
    let mut pool = pool_of(&[report(1, 8, 5)]);
    pool.report(Millis(1), &report(1, 8, 2)).unwrap();
    let status = pool.status(Millis(1), &StatusRequest::default());
    assert_eq!((status.nodes[0].regions_free, status.nodes[0].regions_lent), (6, 2));
    assert_eq!(status.owners, [OwnerStatus { owner: OWNER.0, regions: 2 }]);
}

#[test]
fn regions_of_one_plan_are_not_promised_to_the_next() {
    let mut pool = pool_of(&[report(1, 4, 0)]);
    assert_eq!(shares(pool.plan(Millis(0), OWNER, &BTreeSet::new(), 3)), [(1, 3)]);
    assert_eq!(shares(pool.plan(Millis(0), OWNER, &BTreeSet::new(), 3)), [(1, 1)]);
}

#[test]
fn avoided_and_shunned_nodes_get_nothing() {
    let mut pool = pool_of(&[report(1, 4, 0), report(2, 4, 0), report(3, 4, 0)]);
    pool.failed(Millis(0), NodeId(2));
    let avoid = BTreeSet::from([NodeId(1)]);
    assert_eq!(shares(pool.plan(Millis(1), OWNER, &avoid, 1)), [(3, 1)]);
    for node in [1, 2, 3] {
        assert!(pool.heartbeat(SHUN_AFTER_FAILURE, &beat(node, 4, 0)));
    }
    assert_eq!(shares(pool.plan(SHUN_AFTER_FAILURE, OWNER, &avoid, 2)), [(2, 1), (3, 1)]);
}

#[test]
fn a_node_that_lent_less_than_asked_counts_as_full_until_it_says_otherwise() {
    let mut pool = pool_of(&[report(1, 4, 0)]);
    assert_eq!(shares(pool.plan(Millis(0), OWNER, &BTreeSet::new(), 2)), [(1, 2)]);
    pool.granted(NodeId(1), OWNER, LeaseClass::Revocable, 2, &[Lease { epoch: 1, ..Default::default() }]);
    assert!(pool.plan(Millis(0), OWNER, &BTreeSet::new(), 1).is_empty());
    assert!(pool.heartbeat(Millis(1), &beat(1, 3, 1)));
    assert_eq!(shares(pool.plan(Millis(1), OWNER, &BTreeSet::new(), 1)), [(1, 1)]);
}

#[test]
fn an_old_process_of_a_restarted_node_is_refused() {
    let mut pool = pool_of(&[report(1, 4, 0)]);
    let mut restarted = report(1, 4, 0);
    restarted.address.as_mut().unwrap().incarnation = 2;
    pool.report(Millis(0), &restarted).unwrap();
    assert_eq!(pool.report(Millis(0), &report(1, 4, 0)), Err(ReportRefusal::OlderIncarnation));
}

#[test]
fn a_node_is_admitted_again_once_a_later_incarnation_is_silent() {
    let mut pool = Pool::default();
    let mut claimed = report(1, 4, 0);
    claimed.address.as_mut().unwrap().incarnation = u32::MAX;
    pool.report(Millis(0), &claimed).unwrap();
    let just_before = Millis(DEAD_AFTER.0 - 1);
    assert_eq!(pool.report(just_before, &report(1, 4, 0)), Err(ReportRefusal::OlderIncarnation));
    pool.report(DEAD_AFTER, &report(1, 4, 0)).unwrap();
    assert!(pool.heartbeat(DEAD_AFTER, &beat(1, 4, 0)));
    // A node known only from the store does not count as alive either.
    let mut restarted = Pool::default();
    restarted.remember(Millis(0), &claimed);
    restarted.report(Millis(0), &report(1, 4, 0)).unwrap();
}

#[test]
fn all_regions_of_a_pool_have_one_size() {
    let mut pool = pool_of(&[report(1, 4, 0)]);
    let odd = RegisterRequest { region_bytes: 32, ..report(2, 4, 0) };
    assert_eq!(pool.report(Millis(0), &odd), Err(ReportRefusal::RegionSize { pool: 64, node: 32 }));
    // The pool's region size is that of the nodes that are alive.
    pool.report(DEAD_AFTER, &odd).unwrap();
}

#[test]
fn malformed_reports_are_refused_and_leave_nothing_behind() {
    let mut pool = Pool::default();
    let mut twice = report(1, 4, 2);
    twice.lent[1].region = 0;
    let mut beyond = report(1, 4, 2);
    beyond.lent[1].region = 4;
    let mut wordy = report(1, 4, 0);
    wordy.address.as_mut().unwrap().host = "x".repeat(MAX_ADDRESS_BYTES + 1);
    let mut forged = report(1, 4, 0);
    forged.address.as_mut().unwrap().tcp = "127.0.0.1:9\nnode two".into();
    let mut turned = report(1, 4, 0);
    turned.address.as_mut().unwrap().shm_socket = "/run/\u{202E}kcos".into();
    let nowhere = RegisterRequest { address: None, ..report(1, 4, 0) };
    let huge = RegisterRequest { regions_total: MAX_REGIONS_PER_NODE + 1, ..report(1, 4, 0) };
    for bad in [twice, beyond, wordy, forged, turned, nowhere, huge] {
        assert!(matches!(pool.report(Millis(0), &bad), Err(ReportRefusal::Malformed(_))));
    }
    assert!(pool.status(Millis(0), &StatusRequest::default()).nodes.is_empty());
}

#[test]
fn the_pool_takes_no_more_nodes_than_its_limit_and_forgets_the_silent() {
    let reports: Vec<_> = (0..MAX_NODES as u64).map(|node| report(node, 1, 0)).collect();
    let mut pool = pool_of(&reports);
    let late = report(MAX_NODES as u64, 1, 0);
    assert_eq!(pool.report(Millis(1), &late), Err(ReportRefusal::Full));
    pool.report(Millis(1), &reports[0]).unwrap();
    assert_eq!(pool.forget(FORGET_AFTER).len(), MAX_NODES - 1);
    pool.report(FORGET_AFTER, &late).unwrap();
}

#[test]
fn the_reason_says_what_is_missing() {
    assert!(Pool::default().why_short(Millis(0)).contains("farpool node"));
    let pool = pool_of(&[report(1, 4, 4)]);
    assert!(pool.why_short(Millis(0)).contains("all 4 regions of 1 nodes are lent"));
    assert!(pool.why_short(DEAD_AFTER).contains("none of the pool's 1 nodes answers"));
}

#[test]
fn regions_that_went_back_to_their_machine_are_neither_free_nor_lent() {
    let withdrawn = |region| RegionState { region, withdrawn: true, ..RegionState::default() };
    let lent = table(2).into_iter().chain([withdrawn(2), withdrawn(3)]).collect();
    let mut pool = pool_of(&[RegisterRequest { lent, ..report(1, 4, 0) }]);
    let status = |pool: &Pool| pool.status(Millis(0), &StatusRequest::default()).nodes.remove(0);
    let known = status(&pool);
    assert_eq!((known.regions_free, known.regions_lent, known.regions_withdrawn), (0, 2, 2));
    assert!(pool.why_short(Millis(0)).contains("2 of 4 have gone back"), "{}", pool.why_short(Millis(0)));
    let grown = HeartbeatRequest { regions_withdrawn: 1, ..beat(1, 1, 2) };
    assert!(pool.heartbeat(Millis(1), &grown));
    let known = status(&pool);
    assert_eq!((known.regions_free, known.regions_lent, known.regions_withdrawn), (1, 2, 1));
}

#[test]
fn the_status_of_300_nodes_with_20_000_owners_each_comes_in_pages_that_fit_into_a_message() {
    const OWNERS: u32 = 20_000;
    /// The largest message that gRPC takes by default.
    const MESSAGE_BYTES: usize = 4 << 20;
    let mut pool = Pool::default();
    for node in 1..=300 {
        let held = |region| RegionState {
            region,
            owner: u64::from(region) * (1 + node % 20),
            held: true,
            ..RegionState::default()
        };
        let lent = (0..OWNERS).map(held).collect();
        pool.report(Millis(0), &RegisterRequest { lent, ..report(node, OWNERS, 0) }).unwrap();
    }
    let sums = pool.status(Millis(1), &StatusRequest { only_sums: true, ..Default::default() });
    assert_eq!((sums.nodes.len(), sums.nodes_alive, sums.region_bytes), (0, 300, 64));
    let (mut nodes, mut owners) = (Vec::new(), Vec::new());
    let mut asked = StatusRequest::default();
    loop {
        let page = pool.status(Millis(1), &asked);
        assert!(prost::Message::encoded_len(&page) < MESSAGE_BYTES);
        let more = page.more;
        nodes.extend(page.nodes.iter().filter_map(|node| Some(node.address.as_ref()?.node)));
        owners.extend(page.owners);
        (asked.nodes_after, asked.owners_after) =
            (nodes.last().copied(), owners.last().map(|last| last.owner));
        if !more {
            break;
        }
    }
    assert_eq!(nodes, (1..=300).collect::<Vec<_>>());
    assert!(owners.is_sorted_by_key(|owner| owner.owner) && owners.len() > OWNERS as usize);
    assert_eq!(owners.iter().map(|owner| u64::from(owner.regions)).sum::<u64>(), 300 * u64::from(OWNERS));
}
