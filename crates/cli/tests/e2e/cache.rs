//! `farpool cache` and `farpool run --cache`: programs read their files through the page cache.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use farpool_cache::{CacheClient, CacheSession, DoorFile, PAGE_BYTES, Replacements, collect_into};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::preload::compile;
use crate::support::{
    Output, Pool, PoolOptions, Process, assert_complaint, built, eventually, farpool, run, run_command, tied,
};

/// Checks itself; see there.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../preload/tests/programs/cached.c");

/// Longer than a process waits for an answer of the daemon.
const BEYOND_PATIENCE: Duration = Duration::from_secs(1);

/// A directory on a disk whose files are cached; its door goes with it.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        files.remove_door(); // of a removed directory that had the same inode
        files
    }

    fn name(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    fn status(&self) -> Value {
        let output = run(["cache", "status", "--json", self.name()]);
        serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    fn remove_door(&self) {
        if let Some(door) = self.status()["door"].as_str() {
            std::fs::remove_file(door).unwrap();
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.remove_door();
    }
}

fn compile_program(dir: &Path) -> PathBuf {
    let program = dir.join("cached");
    let source = std::fs::read_to_string(PROGRAM).unwrap();
    let beside = format!("-I{}", Path::new(PROGRAM).parent().unwrap().display());
    compile(dir, &source, &["-std=gnu11", "-O1", &beside], &program);
    program
}

fn attach(pool: &Pool, files: &Files) -> Process {
    let args = ["cache", "attach", files.name(), "--memory", "8MiB", "--broker", &pool.address];
    Process::ready("cache", farpool(args)).0
}

/// Attaches, and waits until pages are cached.
fn attach_and_await_door(pool: &Pool, files: &Files) -> Process {
    let attached = attach(pool, files);
    eventually("the door is open", || files.status()["state"] == "open");
    attached
}

fn run_cached(files: &Files, program: &Path, args: &[&str]) -> Output {
    let mut command = farpool(["run", "--cache", files.name(), program.to_str().unwrap()]);
    command.args(args).env("FARPOOL_PRELOAD", built("libfarpool_preload.so")).env_remove("LD_PRELOAD");
    run_command(command)
}

#[test]
fn programs_read_from_the_cache_while_it_is_attached_and_from_the_disk_otherwise() {
    let (pool, files, dir) = (Pool::start(PoolOptions::default()), Files::new(), TempDir::new().unwrap());
    let program = compile_program(dir.path());
    let runs_well = || {
        let output = run_cached(&files, &program, &[files.name(), "2", "hooked"]);
        assert!(output.status.success(), "{output:?}");
    };
    runs_well();
    let status = files.status();
    assert_eq!((status["state"].as_str(), status["hits"].as_u64()), (Some("detached"), Some(0)), "{status}");
    let mut attached = attach_and_await_door(&pool, &files);
    runs_well();
    let status = files.status();
    assert_eq!(status["state"].as_str(), Some("open"), "{status}");
    assert!(
        status["hits"].as_u64().unwrap() > 1_000 && status["hit_rate"].as_f64().unwrap() > 0.0,
        "{status}"
    );
    attached.end_well();
    eventually("the door is closed", || files.status()["state"] == "detached");
    runs_well();
    assert_eq!(files.status()["hits"], status["hits"]);
}

#[test]
fn a_killed_daemon_costs_hits_and_another_one_takes_its_place() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let mut attached = attach(&pool, &files);
    let args = ["cache", "attach", files.name(), "--memory", "8MiB", "--broker", &pool.address];
    assert_complaint(&run(args), 1, "another `farpool cache attach` serves these files");
    attached.kill();
    assert_eq!(files.status()["state"], "abandoned");
    attach(&pool, &files).end_well();
}

#[test]
fn a_cache_is_resized_pinned_emptied_and_detached_by_commands() {
    let (pool, files, dir) = (Pool::start(PoolOptions::default()), Files::new(), TempDir::new().unwrap());
    let no_cache = run(["cache", "detach", files.name()]);
    assert_complaint(&no_cache, 1, "no cache is attached");
    let args = ["--memory", "8MiB", "--max-memory", "16MiB", "--broker", &pool.address];
    let (mut attached, _) =
        Process::ready("cache", farpool(["cache", "attach", files.name()].into_iter().chain(args)));
    let program = compile_program(dir.path());
    let fill = || {
        let output = run_cached(&files, &program, &[files.name(), "1", "hooked"]);
        assert!(output.status.success(), "{output:?}");
    };
    let cached = || files.status()["cache"].clone();
    let has_file = |name: &str| {
        cached()["files"].as_array().unwrap().iter().any(|file| file["path"].as_str() == Some(name))
    };
    eventually("the memory is there", || cached()["memory_bytes"] == 8 << 20);
    // On a busy machine, a file is read more than once before the daemon lets its pages in.
    let fill_all = || {
        eventually("the file is cached", || {
            fill();
            has_file("unchanged") && cached()["used_bytes"].as_u64().unwrap() >= 32 * 8192
        })
    };
    fill_all();
    for (size, bytes) in [("4MiB", 4 << 20), ("16MiB", 16 << 20)] {
        let resized = run(["cache", "resize", files.name(), size]);
        assert!(resized.status.success() && resized.stdout.starts_with("resized"), "{resized:?}");
        assert_eq!(
            (cached()["memory_bytes"].as_u64(), cached()["wanted_bytes"].as_u64()),
            (Some(bytes), Some(bytes))
        );
    }
    assert_complaint(&run(["cache", "resize", files.name(), "32MiB"]), 2, "has room for 16 MiB");
    fill_all();
    let is_pinned = || {
        let files = cached()["files"].as_array().unwrap().clone();
        files.iter().any(|file| file["path"] == "unchanged" && file["pinned"] == true)
    };
    let pinned = run(["cache", "pin", files.name(), "unchanged"]);
    assert!(pinned.stdout.contains("256 KiB of 256 KiB are in the cache") && is_pinned(), "{pinned:?}");
    assert!(run(["cache", "unpin", files.name(), "unchanged"]).status.success() && !is_pinned());
    let dropped = run(["cache", "drop", files.name(), "unchanged"]);
    assert!(dropped.status.success(), "{dropped:?}");
    assert!(!has_file("unchanged"), "{}", cached());
    assert!(run(["cache", "drop", files.name()]).status.success());
    eventually("the door is open again", || files.status()["state"] == "open");
    assert_eq!(cached()["used_bytes"], 0);
    let shown = run(["cache", "status", files.name()]);
    assert!(shown.stdout.contains("memory    16 MiB; pages take 0 B"), "{shown:?}");
    let top = run(["cache", "top", files.name(), "--count", "2"]);
    let lines: Vec<&str> = top.stdout.lines().collect();
    assert!(
        lines.len() == 3 && lines[0].contains("hits/s") && lines[2].ends_with("16 MiB        0  open"),
        "{top:?}"
    );
    let detached = run(["cache", "detach", files.name()]);
    assert!(detached.status.success() && files.status()["state"] == "detached", "{detached:?}");
    assert!(attached.wait().status.success());
}

#[test]
fn commands_outlast_a_daemon_that_pauses_and_status_says_that_it_does_not_answer() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let mut attached = attach_and_await_door(&pool, &files);
    attached.signal(Signal::STOP);
    assert_eq!(files.status()["state"], "silent");
    let resizing = farpool(["cache", "resize", files.name(), "4MiB"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(BEYOND_PATIENCE);
    attached.signal(Signal::CONT);
    let resized = resizing.wait_with_output().unwrap();
    assert!(resized.status.success() && resized.stdout.starts_with(b"resized"), "{resized:?}");
    attached.end_well();
}

#[test]
fn a_node_that_hangs_holds_up_one_read_and_is_left_alone_then() {
    static REPLACEMENTS: Replacements = Replacements::new();
    static IS_ENABLED: AtomicBool = AtomicBool::new(true);
    const PAGES: u64 = 40;
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let args = ["cache", "attach", files.name(), "--memory", "8MiB", "--broker", &pool.address];
    let (mut attached, _) = Process::ready("cache", farpool(args.into_iter().chain(["--transport", "tcp"])));
    let path = files.0.path().join("table");
    std::fs::write(&path, vec![7; PAGES as usize * PAGE_BYTES]).unwrap();
    let (file, door) = (File::open(path).unwrap(), DoorFile::open(files.0.path()).unwrap());
    let client = CacheClient::new(Arc::new(door));
    let mut session = CacheSession::new(&client, &REPLACEMENTS, &IS_ENABLED).unwrap();
    let mut read = |page: u64| {
        let (mut is_hit, range) = (true, page * PAGE_BYTES as u64..(page + 1) * PAGE_BYTES as u64);
        let pread = |to: &mut [u8], at| {
            is_hit = false;
            file.read_at(to, at)
        };
        let mut found = Vec::new();
        let read = session.read(file.as_fd(), range, pread, collect_into(&mut found));
        assert!(read == Some(PAGE_BYTES as u64) && found == [7; PAGE_BYTES], "page {page}");
        is_hit
    };
    eventually("all pages are cached", || (0..PAGES).all(&mut read));
    pool.nodes.iter().for_each(|node| node.signal(Signal::STOP));
    let began = Instant::now();
    let hits = (0..PAGES).filter(|page| read(*page)).count();
    assert_eq!(hits, 0);
    // Half a second for each page would be 20 s.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    pool.nodes.iter().for_each(|node| node.signal(Signal::CONT));
    eventually("all pages are found again", || (0..PAGES).all(&mut read));
    attached.end_well();
}

#[test]
fn files_that_are_never_cached_are_refused_and_the_others_pinned() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let mut attached = attach_and_await_door(&pool, &files);
    ["table", "table-wal"]
        .iter()
        .for_each(|name| std::fs::write(files.0.path().join(name), vec![7; 1 << 20]).unwrap());
    let pinned = run(["cache", "pin", files.name(), "table-wal", "missing", "table"]);
    assert!(pinned.stdout.contains("table  1 MiB of 1 MiB are in the cache"), "{pinned:?}");
    for said in ["table-wal is never cached", "cannot open", "2 of 3 files failed"] {
        assert!(pinned.stderr.contains(said) && pinned.status.code() == Some(1), "{said}: {pinned:?}");
    }
    let dropped = run(["cache", "drop", files.name(), "table-wal"]);
    assert_complaint(&dropped, 1, "is never cached");
    std::fs::write(files.0.path().join("other"), "unknown to the cache").unwrap();
    assert!(run(["cache", "unpin", files.name(), "other"]).stdout.starts_with("not in the cache"));
    std::fs::remove_file(files.0.path().join("table")).unwrap();
    let pins = || {
        let listed = files.status()["cache"]["files"].clone();
        listed.as_array().unwrap().iter().filter(|file| file["pinned"] == true).count()
    };
    assert_eq!(pins(), 1, "it keeps its pages after it was removed");
    assert!(run(["cache", "unpin", files.name()]).stdout.starts_with("unpinned  all files"));
    assert_eq!(pins(), 0);
    attached.end_well();
}

#[test]
fn verify_names_a_page_that_was_changed_without_the_cache() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let mut attached = attach_and_await_door(&pool, &files);
    let table = files.0.path().join("table");
    std::fs::write(&table, vec![7; 40 * PAGE_BYTES]).unwrap();
    assert!(run(["cache", "pin", files.name(), "table"]).status.success());
    let verify = || run(["cache", "verify", files.name(), "--sample", "1/1"]);
    assert!(verify().stdout.contains("40 pages in the cache are as on the disk"), "{:?}", verify());
    File::options().write(true).open(&table).unwrap().write_all_at(&[8], 3 * PAGE_BYTES as u64).unwrap();
    let found = verify();
    assert_complaint(&found, 1, "farpool cache drop");
    for said in ["page 3 of", "1 of 40 pages in the cache"] {
        assert!(found.stderr.contains(said), "{found:?}");
    }
    assert!(run(["cache", "drop", files.name(), "table"]).status.success());
    assert!(verify().stdout.starts_with("nothing compared"), "{:?}", verify());
    attached.end_well();
}

