//! `fusermount3`, the set-user-id helper that mounts and unmounts for ordinary users (package `fuse3`).

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

const NAME: &str = "fusermount3";
/// The variable in which the helper finds the number of the socket on which to send the opened device.
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";
/// The helper makes a few system calls; one that takes longer is stuck and is ended.
const HELPER_LIMIT: Duration = Duration::from_secs(10);

/// The helper, if it is installed.
pub(crate) fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    std::env::split_paths(&path).map(|dir| dir.join(NAME)).find(|candidate| candidate.is_file())
}

/// Has the helper mount, and receives the device that it has opened.
pub(crate) fn mount(mountpoint: &Path, options: &str) -> io::Result<OwnedFd> {
    let helper = find().ok_or(io::ErrorKind::NotFound)?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(HELPER_LIMIT))?;
    let mut command = Command::new(helper);
    command.arg("-o").arg(options).arg("--").arg(mountpoint);
    // Standard input is a descriptor that a child inherits without further work.
    command.env(SOCKET_VARIABLE, "0").stdin(OwnedFd::from(theirs));
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    drop(command);
    let device = receive_descriptor(&ours);
    let output = finish(child)?;
    match device {
        Some(device) if output.status.success() => Ok(device),
        _ => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// Has the helper unmount: the mount vanishes from its path at once, even if files are open there.
pub(crate) fn unmount(mountpoint: &Path) -> io::Result<()> {
    let helper = find().ok_or(io::ErrorKind::NotFound)?;
    let arguments = ["-u", "-z", "-q", "--"].map(OsStr::new);
    let mut command = Command::new(helper);
    command.args(arguments).arg(mountpoint);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let output = finish(child)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// Waits until the process `pid` has ended; false if it has not ended within the time.
pub(crate) fn wait_for_exit(pid: Pid, within: Duration) -> io::Result<bool> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let limit = Timespec { tv_sec: within.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: 0 };
    let mut descriptors = [PollFd::new(&process, PollFlags::IN)];
    loop {
        match poll(&mut descriptors, Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

fn finish(mut child: Child) -> io::Result<Output> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let ended = pid.map_or(Ok(true), |pid| wait_for_exit(pid, HELPER_LIMIT))?;
    if !ended {
        child.kill()?;
    }
    child.wait_with_output()
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut data = [io::IoSliceMut::new(&mut byte)];
    recvmsg(socket.as_fd(), &mut data, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}
