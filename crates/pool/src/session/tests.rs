use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};

use rustix::io::Errno;

use super::scripted::{Answer, Kind, Leases, RETRIES, World, extent, node};
use super::*;
use crate::overflow::scripted::{Mood, Scripted as Storage};
use crate::overflow::{OVERFLOW_NODE, Overflowing};
use crate::space::EXTENT_BYTES;

const SHORT: AccessError = AccessError::Short { node: NodeId(1) };
const LOST: AccessError = AccessError::NodeLost { node: NodeId(1) };
/// No script here lets a sibling be asked more often.
const MOST_BORROWED: usize = 1_000;

/// A node, a session, and an extent on the node.
struct Bench {
    world: World,
    leases: Arc<Leases>,
    node: Arc<NodeState>,
    core: SessionCore,
    extent: Extent,
}

impl Bench {
    fn new() -> Self {
        let world = World::new();
        let leases = Leases::new(&world);
        let node = node(1);
        let (core, extent) = (world.core(leases.clone()), extent(&node, 0, 1));
        Bench { world, leases, node, core, extent }
    }

    /// A bench whose session has siblings that do this, given the bytes of a transfer and the number of
    /// transfers before.
    fn with_siblings(does: impl Fn(&mut [u8], usize) -> Borrowed + Send + Sync + 'static) -> Self {
        let siblings = Scripted { does, asked: AtomicUsize::new(0) };
        let bench = Bench::new();
        Bench { core: bench.core.among(Arc::new(siblings)), ..bench }
    }

    fn asked(&self, kind: Kind) -> usize {
        self.world.asked(self.node.peer.node, kind)
    }

    fn read(&self, bytes: usize) -> Result<Vec<u8>, AccessError> {
        self.world.read(&self.core, &self.extent, bytes)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), AccessError> {
        self.world.write(&self.core, &self.extent, bytes)
    }
}

struct Scripted<F> {
    does: F,
    asked: AtomicUsize,
}

impl<F: Fn(&mut [u8], usize) -> Borrowed + Send + Sync> Siblings for Scripted<F> {
    fn transfer(&self, _: Direction, _: &Extent, _: u64, bytes: &mut [u8]) -> Borrowed {
        let before = self.asked.fetch_add(1, Ordering::Relaxed); // a count
        assert!(before < MOST_BORROWED, "a session asks its siblings without end");
        (self.does)(bytes, before)
    }
}

/// A sibling that reads sevens.
fn sevens(bytes: &mut [u8], _: usize) -> Borrowed {
    bytes.fill(7);
    Borrowed::Done(Ok(()))
}

fn only(kind: Kind, answer: Answer) -> impl FnMut(&super::scripted::Asked) -> Answer + Send + 'static {
    move |asked| if asked.kind == kind { answer } else { Answer::Serve }
}

#[test]
fn a_shortage_is_no_loss_unless_an_earlier_try_is_in_doubt() {
    let node = NodeId(1);
    let region = RegionId { node, index: 0 };
    let short = AccessError::Short { node };
    assert_eq!(settled(short, region, false), short);
    assert_eq!(settled(short, region, true), AccessError::NodeLost { node });
    let refused = AccessError::Refused(OpError::Refused(Refusal::TooLong));
    assert_eq!(settled(refused, region, false), refused);
    assert_eq!(settled(refused, region, true), AccessError::LeaseLost { region });
    let no_place = |in_doubt| Failure::NoPlace { in_doubt }.into_error(region);
    assert_eq!((no_place(false), no_place(true)), (short, AccessError::NodeLost { node }));
}

#[test]
fn a_region_is_attached_once_and_anew_under_a_new_epoch() {
    let bench = Bench::new();
    bench.write(&[1, 2, 3]).unwrap();
    assert_eq!(bench.read(3).unwrap(), [1, 2, 3]);
    assert_eq!((bench.asked(Kind::Connect), bench.asked(Kind::Attach)), (1, 1));
    let renewed = extent(&bench.node, 0, 2);
    for _ in 0..2 {
        assert_eq!(bench.world.read(&bench.core, &renewed, 3).unwrap(), [1, 2, 3]);
    }
    assert_eq!((bench.asked(Kind::Connect), bench.asked(Kind::Attach)), (1, 2));
}

#[test]
fn a_session_without_siblings_reports_each_time_that_the_node_has_no_place_for_it() {
    let bench = Bench::new();
    bench.world.answers(only(Kind::Attach, Answer::Refuse(Refusal::Exhausted)));
    for asked in 1..=2 {
        assert_eq!(bench.read(3), Err(SHORT));
        assert_eq!(bench.asked(Kind::Attach), asked);
        assert_eq!(bench.world.connections(bench.node.peer.node), 0, "it would occupy a place");
    }
    assert_eq!(bench.leases.failures(), 0, "a refusal is an answer");
}