#[test]
fn directories_with_caches_must_not_overlap() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let below = files.0.path().join("below");
    std::fs::create_dir(&below).unwrap();
    let mut attached = attach(&pool, &files);
    let args = ["cache", "attach", below.to_str().unwrap(), "--memory", "8MiB", "--broker", &pool.address];
    assert_complaint(&run(args), 1, "which overlaps: detach it first");
    attached.end_well();
    let door = DoorFile::find(&below).unwrap().expect("attach has made it");
    door.remove().unwrap();
}

#[test]
fn an_index_for_which_there_is_no_memory_is_refused_with_the_option_that_makes_it_smaller() {
    let (pool, files) = (Pool::start(PoolOptions::default()), Files::new());
    let limited = ["--as=2000000000", "--", env!("CARGO_BIN_EXE_farpool")];
    let attach = ["cache", "attach", files.name(), "--broker", &pool.address];
    let sizes = ["--memory", "8MiB", "--max-memory", "512GiB"];
    let limited = tied("prlimit", limited.iter().chain(&attach).chain(&sizes));
    assert_complaint(&run_command(limited), 1, "lower --max-memory");
}

#[test]
fn what_cannot_be_cached_is_refused_with_the_reason() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let name = file.path().to_str().unwrap();
    for args in [&["cache", "attach", name, "--memory", "8MiB"][..], &["cache", "status", name]] {
        assert_complaint(&run(args), 1, "cannot cache the files in");
    }
    assert_complaint(&run(["cache", "attach", "/", "--memory", "1"]), 1, "at least 8 KiB");
}
