//! The checks: each examines one thing, and judges it in a function of its own that tests can call.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use farpool_fabric::{LargePages, SharedMemory};
use farpool_fabric_verbs::{Finding, Level, diagnose};
use rustix::fs::{Access, access};
use rustix::process::{Resource, geteuid, getrlimit};

use super::Check;
use crate::errors::describe;
use crate::reach::{BrokerAt, status_of};
use crate::size::ByteSize;

const FUSE_DEVICE: &str = "/dev/fuse";
const FUSE_HELPER: &str = "fusermount3";
/// The first version with `MADV_POPULATE_WRITE`, with which a node reserves its memory.
const KERNEL_MIN: (u32, u32) = (5, 14);
/// What a small node lends: one region.
const LOCKABLE_MIN: ByteSize = ByteSize(64 << 20);
/// A region of memory is a file to the kernel; this is the default size.
const FILE_MIN: ByteSize = ByteSize(64 << 20);
/// Descriptors: one per region, and some per client.
const OPEN_FILES_MIN: u64 = 1024;
/// Below it, lending makes little sense.
const SPARE_MIN: ByteSize = ByteSize(256 << 20);

/// Everything but the broker.
pub fn machine() -> Vec<Check> {
    vec![
        kernel(&rustix::system::uname().release().to_string_lossy()),
        fuse_device(OpenOptions::new().read(true).write(true).open(FUSE_DEVICE).map(drop)),
        fuse_helper(find_program(FUSE_HELPER), geteuid().is_root()),
        memory_to_lend(farpool_node::default_reserve().and_then(farpool_node::memory_to_lend)),
        lockable(farpool_node::lockable_memory().map(ByteSize)),
        memory_files(getrlimit(Resource::Fsize).current.map(ByteSize)),
        open_files(getrlimit(Resource::Nofile).current),
        large_pages(probe_large_pages()),
        memory_groups(&MemoryGroups::find()),
    ]
    .into_iter()
    .chain(diagnose().iter().map(rdma))
    .collect()
}

/// One of several lines, or the only one if there is no RDMA. Never a failure: everything works without it.
fn rdma(finding: &Finding) -> Check {
    let name = "rdma";
    let found = format!("{}: {}", finding.subject, finding.found);
    match (finding.level, &finding.fix) {
        (Level::Wrong, fix) => Check::warn(name, found, fix.as_deref().unwrap_or("see the manual")),
        (Level::Good | Level::Absent, None) => Check::ok(name, found),
        (Level::Good | Level::Absent, Some(fix)) => Check::ok(name, format!("{found}; to enable it: {fix}")),
    }
}

fn kernel(release: &str) -> Check {
    let name = "kernel";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_MIN => Check::ok(name, release),
        _ => {
            let fix = format!(
                "nodes reserve memory with MADV_POPULATE_WRITE: use Linux {}.{} or later",
                KERNEL_MIN.0, KERNEL_MIN.1
            );
            Check::fail(name, release, fix)
        }
    }
}

fn fuse_device(opened: io::Result<()>) -> Check {
    let name = "fuse device";
    match opened {
        Ok(()) => Check::ok(name, format!("{FUSE_DEVICE} opens")),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Check::fail(
            name,
            format!("{FUSE_DEVICE}: {error}"),
            format!("chmod 666 {FUSE_DEVICE}, or run `farpool mount` as root"),
        ),
        Err(error) => {
            let fix = "modprobe fuse; a container needs --device /dev/fuse --cap-add SYS_ADMIN";
            Check::fail(name, format!("{FUSE_DEVICE}: {error}"), fix)
        }
    }
}

fn fuse_helper(found: Option<PathBuf>, is_root: bool) -> Check {
    let name = "fuse helper";
    let fix = "install Debian's package fuse3";
    match found {
        Some(path) => Check::ok(name, path.display().to_string()),
        None if is_root => Check::warn(name, format!("no {FUSE_HELPER}; root mounts without it"), fix),
        None => Check::fail(name, format!("no {FUSE_HELPER}, without which only root can mount"), fix),
    }
}

fn memory_to_lend(spare: io::Result<u64>) -> Check {
    let name = "memory to lend";
    match spare.map(ByteSize) {
        Ok(spare) if spare >= SPARE_MIN => {
            Check::ok(name, format!("{spare} (what `node --memory auto` takes)"))
        }
        Ok(spare) => Check::warn(name, format!("{spare}"), "end other programs, or let another machine lend"),
        Err(error) => Check::fail(name, error.to_string(), "mount /proc"),
    }
}

