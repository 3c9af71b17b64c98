//! `farpool sim`: the system in a simulated world, over many seeds, or broken on purpose.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use farpool_sim::{Catch, RunReport, Scenario, Sweep, find_scenario, hunt, run_guarded, sweep};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::errors::UsageError;
use crate::output::{tell, tell_json};

/// Seeds unless told otherwise: some seconds.
const DEFAULT_SEEDS: u64 = 2_000;
/// Runs that are over sooner need no progress bar.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// Run the system in a simulated world in which much goes wrong
///
/// One seed is one history, bit for bit. A seed that fails is named with the command that replays it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool sim fabric --seeds 10000         operations, fences and incarnations under faults
  farpool sim pool --seeds 10000           leases under faults
  farpool sim file --seeds 5000            files under faults
  farpool sim pool --seed 17               one seed, with a readable trace
  farpool sim pool --mutation all          break the code on purpose; each fault must be noticed")]
pub struct SimArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// One-sided operations: order, visibility, refusals, fences, incarnations, torn copies
    #[command(after_help = "\
Mutations:
  no-fence                           a fence stops nobody
  no-scrub                           what an earlier holder wrote is there again
  epoch-word-not-checked-after-copy  shared memory: an operation is done when its copy is
  old-incarnation-still-applied      a node serves an older incarnation after answering a newer one
  duplicate-completion               a completion is delivered twice
  fence-flag-ignored                 a node lets fenced operations pass reads and atomics
  reader-trusts-torn-copy            a reader takes a record without looking at its checksum")]
    Fabric(SeedArgs),
    /// Brokers, nodes, owners and clients: leases, grants, renewals, crashes, partitions, lost messages,
    /// wrong clocks
    #[command(after_help = "\
Mutations:
  client-trusts-its-lease-past-its-own-clock  a client goes on until its node refuses it
  new-broker-forgets-what-a-node-holds        a broker that was started again takes all regions for free
  epoch-reused-after-restart                  a node that was started again counts from the beginning
  region-lent-before-the-last-grant-is-gone   a lease's end fences its owner, not the clients that it let in
  node-answers-a-renewal-it-does-not-count    a node says that a lease goes on, and does not tell its table")]
    Pool(SeedArgs),
    /// Files: reads, writes, holes and moves while nodes, clients and connections fail
    #[command(after_help = "\
Mutations:
  checksum-skipped                     a block passes whatever it holds
  block-word-unlocked-before-the-data  a write is done as soon as it is posted
  lost-write-acknowledged              a write is done, and nothing was sent
  extent-reused-too-early              an extent is written again while a dead write may still land there
  size-not-shared                      a file that is written past its end is not longer for it
  grown-size-not-told                  a process makes a file longer directly, and the kernel is not told before it uses its own size
  growth-not-taken-back                a process goes on making a file longer after the right to do so was taken back
  cut-tail-shows-again                 what is cut off of a block is there again once the file grows
  failed-write-clears-the-file         a write that failed takes along what the file held there, not only what lay past its end
  write-in-doubt-taken-for-none        the old word stands after a write of which nobody knows
  stale-parity                         a write leaves the parity as it is
  rebuild-misses-a-late-write          others write into an extent while it is made anew elsewhere
  acceleration-not-revoked             a process works on a file directly that is closed to it
  freed-extent-not-written-down        the next owner takes an extent for a file's that had given it up
  locks-of-a-dead-owner-not-settled    the next owner leaves blocks locked that the dead one was writing
  late-write-of-a-dead-owner-forgotten what the dead owner was writing to is used again at once
  refused-connection-taken-for-death   a node that refuses connections is given up, though it answers renewals")]
    File(SeedArgs),
    /// Transactions: snapshots, commits and conflicts on records of several nodes, slow, torn and out of step
    #[command(after_help = "\
