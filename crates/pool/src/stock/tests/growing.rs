//! Tests of growth: requests for regions, and the tasks that wait for extents.

use super::*;

#[test]
fn a_task_that_finds_no_extent_waits_for_regions_or_the_word_that_the_pool_is_full() {
    let rig = Rig::new(None, None);
    let stock = rig.at(0);
    let grown = taking(stock, &Where::Anywhere, || {
        assert_eq!(rig.lends(&[lease(1, 0, 1)]), GrowthOutcome::Grown);
        stock.growth_ended(GrowthOutcome::Grown);
    });
    let Poll::Ready(Ok(first)) = grown else { panic!("a region has come") };
    let _others: Vec<_> = (0..3).map(|_| stock.take_now(0, &Where::Anywhere).unwrap()).collect();
    let full = || {
        stock.growth_ended(GrowthOutcome::Full);
    };
    assert!(is_refused(taking(stock, &Where::Anywhere, full)));
    let mut again = pin!(stock.take_extent(0));
    assert!(is_refused(poll(&mut again)), "a full pool is not asked for each page");
    drop(first);
    let Poll::Ready(Ok(_first)) = poll(&mut pin!(stock.take_extent(0))) else { panic!("one is free again") };
    rig.at(500);
    assert!(is_refused(taking(stock, &Where::Anywhere, full)), "half a second later it is asked again");
}

#[test]
fn an_owner_at_its_limit_does_not_wait() {
    let rig = Rig::new(Some(1), None);
    assert_eq!((rig.stock.regions_wanted(), rig.stock.is_low()), (1, true));
    rig.lends(&[lease(1, 0, 1)]);
    assert_eq!(rig.stock.regions_wanted(), 0);
    let _all: Vec<_> = (0..4).map(|_| rig.stock.take_now(0, &Where::Anywhere).unwrap()).collect();
    assert!(is_refused(poll(&mut pin!(rig.stock.take_extent(0)))));
    assert!(poll(&mut pin!(rig.stock.growth_wanted())).is_pending());
}

#[test]
fn without_a_spare_regions_are_leased_only_for_those_who_wait() {
    let rig = Rig::new(None, None);
    let wanted = || poll(&mut pin!(rig.stock.growth_wanted())).is_ready();
    rig.stock.keep_no_spare();
    rig.lends(&[lease(1, 0, 1), lease(1, 1, 2), lease(1, 2, 3)]);
    let take = || rig.stock.take_extent(0);
    let mut taken = Vec::new();
    for _ in 0..12 {
        let Poll::Ready(Ok(extent)) = poll(&mut pin!(take())) else { panic!("there is one") };
        taken.push(extent);
        assert!(!wanted());
    }
    assert!(poll(&mut pin!(take())).is_pending());
    assert!(wanted() && rig.stock.is_low());
    // A region that nobody uses any more is given back, although others are in use.
    taken.sort_by_key(Extent::number);
    taken.truncate(8);
    let linger = Duration::from_millis(100);
    assert!(rig.stock.shrink(linger).is_empty(), "it has just become empty");
    assert_eq!(rig.at(1_000).shrink(linger).len(), 1);
}

#[test]
fn more_regions_are_wanted_when_few_extents_are_left() {
    let rig = Rig::new(None, None);
    let wanted = || poll(&mut pin!(rig.stock.growth_wanted())).is_ready();
    let regions = LOW_WATER_EXTENTS as u32 / 4 + 1;
    rig.lends(&(0..regions).map(|index| lease(1, index, index + 1)).collect::<Vec<_>>());
    let take = || match poll(&mut pin!(rig.stock.take_extent(0))) {
        Poll::Ready(Ok(extent)) => extent,
        _ => panic!("there is one"),
    };
    let mut taken: Vec<_> = (0..4).map(|_| take()).collect();
    assert!(!wanted() && !rig.stock.is_low(), "as many are left as are to be");
    taken.push(take());
    assert!(wanted() && rig.stock.is_low());
}

#[test]
fn a_task_whose_time_has_passed_does_not_wait_for_another_attempt() {
    let rig = Rig::new(None, None);
    let mut taking = pin!(rig.at(0).take_extent(0));
    assert!(poll(&mut taking).is_pending());
    rig.at(2_999).growth_ended(GrowthOutcome::Grown);
    assert!(poll(&mut taking).is_pending(), "other tasks have taken what came");
    rig.at(3_000).growth_ended(GrowthOutcome::Grown);
    assert!(is_refused(poll(&mut taking)));
}

#[test]
fn a_task_waits_three_seconds_for_a_broker_that_does_not_answer() {
    let rig = Rig::new(None, None);
    let mut taking = pin!(rig.at(0).take_extent(0));
    for ms in [0, 1_000, 2_999] {
        assert!(poll(&mut taking).is_pending(), "{ms} ms");
        rig.at(ms).growth_ended(GrowthOutcome::Unreachable);
    }
    assert!(poll(&mut taking).is_pending());
    rig.at(3_000).growth_ended(GrowthOutcome::Unreachable);
    assert!(is_refused(poll(&mut taking)));
    assert!(
        is_refused(poll(&mut pin!(rig.stock.take_extent(0)))),
        "the next task does not wait as long again"
    );
}

#[test]
fn full_elsewhere_is_no_answer_for_a_task_that_takes_any_node() {
    let rig = Rig::new(None, None);
    let stock = rig.at(0);
    rig.lends(&[lease(1, 0, 1), lease(2, 0, 2)]);
    let only_two = Where::On(NodeId(2));
    let _all: Vec<_> = (0..8).map(|_| stock.take_now(0, &Where::Anywhere).unwrap()).collect();
    let limited = || {
        assert!(stock.is_low());
        let asked = stock.with_holder(|holder| holder.acquisition(stock.now(), LeaseClass::Revocable, 1));
        assert_eq!(asked.avoid, [1]);
        stock.growth_ended(GrowthOutcome::Full);
    };
    let mut anywhere = pin!(stock.take_extent(0));
    assert!(poll(&mut anywhere).is_pending());
    assert!(is_refused(taking(stock, &only_two, limited)));
    assert!(poll(&mut anywhere).is_pending());
    rig.at(3_000).growth_ended(GrowthOutcome::Full);
    assert!(is_refused(poll(&mut anywhere)), "but not for ever");
    rig.at(3_500);
    let full = || {
        stock.growth_ended(GrowthOutcome::Full);
    };
    assert!(is_refused(taking(stock, &only_two, full)));
}
