//! Locks between processes: `flock`, record locks of processes and of open files (`F_OFD_SETLK`).
//!
//! The other processes are this test program run again. They read calls from standard input, a line for each
//! call, and answer each with a line.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Lines, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::support::{Scratch, eventually};

/// Set for a process that locks: the file.
const LOCK: &str = "FARPOOL_TEST_LOCK";
const ANSWER: &str = "answer ";
/// All kinds of locks.
const KINDS: [&str; 3] = ["flock", "record", "open-file"];
const WHOLE: (i64, i64) = (0, 0);
/// How often each process of a test increments a number in a file.
const INCREMENTS: u64 = 200;

fn answer_of(result: libc::c_int) -> String {
    if result == 0 { "ok".into() } else { io::Error::last_os_error().raw_os_error().unwrap().to_string() }
}

fn range_of(mode: &str, (start, length): (i64, i64)) -> libc::flock {
    let kind = match mode {
        "exclusive" => libc::F_WRLCK,
        "shared" => libc::F_RDLCK,
        _ => libc::F_UNLCK,
    };
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: length,
        l_pid: 0,
    }
}

/// Locks or unlocks, and waits if `wait` says so.
fn lock(file: &File, kind: &str, mode: &str, wait: bool, range: (i64, i64)) -> String {
    let number = file.as_raw_fd();
    let mut record = range_of(mode, range);
    // SAFETY: the descriptor is open, and `record` lives until the call returns; nothing else borrows it.
    let result = unsafe {
        match (kind, wait) {
            ("record", false) => libc::fcntl(number, libc::F_SETLK, &raw mut record),
            ("record", true) => libc::fcntl(number, libc::F_SETLKW, &raw mut record),
            ("open-file", false) => libc::fcntl(number, libc::F_OFD_SETLK, &raw mut record),
            ("open-file", true) => libc::fcntl(number, libc::F_OFD_SETLKW, &raw mut record),
            _ => {
                let mode = match mode {
                    "exclusive" => libc::LOCK_EX,
                    "shared" => libc::LOCK_SH,
                    _ => libc::LOCK_UN,
                };
                libc::flock(number, if wait { mode } else { mode | libc::LOCK_NB })
            }
        }
    };
    answer_of(result)
}

/// The holder of a record lock for which an exclusive one would have to wait.
fn holder(file: &File) -> String {
    let mut record = range_of("exclusive", WHOLE);
    // SAFETY: the descriptor is open, and `record` lives until the call returns; nothing else borrows it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut record) };
    assert_eq!(result, 0);
    if i32::from(record.l_type) == libc::F_UNLCK { "none".into() } else { record.l_pid.to_string() }
}

/// Increments a number in the file's first bytes, each time under the lock.
fn increment(file: &File, kind: &str) -> String {
    let mut number = [0; 8];
    for _ in 0..INCREMENTS {
        assert_eq!(lock(file, kind, "exclusive", true, WHOLE), "ok");
        file.read_exact_at(&mut number, 0).unwrap();
        let next = u64::from_ne_bytes(number) + 1;
        file.write_all_at(&next.to_ne_bytes(), 0).unwrap();
        assert_eq!(lock(file, kind, "none", false, WHOLE), "ok");
    }
    "ok".into()
}

/// Does nothing, unless another test has started it to lock a file until its standard input ends.
#[test]
fn lock_when_another_test_asks() {
    let Some(path) = std::env::var_os(LOCK) else { return };
    let file = File::options().read(true).write(true).open(path).unwrap();
    for line in io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let answer = match words[..] {
            ["lock", kind, mode, wait, start, length] => {
                lock(&file, kind, mode, wait == "wait", (start.parse().unwrap(), length.parse().unwrap()))
            }
            ["increment", kind] => increment(&file, kind),
            ["holder"] => holder(&file),
            _ => panic!("{line}: no such call"),
        };
        println!("\n{ANSWER}{answer}");
    }
}

/// Another process that has the file open.
struct Locker {
    process: Child,
    calls: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Locker {
    fn start(path: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["locks::lock_when_another_test_asks", "--exact", "--nocapture"]).env(LOCK, path);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let calls = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        Locker { process, calls, answers }
    }

    /// Sends a call to the process without waiting for its answer.
    fn tell(&mut self, call: &str) {
        writeln!(self.calls, "{call}").unwrap();
    }

    fn answer(&mut self) -> String {
        let lines = self.answers.by_ref().map(Result::unwrap);
        lines.filter_map(|line| Some(line.strip_prefix(ANSWER)?.to_owned())).next().unwrap()
    }

    fn call(&mut self, call: &str) -> String {
        self.tell(call);
        self.answer()
    }