Mutations:
  own-slot-patched-into-the-cut          a session adds its own last commit to a cut, instead of waiting for one that has it
  begin-from-unpublished-scan            a transaction takes the slots' words themselves for its snapshot
  validation-skipped                     a record counts as locked whatever was found there
  checksum-off                           data are taken as they are found
  installed-before-kept                  a new version is written before the old one is in its ring
  visibility-before-install              a commit is shown before it is installed
  lock-bit-ignored                       a record that somebody has locked is locked again
  lock-before-intent                     records are locked before it is written down what they held
  locks-released-before-fence            what a client has left is undone before its grants are fenced
  slot-reused-before-rollback            a slot has its next client before what the last one left is undone
  partitions-read-one-after-another      several parts of an oracle are read once, whatever was published meanwhile
  publish-out-of-order                   a publisher's next cut has less of some slots than the one before
  one-log-copy-only                      a client writes its intents to one copy of its log only
  slot-wrapped                           a slot whose timestamps are used up begins again in the same generation
  log-freed-before-shown                 the log's room for a commit is given back when it is over, rather than when it is shown
  verdict-without-head                   who looks after a slot writes his verdicts without the heads of which they are
  undone-header-before-data              who undoes a commit unlocks a record before its data are back
  generation-not-skipped                 who looks after a slot lets it go on behind its word, with counts that may have been used
  counts-of-vanished-commits-used-again  a slot's next client begins behind its word, not behind what the last one has used
  busy-forgotten                         a node carries out what follows an access that it has refused since the memory was being moved
  moved-bit-ignored                      a place of a ring is written again though the version there was not moved, and may be needed
  gc-ahead-of-the-horizon                the horizon is the newest cut, whatever snapshots there are
  marked-as-moved-before-it-is-copied    a place of a ring is marked as moved before the version is copied
  moved-version-given-up-too-early       the mover gives up what the newest cut sees replaced
  snapshot-announced-after-it-is-taken   a worker takes its first snapshots before it announces itself
  open-snapshots-not-announced           a worker announces how far it has come while it still has older snapshots
  block-reused-before-horizon            a block is written again though the version that points to it may be needed
  payload-after-intent                   a payload is written to its block only when the commit that points to it is shown
  pointer-checksum-off                   a payload is taken as it is found in its block
  chunk-taken-from-the-living            a chunk is taken over though its owner has a seat
  counts-not-shown-used-again            a recovered slot begins again with counts that were given out and left no trace")]
    Txn(SeedArgs),
    /// Hash tables over one-sided operations: keys inserted and found while buckets split and clients die
    #[command(after_help = "\
Mutations:
  bucket-split-without-closing    a bucket is split while others may still put something into it
  duplicate-insert-across-a-split who has looked for a key in a bucket does not look in what it was split into
  lost-entry-not-read-again       who was not the first to fill an entry takes the next, whoever it was
  any-empty-entry-taken           a key is put into any empty entry, not the first
  entry-before-its-key            an entry names a record before its key is written
  hash-taken-for-the-key          what fits the hash is the key
  number-in-doubt-used-again      a number of which nobody knows whether it was named is used for another key")]
    Hash(SeedArgs),
    /// Compute servers of a database: seats, recovery of the dead, roles, transactions and changes of the
    /// catalog, while all of them fail
    #[command(after_help = "\
Mutations:
  list-after-other-grants              a member uses other regions before it has listed its grants
  carer-not-checked                    a seat is recovered although another live member is already recovering it
  silent-carer-not-shut-out            a member that takes over from an unresponsive recoverer does not evict it first
  seat-not-looked-at-behind-the-fence  after fencing a member, the recoverer does not check that the seat is still that member's
  seat-left-while-on-duty              a seat is given back while its member still performs a duty for all members
  log-copy-without-verdicts            what a member left is rolled back with one copy of its log, and the other copy is used again
  roles-freed-before-fence             a member's roles are freed before it is evicted
  seat-freed-before-recovery           a seat is freed before what its member left is rolled back
  seat-freed-before-words-forgotten    a seat is freed before the announcements of its workers are removed
  beats-while-a-duty-stands-still      a member sends heartbeats while its publisher, its collector or its recoverer stands still
  beats-while-a-commit-stands-still    a member sends heartbeats while one of its threads stands still in the middle of a commit
  tombstone-freed-early                the memory of a dropped table is reused while snapshots may have the table
  memory-reused-uncleared              the memory of a dropped table is reused without being cleared
  busy-client-forgotten                the word of a client is cleared while it runs a transaction
  catalog-version-not-looked-at        a transaction uses a table without checking that it still exists, though the catalog has changed
  tables-missing-from-collector        the collector does not learn which tables there are")]
    Members(SeedArgs),
}

