//! The watcher: a child process that outlives a killed daemon just long enough to take its mount away.
//!
//! A daemon that ends in whatever way closes its device, and the kernel answers every call on the mount with
//! ENOTCONN; but the dead mount would stay on its path. So a child holds the reading end of a pipe whose writing
//! end only the daemon has. A byte means a clean end, and the child leaves. End of file without that byte means
//! that the daemon is gone: if a *dead* FUSE mount lies on the path, the child detaches it. A live one is never
//! touched, so it does not matter whose mount it is or when it was made, and nothing has to be told to the child.
//!
//! The child is forked, not executed anew, so it runs under the rules of signal handlers: system calls on memory
//! prepared before the fork, no allocation, no locks. It must be started before the process has threads, maps far
//! memory or opens the device: a child that holds these would keep alive what the daemon's end is to set free.

use std::ffi::{CStr, CString};
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::error::MountError;
use crate::helper::{self, wait_for_exit};
use crate::mountpoint::resolve;

/// The child has one byte to read and one call to make; it is left to init if that takes longer.
const GOODBYE_LIMIT: Duration = Duration::from_secs(2);
/// Where the child keeps its end of the pipe after it has closed everything else.
const CHILD_PIPE: RawFd = 3;
const CHILD_NAME: &CStr = c"farpool-watcher";

/// The daemon's hold on its watcher: dropping it is a clean end.
#[derive(Debug)]
pub struct Watcher {
    pipe: PipeWriter,
    child: Pid,
}

/// Starts the watcher of a mount that is about to be made on `mountpoint`. To be called while the process has a
/// single thread, before it leases anything.
pub fn start_watcher(mountpoint: &Path) -> Result<Watcher, MountError> {
    let resolved = resolve(mountpoint)?;
    start(&resolved).map_err(|source| MountError::NoWatcher { source })
}

fn start(mountpoint: &Path) -> io::Result<Watcher> {
    let plan = Plan::new(mountpoint)?;
    let (theirs, ours) = io::pipe()?;
    let null: OwnedFd = std::fs::File::options().read(true).write(true).open("/dev/null")?.into();
    // SAFETY: the child calls nothing but async-signal-safe functions and never returns.
    // - In bounds, alive: it works on its copy of `plan`, made before the fork.
    // - Exclusive: locks that other threads might have held at the fork are never taken.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => watch(theirs.as_raw_fd(), null.as_raw_fd(), &plan),
        pid => {
            let child = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
            Ok(Watcher { pipe: ours, child })
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // A watcher that has gone already needs no goodbye; SIGPIPE is ignored by Rust's runtime.
        let _ = self.pipe.write(b"x");
        if matches!(wait_for_exit(self.child, GOODBYE_LIMIT), Ok(true)) {
            let _ = waitpid(Some(self.child), WaitOptions::NOHANG);
        }
    }
}

/// All that the child needs, prepared before the fork.
struct Plan {
    mountpoint: CString,
    /// `fusermount3` and its arguments, for users who may not unmount themselves.
    helper: Option<(CString, [CString; 6])>,
}

impl Plan {
    fn new(mountpoint: &Path) -> io::Result<Self> {
        let mountpoint = CString::new(mountpoint.as_os_str().as_bytes())?;
        let helper = match helper::find() {
            Some(path) => {
                let path = CString::new(path.as_os_str().as_bytes())?;
                let [unmount, lazily, quietly, rest] = [c"-u", c"-z", c"-q", c"--"].map(CStr::to_owned);
                Some((path.clone(), [path, unmount, lazily, quietly, rest, mountpoint.clone()]))
            }
            None => None,
        };
        Ok(Plan { mountpoint, helper })
    }
}

/// The life of the child.
fn watch(pipe: RawFd, null: RawFd, plan: &Plan) -> ! {
    // SAFETY: system calls on numbers and on the C strings of `plan`, which this process alone has and never frees.
    unsafe {
        leave_the_daemon(pipe, null);
        if daemon_was_killed() && is_dead(&plan.mountpoint) {
            let flags = libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW;
            if libc::umount2(plan.mountpoint.as_ptr(), flags) != 0 {
                execute_helper(plan);
            }
        }
        libc::_exit(0)
    }
}

