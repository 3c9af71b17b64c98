//! `farpool doctor` says what is wrong and how to fix it.

use serde_json::Value;

use crate::support::{Output, Up, run, run_command};

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn machine_that_runs_these_tests_is_healthy() {
    let up = Up::start();
    let output = run_command(up.farpool(&["doctor", "--json"]));
    let report = json(&output);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(report["healthy"], true);
    assert_eq!(check(&report, "broker")["state"], "ok");
    for name in ["kernel", "fuse device", "fuse helper", "lockable memory", "large pages", "control groups"] {
        assert!(!check(&report, name)["found"].as_str().unwrap().is_empty(), "{name}");
    }
}

#[test]
fn broker_that_was_named_and_does_not_answer_fails_with_the_fix() {
    let output = run(["doctor", "--json", "--broker", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["healthy"], false);
    assert_eq!(check(&report, "broker")["state"], "fail");
    assert!(check(&report, "broker")["fix"].as_str().unwrap().contains("farpool up"));
}

#[test]
fn no_broker_at_all_is_only_a_warning() {
    let report = json(&run(["doctor", "--json"]));
    assert_eq!(check(&report, "broker")["state"], "warn");
}

#[test]
fn lines_name_the_fix_below_the_failed_check() {
    let output = run(["doctor", "--broker", "127.0.0.1:1"]);
    assert!(output.stdout.lines().any(|line| line.starts_with("FAIL  broker")), "{output:?}");
    assert!(output.stdout.contains("-> start one with `farpool up`"), "{output:?}");
    assert_eq!(output.stderr, "farpool: this machine is not ready: broker");
}

#[test]
fn a_directory_with_a_cache_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let report = json(&run(["doctor", "--json", "--cache", dir.path().to_str().unwrap()]));
    assert_eq!(check(&report, "cached files")["state"], "ok");
    assert_eq!(check(&report, "cache door")["state"], "warn");
    assert!(check(&report, "cache door")["fix"].as_str().unwrap().starts_with("farpool cache attach "));
}
