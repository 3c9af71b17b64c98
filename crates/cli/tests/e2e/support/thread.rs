//! Stops one thread of a child process while the others go on, by ptrace(2).

use std::io::Error;
use std::os::raw::c_uint;
use std::path::Path;

use libc::{__WALL, PTRACE_DETACH, PTRACE_INTERRUPT, PTRACE_SEIZE, c_void, pid_t, ptrace, waitpid};

/// A stopped thread of a child. It goes on when this is dropped, by the thread of this process that has
/// stopped it: ptrace(2) belongs to a thread.
pub struct StoppedThread {
    id: pid_t,
}

impl StoppedThread {
    /// Stops the thread called `name` of a child, or of the program that the child now runs.
    #[track_caller]
    pub fn stop(process: u32, name: &str) -> StoppedThread {
        let id = find(process, name);
        let none = std::ptr::null_mut::<c_void>();
        for request in [PTRACE_SEIZE, PTRACE_INTERRUPT] {
            // SAFETY: neither request reads or writes memory of this process: both pointers are null.
            let asked = unsafe { ptrace(request as c_uint, id, none, none) };
            let error = Error::last_os_error();
            assert_ne!(
                asked, -1,
                "cannot stop a thread of a child by ptrace, which this test needs: {error}"
            );
        }
        let mut status = 0;
        // SAFETY: the kernel writes one `c_int`: `status` is one, not borrowed elsewhere, and lives until
        // the call returns.
        let waited = unsafe { waitpid(id, &mut status, __WALL) };
        assert!(waited == id && libc::WIFSTOPPED(status), "{name}: {waited}, status {status:#x}");
        StoppedThread { id }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<c_void>();
        // SAFETY: the request reads and writes no memory of this process: both pointers are null. A thread
        // that has ended by now needs no detaching, so the error is ignored.
        unsafe { ptrace(PTRACE_DETACH as c_uint, self.id, none, none) };
    }
}

/// The id of the thread called `name`.
#[track_caller]
fn find(process: u32, name: &str) -> pid_t {
    let tasks = Path::new("/proc").join(process.to_string()).join("task");
    let threads = std::fs::read_dir(tasks).unwrap().flatten();
    let is_named =
        |path: &Path| std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    let found = threads.map(|thread| thread.path()).find(|path| is_named(path));
    let found = found.unwrap_or_else(|| panic!("process {process} has no thread {name}"));
    found.file_name().and_then(|id| id.to_str()?.parse().ok()).expect("threads are numbers")
}
