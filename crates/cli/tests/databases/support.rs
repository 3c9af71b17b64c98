//! The pool, mount and folder for each test.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use farpool_bench::databases::{Access, Ground, GroundOptions};
use farpool_bench::{DEFAULT_WORK_DIR, StopFlag, Transport};

/// The command that starts databases, as words separated by blanks.
const WRAPPER: &str = "FARPOOL_WRAPPER";
/// How the mount reaches its nodes: shm or tcp.
const TRANSPORT: &str = "FARPOOL_TRANSPORT";

/// Longest wait: only something that hangs takes as long, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two checks of a condition that can only be polled.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Polls until `condition` holds; panics if it does not in time, or if Ctrl-C is pressed.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        stop().check().unwrap();
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// One flag for the process: a signal stops all tests.
fn stop() -> StopFlag {
    static STOP: OnceLock<StopFlag> = OnceLock::new();
    STOP.get_or_init(|| StopFlag::on_signals().unwrap()).clone()
}

/// A pool of two nodes that lend this much each, a mount of it, and a folder on the disk.
#[track_caller]
pub fn ground(memory_per_node_mib: u64) -> Ground {
    ground_with(memory_per_node_mib, Access::Kernel)
}

/// The same, with a choice of how databases access the mount's files.
#[track_caller]
pub fn ground_with(memory_per_node_mib: u64, access: Access) -> Ground {
    let wrapper = std::env::var_os(WRAPPER).unwrap_or_default();
    let wrapper =
        wrapper.to_str().expect("the wrapper is text").split_whitespace().map(OsString::from).collect();
    let transport = std::env::var(TRANSPORT).map_or(Transport::default(), |name| name.parse().unwrap());
    let options = GroundOptions {
        farpool: Path::new(env!("CARGO_BIN_EXE_farpool")),
        work_dir: Path::new(DEFAULT_WORK_DIR),
        memory_per_node_mib,
        transport,
        access,
        wrapper,
    };
    Ground::prepare(&options, &stop()).unwrap()
}
