//! What the kernel knows about a process: what it has read, written and computed, and where it may run; and
//! how busy all processors are.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::machine::{field, kib};

/// What a process has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Done {
    /// Bytes that it read by system calls.
    pub read_bytes: u64,
    /// Bytes that it wrote by system calls.
    pub written_bytes: u64,
    /// Processor time, in user and kernel mode.
    pub cpu_s: f64,
}

impl Done {
    /// Reads it for this process; `None` if the process has ended or we may not inspect it.
    pub fn of(pid: u32) -> Option<Self> {
        let io = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let cpu_ticks = cpu_ticks(&stat)?;
        Some(Done {
            read_bytes: field(&io, "rchar")?.parse().ok()?,
            written_bytes: field(&io, "wchar")?.parse().ok()?,
            cpu_s: cpu_ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        })
    }
}

/// `utime` and `stime` (proc(5)). The program's name, in parentheses, may contain any characters.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// What all processors of the machine have done since it started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorTime {
    busy: u64,
    all: u64,
}

impl ProcessorTime {
    /// Reads it.
    pub fn now() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        Self::parse(&stat).context("cannot parse /proc/stat")
    }

    /// The first line: user, nice, system, idle, iowait, irq, softirq (proc(5)). What follows is time that
    /// the host takes away, and time of guests, which is part of user and nice.
    fn parse(stat: &str) -> Option<Self> {
        let words = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(7);
        let ticks: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        let [user, nice, system, idle, iowait, irq, softirq] = *ticks.as_array()?;
        let busy = user + nice + system + irq + softirq;
        Some(ProcessorTime { busy, all: busy + idle + iowait })
    }

    /// The share of the time since `before` in which processors were busy.
    pub fn busy_since(self, before: Self) -> f64 {
        let all = self.all.saturating_sub(before.all).max(1);
        self.busy.saturating_sub(before.busy) as f64 / all as f64
    }
}

/// The first child of a process whose command line contains a text.
pub fn child_titled(parent_pid: u32, text: &str) -> Option<u32> {
    children_titled(parent_pid, text).next()
}

/// The children of a process whose command lines contain a text.
pub fn children_titled(parent_pid: u32, text: &str) -> impl Iterator<Item = u32> {
    let proc = Path::new("/proc");
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(move |&pid| parent(proc, pid) == Some(parent_pid)).filter(move |pid| {
        let title = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default(); // fails if it has ended
        String::from_utf8_lossy(&title).contains(text)
    })
}

/// Size of a process's page tables in KiB; `None` if it has ended.
pub fn page_tables_kib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kib(&status, "VmPTE")
}

/// Restricts a process, its descendants and all their threads to one processor. Threads and processes that
/// they start inherit this.
pub fn confine(pid: u32, processor: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    for pid in family(Path::new("/proc"), pid)? {
        for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let thread = entry.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            // Ignores a thread that has ended meanwhile.
            let confined = thread.map(|thread| sched_setaffinity(Some(thread), &set));
            if let Some(Err(error)) = confined.filter(|result| *result != Err(rustix::io::Errno::SRCH)) {
                bail!("cannot confine process {pid} to processor {processor}: {error}");
            }
        }
    }
    Ok(())
}

/// A process and all its descendants.
fn family(proc: &Path, pid: u32) -> Result<Vec<u32>> {
    let entries = fs::read_dir(proc).context("cannot read /proc")?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: Vec<(u32, u32)> = pids.filter_map(|pid| Some((pid, parent(proc, pid)?))).collect();
    let mut family = vec![pid];
    let mut next = 0;
    while let Some(&elder) = family.get(next) {
        family.extend(parents.iter().filter(|(_, parent)| *parent == elder).map(|(pid, _)| *pid));
        next += 1;
    }
    Ok(family)
}

fn parent(proc: &Path, pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?;
    stat[stat.rfind(')')? + 1..].split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn processors_that_wait_for_a_disk_are_not_busy() {
        let before = ProcessorTime::parse("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 2 3\n").unwrap();
        let now = ProcessorTime::parse("cpu  40 0 20 100 30 5 5 9 40 0\n").unwrap();
        assert_eq!(now.busy_since(before), 0.5);
        assert_eq!(ProcessorTime::parse("cpu0 1 2 3 4 5 6 7 8"), None);
    }

    #[test]
    fn processor_time_is_found_after_any_program_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194304 100 0 0 0 25 17 0 0 20 0 1 0 100";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("7 (x"), None);
    }

    #[test]
    fn this_process_has_read_something_and_has_page_tables() {
        assert!(Done::of(std::process::id()).unwrap().read_bytes > 0);
        assert!(page_tables_kib(std::process::id()).unwrap() > 0);
        assert_eq!(Done::of(u32::MAX), None);
    }

    #[test]
    fn child_is_found_by_its_title() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo titled 600.25; read -r end"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        // A newly spawned child may not have its command line yet; a child that has written output has.
        assert!(child.stdout.as_mut().unwrap().read(&mut [0]).unwrap() > 0);
        assert_eq!(child_titled(std::process::id(), "600.25"), Some(child.id()));
        assert_eq!(child_titled(std::process::id(), "no such title"), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn family_is_a_process_with_all_its_descendants() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, parent) in [(10, 1), (11, 10), (12, 11), (13, 1), (14, 10)] {
            let dir = proc.path().join(pid.to_string());
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("stat"), format!("{pid} (p) S {parent} 0")).unwrap();
        }
        let mut found = family(proc.path(), 10).unwrap();
        found.sort_unstable();
        assert_eq!(found, [10, 11, 12, 14]);
    }
}
