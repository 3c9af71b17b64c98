//! Runs scenarios over seeds.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farpool_fabric::sim::{Executor, RunEnd, World};
use serde::{Serialize, Serializer};

/// The most failing seeds that are kept. One is enough to find the fault; a few show whether failures are
/// alike.
const FAILURES_KEPT: usize = 10;

/// The result of one seed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RunReport {
    /// The seed.
    pub seed: u64,
    /// The violations that the checker found; empty if there are none.
    pub violations: Vec<String>,
    /// The run ended in a panic; other violations may be consequences of it.
    pub panicked: bool,
    /// Hash of the whole history.
    #[serde(serialize_with = "as_hex")]
    pub trace_hash: u64,
    /// Events in the world.
    pub events: u64,
    /// Operations that were judged.
    pub operations: u64,
    /// The time that has passed in the world.
    pub virtual_us: u64,
    /// A readable trace, if one was asked for.
    #[serde(skip)]
    pub trace: Vec<String>,
    /// What clients asked and were answered, in a form for independent checkers, one operation a line. Empty
    /// unless the scenario has such a form and a trace was asked for.
    #[serde(skip)]
    pub history: Vec<String>,
}

impl RunReport {
    /// The report of a world at its end. The scenario adds the seed, the operations and its judgement.
    pub(crate) fn of_world(world: &World) -> RunReport {
        RunReport {
            trace_hash: world.trace_hash(),
            events: world.trace_events(),
            virtual_us: world.now_ns() / 1_000,
            trace: world.trace_lines(),
            ..RunReport::default()
        }
    }
}

/// Something to simulate, with the ways to break it.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// The name on the command line.
    pub name: &'static str,
    /// Names of the faults that the checker must notice.
    pub mutations: &'static [&'static str],
    /// Runs a seed, broken in one of these ways or in none, and keeps a readable trace if asked to.
    pub run: fn(seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport,
}

/// All scenarios.
const SCENARIOS: &[Scenario] = &[
    crate::FABRIC,
    crate::POOL,
    crate::FILE,
    crate::TXN,
    crate::HASH,
    crate::INDEX,
    crate::MEMBERS,
    crate::CACHE,
];

/// Finds a scenario by its name.
pub fn find_scenario(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}

/// Runs one seed; a panic of the code under test is a violation like any other.
pub fn run_guarded(scenario: &Scenario, seed: u64, mutation: Option<&'static str>, trace: bool) -> RunReport {
    // Unwind safe: nothing looks at the state of a run after a panic.
    catch_unwind(AssertUnwindSafe(|| (scenario.run)(seed, mutation, trace))).unwrap_or_else(|panic| {
        RunReport { seed, violations: vec![described(&*panic)], panicked: true, ..RunReport::default() }
    })
}

/// Runs a world to its end. Returns whether it panicked and what went wrong, if anything. Panics are caught
/// here, so that a run that panics has a trace as well.
pub(crate) fn run_to_end(
    mut executor: Executor,
    until_ns: u64,
    clients_left: impl Fn() -> u32,
) -> (bool, Option<String>) {
    match catch_unwind(AssertUnwindSafe(|| executor.run(until_ns))) {
        Ok(RunEnd::Finished) => (false, None),
        Ok(end) => (false, Some(format!("a task hangs: {end:?} with {} clients left", clients_left()))),
        Err(panic) => (true, Some(described(&*panic))),
    }
}

/// Describes a panic as a violation.
fn described(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or_default())
}

/// The result of many seeds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sweep {
    /// Seeds that were run.
    pub seeds: u64,
    /// Seeds that failed.
    pub failed: u64,
    /// The failures with the lowest seeds, a few at most.
    pub failures: Vec<RunReport>,
    /// Operations judged, over all seeds.
    pub operations: u64,
    /// Events, over all seeds.
    pub events: u64,
    /// Hash over the hashes of all histories; it does not depend on the order in which the seeds ran.
    #[serde(serialize_with = "as_hex")]
    pub hash: u64,
}

/// Serialises a hash as hexadecimal text: many readers of JSON treat numbers as floating point, with 53 bits.
fn as_hex<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{hash:016x}"))
}

impl Sweep {
    fn add(&mut self, report: RunReport) {
        self.seeds += 1;
        self.operations += report.operations;
        self.events += report.events;
        self.hash = self.hash.wrapping_add(report.trace_hash ^ report.seed);
        if !report.violations.is_empty() {
            self.failed += 1;
            self.failures.push(report);
            self.failures.sort_by_key(|failure| failure.seed);
            self.failures.truncate(FAILURES_KEPT);
        }
    }
}

