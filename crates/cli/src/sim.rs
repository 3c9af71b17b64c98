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
const DEFAULT_SEEDS: u64 = 5_000;
/// Shorter runs need no progress bar.
const BAR_AFTER: Duration = Duration::from_millis(500);

/// Run the system in a simulated world that injects faults
///
/// A seed always gives the same history, bit for bit. For a seed that fails, the command that replays it is
/// printed.
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
  no-fence                           a fence does not stop its client
  no-scrub                           data of an earlier owner are visible to the next one
  epoch-word-not-checked-after-copy  shared memory: an operation succeeds without a check after its copy
  old-incarnation-still-applied      a node serves an older incarnation after answering a newer one
  duplicate-completion               a completion is delivered twice
  fence-flag-ignored                 a node lets fenced operations pass reads and atomics
  reader-trusts-torn-copy            a reader accepts a record without checking its checksum")]
    Fabric(SeedArgs),
    /// Brokers, nodes, owners and clients: leases, grants, renewals, crashes, partitions, lost messages,
    /// wrong clocks
    #[command(after_help = "\
Mutations:
  client-trusts-its-lease-past-its-own-clock  a client continues until its node refuses it
  new-broker-forgets-what-a-node-holds        a restarted broker takes all regions for free
  epoch-reused-after-restart                  a restarted node counts epochs from the beginning
  region-lent-before-the-last-grant-is-gone   a lease's end fences its owner, but not its other clients
  node-answers-a-renewal-it-does-not-count    a node confirms a renewal, but its table does not record it
  revoked-lease-outlives-its-grace            a lease that was taken back is fenced later than was announced
  fenced-grant-stays-in-the-table             a node fences a grant, but its table keeps the grant
  revocation-not-announced                    a node does not tell an owner of a revocation until it renews
  leases-taken-back-on-two-nodes-at-once      the broker does not notice that a node is taking leases back
  withdrawn-memory-lent-again-uncleared       a node that shrinks keeps a region's memory, and lends it again
                                              when it grows
  resized-node-keeps-its-memory               a node that shrinks keeps the memory of its free regions
  node-under-pressure-keeps-its-memory        a node does not notice that its machine needs memory
  node-lends-no-more-after-pressure           a node does not notice that its machine has memory again")]
    Pool(SeedArgs),
    /// Files: reads, writes, holes and moves while nodes, clients and connections fail
    #[command(after_help = "\
Mutations:
  checksum-skipped                     every block passes its check
  block-word-unlocked-before-the-data  a write is acknowledged as soon as it is posted
  lost-write-acknowledged              a write that was never sent is acknowledged
  extent-reused-too-early              an extent is reused while an in-flight write may still land there
  size-not-shared                      a write past the end of a file does not make the file longer
  grown-size-not-told                  a direct client makes a file longer, and the kernel uses the old size
  growth-not-taken-back                a direct client makes a file longer after its right to do so has ended
  cut-tail-shows-again                 what was cut off from a block is there again once the file grows
  failed-write-clears-the-file         a failed write also clears what lay before the old end of the file
  write-in-doubt-taken-for-none        the old block word stays after a write whose outcome is unknown
  stale-parity                         a write does not update the parity
  rebuild-misses-a-late-write          others write into an extent while it is rebuilt elsewhere
  acceleration-not-revoked             a direct client works on a file that is closed to it
  freed-extent-not-written-down        the next owner assigns an extent to a file that had already freed it
  locks-of-a-dead-owner-not-settled    the next owner leaves blocks locked that the dead owner was writing
  late-write-of-a-dead-owner-forgotten an extent to which the dead owner was writing is reused at once
  refused-connection-taken-for-death   a node that answers renewals is given up for refusing connections
  overflow-handed-out-unreserved       the overflow directory gives a region for which it has no storage
  overflow-read-before-written         the overflow directory acknowledges a write before it can be read
  kept-overflow-not-taken-over         a successor does not find the regions of the overflow directory
  kept-overflow-without-its-data       a successor finds the regions of the overflow directory empty
  moved-back-over-newer                other clients write to an extent while it moves")]
    File(SeedArgs),
    /// Transactions: snapshots, commits and conflicts on records of several nodes, slow, torn and out of step
    #[command(after_help = "\
