//! `farpool sim` from outside: exit status, replay, and the same history in every process.

use std::time::Duration;

use serde_json::Value;

use crate::support::{Process, assert_complaint, farpool, run};

const SCENARIOS: [&str; 6] = ["fabric", "pool", "file", "txn", "hash", "members"];
/// The scenario whose mutations are hunted through the command line: the fastest one. The tests of crate
/// `sim` hunt those of all scenarios, with the same seeds.
const HUNTED: &str = "fabric";

/// For a hunt on a busy machine.
const HUNT_PATIENCE: Duration = Duration::from_secs(600);

fn facts(args: &[&str]) -> Value {
    let command = farpool(["sim"].iter().chain(args).chain(&["--json"]));
    let output = Process::start(format!("sim {args:?}"), command).wait_within(HUNT_PATIENCE);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_str(&output.stdout).unwrap()
}

#[test]
fn some_seeds_of_each_scenario_pass_and_have_the_same_histories_in_every_process() {
    for scenario in SCENARIOS {
        let (once, again) = (facts(&[scenario, "--seeds", "40"]), facts(&[scenario, "--seeds", "40"]));
        assert_eq!(once["failed"], 0, "{once}");
        assert_eq!(once["seeds"], 40);
        assert_eq!(once["hash"], again["hash"]);
        // As text: a JSON reader keeps 53 bits of a number.
        assert_eq!(once["hash"].as_str().map(str::len), Some(16), "{once}");
    }
}

#[test]
fn a_seed_is_replayed_with_the_same_readable_trace() {
    for scenario in SCENARIOS {
        let once = run(["sim", scenario, "--seed", "7"]);
        assert!(once.status.success(), "{once:?}");
        assert!(once.stdout.lines().count() > 20, "{once:?}");
        assert!(once.stdout.lines().last().unwrap().starts_with("seed 7: "), "{once:?}");
        assert_eq!(once.stdout, run(["sim", scenario, "--seed", "7"]).stdout);
    }
}

#[test]
fn a_history_is_written_for_other_checkers() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("history.jsonl");
    let output = run(["sim", "txn", "--seed", "7", "--history", file.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let written = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for end in ["invoke", "ok"] {
        assert!(lines.iter().filter(|line| line["type"] == end).count() > 10, "{written}");
    }
    assert!(lines.iter().all(|line| line["value"].is_array() && line["process"].is_u64()), "{written}");
}

#[test]
fn every_mutation_is_caught_and_the_seeds_are_named() {
    let facts = facts(&[HUNTED, "--mutation", "all"]);
    let mutations = facts["mutations"].as_array().unwrap();
    assert!(mutations.len() >= 4, "{facts}");
    for mutation in mutations {
        assert!(!mutation["caught_by"].as_array().unwrap().is_empty(), "{mutation}");
    }
}

#[test]
fn an_unknown_mutation_or_one_that_goes_unnoticed_is_an_error() {
    assert_complaint(&run(["sim", "fabric", "--mutation", "nothing"]), 2, "no-fence");
    assert_complaint(&run(["sim", "fabric", "--mutation", "all", "--seed", "1"]), 2, "name it");
    let unnoticed = run(["sim", "fabric", "--mutation", "reader-trusts-torn-copy", "--seeds", "1"]);
    assert_eq!(unnoticed.status.code(), Some(1), "{unnoticed:?}");
    assert!(unnoticed.stderr.contains("went unnoticed: reader-trusts-torn-copy"), "{unnoticed:?}");
}
