//! How much memory a node may lend.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// Memory left to the machine at least, whatever `auto` finds: the kernel and a shell need some.
const LEAST_RESERVE_BYTES: u64 = 512 << 20;
/// Memory left to the machine, as a percentage of the available memory.
const RESERVE_PERCENT: u64 = 10;

/// The amount for `--memory auto`: the smaller of the machine's available memory and the room in this
/// process's cgroup, less a reserve.
pub fn memory_to_lend() -> io::Result<u64> {
    Ok(less_reserve(available_memory()?))
}

fn less_reserve(available: u64) -> u64 {
    available.saturating_sub((available / 100 * RESERVE_PERCENT).max(LEAST_RESERVE_BYTES))
}

/// Memory that this process could take now without displacing others.
pub fn available_memory() -> io::Result<u64> {
    let machine = mem_available(&fs::read_to_string("/proc/meminfo")?)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let room = cgroup_room(&groups, Path::new("/sys/fs/cgroup"));
    Ok(room.map_or(machine, |room| room.min(machine)))
}

/// Bytes that this process may lock; `None`: no limit.
pub fn lockable_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if may_lock_anything(&status) { None } else { getrlimit(Resource::Memlock).current }
}

/// Whether a process with this `/proc/self/status` has CAP_IPC_LOCK.
fn may_lock_anything(status: &str) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
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
/// if there is no limit. `groups` is `/proc/self/cgroup`; the hierarchies are below `mounted`.
fn cgroup_room(groups: &str, mounted: &Path) -> Option<u64> {
    let (root, path, limit, usage) = groups.lines().find_map(|line| cgroup_files(line, mounted))?;
    // In a container the path may be the host's, and only the root may exist.
    Path::new(path).ancestors().filter_map(|group| room_of(&root, group, limit, usage)).min()
}

fn room_of(root: &Path, group: &Path, limit: &str, usage: &str) -> Option<u64> {
    let directory = root.join(group.strip_prefix("/").ok()?);
    let number = |file| fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
    Some(number(limit)?.saturating_sub(number(usage)?)) // "max", no limit, does not parse as a number
}

/// The hierarchy, the group within it, and the names of the files with its limit and its use, for one line of
/// `/proc/self/cgroup`.
fn cgroup_files<'a>(line: &'a str, mounted: &Path) -> Option<(PathBuf, &'a str, &'static str, &'static str)> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    if controllers.split(',').any(|controller| controller == "memory") {
        return Some((mounted.join("memory"), path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
    let unified = controllers.is_empty() && mounted.join("cgroup.controllers").exists();
    unified.then(|| (mounted.to_owned(), path, "memory.max", "memory.current"))
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
    fn auto_leaves_a_tenth_or_512_mib_to_the_machine_whichever_is_more() {
        const MIB: u64 = 1 << 20;
        assert_eq!(less_reserve(10_000 * MIB), 9_000 * MIB);
        assert_eq!(less_reserve(1_000 * MIB), 488 * MIB);
        assert_eq!(less_reserve(512 * MIB), 0);
        assert_eq!(less_reserve(100 * MIB), 0);
    }

    #[test]
    fn the_available_memory_is_a_part_of_this_machine_s_and_auto_lends_a_part_of_it() {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().next().and_then(|line| line.split_whitespace().nth(1)).unwrap();
        let total_bytes = total.parse::<u64>().unwrap() << 10;
        let (lent, available) = (memory_to_lend().unwrap(), available_memory().unwrap());
        assert!((16 << 20..total_bytes).contains(&available), "{available} of {total_bytes}");
        // Half of what auto would lend: other processes take memory and give it back meanwhile.
        assert!(lent < total_bytes && lent >= less_reserve(available) / 2, "{lent} of {available}");
    }

    #[test]
    fn the_limit_on_locked_memory_binds_only_processes_without_the_capability() {
        assert!(may_lock_anything("Name:\tfarpool\nCapEff:\t0000000000004000\n"));
        assert!(!may_lock_anything("CapEff:\t000001ffffffbfff\n"));
        assert!(!may_lock_anything("CapEff:\t0000000000000000\n"));
        assert!(!may_lock_anything("CapPrm:\t0000000000004000\n"));

        let own = |file| fs::read_to_string(Path::new("/proc/self").join(file)).unwrap();
        let limits = own("limits");
        let limit = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
        let bytes = limit.split_whitespace().nth(3).unwrap().parse::<u64>().ok(); // or "unlimited"
        assert_eq!(lockable_memory(), bytes.filter(|_| !may_lock_anything(&own("status"))));
    }

    /// Creates a group below `mounted` with a limit and a use.
    fn group(mounted: &Path, group: &str, [limit, usage]: [(&str, &str); 2]) {
        let directory = mounted.join(group);
        fs::create_dir_all(&directory).unwrap();
        for (file, value) in [limit, usage] {
            fs::write(directory.join(file), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn the_room_of_a_group_is_the_least_of_its_own_and_of_those_above_it() {
        let mounted = tempfile::tempdir().unwrap();
        let room = |path: &str| cgroup_room(&format!("0::{path}\n"), mounted.path());
        let files = |limit, usage| [("memory.max", limit), ("memory.current", usage)];
        group(mounted.path(), "a", files("1000", "300"));
        group(mounted.path(), "a/b", files("max", "100"));
        group(mounted.path(), "a/c", files("500", "400"));
        group(mounted.path(), "a/full", files("100", "101"));
        assert_eq!(room("/a"), None, "no hierarchy of version 2 is mounted");
        fs::write(mounted.path().join("cgroup.controllers"), "memory\n").unwrap();
        assert_eq!(room("/a"), Some(700));
        assert_eq!(room("/a/b"), Some(700));
        assert_eq!(room("/a/c"), Some(100));
        assert_eq!(room("/a/full"), Some(0));
        assert_eq!(room("/elsewhere"), None);
    }

    #[test]
    fn version_1_memory_groups_are_found_by_name() {
        let mounted = tempfile::tempdir().unwrap();
        let files = [("memory.limit_in_bytes", "1000"), ("memory.usage_in_bytes", "300")];
        group(mounted.path(), "memory/database", files);
        fs::write(mounted.path().join("cgroup.controllers"), "").unwrap();
        let room = |groups| cgroup_room(groups, mounted.path());
        assert_eq!(room("9:memory:/database\n"), Some(700));
        assert_eq!(room("3:cpu,cpuacct:/x\n9:hugetlb,memory:/database\n0::/\n"), Some(700));
        assert_eq!(cgroup_files("3:cpu,cpuacct:/x", mounted.path()), None);
        assert_eq!(cgroup_files("garbage", mounted.path()), None);
    }
}
