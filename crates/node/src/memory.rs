//! How much memory a node may lend, and how short of memory its machine is.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::pressure::Measured;

/// Memory left to the machine at least, whatever `auto` finds: the kernel and a shell need some.
const LEAST_LEFT_BYTES: u64 = 512 << 20;
/// Memory left to the machine, as a percentage of the idle memory.
const LEFT_PERCENT: u64 = 10;

/// Bounds of the reserve of a node that is given none.
const RESERVE_BYTES: std::ops::RangeInclusive<u64> = 256 << 20..=2 << 30;

const MEMINFO: &str = "/proc/meminfo";
const CGROUPS: &str = "/sys/fs/cgroup";

/// The amount for `--memory auto`: the smaller of the machine's idle memory and the room in this process's
/// cgroup, less a tenth of it, 512 MiB or twice the reserve, whichever is most.
pub fn memory_to_lend(reserve_bytes: u64) -> io::Result<u64> {
    Ok(less_what_is_left(idle_memory()?, reserve_bytes))
}

fn less_what_is_left(idle: u64, reserve_bytes: u64) -> u64 {
    let least = LEAST_LEFT_BYTES.max(reserve_bytes.saturating_mul(2));
    idle.saturating_sub((idle / 100 * LEFT_PERCENT).max(least))
}

/// The memory that a node leaves available to its machine unless told otherwise: a fiftieth of the machine's
/// or its cgroup's memory within [`RESERVE_BYTES`], but not more than an eighth of it.
pub fn default_reserve() -> io::Result<u64> {
    let machine = meminfo_bytes(&fs::read_to_string(MEMINFO)?, "MemTotal")?;
    let limit = own_cgroup().and_then(|cgroup| cgroup.limit());
    Ok(reserve_of(limit.map_or(machine, |limit| limit.min(machine))))
}

fn reserve_of(total: u64) -> u64 {
    (total / 50).clamp(*RESERVE_BYTES.start(), *RESERVE_BYTES.end()).min(total / 8)
}

/// Memory that this process could take now without displacing others.
pub fn available_memory() -> io::Result<u64> {
    available(&fs::read_to_string(MEMINFO)?)
}

fn available(meminfo: &str) -> io::Result<u64> {
    let machine = meminfo_bytes(meminfo, "MemAvailable")?;
    let room = own_cgroup().and_then(|cgroup| cgroup.room());
    Ok(room.map_or(machine, |room| room.min(machine)))
}

/// The available memory without what other processes have claimed and not used yet (paper 1, section 4.2:
/// memory committed to a local process is not lent).
fn idle_memory() -> io::Result<u64> {
    let meminfo = fs::read_to_string(MEMINFO)?;
    Ok(available(&meminfo)?.saturating_sub(claimed_and_unused(&meminfo)?))
}

/// Memory that the machine's processes have claimed and not touched yet.
fn claimed_and_unused(meminfo: &str) -> io::Result<u64> {
    let bytes = |name| meminfo_bytes(meminfo, name);
    let swapped = bytes("SwapTotal")?.saturating_sub(bytes("SwapFree")?);
    let used = bytes("AnonPages")? + bytes("Shmem")? + swapped;
    Ok(bytes("Committed_AS")?.saturating_sub(used))
}

/// Measures how short of memory the machine, or this process's cgroup, is.
///
/// The time for which processes wait is the whole machine's, not that of the node's cgroup: processes that
/// need the node's memory may be in a sibling group. So those of all other groups count, too.
pub(crate) fn measure() -> io::Result<Measured> {
    // Without the file, the kernel does not measure the pressure.
    let pressure = fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
    Ok(Measured { available_bytes: available_memory()?, stalled: stalled(&pressure).unwrap_or_default() })
}

/// For how long some process has waited for memory, from a file of pressure stall information.
fn stalled(pressure: &str) -> Option<Duration> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split_whitespace().find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
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

/// An entry of `/proc/meminfo`.
fn meminfo_bytes(meminfo: &str, name: &str) -> io::Result<u64> {
    let mut lines = meminfo.lines().filter_map(|line| line.split_once(':'));
    let value = lines.find(|(key, _)| *key == name).and_then(|(_, value)| value.trim().strip_suffix("kB"));
    let kib = value.and_then(|value| value.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other(format!("{MEMINFO} has no {name}")))
}

/// A memory cgroup, of version 1 or 2.
struct Cgroup {
    hierarchy: PathBuf,
    /// From the root of the hierarchy.
    path: String,
    files: &'static CgroupFiles,
}

/// How a version of cgroups names what counts here.
struct CgroupFiles {
    /// The group's limits; the least counts. Above the first the kernel ends processes, above the second it
    /// slows them down.
    limits: &'static [&'static str],
    usage: &'static str,
    /// What the kernel takes from the group when others need the memory, as named in `memory.stat`.
    reclaimable: &'static [&'static str],
}