fn lockable(limit: Option<ByteSize>) -> Check {
    let name = "lockable memory";
    let fix = "ulimit -l unlimited as root, or LimitMEMLOCK=infinity in the unit, or `node --no-lock`";
    match limit {
        None => Check::ok(name, "unlimited"),
        Some(limit) if limit >= LOCKABLE_MIN => {
            Check::warn(name, format!("`node --memory` can lock up to {limit}"), fix)
        }
        Some(limit) => {
            Check::warn(name, format!("{limit}: too little for one region of {LOCKABLE_MIN}"), fix)
        }
    }
}

fn memory_files(limit: Option<ByteSize>) -> Check {
    let name = "memory files";
    // Shared memory lies in memfds. The limits of /dev/shm and kernel.shmmax do not apply to them, but the
    // limit on file sizes does.
    match limit {
        Some(limit) if limit < FILE_MIN => Check::fail(
            name,
            format!("limited to {limit} each"),
            "ulimit -f unlimited: regions are files to the kernel",
        ),
        _ => match rustix::fs::memfd_create("farpool-doctor", rustix::fs::MemfdFlags::CLOEXEC) {
            Ok(_) => Check::ok(name, "memfds can be made; /dev/shm and kernel.shmmax do not limit them"),
            Err(error) => {
                Check::fail(name, format!("no memfd: {error}"), "allow memfd_create in the sandbox's rules")
            }
        },
    }
}

fn open_files(limit: Option<u64>) -> Check {
    let name = "open files";
    let fix = "ulimit -n 65536: a node needs one descriptor per region";
    match limit {
        Some(limit) if limit < OPEN_FILES_MIN => Check::warn(name, limit.to_string(), fix),
        Some(limit) => Check::ok(name, format!("{limit}")),
        None => Check::ok(name, "unlimited"),
    }
}

/// Prefaults memory as a node does for its regions.
fn probe_large_pages() -> io::Result<LargePages> {
    const PROBE_BYTES: u64 = 4 << 20;
    SharedMemory::create("farpool-doctor", PROBE_BYTES)?.mapping().prefault()
}

/// A lack of large pages is no failure: everything works with small pages as well.
fn large_pages(probed: io::Result<LargePages>) -> Check {
    let name = "large pages";
    match probed {
        Ok(LargePages::AsFarAsTheyFit) => Check::ok(name, "the kernel puts regions into pages of 2 MiB"),
        Ok(LargePages::NotAll) => Check::ok(
            name,
            "none, random reads are slower: needs Linux 6.1 with transparent huge pages, and memory that is not \
             fragmented (echo 1 > /proc/sys/vm/compact_memory)",
        ),
        Err(error) => Check::fail(name, error.to_string(), "free some memory"),
    }
}

/// How the machine's control groups are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MemoryGroups {
    version: Option<u32>,
    /// Whether the memory controller exists.
    has_memory: bool,
    /// Whether this user may create a group under it.
    writable: bool,
}

impl MemoryGroups {
    fn find() -> Self {
        let root = Path::new("/sys/fs/cgroup");
        let (v1, v2) = (root.join("memory"), root.join("cgroup.controllers"));
        let writable = |dir: &Path| access(dir, Access::WRITE_OK).is_ok();
        if v1.join("memory.limit_in_bytes").exists() {
            return MemoryGroups { version: Some(1), has_memory: true, writable: writable(&v1) };
        }
        match fs::read_to_string(v2) {
            Ok(controllers) => {
                let has_memory = controllers.split_whitespace().any(|controller| controller == "memory");
                MemoryGroups { version: Some(2), has_memory, writable: writable(root) }
            }
            Err(_) => MemoryGroups { version: None, has_memory: false, writable: false },
        }
    }
}