Mutations:
  own-slot-patched-into-the-cut          a session adds its own last commit to a cut that lacks it
  begin-from-unpublished-scan            a transaction begins from its own scan of the slots' words
  validation-skipped                     a record counts as locked whatever header was found there
  checksum-off                           data are accepted although their checksum is wrong
  visibility-before-install              the slot's watermark reaches a commit before it is installed
  lock-bit-ignored                       a record that another transaction has locked is locked again
  lock-before-intent                     records are locked before the log has their intents
  locks-released-before-fence            what a client has left is rolled back before its grants are fenced
  slot-reused-before-rollback            a slot is reused before what its last client left is rolled back
  partitions-read-one-after-another      the parts of a split oracle are read only once, during publications
  publish-out-of-order                   a publisher's next cut has lower counts of some slots
  one-log-copy-only                      a client writes its intents to one copy of its log only
  slot-wrapped                           a slot whose timestamps are used up restarts in the same generation
  log-freed-before-watermark             log space is freed when a commit finishes, before the watermark
  verdict-without-head                   a recoverer writes its verdicts without the heads of their commits
  undone-header-before-data              a rollback unlocks a record before its data are restored
  generation-not-skipped                 a recovered slot continues right after its word, and may reuse counts
  counts-of-vanished-commits-used-again  a slot's next client begins after the slot's word, and reuses counts
  log-reused-before-horizon              log space is used again though the replaced versions may be needed
  log-of-predecessor-overwritten         the next client of a recovered slot uses all of its log at once
  gc-ahead-of-the-horizon                the horizon is the newest cut, whatever snapshots are open
  snapshot-announced-after-it-is-taken   a worker takes its first snapshots before it announces itself
  open-snapshots-not-announced           a worker announces its progress past snapshots that it still has open
  block-reused-before-horizon            a block is overwritten though a snapshot may need its version
  payload-after-intent                   a payload is written only after the watermark has reached its commit
  pointer-checksum-off                   a payload is accepted although its checksum is wrong
  chunk-taken-from-the-living            a member takes over a chunk whose owner still has a seat
  counts-ahead-of-watermark-reused       a recovered slot reuses counts that were given out without a trace")]
    Txn(SeedArgs),
    /// Hash tables over one-sided operations: keys inserted and found while buckets split and clients die
    #[command(after_help = "\
Mutations:
  bucket-split-without-closing    a bucket is split while others may still insert into it
  duplicate-insert-across-a-split a search ignores the buckets into which its bucket was split
  lost-entry-not-read-again       a client that loses the race for an entry takes the next one unread
  any-empty-entry-taken           a key is inserted at any empty entry, not at the first one
  entry-before-its-key            an entry points to a record before its key is written
  hash-taken-for-the-key          an entry with the right hash counts as the key
  number-in-doubt-used-again      a number that an entry may already have named is used for another key
  unknown-piece-passed-over       an entry of a piece that the client does not know is passed over
  key-committed-without-its-place a record is committed without an entry in the order of keys
  scan-trusts-the-index           a scan takes each entry for a row, whether it is visible or not
  row-committed-without-its-entry a row is committed without an entry in a secondary index
  entry-taken-for-the-key-of-its-row  a row is found under a key that its visible version does not have
  unique-key-twice                a commit does not look again whether another row has got its key
  entry-removed-under-insert      an entry is removed although a transaction is about to need it
  entry-removed-too-early         an entry is removed although a snapshot may need it")]
    Hash(SeedArgs),
    /// Ordered indexes over one-sided operations: records entered, removed and read in order while leaves are
    /// replaced and clients die
    #[command(after_help = "\
Mutations:
  leaf-fences-not-checked              a client uses a leaf that is not for the wanted key
  reserved-entry-survives-replacement  an entry becomes live after its leaf was replaced
  live-before-its-key                  an entry is live before its key is written
  entry-written-unreserved             several clients write their keys to the same empty entry
  entry-removed-under-insert           an entry is removed although an insert has just relied on it
  replaced-leaf-trusted                a client that reads takes a leaf for current that was replaced
  half-split-leaf-without-sibling      the first of two new leaves does not name the second one
  place-of-a-removed-entry-used-again  a new entry gets the word of one that was removed in the same place")]
    Index(SeedArgs),
    /// Compute servers of a database: seats, recovery of dead members, roles, transactions and changes of the
    /// catalog, while servers and connections fail
    #[command(after_help = "\