const VERSION_1: CgroupFiles = CgroupFiles {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
};
const VERSION_2: CgroupFiles = CgroupFiles {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// The memory cgroup of this process, if it has one.
fn own_cgroup() -> Option<Cgroup> {
    Cgroup::find(&fs::read_to_string("/proc/self/cgroup").ok()?, Path::new(CGROUPS))
}

impl Cgroup {
    /// Finds a process's group. `groups` is its `/proc/PID/cgroup`; the hierarchies are below `mounted`.
    fn find(groups: &str, mounted: &Path) -> Option<Self> {
        groups.lines().find_map(|line| Self::in_line(line, mounted))
    }

    fn in_line(line: &str, mounted: &Path) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?.to_owned());
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some(Cgroup { hierarchy: mounted.join("memory"), path, files: &VERSION_1 });
        }
        let unified = controllers.is_empty() && mounted.join("cgroup.controllers").exists();
        unified.then(|| Cgroup { hierarchy: mounted.to_owned(), path, files: &VERSION_2 })
    }

    /// The smallest limit of the group and those above it. `None`: there is none.
    fn limit(&self) -> Option<u64> {
        self.least(|directory| self.limit_of(directory))
    }

    /// The least room in the group and those above it: what is left below the limit, and what the kernel can
    /// take from the group. `None`: there is no limit.
    fn room(&self) -> Option<u64> {
        self.least(|directory| self.room_of(directory))
    }

    fn least(&self, of: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
        // In a container the path may be the host's, and only the root may exist.
        let groups = Path::new(&self.path).ancestors();
        groups.filter_map(|group| of(&self.hierarchy.join(group.strip_prefix("/").ok()?))).min()
    }

    fn limit_of(&self, directory: &Path) -> Option<u64> {
        // "max", no limit, does not parse as a number.
        self.files.limits.iter().filter_map(|limit| number_in(&directory.join(limit))).min()
    }

    fn room_of(&self, directory: &Path) -> Option<u64> {
        let (limit, usage) = (self.limit_of(directory)?, number_in(&directory.join(self.files.usage))?);
        let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let entries = stat.lines().filter_map(|line| line.split_once(' '));
        let reclaimable = |(name, bytes): (&str, &str)| {
            if self.files.reclaimable.contains(&name) { bytes.parse::<u64>().ok() } else { None }
        };
        let reclaimable = entries.filter_map(reclaimable).sum::<u64>();
        Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
    }
}

