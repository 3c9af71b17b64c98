//! Looks for the usual faults of an RDMA set-up, and says what mends each.

use rustix::process::{Resource, getrlimit};

use crate::cm::EventChannel;
use crate::device::{Device, Port};
use crate::error::VerbsError;
use crate::library::Library;

/// Memory that a node wants to register at the least: one region of the default size.
const LEAST_MEMLOCK_BYTES: u64 = 64 << 20;

/// How a finding is to be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// As it should be.
    Good,
    /// RDMA is not there; everything works without it.
    Absent,
    /// RDMA is there and cannot be used as it is.
    Wrong,
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub name: String,
    /// How it is to be taken.
    pub level: Level,
    /// What was found, and what mends it.
    pub text: String,
}

impl Finding {
    fn new(name: impl Into<String>, level: Level, text: impl Into<String>) -> Self {
        Finding { name: name.into(), level, text: text.into() }
    }
}

/// Looks at the libraries, the connection manager, every port of every device, and the limit on locked memory.
/// Without libraries or devices there is one finding, which says so.
pub fn diagnose() -> Vec<Finding> {
    let library = match Library::get() {
        Ok(library) => library,
        Err(error) => return vec![Finding::new("rdma-core", Level::Absent, error.to_string())],
    };
    let devices = match Device::all(library) {
        Ok(devices) => devices,
        Err(error) => return vec![Finding::new("rdma device", Level::Absent, error.to_string())],
    };
    let mut findings = vec![match EventChannel::new(library) {
        Ok(_) => Finding::new("rdma connection manager", Level::Good, "answers"),
        Err(error) => Finding::new(
            "rdma connection manager",
            Level::Wrong,
            format!("{error}: load its module (modprobe rdma_ucm)"),
        ),
    }];
    for device in devices {
        let name = device.name(library);
        findings.push(capabilities(library, device, &name));
        findings.extend(Port::of(&name).iter().map(port));
    }
    findings.push(memlock(getrlimit(Resource::Memlock).current));
    findings
}

fn capabilities(library: &Library, device: Device, name: &str) -> Finding {
    match device.capabilities(library) {
        Ok(found) => {
            let atomics = if found.atomics { "atomics by the card" } else { "atomics by message" };
            let windows = if found.windows { "memory windows" } else { "a registration per client" };
            Finding::new(format!("rdma device {name}"), Level::Good, format!("{atomics}, {windows}"))
        }
        Err(error) => Finding::new(format!("rdma device {name}"), Level::Wrong, error.to_string()),
    }
}

fn port(port: &Port) -> Finding {
    let name = format!("rdma port {}/{}", port.device, port.number);
    let state = port.state();
    if state != "ACTIVE" {
        let device = port.device.clone();
        return Finding::new(
            name,
            Level::Wrong,
            VerbsError::PortDown { device, port: port.number, state }.to_string(),
        );
    }
    if !port.is_ethernet() {
        return Finding::new(name, Level::Good, "active");
    }
    match port.roce_v2_gids().len() {
        0 => Finding::new(
            name,
            Level::Wrong,
            "active, but without a RoCE v2 GID: give its interface an address (ip addr add)",
        ),
        count => Finding::new(name, Level::Good, format!("active, {count} RoCE v2 GIDs")),
    }
}

fn memlock(limit: Option<u64>) -> Finding {
    match limit {
        Some(limit) if limit < LEAST_MEMLOCK_BYTES => {
            let bytes = LEAST_MEMLOCK_BYTES as usize;
            let text = VerbsError::Memlock { bytes, limit_kib: limit / 1024 }.to_string();
            Finding::new("locked memory", Level::Wrong, text)
        }
        Some(limit) => Finding::new("locked memory", Level::Good, format!("{} MiB", limit >> 20)),
        None => Finding::new("locked memory", Level::Good, "unlimited"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_limit_on_locked_memory_is_wrong_and_names_the_fix() {
        let finding = memlock(Some(64 << 10));
        assert_eq!(finding.level, Level::Wrong);
        assert!(finding.text.contains("ulimit -l"), "{}", finding.text);
        assert_eq!(memlock(None).level, Level::Good);
        assert_eq!(memlock(Some(1 << 30)).level, Level::Good);
    }

    #[test]
    fn every_machine_gets_at_least_one_finding() {
        assert!(!diagnose().is_empty());
    }
}
