//! The watcher: a child process that outlives a killed daemon just long enough to remove its mount.
//!
//! When a daemon ends, for whatever reason, its device is closed, and the kernel answers every call on the
//! mount with ENOTCONN. But the dead mount would stay on its path. So a child holds the reading end of a pipe
//! whose writing end only the daemon has. A byte means a clean end, and the child exits. End of file without
//! that byte means that the daemon has died. If the mount on the path is the one that the child was told of,
//! the child removes it by force: a thread of the daemon that waits for the mount itself (`flusher`) may
//! still keep the mount alive, and calls on it would then wait for ever. If the child was told of no mount,
//! it detaches what is mounted on the path only if that is a *dead* FUSE mount; a live one belongs to another
//! process.
//!
//! The child is forked and does not `exec`, so it keeps to the rules of signal handlers: system calls on
//! memory prepared before the fork, no allocation, no locks. It must be started before the process has
//! threads, maps far memory or opens the device: a child that holds these would keep alive what must be
//! released when the daemon ends.

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

/// How long the daemon waits for the child, which has one byte to read and one call to make. A child that
/// takes longer is left to init.
const GOODBYE_LIMIT: Duration = Duration::from_secs(2);
/// The descriptor of the pipe in the child, which has closed all others.
const CHILD_PIPE: RawFd = 3;
const CHILD_NAME: &CStr = c"farpool-watcher";
/// The two messages to the child: a clean end (one byte), and the mount that it watches (this many bytes).
const GOODBYE: u8 = b'x';
const MOUNT_MESSAGE_BYTES: usize = 8;

/// Files by which the owner of a FUSE connection can end it.
const CONNECTIONS: &[u8] = b"/sys/fs/fuse/connections/";
const ABORT: &[u8] = b"/abort";
/// Digits of the largest minor number.
const MINOR_DIGITS: usize = 10;
const ABORT_PATH_BYTES: usize = CONNECTIONS.len() + MINOR_DIGITS + ABORT.len() + 1;

/// Major and minor number of a file system.
pub(crate) type Device = (u32, u32);

/// The daemon's handle of its watcher. Dropping it tells the watcher that the daemon ends cleanly.
#[derive(Debug)]
pub struct Watcher {
    pipe: PipeWriter,
    child: Pid,
}

/// Starts the watcher of a mount that is about to be made on `mountpoint`. Call it while the process has a
/// single thread, before it leases any memory.
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

impl Watcher {
    /// Tells the child that the mount has been made: major and minor number of its file system.
    pub(crate) fn mounted(&mut self, device: Device) -> io::Result<()> {
        let mut message = [0; MOUNT_MESSAGE_BYTES];
        message[..4].copy_from_slice(&device.0.to_ne_bytes());
        message[4..].copy_from_slice(&device.1.to_ne_bytes());
        self.pipe.write_all(&message) // atomic: it is shorter than `PIPE_BUF`
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // A watcher that has already exited needs no goodbye. Rust's runtime ignores SIGPIPE.
        let _ = self.pipe.write(&[GOODBYE]);
        if matches!(wait_for_exit(self.child, GOODBYE_LIMIT), Ok(true)) {
            let _ = waitpid(Some(self.child), WaitOptions::NOHANG);
        }
    }
}