fn number_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let meminfo = "MemTotal:       24576000 kB\nMemAvailable:   1024 kB\n";
        let available = |meminfo| meminfo_bytes(meminfo, "MemAvailable").map_err(|error| error.to_string());
        assert_eq!(available(meminfo), Ok(1 << 20));
        for unusable in ["MemTotal: 1 kB", "MemAvailable: lots", "MemAvailable: 1 MB"] {
            assert!(available(unusable).unwrap_err().contains("MemAvailable"), "{unusable}");
        }
    }

    #[test]
    fn auto_leaves_a_tenth_or_512_mib_or_twice_the_reserve_to_the_machine_whichever_is_most() {
        let lent = |idle_mib, reserve_mib| less_what_is_left(idle_mib * MIB, reserve_mib * MIB) / MIB;
        assert_eq!(lent(10_000, 400), 9_000);
        assert_eq!(lent(10_000, 600), 8_800);
        assert_eq!((lent(1_000, 0), lent(512, 0), lent(100, 256)), (488, 0, 0));
    }

    #[test]
    fn memory_that_processes_have_claimed_is_not_idle_though_they_do_not_use_it_yet() {
        let used = "AnonPages: 100 kB\nShmem: 30 kB\nSwapTotal: 50 kB\nSwapFree: 46 kB\n";
        let unused = |claimed_kib| claimed_and_unused(&format!("{used}Committed_AS: {claimed_kib} kB\n"));
        assert_eq!(unused(300).unwrap(), 166 << 10);
        assert_eq!(unused(100).unwrap(), 0);
    }

    #[test]
    fn a_node_reserves_a_fiftieth_within_bounds_and_at_most_an_eighth() {
        let reserved = |total_mib| reserve_of(total_mib * MIB) / MIB;
        assert_eq!(reserved(50_000), 1_000);
        assert_eq!((reserved(4_000), reserved(1 << 20)), (256, 2 << 10));
        assert_eq!(reserved(800), 100);
        assert!(default_reserve().unwrap() >= MIB, "this machine has 8 MiB or more");
    }

    #[test]
    fn the_time_that_processes_wait_is_the_total_of_the_line_some() {
        let file = "some avg10=0.00 avg60=0.12 avg300=0.05 total=1500\nfull avg10=0.00 total=900\n";
        assert_eq!(stalled(file), Some(Duration::from_micros(1_500)));
        assert_eq!((stalled(""), stalled("some total=x")), (None, None));
        assert!(measure().unwrap().available_bytes > 0);
    }

    #[test]
    fn the_idle_memory_is_a_part_of_this_machine_s_and_auto_lends_a_part_of_it() {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().next().and_then(|line| line.split_whitespace().nth(1)).unwrap();
        let total_bytes = total.parse::<u64>().unwrap() << 10;
        let (lent, available) = (memory_to_lend(0).unwrap(), idle_memory().unwrap());
        assert!((16 << 20..total_bytes).contains(&available), "{available} of {total_bytes}");
        // Half of what auto would lend: other processes take memory and give it back meanwhile.
        assert!(lent < total_bytes && lent >= less_what_is_left(available, 0) / 2, "{lent} of {available}");
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

    /// Creates a group below `mounted` with a limit, a use and statistics.
    fn group(mounted: &Path, group: &str, files: &CgroupFiles, [limit, usage, stat]: [&str; 3]) {
        let directory = mounted.join(group);
        fs::create_dir_all(&directory).unwrap();
        for (file, value) in [(files.limits[0], limit), (files.usage, usage), ("memory.stat", stat)] {
            fs::write(directory.join(file), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn the_room_of_a_group_is_the_least_of_its_own_and_of_those_above_it() {
        let mounted = tempfile::tempdir().unwrap();
        let cgroup = |path: &str| Cgroup::find(&format!("0::{path}\n"), mounted.path());
        let room = |path: &str| cgroup(path).unwrap().room();
        let add = |name, limit, usage| group(mounted.path(), name, &VERSION_2, [limit, usage, ""]);
        add("a", "1000", "300");
        add("a/b", "max", "100");
        add("a/c", "500", "400");
        add("a/full", "100", "101");
        assert!(cgroup("/a").is_none(), "no hierarchy of version 2 is mounted");
        fs::write(mounted.path().join("cgroup.controllers"), "memory\n").unwrap();
        assert_eq!((room("/a"), cgroup("/a").unwrap().limit()), (Some(700), Some(1_000)));
        assert_eq!((room("/a/b"), cgroup("/a/b").unwrap().limit()), (Some(700), Some(1_000)));
        assert_eq!((room("/a/c"), cgroup("/a/c").unwrap().limit()), (Some(100), Some(500)));
        assert_eq!(room("/a/full"), Some(0));
        fs::write(mounted.path().join("a/c/memory.high"), "450\n").unwrap();
        assert_eq!(room("/a/c"), Some(50), "processes of the group are slowed down above that");
        assert_eq!((room("/elsewhere"), cgroup("/elsewhere").unwrap().limit()), (None, None));
    }

    #[test]
    fn page_cache_in_a_group_counts_as_room_and_shared_memory_does_not() {
        let mounted = tempfile::tempdir().unwrap();
        fs::write(mounted.path().join("cgroup.controllers"), "").unwrap();
        let stat = "anon 100\nfile 500\nshmem 300\ninactive_file 140\nactive_file 50\ninactive_anon 200\nslab_reclaimable 10";
        group(mounted.path(), "a", &VERSION_2, ["1000", "900", stat]);
        assert_eq!(Cgroup::find("0::/a\n", mounted.path()).unwrap().room(), Some(300));
        let stat = "cache 500\ninactive_file 1\ntotal_inactive_file 150\ntotal_active_file 50";
        group(mounted.path(), "memory/a", &VERSION_1, ["1000", "900", stat]);
        assert_eq!(Cgroup::find("4:memory:/a\n", mounted.path()).unwrap().room(), Some(300));
    }

    #[test]
    fn the_group_of_this_process_is_the_one_that_the_kernel_names() {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |cgroup: Option<Cgroup>| cgroup.map(|cgroup| cgroup.path);
        assert_eq!(path(own_cgroup()), path(Cgroup::find(&groups, Path::new("/sys/fs/cgroup"))));
    }

    #[test]
    fn version_1_memory_groups_are_found_by_name() {
        let mounted = tempfile::tempdir().unwrap();
        group(mounted.path(), "memory/database", &VERSION_1, ["1000", "300", ""]);
        fs::write(mounted.path().join("cgroup.controllers"), "").unwrap();
        let room = |groups| Cgroup::find(groups, mounted.path()).and_then(|cgroup| cgroup.room());
        assert_eq!(room("9:memory:/database\n"), Some(700));
        assert_eq!(room("3:cpu,cpuacct:/x\n9:hugetlb,memory:/database\n0::/\n"), Some(700));
        assert!(Cgroup::in_line("3:cpu,cpuacct:/x", mounted.path()).is_none());
        assert!(Cgroup::in_line("garbage", mounted.path()).is_none());
    }
}
