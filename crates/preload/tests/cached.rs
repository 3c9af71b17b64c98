//! The library in C programs that use the page cache without knowing of it, on real nodes.

mod building;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use building::{compile, library};
use farpool_cache::{AttachedCache, CacheConfig, Door, DoorFile};
use farpool_fabric::TransportChoice;
use farpool_testpool::{Rig, wait_until};

/// Fewer slots than the program has blocks, so that pages are evicted.
const SETTINGS: CacheConfig = CacheConfig { slots: 32, max_slots: 32, files: 64 };
const SECONDS: &str = "3";
/// How the program says that it found an old page.
const FOUND_OLD: i32 = 3;

/// A directory on a disk for a program's files, and the program.
struct Stage {
    files: tempfile::TempDir,
    _built: tempfile::TempDir,
    program: PathBuf,
}

impl Stage {
    fn new(program: &str) -> Stage {
        let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let built = tempfile::tempdir().unwrap();
        let program = compile(program, built.path());
        Stage { files, _built: built, program }
    }

    fn path(&self) -> &Path {
        self.files.path()
    }

    fn door(&self) -> DoorFile {
        DoorFile::open(self.path()).unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(self.path()).args(arguments);
        command.env("LD_PRELOAD", library()).env("FARPOOL_CACHE", self.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.door().remove().unwrap();
    }
}

fn attach(rig: &Rig, stage: &Stage) -> AttachedCache {
    let attached = AttachedCache::new(stage.door(), rig.pool(TransportChoice::Auto), SETTINGS).unwrap();
    wait_until(|| stage.door().status().door == Door::Open);
    attached
}

#[track_caller]
fn assert_well(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}

#[test]
fn processes_that_share_a_cached_file_find_no_old_page() {
    let (rig, stage) = (Rig::new(1, 4), Stage::new("cached"));
    let attached = attach(&rig, &stage);
    let before = stage.door().status();
    assert_well(&stage.run(&[SECONDS, "hooked"]));
    let usage = stage.door().status();
    assert!(usage.hits > 1_000 && usage.outsiders == 0, "{usage:?}");
    assert_eq!(usage.turns, before.turns, "the cache has lost its pages: {usage:?}");
    drop(attached);
}

#[test]
fn a_cache_that_comes_and_goes_while_processes_work_shows_no_old_page() {
    let (rig, stage) = (Rig::new(1, 4), Stage::new("cached"));
    let mut running = stage.command(&[SECONDS, "hooked"]).spawn().unwrap();
    while running.try_wait().unwrap().is_none() {
        let attached = attach(&rig, &stage);
        std::thread::sleep(Duration::from_millis(300));
        drop(attached);
    }
    assert!(running.wait().unwrap().success());
    assert!(stage.door().status().hits > 1_000, "{:?}", stage.door().status());
}

#[test]
fn writes_that_no_hook_sees_are_found_out_so_this_test_can_fail() {
    let (rig, stage) = (Rig::new(1, 4), Stage::new("cached"));
    let _attached = attach(&rig, &stage);
    let output = stage.run(&[SECONDS, "foreign"]);
    assert_eq!(output.status.code(), Some(FOUND_OLD), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs `edges.c`, see there, in one way, beside a cache.
fn run_edge(how: &str) -> Output {
    let (rig, stage) = (Rig::new(1, 4), Stage::new("edges"));
    let _attached = attach(&rig, &stage);
    stage.run(&[how])
}

#[test]
fn at_the_edges_too_writes_that_no_hook_sees_are_found_out() {
    assert_eq!(run_edge("foreign").status.code(), Some(FOUND_OLD));
}

macro_rules! edges {
    ($($name:ident: $how:literal;)*) => {
        $(#[test]
        fn $name() {
            assert_well(&run_edge($how));
        })*
    };
}

edges! {
    what_is_appended_is_not_found_elsewhere: "append";
    a_new_file_with_the_stamp_of_an_old_one_is_told_from_it: "rebirth";
    a_descriptor_that_is_replaced_during_a_call_puts_no_page_under_another_file: "replacing";
    a_child_without_free_descriptors_announces_its_writes: "full-table";
    a_mapping_keeps_the_cache_off_when_its_thread_has_ended: "mapping";
    a_mapping_by_another_name_of_the_file_switches_the_cache_off: "link";
    a_stream_keeps_the_cache_off_in_the_child_of_a_fork: "stream-in-child";
    standard_output_to_a_cached_file_switches_the_cache_off: "standard-output";
    a_hardened_open_that_truncates_is_announced: "hardened-open";
    truncating_by_path_gives_up_no_lock: "locks";
    a_thread_that_waits_in_a_write_can_be_cancelled: "cancelled";
    signal_handlers_may_write_while_libc_allocates: "handlers";
    the_child_of_a_vfork_takes_no_place: "vforked";
}