    fn lock(&mut self, kind: &str, mode: &str) -> String {
        self.call(&format!("lock {kind} {mode} now 0 0"))
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn new_file(dir: &Scratch, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, [0; 8]).unwrap();
    path
}

/// Whether a process is waiting for a lock on the file.
fn is_awaited(path: &Path) -> bool {
    let inode = format!(":{} ", fs::metadata(path).unwrap().ino());
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().any(|line| line.contains("->") && line.contains(&inode))
}

/// The answer for a lock that another process holds: EAGAIN.
fn taken() -> String {
    libc::EAGAIN.to_string()
}

#[test]
fn exclusive_locks_exclude_other_processes_and_shared_ones_only_exclusive_ones() {
    let dir = Scratch::new();
    for kind in KINDS {
        let path = new_file(&dir, kind);
        let (mut first, mut second) = (Locker::start(&path), Locker::start(&path));
        assert_eq!(first.lock(kind, "exclusive"), "ok", "{kind}");
        assert_eq!(second.lock(kind, "exclusive"), taken(), "{kind}");
        assert_eq!(second.lock(kind, "shared"), taken(), "{kind}");
        assert_eq!(first.lock(kind, "shared"), "ok", "{kind}");
        assert_eq!(second.lock(kind, "shared"), "ok", "{kind}");
        assert_eq!(second.lock(kind, "exclusive"), taken(), "{kind}");
        assert_eq!(first.lock(kind, "none"), "ok", "{kind}");
        assert_eq!(second.lock(kind, "exclusive"), "ok", "{kind}");
    }
}

#[test]
fn processes_that_count_under_a_lock_lose_nothing() {
    let dir = Scratch::new();
    for kind in KINDS {
        let path = new_file(&dir, kind);
        let mut lockers: Vec<_> = (0..4).map(|_| Locker::start(&path)).collect();
        lockers.iter_mut().for_each(|locker| locker.tell(&format!("increment {kind}")));
        assert!(lockers.iter_mut().all(|locker| locker.answer() == "ok"), "{kind}");
        let counted = u64::from_ne_bytes(fs::read(&path).unwrap().try_into().unwrap());
        assert_eq!(counted, 4 * INCREMENTS, "{kind}");
    }
}

#[test]
fn a_wait_ends_when_the_lock_is_given_up_or_its_holder_is_killed() {
    let dir = Scratch::new();
    for kind in KINDS {
        for killed in [false, true] {
            let path = new_file(&dir, kind);
            let (mut holder, mut waiter) = (Locker::start(&path), Locker::start(&path));
            assert_eq!(holder.lock(kind, "exclusive"), "ok", "{kind}");
            waiter.tell(&format!("lock {kind} exclusive wait 0 0"));
            eventually("the lock is awaited", || is_awaited(&path));
            if killed {
                holder.kill();
            } else {
                assert_eq!(holder.lock(kind, "none"), "ok", "{kind}");
            }
            assert_eq!(waiter.answer(), "ok", "{kind}");
        }
    }
}

#[test]
fn a_process_that_waits_for_a_lock_can_be_killed() {
    let dir = Scratch::new();
    for kind in KINDS {
        let path = new_file(&dir, kind);
        let (mut holder, mut waiter) = (Locker::start(&path), Locker::start(&path));
        assert_eq!(holder.lock(kind, "exclusive"), "ok", "{kind}");
        waiter.tell(&format!("lock {kind} exclusive wait 0 0"));
        eventually("the lock is awaited", || is_awaited(&path));
        waiter.kill();
        assert!(!is_awaited(&path), "{kind}");
        assert_eq!(holder.lock(kind, "shared"), "ok", "{kind}");
    }
}

#[test]
fn record_locks_are_for_ranges_and_name_their_holder() {
    let dir = Scratch::new();
    let path = new_file(&dir, "file");
    let (mut first, mut second) = (Locker::start(&path), Locker::start(&path));
    assert_eq!(second.call("holder"), "none");
    assert_eq!(first.call("lock record exclusive now 0 100"), "ok");
    assert_eq!(second.call("holder"), first.process.id().to_string());
    assert_eq!(second.call("lock record exclusive now 99 1"), taken());
    assert_eq!(second.call("lock record exclusive now 100 0"), "ok");
    assert_eq!(first.call("lock record none now 40 20"), "ok");
    assert_eq!(second.call("lock record exclusive now 40 20"), "ok");
    assert_eq!(second.call("lock record exclusive now 39 1"), taken());
    assert_eq!(second.call("lock record exclusive now 60 1"), taken());
    assert_eq!(first.lock("record", "shared"), taken());
    second.kill();
    assert_eq!(first.lock("record", "exclusive"), "ok");
}

#[test]
fn locks_follow_the_file_and_not_its_name() {
    let dir = Scratch::new();
    let path = new_file(&dir, "old");
    let mut first = Locker::start(&path);
    assert_eq!(first.lock("flock", "exclusive"), "ok");
    fs::rename(&path, dir.join("new")).unwrap();
    let mut second = Locker::start(&dir.join("new"));
    assert_eq!(second.lock("flock", "exclusive"), taken());
    new_file(&dir, "old");
    let mut third = Locker::start(&path);
    assert_eq!(third.lock("flock", "exclusive"), "ok");
}
