//! The layering of the house: dependencies point down, and crates of one floor never import each other.
//!
//! A dev-dependency obeys the same rule. One that pointed up would make the tests of a lower crate build the
//! upper ones, and cargo would accept it silently; such a test belongs to the upper crate. Build-dependencies
//! likewise.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

/// Which floor each crate lives on. A crate that is not here is an error: whoever adds one decides where it
/// lives.
const FLOORS: [(&str, u8); 22] = [
    ("farpool-throttle", 1),
    ("farpool-wire", 1),
    ("farpool-control", 2),
    ("farpool-fabric", 2),
    ("farpool-fabric-verbs", 2),
    ("farpool-keep", 2),
    ("farpool-lease", 2),
    ("farpool-broker", 3),
    ("farpool-node", 3),
    ("farpool-pool", 3),
    ("farpool-testpool", 3),
    ("farpool-cache", 4),
    ("farpool-file", 4),
    ("farpool-txn", 4),
    ("farpool-capi", 5),
    ("farpool-mount", 5),
    ("farpool-namdb", 5),
    ("farpool-postgres", 5),
    ("farpool-preload", 5),
    ("farpool-bench", 6),
    ("farpool-sim", 6),
    ("farpool-cli", 7),
];

/// The only dependencies between crates of one floor. A transport that needs hardware is a crate of its own,
/// so that it can stay outside the default members. The module for PostgreSQL is the interposer, loaded in
/// another way. The pool for tests starts brokers and nodes, and crates of floor 4 test with it.
const SAME_FLOOR: [(&str, &str); 5] = [
    ("farpool-fabric-verbs", "farpool-fabric"),
    ("farpool-postgres", "farpool-preload"),
    ("farpool-testpool", "farpool-broker"),
    ("farpool-testpool", "farpool-node"),
    ("farpool-testpool", "farpool-pool"),
];

/// Outside the house: depends on none of its crates, and none depends on it.
const OUTSIDE: [&str; 1] = ["xtask"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    /// Present if it comes from a folder instead of a registry.
    path: Option<String>,
}

/// Reads what `cargo metadata --no-deps` printed and says what is wrong with it.
pub fn check(metadata: &str) -> Result<Vec<String>> {
    let metadata: Metadata =
        serde_json::from_str(metadata).context("cannot read what cargo metadata printed")?;
    let floors: BTreeMap<&str, u8> = FLOORS.into_iter().collect();
    let mut complaints = Vec::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        if !floors.contains_key(name) && !OUTSIDE.contains(&name) {
            complaints.push(format!("{name} lives on no floor: add it to FLOORS in xtask/src/layering.rs"));
            continue;
        }
        let local = package.dependencies.iter().filter(|dependency| dependency.path.is_some());
        complaints.extend(local.filter_map(|dependency| complaint(&floors, name, dependency)));
    }
    Ok(complaints)
}

fn complaint(floors: &BTreeMap<&str, u8>, name: &str, dependency: &Dependency) -> Option<String> {
    let kind = dependency.kind.as_deref().map(|kind| format!("{kind}-")).unwrap_or_default();
    let edge = format!("{name} has the {kind}dependency {}", dependency.name);
    let (Some(from), Some(to)) = (floors.get(name), floors.get(dependency.name.as_str())) else {
        return Some(format!("{edge}, and one of them is not part of the house"));
    };
    match from.cmp(to) {
        std::cmp::Ordering::Greater => None,
        // A crate turns on features for its own tests by depending on itself.
        std::cmp::Ordering::Equal if name == dependency.name && kind == "dev-" => None,
        std::cmp::Ordering::Equal if SAME_FLOOR.contains(&(name, &dependency.name)) => None,
        std::cmp::Ordering::Equal => Some(format!("{edge}, but both live on floor {from}")),
        std::cmp::Ordering::Less => Some(format!("{edge}, which points up from floor {from} to floor {to}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn complaints(name: &str, dependency: &str, kind: Option<&str>) -> Vec<String> {
        let metadata = json!({"packages": [{"name": name, "dependencies": [
            {"name": dependency, "kind": kind, "path": "/somewhere", "source": null}]}]});
        check(&metadata.to_string()).unwrap()
    }

    #[test]
    fn edge_that_points_up_is_reported() {
        let found = complaints("farpool-wire", "farpool-fabric", None);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("points up from floor 1 to floor 2"), "{found:?}");
    }

    #[test]
    fn edge_between_crates_of_one_floor_is_reported() {
        let found = complaints("farpool-node", "farpool-broker", None);
        assert!(found[0].contains("both live on floor 3"), "{found:?}");
    }

    #[test]
    fn the_one_edge_within_a_floor_points_one_way_only() {
        assert!(complaints("farpool-fabric-verbs", "farpool-fabric", None).is_empty());
        assert_eq!(complaints("farpool-fabric", "farpool-fabric-verbs", None).len(), 1);
    }

    #[test]
    fn dev_and_build_dependencies_that_point_up_are_reported_as_such() {
        for kind in ["dev", "build"] {
            let found = complaints("farpool-file", "farpool-mount", Some(kind));
            assert!(found[0].contains(&format!("{kind}-dependency")), "{found:?}");
        }
    }

    #[test]
    fn edge_that_points_down_by_any_number_of_floors_is_fine() {
        assert!(complaints("farpool-cli", "farpool-wire", None).is_empty());
        assert!(complaints("farpool-lease", "farpool-wire", Some("dev")).is_empty());
    }

    #[test]
    fn crate_without_a_floor_is_reported_whatever_it_depends_on() {
        let found = complaints("farpool-attic", "farpool-wire", None);
        assert!(found[0].contains("lives on no floor"), "{found:?}");
        assert!(complaints("farpool-cli", "farpool-attic", None)[0].contains("not part of the house"));
    }

    #[test]
    fn checks_stay_outside_the_house() {
        assert_eq!(complaints("xtask", "farpool-wire", None).len(), 1);
        assert_eq!(complaints("farpool-cli", "xtask", None).len(), 1);
    }

    #[test]
    fn dependency_from_a_registry_has_no_floor() {
        let metadata = json!({"packages": [{"name": "farpool-wire", "dependencies": [
            {"name": "serde", "kind": null, "source": "registry"}]}]});
        assert!(check(&metadata.to_string()).unwrap().is_empty());
    }

    #[test]
    fn something_that_is_not_metadata_is_an_error() {
        assert!(check("{}").is_err());
    }
}
