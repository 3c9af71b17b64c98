//! How much memory a node may lend.

use std::fs;
use std::io;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// Memory left to the machine at least, whatever `auto` finds: the kernel and a shell need some.
const LEAST_RESERVE_BYTES: u64 = 512 << 20;
/// Memory left to the machine, as a percentage of the available memory.
const RESERVE_PERCENT: u64 = 10;

/// The amount for `--memory auto`: the smaller of the machine's available memory and the room in this
/// process's cgroup, less a reserve.
pub fn memory_to_lend() -> io::Result<u64> {
    let available = available_memory()?;
    let reserve = (available / 100 * RESERVE_PERCENT).max(LEAST_RESERVE_BYTES);
    Ok(available.saturating_sub(reserve))
}

/// Memory that this process could take now without displacing others.
pub fn available_memory() -> io::Result<u64> {
    let machine = mem_available(&fs::read_to_string("/proc/meminfo")?)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))?;
    Ok(cgroup_room().map_or(machine, |room| room.min(machine)))
}

/// Bytes that this process may lock; `None`: no limit.
pub fn lockable_memory() -> Option<u64> {
    if may_lock_anything() { None } else { getrlimit(Resource::Memlock).current }
}

/// Whether the process has CAP_IPC_LOCK.
fn may_lock_anything() -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & CAP_IPC_LOCK != 0)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The smallest room left in this process's memory cgroup (version 1 or 2) and the cgroups above it. `None`
/// if there is no limit.
fn cgroup_room() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let (root, path, limit, usage) = groups.lines().find_map(cgroup_files)?;
    // In a container the path may be the host's, and only the root may exist.
    Path::new(path).ancestors().filter_map(|group| room_of(root, group, limit, usage)).min()
}

fn room_of(root: &str, group: &Path, limit: &str, usage: &str) -> Option<u64> {
    let directory = Path::new(root).join(group.strip_prefix("/").ok()?);
    let number = |file| fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
    Some(number(limit)?.saturating_sub(number(usage)?)) // "max", no limit, does not parse as a number
}

/// The hierarchy, the group within it, and the names of the files with its limit and its use, for one line of
/// `/proc/self/cgroup`.
fn cgroup_files(line: &str) -> Option<(&'static str, &str, &'static str, &'static str)> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    if controllers.split(',').any(|controller| controller == "memory") {
        return Some(("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
    let unified = controllers.is_empty() && fs::exists("/sys/fs/cgroup/cgroup.controllers").unwrap_or(false);
    unified.then_some(("/sys/fs/cgroup", path, "memory.max", "memory.current"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let meminfo = "MemTotal:       24576000 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(mem_available(meminfo), Some(1 << 20));
        assert_eq!(mem_available("MemTotal: 1 kB"), None);
        assert_eq!(mem_available("MemAvailable: lots"), None);
    }

    #[test]
    fn auto_leaves_a_reserve() {
        let lent = memory_to_lend().unwrap();
        assert!(lent <= available_memory().unwrap());
    }

    #[test]
    fn the_room_of_a_group_is_its_limit_less_its_use() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        fs::write(root.path().join("a/memory.max"), "1000\n").unwrap();
        fs::write(root.path().join("a/memory.current"), "300\n").unwrap();
        fs::write(root.path().join("a/b/memory.max"), "max\n").unwrap();
        let room =
            |group| room_of(root.path().to_str().unwrap(), Path::new(group), "memory.max", "memory.current");
        assert_eq!(room("/a"), Some(700));
        assert_eq!(room("/a/b"), None);
        assert_eq!(room("/elsewhere"), None);
    }

    #[test]
    fn version_1_memory_groups_are_found_by_name() {
        let found = cgroup_files("9:memory:/database").unwrap();
        assert_eq!(
            found,
            ("/sys/fs/cgroup/memory", "/database", "memory.limit_in_bytes", "memory.usage_in_bytes")
        );
        assert_eq!(cgroup_files("3:cpu,cpuacct:/x"), None);
        assert_eq!(cgroup_files("garbage"), None);
    }
}
