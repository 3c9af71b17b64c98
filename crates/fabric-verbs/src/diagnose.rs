//! Looks for the usual faults of an RDMA set-up, and says how to fix each.

use std::net::Ipv6Addr;

use rustix::process::{Resource, getrlimit};

use crate::cm::EventChannel;
use crate::device::{Device, Port};
use crate::library::Library;

/// The least memory that a node must be able to register: one region of the default size.
const LEAST_MEMLOCK_BYTES: u64 = 64 << 20;

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// No problem.
    Good,
    /// This machine has no RDMA; everything works without it.
    Absent,
    /// This machine has RDMA, but it cannot be used as it is.
    Wrong,
}

/// The result of one check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What was checked, in a word or two.
    pub subject: String,
    /// Its severity.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// How to fix it; always present if the level is [`Level::Wrong`].
    pub fix: Option<String>,
}

impl Finding {
    fn good(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Finding { subject: subject.into(), level: Level::Good, found: found.into(), fix: None }
    }

    fn wrong(subject: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        let fix = Some(fix.into());
        Finding { subject: subject.into(), level: Level::Wrong, found: found.into(), fix }
    }

    fn absent(subject: &str, found: &str, fix: &str) -> Self {
        Finding { level: Level::Absent, ..Finding::wrong(subject, found, fix) }
    }
}

/// Checks the libraries, the connection manager, every port of every device, and the limit on locked memory.
/// Without libraries or devices there is only one finding, which says so.
pub fn diagnose() -> Vec<Finding> {
    let Ok(library) = Library::get() else {
        let fix = "install rdma-core (Debian: libibverbs1 librdmacm1 ibverbs-providers)";
        return vec![Finding::absent("libraries", "not installed", fix)];
    };
    let Ok(devices) = Device::all(library) else {
        let fix = "load the card's driver, or make a soft one: rdma link add rxe0 type rxe netdev INTERFACE";
        return vec![Finding::absent("device", "none", fix)];
    };
    let mut findings = vec![match EventChannel::new(library) {
        Ok(_) => Finding::good("connection manager", "answers"),
        Err(error) => Finding::wrong("connection manager", error.to_string(), "modprobe rdma_ucm"),
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
            Finding::good(format!("device {name}"), format!("{atomics}, {windows}"))
        }
        Err(error) => {
            let fix = "look for the driver's message in dmesg";
            Finding::wrong(format!("device {name}"), error.to_string(), fix)
        }
    }
}

fn port(port: &Port) -> Finding {
    let subject = format!("port {}/{}", port.device, port.number);
    let state = port.state();
    if state != "ACTIVE" {
        return Finding::wrong(
            subject,
            state.to_lowercase(),
            "ip link set INTERFACE up, and check the cable",
        );
    }
    if !port.is_ethernet() {
        return Finding::good(subject, "active");
    }
    // Every port has a link-local GID, which does not serve to reach an address.
    let of_addresses = |gid: &&[u8; 16]| !Ipv6Addr::from(**gid).is_unicast_link_local();
    match port.roce_v2_gids().iter().filter(of_addresses).count() {
        0 => {
            let fix = "ip addr add ADDRESS dev INTERFACE: the GID comes from it";
            Finding::wrong(subject, "active, but no address has a GID of RoCE v2", fix)
        }
        count => Finding::good(subject, format!("active, GIDs of RoCE v2: {count}")),
    }
}

fn memlock(limit: Option<u64>) -> Finding {
    let subject = "memory that may be registered";
    match limit {
        Some(limit) if limit < LEAST_MEMLOCK_BYTES => {
            let fix = "ulimit -l unlimited as root, or LimitMEMLOCK=infinity in the unit";
            Finding::wrong(subject, format!("{} KiB: too little for one region", limit >> 10), fix)
        }
        Some(limit) => Finding::good(subject, format!("{} MiB", limit >> 20)),
        None => Finding::good(subject, "unlimited"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_limit_on_locked_memory_is_wrong_and_names_the_fix() {
        let finding = memlock(Some(64 << 10));
        assert_eq!(finding.level, Level::Wrong);
        assert!(finding.fix.as_ref().is_some_and(|fix| fix.contains("ulimit -l")), "{finding:?}");
        assert_eq!(memlock(None).level, Level::Good);
        assert_eq!(memlock(Some(1 << 30)).level, Level::Good);
    }

    #[test]
    fn every_machine_gets_a_finding_and_every_fault_names_its_fix() {
        let findings = diagnose();
        assert!(!findings.is_empty());
        for finding in findings {
            assert!(finding.level == Level::Good || finding.fix.is_some(), "{finding:?}");
        }
    }
}
