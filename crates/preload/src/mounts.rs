//! The backend for the mounts of this machine: two ioctls to the daemon through the kernel, and the socket of
//! the daemon.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_file::guest::{Given, GuestFile, GuestSession, Host as GuestHost, Room};
use farpool_wire::{GUEST_VERSION, REGISTER, Registered, UNREGISTER};

use crate::backend::{Backend, File, Host, Registration, SOCKET_NAME_MAX, TICKET_BYTES};
use crate::sys;

/// `FUSE_SUPER_MAGIC` of `linux/magic.h`.
const FUSE: i64 = 0x6573_5546;
/// How many FUSE file systems are remembered that do not accept direct clients; a further one replaces the
/// oldest.
const OTHERS_MAX: usize = 16;
/// A call through the kernel takes about 20 microseconds more than a direct one. Opening a file with the
/// daemon, and unmapping it at the end, takes about 300.
const CALLS_WORTH_OPENING: u32 = 16;

/// All mounts of the machine.
pub struct Mounts {
    /// Devices of other file systems: each entry is zero, or the device's number plus one. They are hints, so
    /// they order nothing.
    others: [AtomicU64; OTHERS_MAX],
    next_other: AtomicU64,
}

impl Mounts {
    /// A backend that knows nothing yet.
    #[allow(clippy::new_without_default)] // a static needs `const`
    pub const fn new() -> Self {
        Mounts { others: [const { AtomicU64::new(0) }; OTHERS_MAX], next_other: AtomicU64::new(0) }
    }

    fn is_other(&self, device: u64) -> bool {
        self.others.iter().any(|other| other.load(Ordering::Relaxed) == device.wrapping_add(1))
    }

    fn note_other(&self, fd: RawFd) {
        if let Some(file) = sys::facts(fd) {
            let place = self.next_other.fetch_add(1, Ordering::Relaxed) as usize % OTHERS_MAX;
            self.others[place].store(file.id.device.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

impl Backend for Mounts {
    fn recognises(&self, fd: RawFd) -> bool {
        sys::file_system(fd) == Some(FUSE)
            && sys::facts(fd).is_some_and(|file| file.is_regular && !self.is_other(file.id.device))
    }

    fn calls_worth_opening(&self) -> u32 {
        CALLS_WORTH_OPENING
    }

    fn register(&self, fd: RawFd) -> Option<Registration> {
        let mut answer = [0_u8; Registered::BYTES];
        // SAFETY: the command's number encodes the answer's maximal size. The buffer has that size, lives
        // until the call returns, and is borrowed by nothing else.
        let done = unsafe { libc::syscall(libc::SYS_ioctl, fd, REGISTER, answer.as_mut_ptr()) };
        if done != 0 {
            // Another file system or a mount without direct clients (ENOTTY, ENOSYS), or a mount that does
            // not admit this user (EACCES).
            if matches!(sys::last_error(), libc::ENOTTY | libc::ENOSYS | libc::EACCES) {
                self.note_other(fd);
            }
            return None;
        }
        let answer = Registered::decode(&answer).filter(|answer| answer.version == GUEST_VERSION);
        let Some(answer) = answer else {
            self.unregister(fd);
            return None;
        };
        let mut socket = [0; SOCKET_NAME_MAX];
        socket[..answer.socket.len()].copy_from_slice(answer.socket.as_bytes());
        Some(Registration { ticket: answer.ticket, socket })
    }

    fn unregister(&self, fd: RawFd) {
        // SAFETY: takes no memory.
        let done = unsafe { libc::syscall(libc::SYS_ioctl, fd, UNREGISTER, 0) };
        if done != 0 && matches!(sys::last_error(), libc::ENOTTY | libc::ENOSYS) {
            self.note_other(fd);
        }
    }

    fn join(&self, registration: &Registration) -> Option<Arc<dyn Host>> {
        let name = registration.socket.split(|&byte| byte == 0).next()?;
        let host = GuestHost::join(std::str::from_utf8(name).ok()?).ok()?;
        Some(Arc::new(Joined(host)))
    }
}

struct Joined(Arc<GuestHost>);

impl Host for Joined {
    fn open(&self, ticket: &[u8; TICKET_BYTES]) -> Option<Box<dyn File>> {
        self.0.open(ticket).ok().map(|file| Box::new(file) as Box<dyn File>)
    }

    fn session(&self) -> Option<Box<dyn Any>> {
        self.0.session().ok().map(|session| Box::new(session) as Box<dyn Any>)
    }

    fn has_ended(&self) -> bool {
        self.0.notice_end()
    }

    fn abandon(&self) {
        self.0.abandon();
    }
}

impl File for GuestFile {
    fn read_at(&self, session: &dyn Any, offset: u64, to: &[Room<'_>]) -> Option<usize> {
        GuestFile::read_at(self, session.downcast_ref::<GuestSession>()?, offset, to)
    }

    fn write_at(&self, session: &dyn Any, offset: u64, from: &[Given<'_>]) -> Option<usize> {
        GuestFile::write_at(self, session.downcast_ref::<GuestSession>()?, offset, from)
    }
}