/// Runs all `seeds` on `threads` threads; calls `progress` after each.
pub fn sweep(scenario: &Scenario, seeds: Range<u64>, threads: usize, progress: &(dyn Fn() + Sync)) -> Sweep {
    let total = Mutex::new(Sweep::default());
    in_parallel(seeds, threads, |seed| {
        let report = run_guarded(scenario, seed, None, false);
        total.lock().expect("runs are guarded").add(report);
        progress();
        true
    });
    total.into_inner().expect("runs are guarded")
}

/// A fault and the seeds that noticed it.
#[derive(Clone, Debug, Serialize)]
pub struct Catch {
    /// The fault.
    pub mutation: &'static str,
    /// Seeds run before enough of them had noticed it.
    pub seeds_run: u64,
    /// The first few seeds that noticed. If there are none, the checker does not detect this fault.
    pub caught_by: Vec<u64>,
    /// The first violation that the first of them reported.
    pub violation: Option<String>,
}

/// Breaks the code under test in one way and looks for seeds that notice, until there are `enough`. A seed
/// has noticed when its checker complains; a panic does not count. A seed that also fails without the fault
/// does not count either.
pub fn hunt(
    scenario: &Scenario,
    mutation: &'static str,
    seeds: Range<u64>,
    enough: usize,
    threads: usize,
    progress: &(dyn Fn() + Sync),
) -> Catch {
    let caught: Mutex<Vec<RunReport>> = Mutex::default();
    let run = AtomicU64::new(0);
    in_parallel(seeds, threads, |seed| {
        let report = run_guarded(scenario, seed, Some(mutation), false);
        run.fetch_add(1, Ordering::Relaxed); // a count; joining the threads orders it
        progress();
        let complains = !report.violations.is_empty() && !report.panicked;
        let noticed = complains && run_guarded(scenario, seed, None, false).violations.is_empty();
        let mut caught = caught.lock().expect("runs are guarded");
        if noticed {
            caught.push(report);
        }
        caught.len() < enough
    });
    let mut caught = caught.into_inner().expect("runs are guarded");
    caught.sort_by_key(|report| report.seed);
    Catch {
        mutation,
        seeds_run: run.into_inner(),
        caught_by: caught.iter().map(|report| report.seed).take(enough).collect(),
        violation: caught.first().and_then(|report| report.violations.first().cloned()),
    }
}

/// Calls `body` for each seed until it returns `false`. Seeds are taken in order, but several threads may
/// finish them in another order.
fn in_parallel(seeds: Range<u64>, threads: usize, body: impl Fn(u64) -> bool + Sync) {
    let next = AtomicU64::new(seeds.start);
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                // Relaxed: the loop shares only these two words, and neither guards other data. Joining the
                // threads orders the rest.
                while !enough.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    if !body(seed) {
                        enough.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: Range<u64> = 0..10;

    fn hunted(run: fn(u64, Option<&'static str>, bool) -> RunReport) -> Vec<u64> {
        let scenario = Scenario { name: "test", mutations: &["a fault"], run };
        hunt(&scenario, "a fault", SEEDS, 3, 1, &|| {}).caught_by
    }

    fn complaint(seed: u64, complains: bool) -> RunReport {
        let violations = if complains { vec!["wrong".to_owned()] } else { Vec::new() };
        RunReport { seed, violations, ..RunReport::default() }
    }

    #[test]
    fn only_seeds_that_pass_without_the_fault_catch_it() {
        assert_eq!(hunted(|seed, mutation, _| complaint(seed, mutation.is_some() && seed > 4)), [5, 6, 7]);
        assert_eq!(
            hunted(|seed, _, _| complaint(seed, true)),
            [0; 0],
            "they complain without the fault, too"
        );
        assert_eq!(hunted(|seed, _, _| complaint(seed, false)), [0; 0]);
    }

    #[test]
    fn a_panic_fails_a_run_and_catches_no_fault() {
        let panics = |seed, mutation: Option<_>, _| {
            assert!(mutation.is_none(), "a panic, not a complaint of the checker");
            complaint(seed, false)
        };
        assert_eq!(hunted(panics), [0; 0]);
        let scenario = Scenario { name: "test", mutations: &[], run: |_, _, _| panic!("at once") };
        assert_eq!(sweep(&scenario, SEEDS, 2, &|| {}).failed, 10);
    }
}
