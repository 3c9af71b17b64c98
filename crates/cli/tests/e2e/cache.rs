//! `farpool cache` and `farpool run --cache`: programs read their files through the page cache.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::preload::compile;
use crate::support::{
    Output, Pool, PoolOptions, Process, assert_complaint, built, eventually, farpool, run, run_command,
};

/// Checks itself; see there.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../preload/tests/programs/cached.c");

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
        std::fs::remove_file(self.status()["door"].as_str().unwrap()).unwrap();
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
    let mut attached = attach(&pool, &files);
    eventually("the door is open", || files.status()["state"] == "open");
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
    fill();
    eventually("the memory is there", || cached()["memory_bytes"] == 8 << 20);
    assert!(has_file("unchanged") && cached()["used_bytes"].as_u64().unwrap() >= 32 * 8192, "{}", cached());
    for (size, bytes) in [("4MiB", 4 << 20), ("16MiB", 16 << 20)] {
        let resized = run(["cache", "resize", files.name(), size]);
        assert!(resized.status.success() && resized.stdout.starts_with("resized"), "{resized:?}");
        assert_eq!(
            (cached()["memory_bytes"].as_u64(), cached()["wanted_bytes"].as_u64()),
            (Some(bytes), Some(bytes))
        );
    }
    assert_complaint(&run(["cache", "resize", files.name(), "32MiB"]), 2, "has room for 16 MiB");
    fill();
    assert!(has_file("unchanged"), "{}", cached());
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
    let detached = run(["cache", "detach", files.name()]);
    assert!(detached.status.success() && files.status()["state"] == "detached", "{detached:?}");
    assert!(attached.wait().status.success());
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
