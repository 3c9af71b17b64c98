//! The interposer with a stand-in for the mount, for tests: every regular file on a tmpfs counts as a file of
//! a mount, and is served through a descriptor of the stand-in's own. So a program must see no difference,
//! and the counts below show that this library served it.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{File as StdFile, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use farpool_preload::backend::{
    Backend, File, Given, Host, Registration, Room, SOCKET_NAME_MAX, TICKET_BYTES,
};

/// Operations served by the stand-in.
static SERVED: AtomicU64 = AtomicU64::new(0);
/// Descriptions whose acceleration was given up.
static GIVEN_UP: AtomicU64 = AtomicU64::new(0);
/// Whether operations of the stand-in panic.
static FAULTY: AtomicBool = AtomicBool::new(false);
/// How many calls through the kernel cost as much as opening a file.
static CALLS_WORTH_OPENING: AtomicU32 = AtomicU32::new(1);
/// Whether the stand-in acts as a mount that has ended.
static DEAD: AtomicBool = AtomicBool::new(false);

/// How many operations have been served.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_double_served() -> u64 {
    SERVED.load(Ordering::Relaxed)
}

/// How often acceleration has been given up.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_double_given_up() -> u64 {
    GIVEN_UP.load(Ordering::Relaxed)
}

/// From now on opening a file costs as much as `calls` calls through the kernel.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_double_open_at(calls: u32) {
    CALLS_WORTH_OPENING.store(calls, Ordering::Relaxed);
}

/// From now on the stand-in acts as a mount that has ended.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_double_die() {
    DEAD.store(true, Ordering::Relaxed);
}

/// From now on every operation panics, as if the library had a fault.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_double_fail() {
    FAULTY.store(true, Ordering::Relaxed);
}

struct Tmpfs;

/// Files by device and inode.
type Files = HashMap<(u64, u64), Arc<StdFile>>;

/// The files that the daemon would know: all that were registered since the last [`forget_files`].
static FILES: Mutex<Option<Files>> = Mutex::new(None);

/// Forgets all files. The descriptor of a file is closed once no open description uses it.
pub fn forget_files() {
    *FILES.lock().unwrap() = None;
}

/// The first of the stand-in's own descriptors. It is high, so that programs get the numbers that they would
/// get without the stand-in.
pub const OWN_DESCRIPTORS_FROM: RawFd = 700;

fn reopen(fd: RawFd) -> Option<StdFile> {
    let low = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{fd}")).ok()?;
    // SAFETY: takes numbers only; makes a descriptor that nothing else owns yet.
    let high = unsafe { libc::fcntl(low.as_raw_fd(), libc::F_DUPFD_CLOEXEC, OWN_DESCRIPTORS_FROM) };
    // SAFETY: the descriptor was just made, and nothing else owns it.
    (high >= 0).then(|| unsafe { StdFile::from_raw_fd(high) })
}

impl Backend for Tmpfs {
    fn recognises(&self, fd: RawFd) -> bool {
        let mut system = std::mem::MaybeUninit::<libc::statfs>::uninit();
        let mut file = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: both buffers live until the calls return, have the size that each call fills, and are read
        // only after the call has succeeded.
        unsafe {
            libc::fstatfs(fd, system.as_mut_ptr()) == 0
                && system.assume_init().f_type == libc::TMPFS_MAGIC
                && libc::fstat(fd, file.as_mut_ptr()) == 0
                && file.assume_init().st_mode & libc::S_IFMT == libc::S_IFREG
        }
    }

    fn calls_worth_opening(&self) -> u32 {
        CALLS_WORTH_OPENING.load(Ordering::Relaxed)
    }

