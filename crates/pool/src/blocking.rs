//! Calls that block on a runtime of their own, in programs that may also have a runtime.

use std::panic::resume_unwind;

use tokio::runtime::Handle;

/// Runs `work`, which blocks on a runtime of its own. Tokio does not allow that on the threads of another
/// runtime. On such a thread, the work gets a thread of its own, for which the caller waits.
pub(crate) fn outside_of_runtimes<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if Handle::try_current().is_err() {
        return work();
    }
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panic| resume_unwind(panic))
}