#[derive(Debug, clap::Args)]
struct SeedArgs {
    /// Run so many seeds, from zero on; with --mutation, at most so many for each
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SEEDS, conflicts_with = "seed",
        value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Run this seed only and print what happened
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Break the code in this way (or in `all` of them) and see whether that is noticed
    #[arg(long, value_name = "NAME|all")]
    mutation: Option<String>,

    /// With --seed, write the history of transactions there, in Elle's JSON form of list-append: `adya check
    /// -c snapshot-isolation FILE`
    #[arg(long, value_name = "FILE", requires = "seed")]
    history: Option<PathBuf>,

    /// Print facts for programs
    #[arg(long)]
    json: bool,
}

/// Runs what was asked for; an error if a checker found something, or missed a fault that was put there.
pub fn run(args: SimArgs) -> Result<()> {
    let (name, args) = match args.what {
        What::Fabric(args) => ("fabric", args),
        What::Pool(args) => ("pool", args),
        What::File(args) => ("file", args),
        What::Txn(args) => ("txn", args),
        What::Hash(args) => ("hash", args),
        What::Members(args) => ("members", args),
    };
    let scenario = find_scenario(name).expect("every subcommand has its scenario");
    let mutations = chosen(scenario, args.mutation.as_deref())?;
    match (args.seed, mutations) {
        (Some(seed), None) => replay(scenario, seed, None, &args),
        (Some(seed), Some(mutations)) if mutations.len() == 1 => {
            replay(scenario, seed, Some(mutations[0]), &args)
        }
        (Some(_), Some(_)) => Err(UsageError("--seed replays one mutation: name it".into()).into()),
        (None, None) => sweep_all(scenario, args.seeds, args.json),
        (None, Some(mutations)) => hunt_all(scenario, &mutations, args.seeds, args.json),
    }
}

fn chosen(scenario: &Scenario, wanted: Option<&str>) -> Result<Option<Vec<&'static str>>> {
    let Some(wanted) = wanted else { return Ok(None) };
    if wanted == "all" {
        return Ok(Some(scenario.mutations.to_vec()));
    }
    match scenario.mutations.iter().find(|mutation| **mutation == wanted) {
        Some(mutation) => Ok(Some(vec![mutation])),
        None => {
            let known = scenario.mutations.join(", ");
            Err(UsageError(format!("no mutation is called {wanted}: try all, {known}")).into())
        }
    }
}

fn replay(scenario: &Scenario, seed: u64, mutation: Option<&'static str>, args: &SeedArgs) -> Result<()> {
    let report = run_guarded(scenario, seed, mutation, !args.json || args.history.is_some());
    if let Some(path) = &args.history {
        if report.history.is_empty() {
            return Err(UsageError(format!("{} has no history of transactions", scenario.name)).into());
        }
        let lines = report.history.join("\n") + "\n";
        std::fs::write(path, lines).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.json {
        tell_json(&report)?;
    } else {
        report.trace.iter().try_for_each(tell)?;
        tell(described(&report))?;
        let mut violations = report.violations.iter();
        violations.try_for_each(|violation| tell(format!("violation: {violation}")))?;
    }
    match (report.violations.is_empty(), mutation) {
        (true, None) | (false, Some(_)) => Ok(()),
        (false, None) => bail!("seed {seed} broke a promise"),
        (true, Some(mutation)) => bail!("seed {seed} does not notice {mutation}; others may"),
    }
}

fn described(report: &RunReport) -> String {
    let RunReport { seed, events, operations, virtual_us, trace_hash, .. } = report;
    format!(
        "seed {seed}: {operations} operations, {events} events in {virtual_us} us, history {trace_hash:016x}"
    )
}

#[derive(Serialize)]
struct SweepFacts<'a> {
    scenario: &'a str,
    seconds: f64,
    #[serde(flatten)]
    sweep: &'a Sweep,
}