fn memory_groups(groups: &MemoryGroups) -> Check {
    let name = "control groups";
    let only_demo = "`farpool demo` then runs without limiting the database";
    match groups {
        MemoryGroups { version: Some(version), has_memory: true, writable: true } => {
            Check::ok(name, format!("version {version}, memory can be limited"))
        }
        MemoryGroups { version: Some(version), has_memory: true, writable: false } => {
            let found = format!("version {version}, but this user may not limit memory");
            Check::warn(name, found, format!("run it as root; {only_demo}"))
        }
        MemoryGroups { version: Some(version), has_memory: false, .. } => {
            let found = format!("version {version} without the memory controller");
            Check::warn(name, found, format!("boot with cgroup_enable=memory; {only_demo}"))
        }
        MemoryGroups { version: None, .. } => {
            Check::warn(name, "not mounted", format!("mount -t cgroup2 none /sys/fs/cgroup; {only_demo}"))
        }
    }
}

/// Whether the broker answers. If none was named or started, that is only a warning.
pub async fn broker(at: &BrokerAt) -> Check {
    let name = "broker";
    let located = match at.find() {
        Ok(Some(located)) => located,
        Ok(None) => return Check::warn(name, "none is running for this user", "start one with `farpool up`"),
        Err(error) => return Check::fail(name, describe(&error), "correct --broker and --tls-dir"),
    };
    match status_of(&located).await {
        Ok(status) => {
            let alive = status.nodes.iter().filter(|node| node.alive).count();
            Check::ok(
                name,
                format!("{} answers, {alive} of {} nodes alive", located.address, status.nodes.len()),
            )
        }
        Err(error) => {
            let text = describe(&error);
            let (found, fix) = text
                .split_once(";\n")
                .unwrap_or((&text, "follow the message, or name another broker with --broker"));
            Check::fail(name, found, fix)
        }
    }
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| access(file, Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn kernels_are_judged_by_number() {
        for (release, state) in [
            ("6.1.0-28-amd64", State::Ok),
            ("5.14.0", State::Ok),
            ("5.13.19", State::Fail),
            ("4.19.0", State::Fail),
            ("10.0", State::Ok),
            ("unknown", State::Fail),
        ] {
            assert_eq!(kernel(release).state, state, "{release}");
        }
    }

    #[test]
    fn fuse_that_is_missing_or_closed_fails_with_the_fix() {
        let missing = fuse_device(Err(ErrorKind::NotFound.into()));
        assert!(missing.state == State::Fail && missing.fix.unwrap().contains("modprobe fuse"));
        let closed = fuse_device(Err(ErrorKind::PermissionDenied.into()));
        assert!(closed.state == State::Fail && closed.fix.unwrap().contains("chmod"));
        assert_eq!(fuse_device(Ok(())).state, State::Ok);
    }

    #[test]
    fn helper_is_needed_by_all_but_root() {
        assert_eq!(fuse_helper(None, true).state, State::Warn);
        assert_eq!(fuse_helper(None, false).state, State::Fail);
        assert_eq!(fuse_helper(Some("/bin/fusermount3".into()), false).state, State::Ok);
    }

    #[test]
    fn little_lockable_memory_is_a_warning_that_says_how_much() {
        let check = lockable(Some(ByteSize(8 << 20)));
        assert!(check.state == State::Warn && check.found.contains("8 MiB"));
        assert!(check.fix.unwrap().contains("ulimit -l"));
        assert_eq!(lockable(None).state, State::Ok);
    }

    #[test]
    fn files_smaller_than_a_region_fail() {
        assert_eq!(memory_files(Some(ByteSize(1 << 20))).state, State::Fail);
        assert_eq!(memory_files(None).state, State::Ok);
    }

    #[test]
    fn large_pages_are_tried_and_their_lack_is_explained() {
        assert!(probe_large_pages().is_ok());
        assert!(large_pages(Ok(LargePages::NotAll)).found.contains("Linux 6.1"));
        assert!(large_pages(Ok(LargePages::AsFarAsTheyFit)).found.contains("2 MiB"));
    }

    #[test]
    fn groups_that_do_not_limit_memory_are_a_warning() {
        let good = MemoryGroups { version: Some(2), has_memory: true, writable: true };
        assert_eq!(memory_groups(&good).state, State::Ok);
        for bad in [
            MemoryGroups { writable: false, ..good },
            MemoryGroups { has_memory: false, ..good },
            MemoryGroups { version: None, ..good },
        ] {
            assert_eq!(memory_groups(&bad).state, State::Warn, "{bad:?}");
        }
    }

    #[test]
    fn every_check_that_is_not_ok_names_the_fix() {
        assert!(machine().iter().all(|check| check.state == State::Ok || check.fix.is_some()));
    }
}