#[test]
fn a_session_that_is_refused_a_place_uses_its_siblings_for_a_while_before_it_asks_again() {
    let bench = Bench::with_siblings(sevens);
    bench.world.store(bench.extent.region().id, &[1, 2, 3]);
    bench.world.answers(|asked| match asked.kind {
        Kind::Attach if asked.before == 0 => Answer::Refuse(Refusal::Exhausted),
        _ => Answer::Serve,
    });
    assert_eq!(bench.read(3).unwrap(), [7, 7, 7]);
    bench.world.advance_to(Millis(CROWDED_FOR.0 - 1));
    assert_eq!(bench.read(3).unwrap(), [7, 7, 7]);
    assert_eq!(bench.asked(Kind::Attach), 1);
    bench.world.advance_to(CROWDED_FOR);
    for _ in 0..2 {
        assert_eq!(bench.read(3).unwrap(), [1, 2, 3]);
    }
    assert_eq!(bench.asked(Kind::Attach), 2);
}

#[test]
fn a_node_without_a_place_does_not_keep_a_session_from_other_nodes() {
    let bench = Bench::with_siblings(sevens);
    bench.world.answers(|asked| match asked.kind {
        Kind::Attach if asked.node == NodeId(1) => Answer::Refuse(Refusal::Exhausted),
        _ => Answer::Serve,
    });
    assert_eq!(bench.read(3).unwrap(), [7, 7, 7]);
    let other = extent(&node(2), 0, 1);
    bench.world.write(&bench.core, &other, &[1, 2, 3]).unwrap();
    assert_eq!(bench.world.stored(other.region().id, 3), [1, 2, 3]);
    assert_eq!(bench.world.read(&bench.core, &other, 3).unwrap(), [1, 2, 3]);
}

#[test]
fn siblings_without_a_connection_make_a_session_ask_the_node_again() {
    let bench = Bench::with_siblings(|_, _| Borrowed::NoneConnected);
    bench.world.answers(|asked| match asked.kind {
        Kind::Attach if asked.before == 0 => Answer::Refuse(Refusal::Exhausted),
        _ => Answer::Serve,
    });
    bench.write(&[1, 2, 3]).unwrap();
    assert_eq!(bench.world.stored(bench.extent.region().id, 3), [1, 2, 3]);
}

#[test]
fn busy_siblings_are_asked_again_until_the_time_for_retries_has_passed() {
    let does = |bytes: &mut [u8], before| if before < 3 { Borrowed::AllBusy } else { sevens(bytes, before) };
    let bench = Bench::with_siblings(does);
    bench.world.answers(only(Kind::Attach, Answer::Refuse(Refusal::Exhausted)));
    assert_eq!(bench.read(3).unwrap(), [7, 7, 7]);

    let bench = Bench::with_siblings(|_, _| Borrowed::AllBusy);
    bench.world.answers(only(Kind::Attach, Answer::Refuse(Refusal::Exhausted)));
    assert_eq!(bench.write(&[1]), Err(SHORT));
    assert!(!bench.extent.is_in_doubt(), "no write was sent");
    assert!(bench.world.now() >= RETRIES.try_within);
}

#[test]
fn a_write_that_a_sibling_may_have_done_is_not_reported_as_a_mere_shortage() {
    for in_doubt in [true, false] {
        let bench = Bench::with_siblings(move |_, before| match before {
            0 => Borrowed::Done(Err(Failure::NoPlace { in_doubt })),
            1 => Borrowed::Done(Err(Failure::NoPlace { in_doubt: false })),
            _ => Borrowed::AllBusy,
        });
        bench.world.answers(only(Kind::Attach, Answer::Refuse(Refusal::Exhausted)));
        assert_eq!(bench.write(&[1]), Err(if in_doubt { LOST } else { SHORT }));
    }
}

#[test]
fn a_session_whose_connection_has_regions_keeps_it_when_another_region_finds_no_place() {
    let bench = Bench::with_siblings(|_, _| panic!("it has a connection of its own"));
    bench.write(&[1, 2, 3]).unwrap();
    bench.world.answers(|asked| match asked.kind {
        Kind::Attach if asked.region == 1 => Answer::Refuse(Refusal::Exhausted),
        _ => Answer::Serve,
    });
    let second = extent(&bench.node, 1, 1);
    assert_eq!(bench.world.read(&bench.core, &second, 3), Err(SHORT));
    assert_eq!(bench.read(3).unwrap(), [1, 2, 3]);
    assert_eq!((bench.asked(Kind::Connect), bench.world.connections(NodeId(1))), (1, 1));
}

