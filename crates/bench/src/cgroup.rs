//! A memory limit for the database, with either version of Linux control groups.
//!
//! Without it the kernel's page cache hides the disk on any machine with gigabytes to spare, and a comparison
//! of places for temporary files would be meaningless. Only the database goes into the group. The memory of
//! the nodes and of the mount stays outside, as it would be on other machines.
//!
//! Pitfalls: a byte is charged to the group that touches it first, so the database joins before it starts;
//! files on tmpfs are charged to the process that writes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::progress::warn;

/// A group cannot be removed at once after its last process has ended, only a moment later.
const REMOVE_DEADLINE: Duration = Duration::from_secs(10);
/// Processes in the group may take half of the deadline to end by themselves; then they are killed.
const GRACE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);

/// The version of the control groups' interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy for all.
    V2,
}

impl Version {
    fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }
}

/// The place where groups with a memory limit are made.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    version: Version,
    root: PathBuf,
}

/// A control group with a memory limit; removed when dropped.
#[derive(Debug)]
pub struct MemoryLimit {
    dir: PathBuf,
    version: Version,
    limit_mib: u64,
    removed: bool,
}

impl MemoryLimit {
    /// Makes a group; an error says why that is not possible on this machine.
    pub fn create(name: &str, limit_mib: u64) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
        let controllers =
            |root: &Path| fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        let hierarchy = find_hierarchy(&mounts, controllers)
            .context("no control groups with the memory controller are mounted")?;
        Self::create_in(&hierarchy, name, limit_mib)
    }

    fn create_in(hierarchy: &Hierarchy, name: &str, limit_mib: u64) -> Result<Self> {
        if hierarchy.version == Version::V2 {
            let control = hierarchy.root.join("cgroup.subtree_control");
            fs::write(&control, "+memory").with_context(|| format!("cannot write {}", control.display()))?;
            // `ThrottledVolume` needs it too, and reports an error if it is missing.
            let _ = fs::write(&control, "+io");
        }
        let dir = hierarchy.root.join(name);
        fs::create_dir(&dir).with_context(|| format!("cannot make the group {}", dir.display()))?;
        let mut group = Self { dir, version: hierarchy.version, limit_mib, removed: false };
        group.change(limit_mib)?;
        Ok(group)
    }

    /// Changes the limit; the kernel reclaims the memory above it.
    pub fn change(&mut self, limit_mib: u64) -> Result<()> {
        let file = self.dir.join(self.version.limit_file());
        fs::write(&file, (limit_mib << 20).to_string())
            .with_context(|| format!("cannot limit memory to {limit_mib} MiB: {}", file.display()))?;
        self.limit_mib = limit_mib;
        Ok(())
    }

    /// The limit.
    pub fn limit_mib(&self) -> u64 {
        self.limit_mib
    }

    /// The version of control groups in which the group was made.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file into which a process writes its id to join the group.
    pub fn procs_file(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }

    /// The file for this group's limits on block devices, with version 2.
    pub fn io_limit_file(&self) -> PathBuf {
        self.dir.join("io.max")
    }

    /// Removes the group; processes still in it are killed after a grace period. A second call does nothing.
    pub fn remove(&mut self) -> Result<()> {
        if self.removed {
            return Ok(());
        }
        let started = Instant::now();
        while let Err(error) = fs::remove_dir(&self.dir) {
            if error.kind() == std::io::ErrorKind::NotFound {
                break;
            }
            if started.elapsed() > REMOVE_DEADLINE {
                bail!("cannot remove the control group {}: {error}; try rmdir", self.dir.display());
            }
            if started.elapsed() > GRACE {
                self.kill_members();
            }
            thread::sleep(POLL);
        }
        self.removed = true;
        Ok(())
    }

    fn kill_members(&self) {
        let members = fs::read_to_string(self.procs_file()).unwrap_or_default();
        for pid in members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
            // The process may end by itself first. What matters is that the group becomes empty, which
            // `remove` finds out.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            warn(&format!("{error:#}"));
        }
    }
}

/// Finds the hierarchy that has the memory controller. A hybrid machine mounts both versions, but only one of
/// them has it.
fn find_hierarchy(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<Hierarchy> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (root, kind, options) = (PathBuf::from(fields.next()?), fields.next()?, fields.next()?);
        match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                Some(Hierarchy { version: Version::V1, root })
            }
            "cgroup2" if controllers(&root).split_whitespace().any(|name| name == "memory") => {
                Some(Hierarchy { version: Version::V2, root })
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";

    #[test]
    fn hybrid_machine_without_memory_in_version_2_uses_version_1() {
        let found = find_hierarchy(HYBRID, |_| "hugetlb".into()).unwrap();
        assert_eq!(found, Hierarchy { version: Version::V1, root: "/sys/fs/cgroup/memory".into() });
    }

    #[test]
    fn hierarchy_of_version_2_is_used_where_it_has_the_memory_controller() {
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        let found = find_hierarchy(mounts, |_| "cpu io memory pids\n".into()).unwrap();
        assert_eq!(found, Hierarchy { version: Version::V2, root: "/sys/fs/cgroup".into() });
    }

    #[test]
    fn machine_without_the_memory_controller_has_no_hierarchy() {
        assert_eq!(find_hierarchy("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", |_| "cpu".into()), None);
        assert_eq!(find_hierarchy("cgroup\n\n", |_| String::new()), None);
    }

    #[test]
    fn limit_is_written_in_bytes_to_the_file_of_each_version() {
        for (version, file) in [(Version::V1, "memory.limit_in_bytes"), (Version::V2, "memory.max")] {
            let root = tempfile::tempdir().unwrap();
            let hierarchy = Hierarchy { version, root: root.path().into() };
            let mut group = MemoryLimit::create_in(&hierarchy, "db", 1024).unwrap();
            let written = || fs::read_to_string(root.path().join("db").join(file)).unwrap();
            assert_eq!(written(), "1073741824");
            group.change(2048).unwrap();
            assert_eq!((written().as_str(), group.limit_mib()), ("2147483648", 2048));
            group.removed = true; // the stand-in holds files, which the kernel's directories do not
        }
    }

    #[test]
    fn hierarchy_that_refuses_is_an_error_that_names_the_file() {
        let hierarchy = Hierarchy { version: Version::V1, root: "/proc/self/no-such-hierarchy".into() };
        let error = MemoryLimit::create_in(&hierarchy, "db", 1).unwrap_err();
        assert!(error.to_string().contains("no-such-hierarchy/db"), "{error}");
    }
}