Mutations:
  list-after-other-grants              a member uses other regions before it has listed its grants
  recoverer-not-checked                a seat is recovered although another member is recovering it
  silent-recoverer-not-evicted         a member that replaces a silent recoverer does not evict it first
  seat-not-looked-at-behind-the-fence  after its fence, the recoverer does not check whose seat it is
  seat-left-while-on-duty              a seat is given back while its member still performs a duty for all
  log-copy-without-verdicts            a copy of a log that a rollback could not read is used again
  roles-freed-before-fence             a member's roles are freed before it is evicted
  seat-freed-before-recovery           a seat is freed before what its member left is rolled back
  seat-freed-before-words-forgotten    a seat is freed before the announcements of its workers are removed
  beats-while-a-duty-stands-still      a member sends heartbeats while one of its duties stands still
  beats-while-a-commit-stands-still    a member sends heartbeats while one of its commits stands still
  tombstone-freed-early                a dropped table's memory is reused while snapshots may have the table
  memory-reused-uncleared              the memory of a dropped table is reused without being cleared
  busy-client-forgotten                the word of a client is cleared while it runs a transaction
  catalog-version-not-looked-at        a transaction uses a table without checking that it still exists
  grown-pieces-not-in-the-maps         the pieces of a table that grows are not entered in the maps
  grown-region-not-listed              a member uses a region that the database got later without listing it
  later-regions-not-opened-by-recoverers  a recoverer does not look for regions that the database got later
  region-given-back-under-members      a region goes back to the pool before all members have left it
  region-given-back-with-tables        a region goes back to the pool although tables have something there
  index-filled-before-all-know-it      an index is filled while transactions are open that do not keep it
  index-searched-before-it-is-ready    an index is searched before all rows are entered")]
    Members(SeedArgs),
    /// The page cache: reads, writes and truncations while pages are evicted and processes stop and die
    #[command(after_help = "\
Mutations:
  header-not-checked-before-admission   a page's header is not looked at again
  no-invalidation                       a writer leaves the entries of its block as they are
  other-bucket-not-invalidated          a writer empties entries in its block's home bucket only
  admission-beside-a-writer             a page is admitted while its block is being written
  slot-reused-before-readers-have-left  a slot is reused at once
  dead-writer-subtracted                a dead writer's header loses one writer, not all
  door-opened-over-an-occupied-place    no wait for places that are occupied before the door opens
  old-entries-trusted                   a new keeper trusts entries that nobody invalidated
  file-id-kept-after-truncation         a file that was changed as a whole keeps its id
  retired-file-hits                     the pages of a file that was unlinked are found
  slot-not-verified                     what is read from a slot is not compared with its checksum
  door-left-open-without-index          a process that cannot use the index leaves the door open
  closed-door-not-noticed               entries are trusted after a caller has closed the door
  door-turned-without-comparing         the keeper turns a door that a caller has closed meanwhile
  outsiders-not-counted                 the door opens while a process changes files without a place
  file-opened-over-an-occupied-place    files are opened while processes do not know of it
  file-opened-twice                     a file is opened under two numbers
  file-kept-after-an-unclean-end        a file that was not signed keeps its pages over a restart
  signature-not-compared                a file that was changed between end and start keeps its pages
  unsettled-file-signed                 a file is signed although another change may have the same time
  handed-over-page-with-later-lsn       a page is taken over that is newer than the new server's disk
  written-page-taken-over               a page is taken over although the new server has written it")]
    Cache(SeedArgs),
}

#[derive(Debug, clap::Args)]
struct SeedArgs {
    /// Number of seeds to run, from zero on; with --mutation, the most for each mutation
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SEEDS, conflicts_with = "seed",
        value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Run this seed only and print what happened
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Break the code in this way (`all`: in each way in turn), and check that the fault is noticed
    #[arg(long, value_name = "NAME|all")]
    mutation: Option<String>,

    /// With --seed, write to FILE what the simulated transactions read and wrote, so that another program can
    /// check it as well. The form is JSON, list-append as the checker Elle reads it. For instance: `adya
    /// check -c snapshot-isolation FILE`
    #[arg(long, value_name = "FILE", requires = "seed")]
    history: Option<PathBuf>,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// Runs the seeds. An error if a checker found a violation, or missed a mutation.
pub fn run(args: SimArgs) -> Result<()> {
    let (name, args) = match args.what {
        What::Fabric(args) => ("fabric", args),
        What::Pool(args) => ("pool", args),
        What::File(args) => ("file", args),
        What::Txn(args) => ("txn", args),
        What::Hash(args) => ("hash", args),
        What::Index(args) => ("index", args),
        What::Members(args) => ("members", args),
        What::Cache(args) => ("cache", args),
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
        (false, None) => bail!("seed {seed} violates an invariant"),
        (true, Some(mutation)) => bail!("{mutation} goes unnoticed in seed {seed}; try other seeds"),
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

/// How many seeds that catch a mutation are listed.
const CATCHES: usize = 3;

fn hunt_all(scenario: &Scenario, mutations: &[&'static str], seeds: u64, json: bool) -> Result<()> {
    let mut catches = Vec::new();
    for &mutation in mutations {
        let bar = Bar::new(seeds, mutation);
        // A panic of the broken code is a catch like others; its message is not printed.
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

/// A progress bar for long runs, shown on a terminal only.
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
    fn mutations_are_chosen_by_name_and_a_wrong_name_lists_the_right_ones() {
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