#[test]
fn a_shortage_of_this_process_says_nothing_about_the_node() {
    let bench = Bench::new();
    bench.world.answers(only(Kind::Connect, Answer::Fail(Errno::MFILE)));
    assert_eq!(bench.read(3), Err(SHORT));
    assert_eq!((bench.leases.failures(), bench.asked(Kind::Connect)), (0, 1));
    bench.world.answers(|asked| match asked.kind {
        Kind::Connect if asked.before == 1 => Answer::Fail(Errno::CONNREFUSED),
        _ => Answer::Serve,
    });
    assert_eq!(bench.read(3), Ok(vec![0, 0, 0]));
    assert_eq!(bench.leases.failures(), 1);
}

#[test]
fn an_operation_is_tried_again_until_the_retry_policys_time_has_passed() {
    for kind in [Kind::Attach, Kind::Read] {
        let bench = Bench::new();
        bench.world.answers(only(kind, Answer::Lose));
        assert_eq!(bench.read(3), Err(SHORT));
        let most = Millis(RETRIES.try_within.0 + LONGEST_PAUSE.as_millis() as u64);
        assert!((RETRIES.try_within..=most).contains(&bench.world.now()), "{:?}", bench.world.now());
        assert!(bench.leases.failures() > 2);
        assert_eq!(bench.leases.failures(), bench.asked(kind));

        let bench = Bench::new();
        bench.world.store(bench.extent.region().id, &[1, 2, 3]);
        bench.world.answers(move |asked| match asked.kind == kind && asked.before < 3 {
            true => Answer::Lose,
            false => Answer::Serve,
        });
        assert_eq!(bench.read(3).unwrap(), [1, 2, 3]);
    }
}

#[test]
fn a_refusal_that_no_lease_explains_ends_an_operation_at_once() {
    let bench = Bench::new();
    bench.world.answers(only(Kind::Write, Answer::Refuse(Refusal::TooLong)));
    assert_eq!(bench.write(&[1]), Err(AccessError::Refused(OpError::Refused(Refusal::TooLong))));
    assert_eq!((bench.asked(Kind::Write), bench.extent.is_in_doubt()), (1, false));
}

#[test]
fn a_write_whose_every_try_may_have_landed_is_a_loss_and_leaves_its_extent_in_doubt() {
    let bench = Bench::new();
    bench.world.answers(only(Kind::Write, Answer::Lose));
    assert_eq!(bench.write(&[1]), Err(LOST));
    assert!(bench.extent.is_in_doubt());
    let bench = Bench::new();
    bench.world.answers(|asked| match asked.kind {
        Kind::Write if asked.before < 2 => Answer::Lose,
        _ => Answer::Serve,
    });
    bench.write(&[1]).unwrap();
    assert!(!bench.extent.is_in_doubt(), "the last try was answered");
}

#[test]
fn a_write_dropped_half_way_puts_its_extent_in_doubt_and_a_read_does_not() {
    let bench = Bench::new();
    bench.world.answers(|asked| match asked.kind {
        Kind::Read | Kind::Write => Answer::Never,
        _ => Answer::Serve,
    });
    let mut context = Context::from_waker(Waker::noop());
    let mut reading = Box::pin(bench.core.read(&bench.extent, 0, bench.core.buffer(3).unwrap()));
    assert!(reading.as_mut().poll(&mut context).is_pending());
    drop(reading);
    assert!(!bench.extent.is_in_doubt());
    let mut writing = Box::pin(bench.core.write(&bench.extent, 0, bench.core.buffer(3).unwrap()));
    assert!(writing.as_mut().poll(&mut context).is_pending());
    assert!(!bench.extent.is_in_doubt(), "it may still end well");
    drop(writing);
    assert!(bench.extent.is_in_doubt());
}

#[test]
fn a_slow_answer_of_a_node_that_was_not_given_up_is_waited_for() {
    let bench = Bench::new();
    bench.world.store(bench.extent.region().id, &[1, 2, 3]);
    bench.world.answers(only(Kind::Read, Answer::Late(4 * LOOK_EVERY)));
    assert_eq!(bench.read(3).unwrap(), [1, 2, 3]);
    assert_eq!((bench.asked(Kind::Connect), bench.asked(Kind::Read)), (1, 1));
}