/// All that the child needs, prepared before the fork.
struct Plan {
    mountpoint: CString,
    /// `fusermount3` and its arguments, for users that may not unmount directly.
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

/// What the child does, from the fork to its exit.
fn watch(pipe: RawFd, null: RawFd, plan: &Plan) -> ! {
    // SAFETY: system calls on numbers and on the C strings of `plan`. Only this process has that copy of
    // `plan`, and it never frees it.
    unsafe {
        leave_the_daemon(pipe, null);
        if let End::Killed { mount } = end_of_daemon() {
            remove_mount(plan, mount);
        }
        libc::_exit(0)
    }
}

/// Removes the mount of a killed daemon.
///
/// # Safety
/// [`leave_the_daemon`] must have run.
unsafe fn remove_mount(plan: &Plan, told: Option<Device>) {
    // SAFETY: system calls on numbers and on the C strings of `plan`. Only this process has that copy of
    // `plan`, and it never frees it.
    unsafe {
        let there = device_at(&plan.mountpoint);
        match told {
            Some((_, minor)) if told == there => end_connection(minor),
            Some(_) => return,
            None if is_dead(&plan.mountpoint) => {}
            None => return,
        }
        let flags = libc::MNT_FORCE | libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW;
        if libc::umount2(plan.mountpoint.as_ptr(), flags) != 0 {
            execute_helper(plan);
        }
    }
}

/// Gives up the terminal, the working directory and every descriptor but the pipe. So the child neither dies
/// of a Ctrl-C that is meant for the daemon nor keeps any of its resources alive.
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

/// How the daemon ended.
enum End {
    Cleanly,
    Killed { mount: Option<Device> },
}

/// Waits for the daemon's goodbye or its end.
///
/// # Safety
/// [`leave_the_daemon`] must have run.
unsafe fn end_of_daemon() -> End {
    let mut mount = None;
    let mut message = [0u8; MOUNT_MESSAGE_BYTES];
    loop {
        // SAFETY: the length is that of `message`, a local variable.
        match unsafe { libc::read(CHILD_PIPE, message.as_mut_ptr().cast(), message.len()) } {
            0 => return End::Killed { mount },
            // SAFETY: errno is a variable of this thread.
            -1 if unsafe { *libc::__errno_location() } == libc::EINTR => {}
            read if read == MOUNT_MESSAGE_BYTES as isize => {
                let [a, b, c, d, e, f, g, h] = message;
                mount = Some((u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])));
            }
            _ => return End::Cleanly,
        }
    }
}

/// Device numbers of the file system at a path, from what the kernel knows without asking a daemon.
///
/// # Safety
/// Between fork and exit only.
unsafe fn device_at(path: &CStr) -> Option<Device> {
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT | libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: the kernel writes one `statx` or nothing; all zeros is a value of it.
    unsafe {
        let done = libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, 0, stat.as_mut_ptr());
        let stat = stat.assume_init();
        (done == 0).then_some((stat.stx_dev_major, stat.stx_dev_minor))
    }
}

/// Ends a mount's connection to the kernel, so that each call that waits for its daemon fails. Does nothing
/// where the file for this under `CONNECTIONS` is missing or may not be written. Unmounting by force has the
/// same effect, but not every user may do it.
///
/// # Safety
/// Between fork and exit only.
unsafe fn end_connection(minor: u32) {
    let mut path = [0u8; ABORT_PATH_BYTES];
    let mut digits = [0u8; MINOR_DIGITS];
    let mut used = MINOR_DIGITS;
    let mut rest = minor;
    loop {
        used -= 1;
        digits[used] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let parts = [CONNECTIONS, &digits[used..], ABORT];
    // `path` keeps its terminating zero: the parts together are at least one byte shorter.
    for (place, byte) in path.iter_mut().zip(parts.into_iter().flatten()) {
        *place = *byte;
    }
    // SAFETY: the path ends with a zero; one byte of a static string is written.
    unsafe {
        let file = libc::open(path.as_ptr().cast(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, c"1".as_ptr().cast(), 1);
            libc::close(file);
        }
    }
}

/// Whether a FUSE mount without a daemon is mounted there. The pipe may close before the device does, so the
/// question may reach a daemon that is still exiting; then the answer comes when it has exited.
///
/// # Safety
/// Between fork and exit only.
unsafe fn is_dead(mountpoint: &CStr) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel writes one `statfs` or nothing; it is never read.
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
    fn end_of_the_daemon_without_goodbye_removes_a_dead_mount() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = start_watcher(dir.path()).unwrap();
        if dead_mount(dir.path()).is_none() {
            return;
        }
        assert!(!lists(dir.path()));
        // As when the daemon is killed: the kernel closes the pipe, without a goodbye.
        watcher.pipe = io::pipe().unwrap().1;
        let start = Instant::now();
        while !lists(dir.path()) {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
    }

    #[test]
    fn after_a_goodbye_the_watcher_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let watcher = start_watcher(dir.path()).unwrap();
        if dead_mount(dir.path()).is_none() {
            return;
        }
        drop(watcher);
        assert!(!lists(dir.path()));
        // A check removes what an earlier daemon and its watcher left behind.
        check_mountpoint(dir.path()).unwrap();
        assert!(lists(dir.path()));
    }
}
