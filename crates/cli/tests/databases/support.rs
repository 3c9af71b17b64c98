//! A ground for each test.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use farpool_workload::databases::{Access, Ground, GroundOptions};
use farpool_workload::{DEFAULT_WORK_DIR, StopFlag, Transport};

/// What databases are run by, as words.
const WRAPPER: &str = "FARPOOL_WRAPPER";
/// How the mount reaches its nodes: shm or tcp.
const TRANSPORT: &str = "FARPOOL_TRANSPORT";

/// Nothing that is waited for takes as long on a busy machine, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a condition that cannot be waited for.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Looks until `condition` holds; panics when it does not in time, or Ctrl-C is pressed.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        stop().check().unwrap();
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// One for the process: a signal is the wish to stop everything.
fn stop() -> StopFlag {
    static STOP: OnceLock<StopFlag> = OnceLock::new();
    STOP.get_or_init(|| StopFlag::on_signals().unwrap()).clone()
}

/// A pool of two nodes that lend so much each, mounted, beside a folder on the disk.
#[track_caller]
pub fn ground(memory_per_node_mib: u64) -> Ground {
    ground_with(memory_per_node_mib, Access::Kernel)
}

/// The same, of which databases work on the mount's files as said.
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