#[test]
fn an_operation_that_waits_ends_soon_after_its_node_is_given_up() {
    for kind in [Kind::Attach, Kind::Write] {
        let bench = Bench::new();
        let node = bench.node.clone();
        bench.world.answers(move |asked| {
            if asked.kind == kind {
                node.give_up(); // by another session
                return Answer::Never;
            }
            Answer::Serve
        });
        assert_eq!(bench.write(&[1]), Err(LOST));
        assert!(bench.world.now().0 <= LOOK_EVERY.as_millis() as u64, "{:?}", bench.world.now());
        assert_eq!(bench.extent.is_in_doubt(), kind == Kind::Write);
    }
}

#[test]
fn a_region_that_is_being_moved_is_asked_for_until_it_is_there() {
    let bench = Bench::new();
    bench.world.answers(|asked| match asked.kind {
        Kind::Attach if asked.before < 3 => Answer::Refuse(Refusal::Busy),
        _ => Answer::Serve,
    });
    bench.write(&[1, 2, 3]).unwrap();
    assert_eq!(bench.world.stored(bench.extent.region().id, 3), [1, 2, 3]);
    assert_eq!(bench.leases.failures(), 0, "the node answers");
}

#[test]
fn a_region_is_asked_for_no_longer_than_moving_may_take_or_its_lease_lasts() {
    let busy = Err(AccessError::Refused(OpError::Refused(Refusal::Busy)));
    let bench = Bench::new();
    bench.world.answers(only(Kind::Attach, Answer::Refuse(Refusal::Busy)));
    assert_eq!(bench.write(&[1]), busy);
    assert_eq!(bench.world.now(), RETRIES.while_moved);

    let bench = Bench::new();
    let region = bench.extent.region().clone();
    bench.world.answers(move |asked| {
        if asked.kind == Kind::Attach && asked.before == 1 {
            region.retire();
        }
        if asked.kind == Kind::Attach { Answer::Refuse(Refusal::Busy) } else { Answer::Serve }
    });
    assert_eq!(bench.write(&[1]), busy);
    assert_eq!(bench.asked(Kind::Attach), 2, "the lease had ended then");
}

#[test]
fn an_idle_session_detaches_regions_that_have_ended_and_leaves_lost_nodes() {
    let Bench { world, node: here, core, extent: first, .. } = Bench::new();
    let lost = node(2);
    let (second, on_lost) = (extent(&here, 1, 1), extent(&lost, 0, 1));
    for extent in [&first, &second, &on_lost] {
        world.write(&core, extent, &[1]).unwrap();
    }
    let idle = Confined(core);
    idle.let_go();
    assert_eq!((world.asked(NodeId(1), Kind::Detach), world.connections(NodeId(2))), (0, 1));
    first.region().retire();
    idle.let_go();
    idle.let_go();
    assert_eq!((world.asked(NodeId(1), Kind::Detach), world.connections(NodeId(2))), (1, 1));
    lost.give_up();
    idle.let_go();
    assert_eq!((world.connections(NodeId(1)), world.connections(NodeId(2))), (1, 0));
    assert_eq!(world.read(&idle.0, &second, 1).unwrap(), [1]);
    assert_eq!(world.asked(NodeId(1), Kind::Attach), 2, "the other region was still attached");
}

#[test]
fn a_transfer_of_the_directory_that_fails_or_hangs_ends_and_such_a_write_leaves_a_doubt() {
    for mood in [Mood::Works, Mood::Fails, Mood::Hangs, Mood::IsGone] {
        let bench = Bench::new();
        let giver = Storage::new(1, EXTENT_BYTES);
        let region = block_on(bench.core.endpoint(), Overflowing::new(giver.clone()).allocate(EXTENT_BYTES));
        let extent = Extent::of_guest(region.unwrap(), 0, 0);
        *giver.mood.lock() = mood;
        let result = match mood {
            Mood::Works => Ok(()),
            Mood::Fails | Mood::Hangs => Err(AccessError::Storage),
            Mood::IsGone => Err(AccessError::Short { node: OVERFLOW_NODE }),
        };
        let read = bench.world.read(&bench.core, &extent, 3).map(drop);
        assert_eq!((read, extent.is_in_doubt()), (result, false), "{mood:?}");
        assert_eq!(bench.world.write(&bench.core, &extent, b"far"), result, "{mood:?}");
        assert_eq!(extent.is_in_doubt(), result == Err(AccessError::Storage), "{mood:?}");
        if mood == Mood::Works {
            assert_eq!(bench.world.read(&bench.core, &extent, 3).unwrap(), b"far");
        }
    }
}