/// Lets go of the terminal, the working directory and every descriptor but the pipe, so that the child neither
/// dies of a Ctrl-C that is meant for the daemon nor keeps anything of it alive.
///
/// # Safety
/// `pipe` and `null` must be open and above standard error.
unsafe fn leave_the_daemon(pipe: RawFd, null: RawFd) {
    // SAFETY: plain system calls; the one string is static.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, CHILD_NAME.as_ptr());
        libc::setsid();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::chdir(c"/".as_ptr());
        for standard in 0..=2 {
            libc::dup2(null, standard);
        }
        libc::dup2(pipe, CHILD_PIPE);
        libc::syscall(libc::SYS_close_range, CHILD_PIPE as u32 + 1, u32::MAX, 0);
    }
}

/// Waits for the daemon's goodbye or its end.
///
/// # Safety
/// [`leave_the_daemon`] must have run.
unsafe fn daemon_was_killed() -> bool {
    let mut goodbye = 0u8;
    loop {
        // SAFETY: one byte into a local variable.
        match unsafe { libc::read(CHILD_PIPE, (&raw mut goodbye).cast(), 1) } {
            0 => return true,
            // SAFETY: errno is a variable of this thread.
            -1 if unsafe { *libc::__errno_location() } == libc::EINTR => {}
            _ => return false,
        }
    }
}

/// Whether a FUSE mount without its daemon lies there. The pipe may close before the device does, so the question
/// may reach a daemon that is still ending; then the answer comes with its end.
///
/// # Safety
/// Between fork and exit only.
unsafe fn is_dead(mountpoint: &CStr) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel writes one `statfs` or nothing; nobody reads it.
    if unsafe { libc::statfs(mountpoint.as_ptr(), stat.as_mut_ptr()) } == 0 {
        return false;
    }
    // SAFETY: errno is a variable of this thread.
    matches!(unsafe { *libc::__errno_location() }, libc::ENOTCONN | libc::ECONNABORTED)
}

/// # Safety
/// Between fork and exit only.
unsafe fn execute_helper(plan: &Plan) {
    let Some((path, arguments)) = &plan.helper else { return };
    let mut pointers = [std::ptr::null(); 7];
    for (pointer, argument) in pointers.iter_mut().zip(arguments) {
        *pointer = argument.as_ptr();
    }
    let no_environment = [std::ptr::null()];
    // SAFETY: both lists end with a null pointer; the strings live until the process is replaced.
    unsafe {
        libc::execve(path.as_ptr(), pointers.as_ptr(), no_environment.as_ptr());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Instant;

    use rustix::mount::{MountFlags, mount};

    use super::*;
    use crate::mountpoint::{check_mountpoint, open_fuse_device};

    /// A FUSE mount whose daemon ends as soon as it has mounted. `None`: this user may not mount.
    fn dead_mount(at: &Path) -> Option<()> {
        let device = open_fuse_device().ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_fd().as_raw_fd());
        let options = CString::new(options).unwrap();
        mount("farpool", at, "fuse.farpool", MountFlags::empty(), options.as_c_str()).ok()
    }

    fn lists(directory: &Path) -> bool {
        std::fs::read_dir(directory).is_ok()
    }

    #[test]
    fn end_of_the_daemon_without_goodbye_takes_a_dead_mount_away() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = start_watcher(dir.path()).unwrap();
        if dead_mount(dir.path()).is_none() {
            return;
        }
        assert!(!lists(dir.path()));
        // As the kernel does it when the daemon is killed: the pipe closes, and nothing was said.
        watcher.pipe = io::pipe().unwrap().1;
        let start = Instant::now();
        while !lists(dir.path()) {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
    }

    #[test]
    fn goodbye_leaves_whatever_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let watcher = start_watcher(dir.path()).unwrap();
        if dead_mount(dir.path()).is_none() {
            return;
        }
        drop(watcher);
        assert!(!lists(dir.path()));
        // What an earlier daemon and its watcher left behind goes before the next mount.
        check_mountpoint(dir.path()).unwrap();
        assert!(lists(dir.path()));
    }
}