    fn register(&self, fd: RawFd) -> Option<Registration> {
        let facts = std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?;
        let id = (facts.dev(), facts.ino());
        // Opened only once: opening and closing the file again would drop the program's record locks.
        if let Entry::Vacant(place) = FILES.lock().unwrap().get_or_insert_default().entry(id) {
            place.insert(Arc::new(reopen(fd)?));
        }
        let mut ticket = [0; TICKET_BYTES];
        ticket[..8].copy_from_slice(&id.0.to_ne_bytes());
        ticket[8..16].copy_from_slice(&id.1.to_ne_bytes());
        Some(Registration { ticket, socket: [0; SOCKET_NAME_MAX] })
    }

    fn unregister(&self, _fd: RawFd) {
        GIVEN_UP.fetch_add(1, Ordering::Relaxed);
    }

    fn join(&self, _registration: &Registration) -> Option<Arc<dyn Host>> {
        Some(Arc::new(Joined { process: std::process::id() }))
    }
}

/// A host that one process has joined: like the real connections, it serves only that process.
struct Joined {
    process: u32,
}

struct Session {
    process: u32,
}

struct Served {
    process: u32,
    file: Arc<StdFile>,
}

impl Host for Joined {
    fn open(&self, ticket: &[u8; TICKET_BYTES]) -> Option<Box<dyn File>> {
        assert_eq!(self.process, std::process::id());
        let number = |at: usize| u64::from_ne_bytes(ticket[at..at + 8].try_into().unwrap());
        let file = FILES.lock().unwrap().as_ref()?.get(&(number(0), number(8)))?.clone();
        Some(Box::new(Served { process: self.process, file }))
    }

    fn session(&self) -> Option<Box<dyn Any>> {
        Some(Box::new(Session { process: self.process }))
    }

    fn has_ended(&self) -> bool {
        DEAD.load(Ordering::Relaxed)
    }

    fn abandon(&self) {
        assert_ne!(self.process, std::process::id());
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        assert_eq!(self.process, std::process::id());
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        assert_eq!(self.process, std::process::id());
    }
}

impl Served {
    fn count(&self, session: &dyn Any, moved: isize) -> Option<usize> {
        assert_eq!(self.process, std::process::id(), "a parent's file in its child");
        assert!(!FAULTY.load(Ordering::Relaxed), "a fault, as asked for");
        assert_eq!(session.downcast_ref::<Session>().unwrap().process, self.process);
        let moved = usize::try_from(moved).ok().filter(|_| !DEAD.load(Ordering::Relaxed))?;
        SERVED.fetch_add(1, Ordering::Relaxed);
        Some(moved)
    }
}

impl File for Served {
    fn read_at(&self, session: &dyn Any, offset: u64, to: &[Room<'_>]) -> Option<usize> {
        let (fd, pieces) = (self.file.as_raw_fd(), to.len());
        // SAFETY:
        // - In bounds: `to` has `pieces` entries, which have the layout of `iovec`; the code that made each
        //   `Room` promised its bytes.
        // - Exclusive: the kernel writes into the program's memory only, as the program asked for.
        // - Alive: `to` and its pieces are borrowed until the call returns.
        let moved = unsafe { libc::syscall(libc::SYS_preadv, fd, to.as_ptr(), pieces, offset, 0) };
        self.count(session, moved as isize)
    }

    fn write_at(&self, session: &dyn Any, offset: u64, from: &[Given<'_>]) -> Option<usize> {
        let (fd, pieces) = (self.file.as_raw_fd(), from.len());
        // SAFETY:
        // - In bounds: `from` has `pieces` entries, which have the layout of `iovec`; the code that made each
        //   `Given` promised its bytes.
        // - Exclusive: the kernel only reads them.
        // - Alive: `from` and its pieces are borrowed until the call returns.
        let moved = unsafe { libc::syscall(libc::SYS_pwritev, fd, from.as_ptr(), pieces, offset, 0) };
        self.count(session, moved as isize)
    }
}

extern "C" fn start() {
    farpool_preload::use_backend(&Tmpfs);
}

#[used]
// SAFETY: the loader calls each function in this section once, and a function without parameters ignores the
// arguments that it passes.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