fn sweep_all(scenario: &Scenario, seeds: u64, json: bool) -> Result<()> {
    let started = Instant::now();
    let bar = Bar::new(seeds, scenario.name);
    let swept = sweep(scenario, 0..seeds, processors(), &|| bar.advance());
    drop(bar);
    let seconds = started.elapsed().as_secs_f64();
    if json {
        tell_json(&SweepFacts { scenario: scenario.name, seconds, sweep: &swept })?;
    } else {
        let Sweep { operations, events, hash, .. } = &swept;
        tell(format!(
            "{seeds} seeds in {seconds:.1} s: {operations} operations, {events} events, histories {hash:016x}"
        ))?;
        for failure in &swept.failures {
            tell(format!("seed {} fails: {}", failure.seed, failure.violations.join("; ")))?;
            tell(format!("  replay: farpool sim {} --seed {}", scenario.name, failure.seed))?;
        }
    }
    match swept.failures.first() {
        None => Ok(()),
        Some(first) => bail!(
            "{} of {seeds} seeds failed; replay the first: farpool sim {} --seed {}",
            swept.failed,
            scenario.name,
            first.seed
        ),
    }
}

#[derive(Serialize)]
struct HuntFacts<'a> {
    scenario: &'a str,
    mutations: &'a [Catch],
}

/// How many seeds that notice a mutation are shown.
const CATCHES: usize = 3;

fn hunt_all(scenario: &Scenario, mutations: &[&'static str], seeds: u64, json: bool) -> Result<()> {
    let mut catches = Vec::new();
    for &mutation in mutations {
        let bar = Bar::new(seeds, mutation);
        // What a broken program panics with is a catch like others, not something to read.
        let quiet = Quiet::new();
        let catch = hunt(scenario, mutation, 0..seeds, CATCHES, processors(), &|| bar.advance());
        drop((quiet, bar));
        if !json {
            tell(match &catch.violation {
                Some(violation) => format!("{mutation}: caught by seeds {:?}: {violation}", catch.caught_by),
                None => format!("{mutation}: NOT noticed in {} seeds", catch.seeds_run),
            })?;
        }
        catches.push(catch);
    }
    if json {
        tell_json(&HuntFacts { scenario: scenario.name, mutations: &catches })?;
    }
    let missed: Vec<&str> =
        catches.iter().filter(|catch| catch.caught_by.is_empty()).map(|catch| catch.mutation).collect();
    if missed.is_empty() { Ok(()) } else { bail!("went unnoticed: {}", missed.join(", ")) }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A progress bar for runs that take long, where somebody looks.
struct Bar(ProgressBar);

impl Bar {
    fn new(seeds: u64, what: &str) -> Self {
        let bar = ProgressBar::new(seeds).with_message(what.to_string());
        let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} seeds, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Bar(bar)
    }

    fn advance(&self) {
        if self.0.elapsed() > BAR_AFTER {
            self.0.inc(1);
        } else {
            self.0.update(|state| state.set_pos(state.pos() + 1));
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

type PanicHook = Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Sync + Send>;

/// While it lives, panics are not printed.
struct Quiet(Option<PanicHook>);

impl Quiet {
    fn new() -> Self {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        Quiet(Some(hook))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(hook) = self.0.take() {
            std::panic::set_hook(hook);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutations_are_chosen_by_name_and_wrong_names_tell_the_right_ones() {
        let scenario = find_scenario("fabric").unwrap();
        assert_eq!(chosen(scenario, None).unwrap(), None);
        assert_eq!(chosen(scenario, Some("no-fence")).unwrap(), Some(vec!["no-fence"]));
        assert_eq!(chosen(scenario, Some("all")).unwrap().unwrap().len(), scenario.mutations.len());
        let error = chosen(scenario, Some("nothing")).unwrap_err().to_string();
        assert!(error.contains("no-fence"), "{error}");
    }

    #[test]
    fn help_names_every_mutation() {
        use clap::CommandFactory;
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            args: SimArgs,
        }
        let mut program = Program::command();
        program.build();
        for subcommand in program.get_subcommands_mut().filter(|command| command.get_name() != "help") {
            let scenario = find_scenario(subcommand.get_name()).expect("each subcommand has its scenario");
            let help = subcommand.render_long_help().to_string();
            for mutation in scenario.mutations {
                assert!(help.contains(mutation), "{mutation}: {help}");
            }
        }
    }

    #[test]
    fn a_mutation_that_a_seed_does_not_notice_is_a_failure() {
        let scenario = find_scenario("fabric").unwrap();
        assert!(hunt_all(scenario, &["no-scrub"], 0, true).is_err());
        assert!(hunt_all(scenario, &["no-scrub"], 20, true).is_ok());
    }
}
