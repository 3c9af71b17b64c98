//! An independent isolation checker judges the histories of `sim txn`. It follows the rules of the literature
//! and shares no code with this crate.

use adya::{History, Opts, Valid, Workload, check};
use farpool_sim::{find_scenario, run_guarded};

const SEEDS: u64 = 40;
/// Each fault that shows in a history must be found within this many seeds.
const HUNTED_SEEDS: u64 = 100;

/// Whether a run of `sim txn` is strong session snapshot isolation, and the anomalies that were found.
fn opinion(seed: u64, mutation: Option<&'static str>) -> (Valid, Vec<String>) {
    let txn = find_scenario("txn").unwrap();
    let report = run_guarded(txn, seed, mutation, true);
    assert!(mutation.is_some() || report.violations.is_empty(), "seed {seed}: {:?}", report.violations);
    let history = History::from_json(&report.history.join("\n")).unwrap();
    let opts = Opts { models: vec!["strong-session-snapshot-isolation".into()], ..Opts::default() };
    let report = check(&history, Workload::ListAppend, &opts);
    (report.valid, report.anomaly_types)
}

#[test]
fn another_checker_finds_nothing_in_the_histories_of_transactions() {
    let mut judged = 0;
    for seed in 0..SEEDS {
        let (valid, anomalies) = opinion(seed, None);
        // `Unknown` is allowed: hardly anything was committed.
        assert_ne!(valid, Valid::False, "seed {seed}: {anomalies:?}");
        judged += u64::from(valid == Valid::True);
    }
    assert!(judged > SEEDS / 2, "the checker reached a verdict on only {judged} histories");
}

#[test]
fn another_checker_refuses_histories_of_engines_that_are_broken() {
    for (mutation, anomaly) in [
        ("validation-skipped", "lost-update"),
        // A long fork is one of these. These anomalies are between records, not between the earlier and later
        // operations of one session.
        ("publish-out-of-order", "G-nonadjacent-item"),
        ("visibility-before-install", "G-single-item"),
    ] {
        let txn = find_scenario("txn").unwrap();
        let mutation =
            *txn.mutations.iter().find(|known| **known == mutation).expect("a mutation of that name");
        let mut seen = Vec::new();
        let is_refused = (0..HUNTED_SEEDS).any(|seed| {
            let (valid, anomalies) = opinion(seed, Some(mutation));
            let is_it = valid == Valid::False && anomalies.iter().any(|found| found == anomaly);
            seen.extend(anomalies);
            is_it
        });
        assert!(is_refused, "{mutation}: no {anomaly} in {seen:?}");
    }
}
