//! The thread that ends leases on time, makes fenced regions free again, watches the pressure on the
//! machine's memory, and gives memory back to the machine because of that or because the node was resized.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::Scrubbed;
use farpool_lease::Lending;

use crate::core::Core;
use crate::memory::{available_memory, measure};
use crate::pressure::{Measured, Pressure};

/// Longest sleep of the keeper, and how often it measures the pressure on memory and checks whether memory is
/// still in use.
const TICK: Duration = Duration::from_millis(200);

/// How often the keeper measures while the reserve is not available: other processes may be taking memory
/// fast.
const TICK_UNDER_PRESSURE: Duration = Duration::from_millis(20);

/// Pause after the keeper failed to get memory for a withdrawn region, or for the spare to which fences move
/// regions. An attempt takes as long as touching all pages of a region, and meanwhile this thread
/// ends no lease.
const RESTORE_PAUSE: Duration = Duration::from_secs(5);

/// The keeper's thread; ends when dropped.
pub(crate) struct Keeper {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the keeper of a core. A message on `woken` says that there is something to do. With a reserve
    /// of 0, it does not watch the pressure on memory.
    pub(crate) fn start(core: Arc<Core>, woken: Receiver<()>, reserve_bytes: u64) -> std::io::Result<Self> {
        let (stop, stopped) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("node-keeper".into())
            .spawn(move || keep(&core, &woken, &stopped, reserve_bytes))?;
        Ok(Keeper { stop: Some(stop), thread: Some(thread) })
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

fn keep(core: &Core, woken: &Receiver<()>, stopped: &Receiver<()>, reserve_bytes: u64) {
    let mut watch = Watch::new(reserve_bytes);
    let mut more = false;
    let (mut restore_at, mut restore_spare_at) = (Instant::now(), Instant::now());
    loop {
        let due = core.leases.lock().next_deadline();
        let until_due = due.map_or(TICK, |due| Duration::from_millis(due.since(core.now()).0));
        let until_look =
            watch.as_ref().map_or(TICK, |watch| watch.next.saturating_duration_since(Instant::now()));
        let sleep = if more { Duration::ZERO } else { until_due.min(until_look).min(TICK) };
        if woken.recv_timeout(sleep) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        if !matches!(stopped.try_recv(), Err(TryRecvError::Empty)) {
            return;
        }
        let Ok(ended) = core.end(|leases| Ok::<_, Infallible>(leases.expire(core.now())));
        for lease in ended {
            tracing::info!(
                region = lease.region,
                epoch = %lease.epoch,
                "lease ended: not renewed, or taken back"
            );
        }
        if let Some(watch) = &mut watch {
            watch.look(core, Instant::now(), measure);
        }
        // One region at a time, so that leases end on time meanwhile.
        more = return_one(core) || withdraw_one(core);
        restore_at = get_memory(restore_at, Instant::now, "a region that was withdrawn", || {
            more |= restore_one(core, reserve_bytes, available_memory)?;
            Ok(())
        });
        let spare = "the next fence of a shared region";
        restore_spare_at = get_memory(restore_spare_at, Instant::now, spare, || core.regions.restore_spare());
    }
}

/// The watch over the machine's memory.
struct Watch {
    pressure: Pressure,
    /// When to measure next.
    next: Instant,
    /// The last measurement failed, which was logged.
    failed: bool,
}

impl Watch {
    /// A watch that leaves so much memory to the machine; none if that is nothing.
    fn new(reserve_bytes: u64) -> Option<Self> {
        let watch = || Watch { pressure: Pressure::new(reserve_bytes), next: Instant::now(), failed: false };
        (reserve_bytes > 0).then(watch)
    }

    /// Measures the pressure if that is due, and has the core act on it.
    fn look(&mut self, core: &Core, now: Instant, measure: impl FnOnce() -> std::io::Result<Measured>) {
        if now < self.next {
            return;
        }
        self.next = now + TICK;
        match measure() {
            Ok(measured) => {
                self.failed = false;
                if self.pressure.is_short(&measured) {
                    self.next = now + TICK_UNDER_PRESSURE;
                }
                core.apply_pressure(&mut self.pressure, measured);
            }
            Err(error) if !self.failed => {
                self.failed = true;
                tracing::error!(%error, "cannot measure the pressure on memory: the node gives none back by itself");
            }
            Err(_) => {}
        }
    }
}

/// Gets memory for `what` if it is missing, but not before `at`. Returns when to do so next.
fn get_memory(
    at: Instant,
    now: impl Fn() -> Instant,
    what: &str,
    get: impl FnOnce() -> std::io::Result<()>,
) -> Instant {
    if now() < at {
        return at;
    }
    let Err(error) = get() else { return at };
    tracing::error!(%error, "no memory for {what}; trying again in {RESTORE_PAUSE:?}");
    now() + RESTORE_PAUSE
}

/// Withdraws a free region if the node has more than its limit. `false`: there is none, or it has to be
/// tried again later.
fn withdraw_one(core: &Core) -> bool {
    let free = core.leases.lock().begin_withdrawal();
    free.is_some_and(|lease| withdraw(core, lease))
}

/// Gets memory for a withdrawn region if the node has fewer than its limit and the machine keeps its reserve.
/// `false`: no region is to be restored.
fn restore_one(
    core: &Core,
    reserve_bytes: u64,
    available_memory: impl FnOnce() -> std::io::Result<u64>,
) -> std::io::Result<bool> {
    let Some(region) = core.leases.lock().next_to_restore() else { return Ok(false) };
    // Without this check, the kernel could end processes to make room.
    let available_bytes = available_memory()?;
    if available_bytes < core.regions.region_bytes().saturating_add(reserve_bytes) {
        let text = format!("only {} MiB are available, and the reserve has to stay", available_bytes >> 20);
        return Err(std::io::Error::new(std::io::ErrorKind::OutOfMemory, text));
    }
    core.regions.restore(region)?;
    core.leases.lock().restored(region);
    core.tell_broker();
    Ok(true)
}

/// Scrubs or withdraws a fenced region. `false`: there is none, or it has to be tried again later.
fn return_one(core: &Core) -> bool {
    let (next, is_excess) = {
        let mut leases = core.leases.lock();
        (leases.begin_scrub(|region| core.regions.is_held(region)), leases.excess() > 0)
    };
    match next {
        Some(lease) if is_excess => withdraw(core, lease),
        Some(lease) => make_free(core, lease),
        None => false,
    }
}

/// Gives the memory of a region that is not lent back to the machine. `false`: it has to be tried again
/// later.
fn withdraw(core: &Core, lease: Lending) -> bool {
    match core.regions.withdraw(lease.region) {
        Scrubbed::Clean => {
            core.leases.lock().withdrawn(lease);
            core.tell_broker();
            true
        }
        Scrubbed::StillHeld => {
            core.leases.lock().not_scrubbed(lease);
            false
        }
    }
}

/// Scrubs a fenced region. `false`: it has to be tried again later.
fn make_free(core: &Core, lease: Lending) -> bool {
    match core.regions.scrub(lease.region) {
        Ok(Scrubbed::Clean) => {
            core.leases.lock().scrubbed(lease);
            core.tell_broker();
            return true;
        }
        Ok(Scrubbed::StillHeld) => {}
        Err(error) => {
            tracing::error!(region = lease.region, %error, "no memory to replace a region's; will try again");
        }
    }
    core.leases.lock().not_scrubbed(lease);
    false
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use farpool_fabric::{Host, Locking, RegionSet};
    use farpool_lease::{LeaseClass, Millis};
    use farpool_wire::control::LeaseRef;
    use farpool_wire::{Epoch, GrantMode, NodeId, OwnerId};

    use super::*;
    use crate::core::tests::{REGION_BYTES, core_without_keeper, reference, wait_until};
    use crate::lender::Lender;
    use crate::logged::logged;

    const OWNER: OwnerId = OwnerId(5);
    const RESERVE: u64 = 3 * REGION_BYTES;

    fn core(regions: RegionSet) -> (Arc<Core>, Keeper) {
        Core::start(NodeId(1), 1, Millis(60_000), regions, 0).unwrap()
    }

    #[test]
    fn nothing_uses_the_memory_any_more_when_the_keeper_is_dropped() {
        let (core, keeper) = core(RegionSet::create(1, 64 << 10, Locking::None, |_| {}).unwrap());
        drop(keeper);
        assert_eq!(Arc::strong_count(&core), 1);
    }

    #[test]
    fn spare_memory_that_a_fence_has_used_is_replaced() {
        const REGION_BYTES: u64 = 7 * 4096; // no other test has regions of this size
        let shared_memories = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let found = open.filter_map(|file| std::fs::metadata(file.path()).ok());
            found.filter(|found| found.len() == REGION_BYTES).count()
        };
        let mut regions = RegionSet::create(1, REGION_BYTES, Locking::None, |_| {}).unwrap();
        regions.keep_spare().unwrap();
        let (core, _keeper) = core(regions);
        assert_eq!(shared_memories(), 2, "the region's and the spare");

        let lease = core.grant(OWNER, LeaseClass::Pinned, 1).remove(0);
        let named = LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap());
        let client = core.add_grant(OWNER, &named, GrantMode::ReadWrite).unwrap();
        drop(core.share(client.lending.region, client.lending.epoch, &client.key).unwrap());
        core.fence_grant(OWNER, &named, client.lending.epoch).unwrap();
        let started = Instant::now();
        while shared_memories() < 2 {
            assert!(started.elapsed() < Duration::from_secs(20), "the spare memory was not replaced");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_node_that_shrinks_gives_memory_back_at_once_and_lends_it_again_when_it_grows() {
        const REGION_BYTES: u64 = 9 * 4096; // no other test has regions of this size
        let memories = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            open.filter_map(|file| std::fs::metadata(file.path()).ok())
                .filter(|it| it.len() == REGION_BYTES)
                .count()
        };
        let (core, _keeper) = core(RegionSet::create(4, REGION_BYTES, Locking::None, |_| {}).unwrap());
        let lease = core.grant(OWNER, LeaseClass::Revocable, 1).remove(0);
        assert_eq!(core.resize(0, Millis(0)).revoked, 1);
        wait_until(|| memories() == 1); // the free regions' memory has gone back
        let named = LeaseRef::new(lease.region, Epoch(lease.epoch), &lease.access_key().unwrap());
        core.release(OWNER, &named).unwrap();
        wait_until(|| memories() == 0); // the lent one's, too
        assert!(core.grant(OWNER, LeaseClass::Revocable, 1).is_empty());
        core.resize(3, Millis(0));
        wait_until(|| core.counts().0.free == 3);
        assert_eq!((memories(), core.grant(OWNER, LeaseClass::Revocable, 4).len()), (3, 3));
    }

    #[test]
    fn a_node_with_many_regions_shrinks_and_grows_without_pauses_between_them() {
        const REGIONS: u32 = 128; // a tick after each would be more than the test waits
        let (core, _keeper) = core(RegionSet::create(REGIONS, 4096, Locking::None, |_| {}).unwrap());
        core.resize(0, Millis(0));
        wait_until(|| core.counts().0.withdrawn == REGIONS);
        core.resize(REGIONS, Millis(0));
        wait_until(|| core.counts().0.free == REGIONS);
    }

    #[test]
    fn a_withdrawn_region_gets_memory_only_if_the_reserve_stays_available() {
        let (core, _woken) = core_without_keeper(60_000);
        core.resize(1, Millis(0));
        assert!(withdraw_one(&core));
        core.resize(2, Millis(0));
        let error = restore_one(&core, RESERVE, || Ok(RESERVE + REGION_BYTES - 1)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory);
        assert_eq!((core.counts().0.free, core.counts().0.withdrawn), (1, 1));
        let restore = || restore_one(&core, RESERVE, || Ok(RESERVE + REGION_BYTES)).unwrap();
        assert!(restore());
        assert_eq!(core.counts().0.free, 2);
        assert!(!restore(), "all regions have memory");
    }

    #[test]
    fn a_fenced_region_goes_to_the_machine_if_the_node_has_more_than_its_limit_and_is_else_free_again() {
        let (core, _woken) = core_without_keeper(60_000);
        let leases = core.grant(OWNER, LeaseClass::Pinned, 2);
        core.resize(1, Millis(0));
        for (lease, (withdrawn, free)) in leases.iter().zip([(1, 0), (1, 1)]) {
            core.release(OWNER, &reference(lease)).unwrap();
            assert!(return_one(&core));
            assert_eq!((core.counts().0.withdrawn, core.counts().0.free), (withdrawn, free));
        }
        assert!(!return_one(&core), "none is on its way back");
    }

    #[test]
    fn memory_is_measured_every_200_ms_and_every_20_ms_while_the_reserve_is_missing() {
        let (core, _woken) = core_without_keeper(60_000);
        let mut watch = Watch::new(RESERVE).unwrap();
        let (start, measurements) = (watch.next, Cell::new(0));
        let mut look_after = |ms, available_bytes| {
            let measure = || {
                measurements.set(measurements.get() + 1);
                Ok(Measured { available_bytes, stalled: Duration::ZERO })
            };
            watch.look(&core, start + Duration::from_millis(ms), measure);
            (measurements.get(), watch.next.duration_since(start).as_millis())
        };
        assert_eq!(look_after(0, RESERVE), (1, 200));
        assert_eq!(look_after(199, 0), (1, 200));
        assert_eq!(look_after(200, RESERVE - 1), (2, 220));
        assert_eq!(core.counts().0.free, 2, "that is another step of the keeper");
        assert_eq!(core.leases.lock().excess(), 1);
        assert_eq!(look_after(219, RESERVE), (2, 220));
        assert_eq!(look_after(230, RESERVE), (3, 430));
    }

    #[test]
    fn an_operator_reads_once_that_memory_cannot_be_measured_until_it_could_be_again() {
        let (core, _woken) = core_without_keeper(60_000);
        let mut watch = Watch::new(RESERVE).unwrap();
        let mut messages = |measured: std::io::Result<Measured>| {
            let due = watch.next;
            logged(|| watch.look(&core, due, || measured)).len()
        };
        let fails = || Err(std::io::ErrorKind::NotFound.into());
        assert_eq!([messages(fails()), messages(fails())], [1, 0]);
        let enough = Measured { available_bytes: RESERVE, stalled: Duration::ZERO };
        assert_eq!([messages(Ok(enough)), messages(fails())], [0, 1]);
    }

    #[test]
    fn the_keeper_pauses_between_attempts_to_get_memory_counted_from_the_end_of_each() {
        let started = Instant::now();
        let (clock, attempts) = (Cell::new(started), Cell::new(0));
        let attempt_takes = Duration::from_secs(1);
        let attempt = |at, result: std::io::Result<()>| {
            get_memory(
                at,
                || clock.get(),
                "a test",
                || {
                    attempts.set(attempts.get() + 1);
                    clock.set(clock.get() + attempt_takes);
                    result
                },
            )
        };
        let no_memory = || Err(std::io::ErrorKind::OutOfMemory.into());
        let next = attempt(started, no_memory());
        assert_eq!((next, attempts.get()), (started + attempt_takes + RESTORE_PAUSE, 1));
        clock.set(next - Duration::from_millis(1));
        assert_eq!((attempt(next, no_memory()), attempts.get()), (next, 1));
        clock.set(next);
        assert_eq!((attempt(next, Ok(())), attempts.get()), (next, 2));
        assert_eq!((attempt(next, Ok(())), attempts.get()), (next, 3), "no pause after a success");
    }
}
