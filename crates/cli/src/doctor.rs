//! `farpool doctor`: what this machine lacks, and how to fix it.

mod cache;
mod checks;

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::output::{tell, tell_json};
use crate::reach::{BrokerAt, runtime};

/// Check what this machine lacks for lending and mounting far memory, and how to fix it
///
/// Each line is ok, warn (it works, but not well or not for all users) or fail (something does not work).
/// Exit status 0 when nothing fails, else 1.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool doctor
  farpool doctor --json | jq -r '.checks[] | select(.state != \"ok\") | .fix'
  farpool doctor --broker db-17:7117 --tls-dir /etc/farpool/tls
  farpool doctor --cache /var/lib/postgresql/15/main")]
pub struct DoctorArgs {
    #[command(flatten)]
    broker: BrokerAt,

    /// Check also whether the files in DIR can be cached (see `farpool cache`), and whether the PostgreSQL
    /// server that has them has loaded the module
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,

    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// How a check went.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Nothing to do.
    Ok,
    /// It works, but not well, or not for all users.
    Warn,
    /// Something does not work.
    Fail,
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    found: String,
    /// How to fix it; present whenever the state is not ok.
    fix: Option<String>,
}

/// Facts about a machine. Names and meanings of the fields are stable; fields may be added.
#[derive(Debug, Serialize)]
struct Report {
    healthy: bool,
    checks: Vec<Check>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Check { name, state: State::Ok, found: found.into(), fix: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Check { name, state: State::Warn, found: found.into(), fix: Some(fix.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Check { state: State::Fail, ..Self::warn(name, found, fix) }
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Ok => "ok  ",
            State::Warn => "warn",
            State::Fail => "FAIL",
        }
    }
}

/// Runs all checks and prints them. An error if one fails.
pub fn run(args: DoctorArgs) -> Result<()> {
    let mut checks = checks::machine();
    checks.push(runtime()?.block_on(checks::broker(&args.broker)));
    checks.extend(args.cache.iter().flat_map(|dir| cache::directory(dir)));
    let failed: Vec<&str> =
        checks.iter().filter(|check| check.state == State::Fail).map(|check| check.name).collect();
    let verdict = failed.join(", ");
    let report = Report { healthy: failed.is_empty(), checks };
    if args.json {
        tell_json(&report)?;
    } else {
        report.lines().into_iter().try_for_each(tell)?;
    }
    if !report.healthy {
        bail!("this machine is not ready: {verdict}");
    }
    Ok(())
}

impl Report {
    fn lines(&self) -> Vec<String> {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let line = |check: &Check| {
            let first = format!("{}  {:width$}  {}", check.state.word(), check.name, check.found);
            let fix = check.fix.as_ref().map(|fix| format!("      {:width$}  -> {fix}", ""));
            std::iter::once(first).chain(fix)
        };
        self.checks.iter().flat_map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fix_is_printed_below_its_check() {
        let checks = vec![Check::ok("kernel", "6.1"), Check::fail("fuse device", "missing", "modprobe fuse")];
        let lines = Report { healthy: false, checks }.lines();
        assert_eq!(
            lines,
            ["ok    kernel       6.1", "FAIL  fuse device  missing", "                   -> modprobe fuse",]
        );
    }

    #[test]
    fn json_fields_are_stable() {
        let report = Report { healthy: true, checks: vec![Check::warn("memlock", "8 MiB", "ulimit")] };
        let json = serde_json::to_value(report).unwrap();
        let expected = serde_json::json!({
            "healthy": true,
            "checks": [{"name": "memlock", "state": "warn", "found": "8 MiB", "fix": "ulimit"}]
        });
        assert_eq!(json, expected);
    }
}
