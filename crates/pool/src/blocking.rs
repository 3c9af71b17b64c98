//! Calls that block on a runtime of their own, in programs that may have a runtime, too.

use std::panic::resume_unwind;

use tokio::runtime::Handle;

/// Runs `work`, which blocks on a runtime of its own. Tokio does not allow that on the threads of another
/// runtime; there a thread is started for it, and the caller waits for that thread.
pub(crate) fn outside_of_runtimes<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if Handle::try_current().is_err() {
        return work();
    }
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panic| resume_unwind(panic))
}
